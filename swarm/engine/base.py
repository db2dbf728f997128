"""The interface of an engine: the KV caches of sessions over one span, advanced by steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from swarm.errors import SwarmError
from swarm.model.numerics import Numerics
from swarm.model.spans import LayerRange


@dataclass(frozen=True, kw_only=True)
class Step:
    """Known tokens that are not computed yet: prefill, decode, verification and catch-up alike.

    `start` is the logical position of the first of the `n` tokens. A `start` below the cached length
    is a rewind: the cache from there on is dropped first.

    `tokens` [n] int32 ids. `hidden` [n, hidden_size] float32, None on the span with layer 0. `rows`: how
    many of the last positions return logits (0 ... n; 0 on spans without the last layer).
    """

    session: str
    start: int
    tokens: NDArray[np.int32]
    hidden: NDArray[np.float32] | None = None
    rows: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


StepResult = NDArray[np.float32] | SwarmError
"""[n, hidden_size] hidden states, or [rows, vocab_size] logits from the span with the head, or an error."""


class Engine(Protocol):
    """Not thread-safe: one thread owns it. Results do not depend on which sessions share a call."""

    @property
    def span(self) -> LayerRange: ...

    @property
    def numerics(self) -> Numerics: ...

    def open(self, session: str, max_tokens: int) -> None:
        """Create a session of up to `max_tokens` positions. Raises EngineError if it exists."""

    def forward(self, steps: Sequence[Step]) -> list[StepResult]:
        """Run at most one step of each session. The caller owns the results, which are in the order of `steps`.

        An invalid step (BadStep, UnknownSession, ContextExceeded) changes nothing and does not affect the
        other steps: its result is the error. If the device fails in a step, its session is closed and its
        result is an EngineError. Raises EngineError only if every step failed on the device.
        """

    def length(self, session: str) -> int:
        """The number of cached logical positions. Raises UnknownSession."""

    def close(self, session: str) -> None:
        """Free the session's cache. Does nothing if the session does not exist."""

"""What an engine is: some sessions' KV caches over one span, and the one way to move them on."""

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

    `start` is the logical position of the first of the `n` tokens. Where it lies below what the
    session has cached, everything from there on is forgotten first: that is the rewind.

    `tokens` [n] int32 ids; `hidden` [n, hidden_size] float32 on spans that do not own layer 0, None
    on the one that does; `rows` how many of the last positions want logits (0 ... n; only on the span
    that owns the last layer, 0 elsewhere).
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
"""[n, hidden_size] hidden states, or [rows, vocab_size] logits from the span with the head. Or why not."""


class Engine(Protocol):
    """Not thread-safe: one thread owns it. Results never depend on which sessions share a call."""

    @property
    def span(self) -> LayerRange: ...

    @property
    def numerics(self) -> Numerics: ...

    def open(self, session: str, max_tokens: int) -> None:
        """Make room for a session of up to `max_tokens` positions. Raises EngineError if it exists."""

    def forward(self, steps: Sequence[Step]) -> list[StepResult]:
        """Run at most one step of each session; results in the order of `steps`, the caller's to keep.

        A step that is wrong (BadStep, UnknownSession, ContextExceeded) leaves its session as it was
        and the others undisturbed: its place in the list holds the error. Where the device failed in a step,
        that session is closed and its place holds an EngineError; raises it only if every step failed so.
        """

    def length(self, session: str) -> int:
        """Logical positions cached. Raises UnknownSession."""

    def close(self, session: str) -> None:
        """Free the session's cache. Closing one that is not there does nothing."""

"""A ring cache: a KV cache of fixed size on the host. Which slot holds which position, and the attention masks. Pure.

::

    context 6, sinks 2, rewind 1, after positions 0 ... 9:

    slot       0   1 │ 2   3   4   5   6
    position   0   1 │ 7   8   9   5   6        the sinks stay; the other slots form a ring
    query 10   +   + │ +   +   +   -   -        attends to the sinks and the last four, itself included; 5 and 6 are
                                                kept for rewinds: a query at 8 or 9 attends to them again

A key is rotated for the position at which it was computed, and positions are never renumbered. The slot of a key
therefore does not matter, and keys are never moved. The positions that a query attends to do not depend on how many
tokens are computed together. Without its first positions, the sinks, a model's output collapses once other positions
are gone (Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swarm.engine.steps import check_position
from swarm.errors import BadStep, ContextExceeded, UnknownSession
from swarm.model.manifest import StaticSpec

MASKED = np.float32(-65504.0)
"""Added to the score of a masked key: the lowest number of f16, in which an NPU computes."""
_EMPTY = -1


class RingCache:
    """One session's positions. `check` changes nothing; `rewind` and `commit` record changes."""

    def __init__(self, spec: StaticSpec, max_tokens: int) -> None:
        if max_tokens < 1:
            raise BadStep(f"a session of {max_tokens} positions cannot hold a token: ask for 1 or more")
        self._spec = spec
        self._max_tokens = max_tokens
        self._positions = np.full(spec.slots, _EMPTY, np.int64)  # slot -> position
        self.length = 0

    def check(self, start: int, n: int) -> None:
        """Check that `n` tokens can be computed from position `start`.

        Raises BadStep for a step that leaves a gap or is empty; ContextExceeded for a step that ends beyond the
        session or is longer than the context; UnknownSession if positions that `start` attends to are no longer
        cached.
        """
        check_position(start, n, length=self.length, max_tokens=self._max_tokens)
        if n > self._spec.context:
            raise ContextExceeded(
                f"{n} tokens at once are more than the {self._spec.context} that this peer's graphs attend to: "
                "shorten the prompt, or use peers without static graphs"
            )
        if start < self.length and not self._can_rewind_to(start):
            raise UnknownSession(
                f"what position {start} attends to is no longer cached: a text beyond {self._spec.context} tokens can "
                f"forget its last {self._spec.rewind}; open the session again and feed its known tokens"
            )

    def rewind(self, start: int) -> None:
        """Drop the positions from `start` on."""
        if start < self.length:
            self._positions[self._positions >= start] = _EMPTY
            self.length = start

    def slots(self, n: int) -> NDArray[np.int64]:
        """[n] int64: the slots, all different, for the next `n` positions, at most a chunk."""
        return self._slots_of(np.arange(self.length, self.length + n))

    def commit(self, n: int) -> None:
        """Record that the next `n` positions were written to their slots."""
        self._positions[self.slots(n)] = np.arange(self.length, self.length + n)
        self.length += n

    def bias(self, width: int, window: int | None) -> NDArray[np.float32]:
        """[width, slots + width] float32 to be added to attention scores: 0 or `MASKED`.

        One row for each of the next `width` positions; the columns are the slots, then those positions themselves.
        `window` is the layer's own sliding window. A padding row attends to itself, because a row must not be fully
        masked; the rows before it do not attend to it.
        """
        fresh = np.arange(self.length, self.length + width, dtype=np.int64)
        keys = np.concatenate([self._positions, fresh])
        distance = fresh[:, None] - keys
        seen = (distance < self._spec.window) | (keys < self._spec.sinks)
        seen &= (keys != _EMPTY) & (distance >= 0)
        if window is not None:
            seen &= distance < window
        return np.where(seen, np.float32(0), MASKED)

    def _slots_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        sinks = self._spec.sinks
        in_ring = sinks + (positions - sinks) % (self._spec.slots - sinks)
        return np.where(positions < sinks, positions, in_ring)

    def _can_rewind_to(self, start: int) -> bool:
        """Whether all positions before `start` that a query at or after `start` attends to are still cached."""
        sinks = min(self._spec.sinks, start)
        first = max(sinks, start - self._spec.window + 1)
        needed = np.concatenate([np.arange(sinks), np.arange(first, start)])
        return bool((self._positions[self._slots_of(needed)] == needed).all())

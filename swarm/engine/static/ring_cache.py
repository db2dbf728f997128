"""A KV cache of fixed size on the host: which slot holds which position, and who may see whom. Pure.

::

    context 6, sinks 2, rewind 1, after positions 0 ... 9:

    slot       0   1 │ 2   3   4   5   6
    position   0   1 │ 7   8   9   5   6        the first two stay; the others take turns
    query 10   +   + │ +   +   +   -   -        sees the sinks and the last four, itself included; 5 and 6 are for
                                                rewinds: a query 8 or 9 would see them again

A key carries the rotation of the position that it was computed at, and positions are never renumbered: where a
key lies changes nothing, so nothing is ever moved. What a query sees follows from positions alone, however many
tokens were computed together. Keeping the first positions is what keeps a model from collapsing once others
are gone (Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swarm.engine.steps import check_place
from swarm.errors import BadStep, ContextExceeded, UnknownSession
from swarm.model.manifest import StaticSpec

HIDDEN = np.float32(-65504.0)
"""Added to the score of a key that is not to be seen: the lowest number of f16, in which an NPU computes."""
_EMPTY = -1


class RingCache:
    """One session's positions. `check` decides, and changes nothing; `begin` and `wrote` follow what is done."""

    def __init__(self, spec: StaticSpec, max_tokens: int) -> None:
        if max_tokens < 1:
            raise BadStep(f"a session of {max_tokens} positions cannot hold a token: ask for 1 or more")
        self._spec = spec
        self._max_tokens = max_tokens
        self._held = np.full(spec.slots, _EMPTY, np.int64)  # slot -> position
        self.length = 0

    def check(self, start: int, n: int) -> None:
        """Whether `n` tokens can follow position `start`.

        Raises BadStep for a step that leaves a gap or is empty; ContextExceeded for one that ends beyond the
        session, or does not fit into the context as a whole; UnknownSession where the text has slid so far that
        what `start` must see is gone.
        """
        check_place(start, n, length=self.length, max_tokens=self._max_tokens)
        if n > self._spec.context:
            raise ContextExceeded(
                f"{n} tokens at once are more than the {self._spec.context} that this peer's graphs attend to: "
                "shorten the prompt, or serve it by peers without static graphs"
            )
        if start < self.length and not self._reaches_back_to(start):
            raise UnknownSession(
                f"what position {start} attends to is no longer cached: a text beyond {self._spec.context} tokens can "
                f"forget its last {self._spec.rewind}; open the session again and feed its known tokens"
            )

    def begin(self, start: int) -> None:
        """Forget the positions from `start` on."""
        if start < self.length:
            self._held[self._held >= start] = _EMPTY
            self.length = start

    def slots(self, n: int) -> NDArray[np.int64]:
        """[n] int64: where the next `n` positions, at most a chunk, go. They are all different."""
        return self._slots_of(np.arange(self.length, self.length + n))

    def wrote(self, n: int) -> None:
        """The next `n` positions are in their slots."""
        self._held[self.slots(n)] = np.arange(self.length, self.length + n)
        self.length += n

    def bias(self, width: int, window: int | None) -> NDArray[np.float32]:
        """[width, slots + width] float32, to be added to attention scores: 0 or `HIDDEN`.

        A row for each of the next `width` positions; columns are the slots, then those positions themselves.
        `window` is the layer's own sliding window. A row that pads a chunk sees itself, so that no row is empty,
        and nobody before it sees it.
        """
        fresh = np.arange(self.length, self.length + width, dtype=np.int64)
        keys = np.concatenate([self._held, fresh])
        distance = fresh[:, None] - keys
        seen = (distance < self._spec.reach) | (keys < self._spec.sinks)
        seen &= (keys != _EMPTY) & (distance >= 0)
        if window is not None:
            seen &= distance < window
        return np.where(seen, np.float32(0), HIDDEN)

    def _slots_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        sinks = self._spec.sinks
        turn = sinks + (positions - sinks) % (self._spec.slots - sinks)
        return np.where(positions < sinks, positions, turn)

    def _reaches_back_to(self, start: int) -> bool:
        """Whether all that a query at `start` sees is still there; later ones see no more of what was before."""
        sinks = min(self._spec.sinks, start)
        first = max(sinks, start - self._spec.reach + 1)
        needed = np.concatenate([np.arange(sinks), np.arange(first, start)])
        return bool((self._held[self._slots_of(needed)] == needed).all())

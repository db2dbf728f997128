"""Maps the logical positions of a session to the slots of its KV cache. Pure: numbers in, numbers out.

A model's cache can only grow. After a rewind, the slots of the dropped positions are dead: zeros in the
mask hide them from attention.

::

    after feeding 0..5, rewinding to 3 and feeding two more:

    slot       0   1   2   3   4   5   6   7
    position   0   1   2   -   -   -   3   4       length 5, slots 8, dead 3
    mask       1   1   1   0   0   0   1   1       positions never have gaps, slots do

If many slots are dead, or the cache is nearly full, the plan asks for a compaction: only the slots in `keep`
are copied into the new cache. A sliding window counts slots, not positions. A cache longer than the window
must therefore have no dead slots: there, every rewind is a compaction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarm.engine.steps import check_position
from swarm.errors import BadStep

# A compaction copies the cache through f32 (5 ms at 66 positions of SmolLM2, growing with the length).
# A dead slot costs one more key in each attention. For few dead slots a compaction costs more than it saves.
_MIN_DEAD = 64
_DEAD_SHARE = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run one step. `keep` [k] int64: the slots to which the cache is compacted first, None for no compaction.

    `attention_mask` [1, slots + n] int64 and `position_ids` [1, n] int64 are read-only views.
    """

    start: int
    n: int
    keep: NDArray[np.int64] | None
    attention_mask: NDArray[np.int64]
    position_ids: NDArray[np.int64]

    @property
    def first_slot(self) -> int:
        """The slot of the first new token."""
        return int(self.attention_mask.shape[1]) - self.n


class Ledger:
    """One session's positions. `plan` decides without changing anything; `commit` records that a plan was run.

    At most `max_tokens` slots are used, dead ones included. `window` is the smallest sliding window among
    the span's layers.
    """

    def __init__(self, max_tokens: int, *, window: int | None = None) -> None:
        if max_tokens < 1:
            raise BadStep(f"a session of {max_tokens} positions cannot hold a token: ask for 1 or more")
        self._max_tokens = max_tokens
        self._window = max_tokens if window is None else window
        self._slot_of = np.empty(max_tokens, np.int64)  # position -> slot, valid below `length`
        self._ones = np.ones((1, max_tokens), np.int64)
        self._counting = np.arange(max_tokens, dtype=np.int64)[None]
        self.length = 0
        self.slots = 0

    @property
    def dead(self) -> int:
        """The number of slots without a position."""
        return self.slots - self.length

    def plan(self, start: int, n: int) -> Plan:
        """How to append `n` tokens at position `start`, after a rewind to it.

        Raises BadStep for a step that leaves a gap or is empty, ContextExceeded for a step that is too long.
        """
        check_position(start, n, length=self.length, max_tokens=self._max_tokens)
        slots, keep = self.slots, None
        if self._must_compact(start, n):
            keep, slots = self._slot_of[:start].copy(), start
        if slots == start:
            mask = self._ones[:, : slots + n]
        else:
            mask = np.zeros((1, slots + n), np.int64)
            mask[0, self._slot_of[:start]] = 1
            mask[0, slots:] = 1
        return Plan(start, n, keep, mask, self._counting[:, start : start + n])

    def commit(self, plan: Plan) -> None:
        """Record that the most recent `plan` has been run."""
        if plan.keep is not None:
            self._slot_of[: plan.start] = self._counting[0, : plan.start]
        self.length, self.slots = plan.start + plan.n, plan.first_slot + plan.n
        self._slot_of[plan.start : self.length] = self._counting[0, plan.first_slot : self.slots]

    def _must_compact(self, start: int, n: int) -> bool:
        dead = self.slots - start
        if dead == 0:
            return False
        return (
            start == 0  # Nothing to copy: a reset, which is free.
            or self.slots + n > min(self._max_tokens, self._window)
            or (dead >= _MIN_DEAD and dead * _DEAD_SHARE > self.slots)
        )

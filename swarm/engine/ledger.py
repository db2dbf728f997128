"""Logical positions of a session against the slots of its KV cache. Pure: numbers in, numbers out.

A model's cache only ever grows. A rewind leaves slots behind that no position owns: dead slots, hidden
from attention by zeros in the mask.

::

    after feeding 0..5, rewinding to 3 and feeding two more:

    slot       0   1   2   3   4   5   6   7
    position   0   1   2   -   -   -   3   4       length 5, slots 8, dead 3
    mask       1   1   1   0   0   0   1   1       positions never have gaps, slots do

Where many are dead, or the room is short, the plan asks for a compaction: `keep` names the slots to
carry over, and the cache starts at those. A sliding window counts slots, not positions, so beyond the
window there must be no dead slots at all: every rewind becomes a compaction there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarm.engine.steps import check_place
from swarm.errors import BadStep

# A compaction copies the cache through f32 (5 ms at 66 positions of SmolLM2, growing with the length)
# where a dead slot costs one more key in each attention. Few dead slots are not worth it.
_MIN_DEAD = 64
_DEAD_SHARE = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step needs. `keep` [k] int64: the slots to carry over before it, None to leave all.

    `attention_mask` [1, slots + n] int64 and `position_ids` [1, n] int64 are views to read, not to
    change.
    """

    start: int
    n: int
    keep: NDArray[np.int64] | None
    attention_mask: NDArray[np.int64]
    position_ids: NDArray[np.int64]

    @property
    def first_slot(self) -> int:
        """The slot that the first of the new tokens takes."""
        return int(self.attention_mask.shape[1]) - self.n


class Ledger:
    """One session's positions. `plan` decides, and changes nothing; `commit` records what was done.

    Never more than `max_tokens` slots are used, dead ones included. `window` is the smallest sliding
    window among the span's layers.
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
        """Slots that no position owns."""
        return self.slots - self.length

    def plan(self, start: int, n: int) -> Plan:
        """What it takes to have `n` tokens follow position `start`, forgetting what was there.

        Raises BadStep for a step that leaves a gap or is empty, ContextExceeded for one too long.
        """
        check_place(start, n, length=self.length, max_tokens=self._max_tokens)
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
        """The step of `plan`, the last that was made, has been run."""
        if plan.keep is not None:
            self._slot_of[: plan.start] = self._counting[0, : plan.start]
        self.length, self.slots = plan.start + plan.n, plan.first_slot + plan.n
        self._slot_of[plan.start : self.length] = self._counting[0, plan.first_slot : self.slots]

    def _must_compact(self, start: int, n: int) -> bool:
        dead = self.slots - start
        if dead == 0:
            return False
        return (
            start == 0  # nothing to carry over: a reset, which costs nothing
            or self.slots + n > min(self._max_tokens, self._window)
            or (dead >= _MIN_DEAD and dead * _DEAD_SHARE > self.slots)
        )

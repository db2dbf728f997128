"""The ledger compared with a cache that is a plain list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.engine.ledger import Ledger, Plan
from swarm.errors import BadStep, ContextExceeded

ROOM = 400


class NaiveCache:
    """Behaves like a model's cache: it appends slots, and compacts to the slots `keep`."""

    def __init__(self) -> None:
        self.slots: list[int] = []

    def run(self, plan: Plan, tokens: list[int]) -> list[int]:
        """The tokens that the step's last token attends to."""
        if plan.keep is not None:
            self.slots = [self.slots[slot] for slot in plan.keep]
        self.slots += tokens
        mask = plan.attention_mask
        assert mask.dtype == plan.position_ids.dtype == np.int64
        assert mask.shape == (1, len(self.slots))
        return [token for token, seen in zip(self.slots, mask[0], strict=True) if seen]


@st.composite
def walks(draw: st.DrawFn) -> list[tuple[float, int]]:
    """Steps as (size of the rewind, from 0 for none to 1 for the whole text; number of tokens)."""
    back = st.one_of(st.just(0.0), st.floats(0, 0.1), st.floats(0, 1))
    return draw(st.lists(st.tuples(back, st.integers(1, 40)), max_size=40))


@given(walks(), st.none() | st.integers(1, 60))
def test_every_token_attends_to_the_known_tokens_before_it_and_no_other(
    walk: list[tuple[float, int]], window: int | None
) -> None:
    ledger, cache = Ledger(ROOM, window=window), NaiveCache()
    known: list[int] = []
    for count, (back, n) in enumerate(walk):
        start = len(known) - round(back * len(known))
        if start + n > ROOM:
            with pytest.raises(ContextExceeded):
                ledger.plan(start, n)
            continue
        known = known[:start] + [1000 * count + i for i in range(n)]
        plan = ledger.plan(start, n)
        seen = cache.run(plan, known[start:])
        ledger.commit(plan)
        assert seen == known
        assert plan.position_ids.tolist() == [list(range(start, start + n))]
        assert ledger.length == len(known)
        assert ledger.slots == len(cache.slots) <= ROOM
        if window is not None and ledger.slots > window:
            assert ledger.dead == 0, "the window counts dead slots"


@given(walks())
def test_a_plan_that_is_not_committed_changes_nothing(walk: list[tuple[float, int]]) -> None:
    ledger = Ledger(ROOM)
    for back, n in walk:
        start = ledger.length - round(back * ledger.length)
        if start + n > ROOM:
            continue
        ledger.plan(0, ROOM)
        first, second = ledger.plan(start, n), ledger.plan(start, n)
        assert first.attention_mask.tolist() == second.attention_mask.tolist()
        assert (first.keep is None) == (second.keep is None)
        if first.keep is not None and second.keep is not None:
            assert first.keep.tolist() == second.keep.tolist()
        ledger.commit(second)


def feed(ledger: Ledger, start: int, n: int) -> Plan:
    plan = ledger.plan(start, n)
    ledger.commit(plan)
    return plan


def test_a_short_rewind_is_only_a_mask() -> None:
    ledger = Ledger(100)
    feed(ledger, 0, 6)
    plan = feed(ledger, 3, 2)
    assert plan.keep is None
    assert plan.attention_mask.tolist() == [[1, 1, 1, 0, 0, 0, 1, 1]]
    assert plan.position_ids.tolist() == [[3, 4]]
    assert (ledger.length, ledger.slots, ledger.dead) == (5, 8, 3)


def test_rejected_drafts_are_compacted_once_a_quarter_of_the_cache_is_dead() -> None:
    ledger, compactions = Ledger(4000), 0
    feed(ledger, 0, 200)
    for _ in range(100):
        plan = feed(ledger, ledger.length - 4, 6)
        compactions += plan.keep is not None
        assert ledger.dead < max(64, ledger.slots / 4) + 6
    assert 1 <= compactions <= 6


def test_a_full_cache_is_compacted_rather_than_refused() -> None:
    ledger = Ledger(20)
    feed(ledger, 0, 18)
    plan = feed(ledger, 15, 5)
    assert plan.keep is not None
    assert plan.keep.tolist() == list(range(15))
    assert (ledger.length, ledger.slots) == (20, 20)


def test_a_rewind_to_the_start_drops_the_whole_cache() -> None:
    ledger = Ledger(20)
    feed(ledger, 0, 10)
    plan = feed(ledger, 0, 3)
    assert plan.keep is not None
    assert plan.keep.tolist() == []
    assert ledger.slots == 3


def test_within_the_window_a_rewind_is_a_mask_and_beyond_it_a_compaction() -> None:
    ledger = Ledger(100, window=8)
    feed(ledger, 0, 5)
    assert feed(ledger, 4, 2).keep is None
    plan = feed(ledger, 5, 4)
    assert plan.keep is not None
    assert plan.keep.tolist() == [0, 1, 2, 3, 5]


@pytest.mark.parametrize(("start", "n"), [(-1, 1), (11, 1), (5, 0), (5, -3)])
def test_a_step_that_leaves_a_gap_or_is_empty_is_refused_by_name(start: int, n: int) -> None:
    ledger = Ledger(20)
    feed(ledger, 0, 10)
    with pytest.raises(BadStep, match=str(start if n > 0 else n)):
        ledger.plan(start, n)


def test_the_error_of_a_step_beyond_the_session_names_its_end() -> None:
    ledger = Ledger(20)
    with pytest.raises(ContextExceeded, match="end at 21"):
        ledger.plan(0, 21)
    with pytest.raises(BadStep, match="0 positions"):
        Ledger(0)

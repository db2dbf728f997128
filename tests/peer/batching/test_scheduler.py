"""Rounds without a model: no step starves, limits are kept, the oldest session advances, every session ends."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.batching.cost_model import CostModel
from peer.batching.scheduler import (
    IDLE_AFTER_S,
    LINGER_SHARE,
    MAX_BLOCK_WAIT_S,
    MAX_LONG_TOKENS,
    MAX_SHORT_TOKENS,
    MAX_STEPS,
    BatchScheduler,
    PendingStep,
    Portion,
    SerialScheduler,
)
from swarm.engine.paged.block_tables import BlockTables
from swarm.engine.paged.blocks import BLOCK_TOKENS, BlockPool, block_names, pack_names, root_name
from swarm.errors import UnknownSession

SIZE = 4
BASE_S, EACH_S = 0.008, 0.001
"""Seconds of the simulated device for an inference, and for each of its tokens."""


def step(
    session: str,
    tokens: int = 1,
    *,
    start: int = 0,
    client: str = "",
    age: float = 0.0,
    at: float = 0.0,
    hops: int = 1,
) -> PendingStep:
    return PendingStep(
        session=session,
        client=client or session,
        opened_at=age,
        engine=None,
        start=start,
        tokens=tokens,
        queued_at=at,
        hops=hops,
    )


def block_tables(blocks: int, *sessions: str) -> BlockTables:
    made = BlockTables(BlockPool(blocks, SIZE))
    for session in sessions:
        made.open(session, blocks * SIZE)
    return made


def compute(tables: BlockTables, portions: list[Portion[PendingStep]]) -> list[str]:
    """Do with a round what an engine does; returns the evicted sessions, whose steps failed."""
    evicted = []
    for portion in portions:
        pending = portion.step
        try:
            table = tables.check(pending.session, pending.next_position, portion.count)
        except UnknownSession:
            evicted.append(pending.session)
            continue
        table.prepare(pending.next_position, portion.count)
        table.commit(np.zeros(portion.count, np.int32))
    return evicted


def sizes(portions: list[Portion[PendingStep]]) -> dict[str, int]:
    return {portion.step.session: portion.count for portion in portions}


def calibrated_scheduler(tables: BlockTables) -> BatchScheduler[PendingStep]:
    """A scheduler that knows how long the simulated device takes."""
    scheduler: BatchScheduler[PendingStep] = BatchScheduler(tables)
    for count in (1, 2, 8, 64, 128, 1, 1):
        scheduler._cost.observe(count, BASE_S + EACH_S * count)
    return scheduler


def test_short_steps_share_a_round_and_a_long_one_gets_a_limited_portion() -> None:
    tables = block_tables(1000, "a", "b", "c", "long")
    scheduler = calibrated_scheduler(tables)
    for pending in (step("long", 900), step("a"), step("b", 5), step("c")):
        scheduler.add(pending)
    portions = scheduler.next_round(0.0)
    found = sizes(portions)
    assert found.pop("long") <= 0.5 * (BASE_S + 7 * EACH_S) / EACH_S
    assert found == {"a": 1, "b": 5, "c": 1}
    scheduler.finish_round(portions, 0.02, 0.02)
    assert len(scheduler) == 1


def test_sessions_over_two_hops_fall_into_two_batches_and_those_of_one_hop_stay_together() -> None:
    names = [f"s{i}" for i in range(9)]
    tables = block_tables(1000, *names, "whole")
    scheduler = calibrated_scheduler(tables)
    for name in names:
        scheduler.add(step(name, client="one", at=1.0, hops=2))
    first = scheduler.next_round(1.0)
    assert list(sizes(first)) == names[:5]
    scheduler.finish_round(first, 0.02, 1.02)
    for name in names[:5]:  # they return before the others had a round
        scheduler.add(step(name, client="one", start=1, at=1.03, hops=2))
    assert list(sizes(scheduler.next_round(1.03))) == [*names[5:], "s0"]
    scheduler.add(step("whole", client="one", age=9.0, at=0.5))
    assert len(scheduler.next_round(1.03)) == 6


def test_a_slow_writer_counts_while_it_is_away_and_no_longer_once_it_pauses() -> None:
    tables = block_tables(1000, *"abcd")
    scheduler = calibrated_scheduler(tables)

    def batch_of(names: str, start: int, at: float) -> int:
        for name in names:
            scheduler.add(step(name, client="one", start=start, at=at, hops=2))
        portions = scheduler.next_round(at)
        scheduler.finish_round(portions, 0.01, at)
        for pending in list(scheduler._pending):
            scheduler.remove(pending)
        return len(portions)

    for start in range(3):  # distant hops: each pair returns every two seconds
        batch_of("ab", start, 2.0 * start)
        batch_of("cd", start, 2.0 * start + 1)
    assert batch_of("ab", 3, 6.0) == 2, "c and d are at another hop, a second after they were here"
    assert batch_of("ab", 4, 60.0) == 1, "c and d have stopped"


def test_a_step_without_blocks_gives_its_place_to_the_next_one() -> None:
    tables = block_tables(4, "old", "new", "other")
    scheduler = calibrated_scheduler(tables)
    for name, tokens, age in (("old", 2 * SIZE - 1, 1.0), ("other", 2 * SIZE - 1, 2.0)):
        scheduler.add(step(name, tokens, client="one", age=age))
    portions = scheduler.next_round(0.0)
    compute(tables, portions)
    scheduler.finish_round(portions, 0.01, 0.0)
    scheduler.add(step("new", client="another", age=9.0, at=0.1, hops=3))
    for name, age in (("old", 1.0), ("other", 2.0)):
        scheduler.add(step(name, start=2 * SIZE - 1, client="one", age=age, at=0.2, hops=3))
    assert sizes(scheduler.next_round(0.2)) == {"old": 1}, (
        "the fair share is one step, and no block is free for that of `new`"
    )


def test_an_engine_whose_steps_must_wait_does_not_stop_another() -> None:
    tables = block_tables(2, "holds", "waits")
    scheduler = calibrated_scheduler(tables)
    scheduler.add(step("holds", 2 * SIZE - 1, age=1.0))
    compute(tables, portions := scheduler.next_round(0.0))
    scheduler.finish_round(portions, 0.01, 0.0)
    waits, holds = step("waits", age=2.0, at=0.1), step("holds", start=2 * SIZE - 1, age=1.0, at=0.1)
    waits.engine = "part"
    scheduler.add(waits)
    scheduler.add(holds)
    assert sizes(scheduler.next_round(0.1)) == {"holds": 1}


def test_a_prompt_advances_although_more_writers_wait_than_a_round_takes() -> None:
    names = [f"w{i}" for i in range(2 * MAX_STEPS)]
    tables = block_tables(4000, "prompt", *names)
    scheduler = calibrated_scheduler(tables)
    scheduler.add(step("prompt", 500, age=9.0))
    for name in names:
        scheduler.add(step(name, client="writers"))
    portions = scheduler.next_round(0.0)
    assert len(portions) == MAX_STEPS
    assert "prompt" in sizes(portions)


def test_a_client_that_wrote_much_while_alone_is_not_put_behind_later_clients() -> None:
    names = [f"new{i}" for i in range(8)]
    tables = block_tables(1000, "long", *names)
    scheduler = calibrated_scheduler(tables)
    now = 0.0
    for start in range(300):
        scheduler.add(step("long", start=start, client="old", at=now, hops=2))
        scheduler.finish_round(scheduler.next_round(now), 0.01, now := now + 0.01)
    for name in names:  # while it is at another stage
        scheduler.add(step(name, client="new", at=now, hops=2))
    scheduler.finish_round(scheduler.next_round(now), 0.01, now)
    scheduler.add(step("long", start=300, client="old", at=now, hops=2))
    for name in names[:5]:
        scheduler.add(step(name, client="new", start=1, at=now, hops=2))
    assert "long" in sizes(scheduler.next_round(now))


def test_a_session_without_a_step_is_evicted_for_an_older_one() -> None:
    """It was opened and adopted a cached prefix; no step followed."""
    tables = block_tables(2, "silent", "old")
    scheduler = calibrated_scheduler(tables)
    scheduler.add_session("silent", client="it", engine=None, opened_at=2.0, now=2.0)
    tables.check("silent", 0, SIZE).prepare(0, SIZE)
    scheduler.add(step("old", 2 * SIZE, age=1.0, at=2.0))
    assert sizes(scheduler.next_round(2.0)) == {"old": 2 * SIZE}
    assert tables.exclusive_blocks("silent") == 0


def test_nothing_of_clients_and_engines_remains_after_their_last_session() -> None:
    tables = block_tables(100, "a", "b")
    scheduler = calibrated_scheduler(tables)
    first, second = step("a"), step("b")
    second.engine = "part"
    for pending in (first, second):
        scheduler.add(pending)
    while portions := scheduler.next_round(0.0):
        scheduler.finish_round(portions, 0.01, 0.0)
    scheduler.remove_session("b")
    assert (list(scheduler._last_rounds), list(scheduler._served_tokens)) == ([None], ["a"])
    scheduler.remove_session("a")
    assert (scheduler._last_rounds, scheduler._served_tokens, scheduler._sequences) == ({}, {}, {})


def test_the_worker_lingers_for_the_rest_of_a_batch_and_for_nothing_else() -> None:
    tables = block_tables(1000, *"abcd", "long")
    scheduler = calibrated_scheduler(tables)
    for name in "abcd":
        scheduler.add(step(name, hops=2))
    assert scheduler.linger_s(0.0) == 0.0, "the fair share waits already"
    for _ in range(2):
        scheduler.finish_round(scheduler.next_round(0.0), 0.02, 0.02)
    scheduler.add(step("a", start=1, at=0.05, hops=2))
    assert scheduler.linger_s(0.05) == pytest.approx(LINGER_SHARE * 0.02)
    for name in "bcd":
        scheduler._sequences[name].gap_s = 1.0
    assert scheduler.linger_s(0.05) == 0.0, "the others are far away"
    scheduler._sequences["d"].gap_s = 0.03
    assert scheduler.linger_s(0.05 + LINGER_SHARE * 0.02) == 0.0
    scheduler.add(step("long", 100, at=0.05))
    assert scheduler.linger_s(0.05) == 0.0, "a long step can run"
    scheduler.remove_session("b")
    scheduler.remove_session("c")
    scheduler.remove_session("d")
    scheduler.remove(scheduler._pending[-1])
    scheduler.remove_session("long")
    assert scheduler.linger_s(0.05) == 0.0, "no other session writes"


def test_a_long_step_gets_small_portions_while_others_write_and_large_ones_alone() -> None:
    tables = block_tables(1000, "writer", "long")
    scheduler = calibrated_scheduler(tables)
    scheduler.add(step("writer"))
    scheduler.finish_round(scheduler.next_round(0.0), 0.01, 0.0)
    scheduler.add(step("long", 900))
    assert sizes(scheduler.next_round(0.1))["long"] <= 0.5 * (BASE_S + EACH_S) / EACH_S + 1
    assert sizes(scheduler.next_round(10.0)) == {"long": MAX_LONG_TOKENS}


def test_the_cost_model_fits_how_long_rounds_took() -> None:
    cost = CostModel()
    assert cost.extra_tokens(1, 1.5) is None
    for n in (1, 40, 3, 100):
        cost.observe(n, BASE_S + EACH_S * n)
    assert cost.extra_tokens(2, 2.0) == pytest.approx((BASE_S + 2 * EACH_S) / EACH_S, abs=1)
    flat = CostModel()
    for n in (1, 2, 3):
        flat.observe(n, BASE_S)
    assert flat.extra_tokens(1, 1.5) is None


def test_clients_get_equal_shares_with_any_number_of_sessions() -> None:
    names = [f"greedy-{i}" for i in range(5)]
    tables = block_tables(100_000, "modest", *names)
    scheduler = calibrated_scheduler(tables)
    for name in names:
        scheduler.add(step(name, 2000, client="greedy"))
    scheduler.add(step("modest", 2000, client="modest", age=9.0))
    tokens_of = {"greedy": 0, "modest": 0}
    for at in range(30):
        portions = scheduler.next_round(float(at))
        compute(tables, portions)
        for portion in portions:
            tokens_of[str(portion.step.client)] += portion.count
        scheduler.finish_round(portions, 0.1, float(at))
    assert abs(tokens_of["greedy"] - tokens_of["modest"]) <= MAX_LONG_TOKENS


def test_a_round_is_of_one_engine_and_each_has_its_turn() -> None:
    tables = block_tables(100, "a", "b")
    scheduler = calibrated_scheduler(tables)
    first, second = step("a", 90), step("b", 90)
    second.engine = "part"
    scheduler.add(first)
    scheduler.add(second)
    order = []
    for at in range(2):
        portions = scheduler.next_round(float(at))
        order.append([portion.step.session for portion in portions])
        scheduler.finish_round(portions, 0.1, float(at))
    assert sorted(order) == [["a"], ["b"]]


def test_idle_sessions_are_evicted_first_then_the_youngest_and_never_older_ones() -> None:
    tables = block_tables(6, "old", "mid", "new", "idle")
    scheduler = calibrated_scheduler(tables)
    for name, age in (("old", 1.0), ("idle", 0.5), ("mid", 2.0), ("new", 3.0)):
        scheduler.add(step(name, SIZE, age=age))
    portions = scheduler.next_round(0.0)
    assert compute(tables, portions) == []
    scheduler.finish_round(portions, 0.01, 0.0)
    assert tables.pool.used == 4
    late = IDLE_AFTER_S + 1.0
    for name, age in (("old", 1.0), ("mid", 2.0), ("new", 3.0)):
        scheduler.add(step(name, SIZE, start=SIZE, age=age, at=late))
    portions = scheduler.next_round(late)
    assert (tables.exclusive_blocks("idle"), scheduler.evictions) == (0, 1)
    assert compute(tables, portions) == []
    scheduler.finish_round(portions, 0.01, late)
    assert tables.pool.used == 6
    scheduler.add(step("old", 2 * SIZE, start=2 * SIZE, age=1.0, at=late))
    scheduler.add(step("mid", SIZE, start=2 * SIZE, age=2.0, at=late))
    portions = scheduler.next_round(late + 0.1)
    assert (tables.exclusive_blocks("new"), scheduler.evictions) == (0, 2)
    assert sizes(portions) == {"old": 2 * SIZE}
    compute(tables, portions)
    scheduler.finish_round(portions, 0.01, late + 0.1)
    (waiting,) = scheduler._pending
    assert waiting.session == "mid"
    assert scheduler.pop_starved(late + 0.2) == []
    assert scheduler.pop_starved(late + 0.2 + MAX_BLOCK_WAIT_S) == [waiting]
    assert len(scheduler) == 0


def test_blocks_that_only_younger_sessions_share_are_evicted_for_an_older_one() -> None:
    first = root_name("model")
    ids = np.arange(4 * BLOCK_TOKENS, dtype=np.int32)
    tables = BlockTables(BlockPool(8, BLOCK_TOKENS))
    packed = pack_names(first, block_names(ids, first=first), max_bytes=1 << 10)
    for session in ("before", "old", "one", "other"):
        tables.open(session, 8 * BLOCK_TOKENS)
    scheduler = calibrated_scheduler(tables)

    def computed(pending: PendingStep) -> list[Portion[PendingStep]]:
        scheduler.add(pending)
        portions = scheduler.next_round(0.0)
        assert compute(tables, portions) == []
        scheduler.finish_round(portions, 0.01, 0.0)
        return portions

    tables.reuse_prefix("before", packed, tag=b"")
    tables.find("before").prepare(0, len(ids))
    tables.find("before").commit(ids)
    tables.close("before")
    computed(step("old", 4 * BLOCK_TOKENS, age=1.0))
    for session, age in (("one", 2.0), ("other", 3.0)):
        scheduler.add_session(session, client=session, engine=None, opened_at=age, now=0.0)
        assert len(tables.reuse_prefix(session, packed, tag=b"")) == len(ids)
    assert (tables.free, tables.exclusive_blocks("one"), tables.exclusive_blocks("other")) == (0, 0, 0)
    assert sizes(computed(step("old", start=4 * BLOCK_TOKENS, age=1.0))) == {"old": 1}
    assert scheduler.evictions == 2
    assert tables.sharing(["old"]) == ["old"]
    assert tables.sharing(["one", "unknown"]) == []


def test_a_session_whose_every_token_takes_seconds_is_not_idle() -> None:
    tables = block_tables(2, "slow", "young")
    scheduler = calibrated_scheduler(tables)
    gap = IDLE_AFTER_S + 1.0
    for start in range(2):
        scheduler.add(step("slow", start=start, at=start * gap, age=1.0))
        portions = scheduler.next_round(start * gap)
        compute(tables, portions)
        scheduler.finish_round(portions, 0.01, start * gap)
    scheduler.add(step("young", 2 * SIZE, at=2 * gap, age=2.0))
    assert scheduler.next_round(1.9 * gap) == []
    assert tables.exclusive_blocks("slow") == 1
    assert "young" in sizes(scheduler.next_round(10 * gap))
    assert tables.exclusive_blocks("slow") == 0


def test_the_serial_scheduler_lets_no_step_overtake() -> None:
    scheduler: SerialScheduler[PendingStep] = SerialScheduler(batch=2)
    for pending in (step("a", 5), step("b"), step("b", start=1), step("c")):
        scheduler.add(pending)
    order = []
    while len(scheduler):
        portions = scheduler.next_round(0.0)
        order.append([portion.step.session for portion in portions])
        scheduler.finish_round(portions, 0.1, 0.0)
    assert order == [["a", "b"], ["b", "c"]]


@dataclass
class Writer:
    """A session with a prompt and a text, written token by token; after an eviction it sends all tokens again."""

    name: str
    client: str
    age: float
    prompt: int
    text: int
    known: int = 0
    cached: int = 0
    step: PendingStep | None = None
    restarts: int = 0
    waits: list[int] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.cached >= self.prompt + self.text

    def next(self, now: float) -> PendingStep:
        known = max(self.known, self.prompt)
        count = known - self.cached
        self.step = step(
            self.name, count, start=self.cached, client=self.client, age=self.age, at=now, hops=1 + self.prompt % 3
        )
        return self.step


writers = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(1, 25), st.integers(0, 30)), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(writers, st.integers(22, 60))
def test_every_session_ends_and_the_oldest_never_starves(plans: list[tuple[int, int, int, int]], blocks: int) -> None:
    """Sessions of three clients start at different times. The cache has room for the largest, and not for all."""
    tables = BlockTables(BlockPool(blocks, SIZE))
    scheduler = calibrated_scheduler(tables)
    remaining = [
        (start, Writer(name=f"s{i}", client=f"c{client}", age=start + i / 100, prompt=prompt, text=text))
        for i, (client, prompt, text, start) in enumerate(plans)
    ]
    running: list[Writer] = []
    now, rounds_before = 0.0, 0
    for turn in itertools.count():
        assert turn < 20_000, "a session never ends"
        for start, writer in [pair for pair in remaining if pair[0] <= turn]:
            remaining.remove((start, writer))
            tables.open(writer.name, blocks * SIZE)
            running.append(writer)
        for writer in running:
            if writer.step is None:
                scheduler.add(writer.next(now))
        if not running and not remaining:
            break
        oldest = min(running, key=lambda writer: writer.age).name if running else ""
        portions = scheduler.next_round(now)
        counts = [portion.count for portion in portions]
        assert len({portion.step.session for portion in portions}) == len(portions) <= MAX_STEPS
        assert sum(count for count in counts if count > MAX_SHORT_TOKENS) <= MAX_LONG_TOKENS
        evicted = compute(tables, portions)
        scheduler.finish_round([portion for portion in portions if portion.step.session not in evicted], 0.02, now)
        now += 0.02 if portions else 0.5
        if portions:
            rounds_before = 0 if oldest in ("", *sizes(portions)) else rounds_before + 1
            assert rounds_before < 40, "the oldest waits"
        for writer in list(running):
            assert writer.step is not None
            if writer.name in evicted:
                scheduler.remove(writer.step)
                writer.restarts += 1
                writer.cached, writer.step = 0, None
            elif writer.step.remaining == 0:
                writer.cached = writer.step.start + writer.step.tokens
                writer.known, writer.step = writer.cached + 1, None
                if writer.ended:
                    running.remove(writer)
                    scheduler.remove_session(writer.name)
                    tables.close(writer.name)
        tables.pool.forget()
    assert tables.pool.free == blocks
    assert len(scheduler) == 0
    assert scheduler._served_tokens == {}

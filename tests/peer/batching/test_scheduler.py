"""Rounds without a model: nobody starves, budgets are kept, the old get on, everybody ends."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.batching.cost_model import CostModel
from peer.batching.scheduler import (
    ALONE,
    LINGER,
    MAX_STEPS,
    PATIENCE_S,
    PAUSE_S,
    SHORT,
    BatchScheduler,
    PendingStep,
    Portion,
    SerialScheduler,
)
from swarm.engine.paged.block_tables import BlockTables
from swarm.engine.paged.blocks import BLOCK_TOKENS, BlockPool, first_name, names_of, pack_names
from swarm.errors import UnknownSession

SIZE = 4
BASE_S, EACH_S = 0.008, 0.001
"""What the pretended device takes for an inference, and for a token of it."""


def due(
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
        put_at=at,
        hops=hops,
    )


def tables(blocks: int, *sessions: str) -> BlockTables:
    made = BlockTables(BlockPool(blocks, SIZE))
    for session in sessions:
        made.open(session, blocks * SIZE)
    return made


def compute(room: BlockTables, portions: list[Portion[PendingStep]]) -> list[str]:
    """Do what an engine does with a round; the sessions that must begin again."""
    lost = []
    for portion in portions:
        one = portion.due
        try:
            table = room.check(one.session, one.next, portion.count)
        except UnknownSession:
            lost.append(one.session)
            continue
        table.prepare(one.next, portion.count)
        table.commit(np.zeros(portion.count, np.int32))
    return lost


def sizes(portions: list[Portion[PendingStep]]) -> dict[str, int]:
    return {portion.due.session: portion.count for portion in portions}


def warmed(room: BlockTables) -> BatchScheduler[PendingStep]:
    """A schedule that knows what the pretended device takes."""
    schedule: BatchScheduler[PendingStep] = BatchScheduler(room)
    for count in (1, 2, 8, 64, 128, 1, 1):
        schedule._cost.observe(count, BASE_S + EACH_S * count)
    return schedule


def test_short_steps_go_together_and_a_long_one_gets_what_they_can_spare() -> None:
    room = tables(1000, "a", "b", "c", "long")
    schedule = warmed(room)
    for one in (due("long", 900), due("a"), due("b", 5), due("c")):
        schedule.add(one)
    portions = schedule.round(0.0)
    found = sizes(portions)
    assert found.pop("long") <= 0.5 * (BASE_S + 7 * EACH_S) / EACH_S
    assert found == {"a": 1, "b": 5, "c": 1}
    schedule.ran(portions, 0.02, 0.02)
    assert len(schedule) == 1


def test_sessions_over_two_hops_fall_into_two_batches_and_those_of_one_hop_stay_together() -> None:
    names = [f"s{i}" for i in range(9)]
    room = tables(1000, *names, "whole")
    schedule = warmed(room)
    for name in names:
        schedule.add(due(name, client="one", at=1.0, hops=2))
    first = schedule.round(1.0)
    assert list(sizes(first)) == names[:5]
    schedule.ran(first, 0.02, 1.02)
    for name in names[:5]:  # back before the others have had their turn
        schedule.add(due(name, client="one", start=1, at=1.03, hops=2))
    assert list(sizes(schedule.round(1.03))) == [*names[5:], "s0"]
    schedule.add(due("whole", client="one", age=9.0, at=0.5))
    assert len(schedule.round(1.03)) == 6


def test_who_writes_slowly_counts_while_it_is_away_and_no_longer_once_it_pauses() -> None:
    room = tables(1000, *"abcd")
    schedule = warmed(room)

    def together(names: str, start: int, at: float) -> int:
        for name in names:
            schedule.add(due(name, client="one", start=start, at=at, hops=2))
        portions = schedule.round(at)
        schedule.ran(portions, 0.01, at)
        for one in list(schedule._due):
            schedule.remove(one)
        return len(portions)

    for start in range(3):  # far hops: each pair comes back every two seconds
        together("ab", start, 2.0 * start)
        together("cd", start, 2.0 * start + 1)
    assert together("ab", 3, 6.0) == 2, "c and d are at another hop, a second after they were here"
    assert together("ab", 4, 60.0) == 1, "c and d have stopped"


def test_where_there_are_no_blocks_for_one_the_next_takes_its_place() -> None:
    room = tables(4, "old", "new", "other")
    schedule = warmed(room)
    for name, tokens, age in (("old", 2 * SIZE - 1, 1.0), ("other", 2 * SIZE - 1, 2.0)):
        schedule.add(due(name, tokens, client="one", age=age))
    portions = schedule.round(0.0)
    compute(room, portions)
    schedule.ran(portions, 0.01, 0.0)
    schedule.add(due("new", client="another", age=9.0, at=0.1, hops=3))
    for name, age in (("old", 1.0), ("other", 2.0)):
        schedule.add(due(name, start=2 * SIZE - 1, client="one", age=age, at=0.2, hops=3))
    assert sizes(schedule.round(0.2)) == {"old": 1}, "one is due to a round; the one whose turn it is finds no block"


def test_an_engine_whose_steps_must_wait_does_not_stop_another() -> None:
    room = tables(2, "holds", "waits")
    schedule = warmed(room)
    schedule.add(due("holds", 2 * SIZE - 1, age=1.0))
    compute(room, portions := schedule.round(0.0))
    schedule.ran(portions, 0.01, 0.0)
    waits, holds = due("waits", age=2.0, at=0.1), due("holds", start=2 * SIZE - 1, age=1.0, at=0.1)
    waits.engine = "part"
    schedule.add(waits)
    schedule.add(holds)
    assert sizes(schedule.round(0.1)) == {"holds": 1}


def test_a_prompt_gets_on_beside_more_writers_than_a_round_takes() -> None:
    names = [f"w{i}" for i in range(2 * MAX_STEPS)]
    room = tables(4000, "prompt", *names)
    schedule = warmed(room)
    schedule.add(due("prompt", 500, age=9.0))
    for name in names:
        schedule.add(due(name, client="writers"))
    portions = schedule.round(0.0)
    assert len(portions) == MAX_STEPS
    assert "prompt" in sizes(portions)


def test_who_wrote_much_while_alone_owes_nothing_to_who_comes_later() -> None:
    names = [f"new{i}" for i in range(8)]
    room = tables(1000, "long", *names)
    schedule = warmed(room)
    now = 0.0
    for start in range(300):
        schedule.add(due("long", start=start, client="old", at=now, hops=2))
        schedule.ran(schedule.round(now), 0.01, now := now + 0.01)
    for name in names:  # while it is at another stage
        schedule.add(due(name, client="new", at=now, hops=2))
    schedule.ran(schedule.round(now), 0.01, now)
    schedule.add(due("long", start=300, client="old", at=now, hops=2))
    for name in names[:5]:
        schedule.add(due(name, client="new", start=1, at=now, hops=2))
    assert "long" in sizes(schedule.round(now))


def test_blocks_of_a_session_that_has_not_begun_go_to_who_needs_them() -> None:
    """It was opened, found the beginning of its text here, and nothing came after that."""
    room = tables(2, "silent", "old")
    schedule = warmed(room)
    schedule.opened("silent", client="it", engine=None, opened_at=2.0, now=2.0)
    room.check("silent", 0, SIZE).prepare(0, SIZE)
    schedule.add(due("old", 2 * SIZE, age=1.0, at=2.0))
    assert sizes(schedule.round(2.0)) == {"old": 2 * SIZE}
    assert room.held("silent") == 0


def test_nothing_is_known_of_clients_and_engines_that_have_gone() -> None:
    room = tables(100, "a", "b")
    schedule = warmed(room)
    first, second = due("a"), due("b")
    second.engine = "part"
    for one in (first, second):
        schedule.add(one)
    while portions := schedule.round(0.0):
        schedule.ran(portions, 0.01, 0.0)
    schedule.forget("b")
    assert (list(schedule._turns), list(schedule._served)) == ([None], ["a"])
    schedule.forget("a")
    assert (schedule._turns, schedule._served, schedule._sequences) == ({}, {}, {})


def test_a_round_waits_a_little_for_the_rest_of_a_batch_and_for_nothing_else() -> None:
    room = tables(1000, *"abcd", "long")
    schedule = warmed(room)
    for name in "abcd":
        schedule.add(due(name, hops=2))
    assert schedule.worth_waiting(0.0) == 0.0, "there are enough for a round"
    for _ in range(2):
        schedule.ran(schedule.round(0.0), 0.02, 0.02)
    schedule.add(due("a", start=1, at=0.05, hops=2))
    assert schedule.worth_waiting(0.05) == pytest.approx(LINGER * 0.02)
    for name in "bcd":
        schedule._sequences[name].gap_s = 1.0
    assert schedule.worth_waiting(0.05) == 0.0, "the others are far away"
    schedule._sequences["d"].gap_s = 0.03
    assert schedule.worth_waiting(0.05 + LINGER * 0.02) == 0.0
    schedule.add(due("long", 100, at=0.05))
    assert schedule.worth_waiting(0.05) == 0.0, "there is something to do"
    schedule.forget("b")
    schedule.forget("c")
    schedule.forget("d")
    schedule.remove(schedule._due[-1])
    schedule.forget("long")
    assert schedule.worth_waiting(0.05) == 0.0, "nobody else writes"


def test_a_long_step_is_bounded_while_others_write_and_runs_in_large_pieces_alone() -> None:
    room = tables(1000, "writer", "long")
    schedule = warmed(room)
    schedule.add(due("writer"))
    schedule.ran(schedule.round(0.0), 0.01, 0.0)
    schedule.add(due("long", 900))
    assert sizes(schedule.round(0.1))["long"] <= 0.5 * (BASE_S + EACH_S) / EACH_S + 1
    assert sizes(schedule.round(10.0)) == {"long": ALONE}


def test_what_is_beside_a_writer_is_fitted_to_what_rounds_take() -> None:
    cost = CostModel()
    assert cost.beside(1, 1.5) is None
    for n in (1, 40, 3, 100):
        cost.observe(n, BASE_S + EACH_S * n)
    assert cost.beside(2, 2.0) == pytest.approx((BASE_S + 2 * EACH_S) / EACH_S, abs=1)
    flat = CostModel()
    for n in (1, 2, 3):
        flat.observe(n, BASE_S)
    assert flat.beside(1, 1.5) is None


def test_clients_take_turns_whatever_the_number_of_their_sessions() -> None:
    names = [f"greedy-{i}" for i in range(5)]
    room = tables(100_000, "modest", *names)
    schedule = warmed(room)
    for name in names:
        schedule.add(due(name, 2000, client="greedy"))
    schedule.add(due("modest", 2000, client="modest", age=9.0))
    given_to = {"greedy": 0, "modest": 0}
    for at in range(30):
        portions = schedule.round(float(at))
        compute(room, portions)
        for portion in portions:
            given_to[str(portion.due.client)] += portion.count
        schedule.ran(portions, 0.1, float(at))
    assert abs(given_to["greedy"] - given_to["modest"]) <= ALONE


def test_a_round_is_of_one_engine_and_each_has_its_turn() -> None:
    room = tables(100, "a", "b")
    schedule = warmed(room)
    first, second = due("a", 90), due("b", 90)
    second.engine = "part"
    schedule.add(first)
    schedule.add(second)
    order = []
    for at in range(2):
        portions = schedule.round(float(at))
        order.append([portion.due.session for portion in portions])
        schedule.ran(portions, 0.1, float(at))
    assert sorted(order) == [["a"], ["b"]]


def test_without_blocks_the_paused_lose_theirs_then_the_youngest_and_never_the_older() -> None:
    room = tables(6, "old", "mid", "new", "idle")
    schedule = warmed(room)
    for name, age in (("old", 1.0), ("idle", 0.5), ("mid", 2.0), ("new", 3.0)):
        schedule.add(due(name, SIZE, age=age))
    portions = schedule.round(0.0)
    assert compute(room, portions) == []
    schedule.ran(portions, 0.01, 0.0)
    assert room.pool.used == 4
    late = PAUSE_S + 1.0
    for name, age in (("old", 1.0), ("mid", 2.0), ("new", 3.0)):
        schedule.add(due(name, SIZE, start=SIZE, age=age, at=late))
    portions = schedule.round(late)
    assert (room.held("idle"), schedule.preempted) == (0, 1)
    assert compute(room, portions) == []
    schedule.ran(portions, 0.01, late)
    assert room.pool.used == 6
    schedule.add(due("old", 2 * SIZE, start=2 * SIZE, age=1.0, at=late))
    schedule.add(due("mid", SIZE, start=2 * SIZE, age=2.0, at=late))
    portions = schedule.round(late + 0.1)
    assert (room.held("new"), schedule.preempted) == (0, 2)
    assert sizes(portions) == {"old": 2 * SIZE}
    compute(room, portions)
    schedule.ran(portions, 0.01, late + 0.1)
    (waiting,) = schedule._due
    assert waiting.session == "mid"
    assert schedule.hopeless(late + 0.2) == []
    assert schedule.hopeless(late + 0.2 + PATIENCE_S) == [waiting]
    assert len(schedule) == 0


def test_what_younger_sessions_hold_only_together_is_an_older_ones_too() -> None:
    first = first_name("model")
    ids = np.arange(4 * BLOCK_TOKENS, dtype=np.int32)
    room = BlockTables(BlockPool(8, BLOCK_TOKENS))
    packed = pack_names(first, names_of(ids, first=first), most=1 << 10)
    for session in ("before", "old", "one", "other"):
        room.open(session, 8 * BLOCK_TOKENS)
    schedule = warmed(room)

    def computed(one: PendingStep) -> list[Portion[PendingStep]]:
        schedule.add(one)
        portions = schedule.round(0.0)
        assert compute(room, portions) == []
        schedule.ran(portions, 0.01, 0.0)
        return portions

    room.adopt("before", packed, tag=b"")
    room.find("before").prepare(0, len(ids))
    room.find("before").commit(ids)
    room.close("before")
    computed(due("old", 4 * BLOCK_TOKENS, age=1.0))
    for session, age in (("one", 2.0), ("other", 3.0)):
        schedule.opened(session, client=session, engine=None, opened_at=age, now=0.0)
        assert len(room.adopt(session, packed, tag=b"")) == len(ids)
    assert (room.free, room.held("one"), room.held("other")) == (0, 0, 0)
    assert sizes(computed(due("old", start=4 * BLOCK_TOKENS, age=1.0))) == {"old": 1}
    assert schedule.preempted == 2
    assert room.sharing(["old"]) == ["old"]
    assert room.sharing(["one", "nobody"]) == []


def test_a_session_whose_every_token_takes_seconds_is_not_pausing() -> None:
    room = tables(2, "slow", "young")
    schedule = warmed(room)
    gap = PAUSE_S + 1.0
    for start in range(2):
        schedule.add(due("slow", start=start, at=start * gap, age=1.0))
        portions = schedule.round(start * gap)
        compute(room, portions)
        schedule.ran(portions, 0.01, start * gap)
    schedule.add(due("young", 2 * SIZE, at=2 * gap, age=2.0))
    assert schedule.round(1.9 * gap) == []
    assert room.held("slow") == 1
    assert "young" in sizes(schedule.round(10 * gap))
    assert room.held("slow") == 0


def test_one_after_another_nothing_overtakes() -> None:
    schedule: SerialScheduler[PendingStep] = SerialScheduler(batch=2)
    for one in (due("a", 5), due("b"), due("b", start=1), due("c")):
        schedule.add(one)
    order = []
    while len(schedule):
        portions = schedule.round(0.0)
        order.append([portion.due.session for portion in portions])
        schedule.ran(portions, 0.1, 0.0)
    assert order == [["a", "b"], ["b", "c"]]


@dataclass
class Writer:
    """A session that reads a prompt and writes a text, token by token, and feeds all again when it is told to."""

    name: str
    client: str
    age: float
    prompt: int
    text: int
    known: int = 0
    cached: int = 0
    due: PendingStep | None = None
    restarts: int = 0
    waits: list[int] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.cached >= self.prompt + self.text

    def next(self, now: float) -> PendingStep:
        known = max(self.known, self.prompt)
        count = known - self.cached
        self.due = due(
            self.name, count, start=self.cached, client=self.client, age=self.age, at=now, hops=1 + self.prompt % 3
        )
        return self.due


writers = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(1, 25), st.integers(0, 30)), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(writers, st.integers(22, 60))
def test_everybody_ends_and_no_short_step_waits_long(plans: list[tuple[int, int, int, int]], blocks: int) -> None:
    """Sessions of three clients come at some time; the cache has room for the largest of them, and not for all."""
    room = BlockTables(BlockPool(blocks, SIZE))
    schedule = warmed(room)
    left = [
        (start, Writer(name=f"s{i}", client=f"c{client}", age=start + i / 100, prompt=prompt, text=text))
        for i, (client, prompt, text, start) in enumerate(plans)
    ]
    running: list[Writer] = []
    now, rounds_before = 0.0, 0
    for turn in itertools.count():
        assert turn < 20_000, "somebody never ends"
        for start, writer in [pair for pair in left if pair[0] <= turn]:
            left.remove((start, writer))
            room.open(writer.name, blocks * SIZE)
            running.append(writer)
        for writer in running:
            if writer.due is None:
                schedule.add(writer.next(now))
        if not running and not left:
            break
        oldest = min(running, key=lambda one: one.age).name if running else ""
        portions = schedule.round(now)
        counts = [portion.count for portion in portions]
        assert len({portion.due.session for portion in portions}) == len(portions) <= MAX_STEPS
        assert sum(count for count in counts if count > SHORT) <= ALONE
        lost = compute(room, portions)
        schedule.ran([portion for portion in portions if portion.due.session not in lost], 0.02, now)
        now += 0.02 if portions else 0.5
        if portions:
            rounds_before = 0 if oldest in ("", *sizes(portions)) else rounds_before + 1
            assert rounds_before < 40, "the oldest waits"
        for writer in list(running):
            assert writer.due is not None
            if writer.name in lost:
                schedule.remove(writer.due)
                writer.restarts += 1
                writer.cached, writer.due = 0, None
            elif writer.due.left == 0:
                writer.cached = writer.due.start + writer.due.tokens
                writer.known, writer.due = writer.cached + 1, None
                if writer.ended:
                    running.remove(writer)
                    schedule.forget(writer.name)
                    room.close(writer.name)
        room.pool.forget()
    assert room.pool.free == blocks
    assert len(schedule) == 0
    assert schedule._served == {}

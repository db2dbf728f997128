"""Schedules of stages in a row, in pretended time: no stage stands idle beside work, nobody waits long, batches stay
large where steps wait at all stages and apart where they do not."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.batching.scheduler import LINGER_SHARE, MAX_SHORT_TOKENS, MAX_STEPS, BatchScheduler, PendingStep, Portion
from swarm.engine.paged.block_tables import BlockTables
from swarm.engine.paged.blocks import BlockPool

BASE_S, EACH_S = 0.010, 0.001
"""What a stage takes for an inference, and for a token of it."""


@dataclass(frozen=True, kw_only=True)
class Writer:
    """A session over the stages from `first` on; `under_way` steps of `tokens` at a time, `away_s` from the last stage
    back to the first, a pause of `pause_s` after every tenth."""

    client: str = "one"
    first: int = 0
    under_way: int = 1
    tokens: int = 1
    away_s: float = 0.001
    pause_s: float = 0.0


class Line:
    """`writers` at `stages` stages, each with a schedule of its own."""

    def __init__(self, stages: int, writers: Sequence[Writer]) -> None:
        self.now = 0.0
        self.schedulers: list[BatchScheduler[PendingStep]] = [
            BatchScheduler(BlockTables(BlockPool(1, 32))) for _ in range(stages)
        ]
        self.writers = writers
        self.steps: Counter[int] = Counter()
        self.rounds: list[list[int]] = [[] for _ in range(stages)]
        self.passed_over: list[int] = []  # in how many rounds after each other a short step had no part
        self._at = [[deque[int]() for _ in writers] for _ in range(stages)]  # one step of a session is due at a time
        self._busy = [False] * stages
        self._free_at, self._last_s = [0.0] * stages, [0.0] * stages
        self._rounds_waited: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._chance = random.Random(3)

    def run(self, seconds: float) -> None:
        for number, writer in enumerate(self.writers):
            for _ in range(writer.under_way):
                self._later(0.0, partial(self._arrive, writer.first, number))
        while self._events[0][0] < seconds:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] == self.now:
                heapq.heappop(self._events)[2]()
            for stage in range(len(self.schedulers)):
                self._begin(stage)

    def _later(self, delay: float, act: Callable[[], None]) -> None:
        """Nothing takes exactly as long as it should: what is kept apart by that alone does not count."""
        self._at_time(self.now + delay * self._chance.uniform(0.93, 1.07), act)

    def _at_time(self, at: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), act))

    def _arrive(self, stage: int, number: int) -> None:
        waiting = self._at[stage][number]
        waiting.append(self.writers[number].tokens)
        if len(waiting) == 1:
            self._add(stage, number)

    def _add(self, stage: int, number: int) -> None:
        writer = self.writers[number]
        self.schedulers[stage].add(
            PendingStep(
                session=str(number),
                client=writer.client,
                opened_at=float(number),
                engine=None,
                start=0,
                tokens=writer.tokens,
                queued_at=self.now,
                hops=len(self.schedulers) - writer.first,
            )
        )

    def _begin(self, stage: int) -> None:
        scheduler = self.schedulers[stage]
        if self._busy[stage] or not len(scheduler):
            return
        wait = scheduler.linger_s(self.now)
        if wait > 1e-9:  # less is a matter of how numbers are rounded
            self._at_time(self.now + wait, lambda: None)
            return
        since = max(self._free_at[stage], min(step.queued_at for step in scheduler._due))
        assert self.now - since <= LINGER_SHARE * self._last_s[stage] + 1e-6, "the device stands idle beside steps"
        portions = scheduler.next_round(self.now)
        assert portions, "the device stands idle while a step could run"
        assert len(portions) <= MAX_STEPS
        self.rounds[stage].append(len(portions))
        self._busy[stage] = True
        chosen = {portion.step.session for portion in portions}
        for step in scheduler._due:
            place = stage, int(step.session)
            self._rounds_waited[place] = 0 if step.session in chosen else self._rounds_waited[place] + 1
            if step.remaining <= MAX_SHORT_TOKENS:
                self.passed_over.append(self._rounds_waited[place])
        seconds = (BASE_S + EACH_S * sum(portion.count for portion in portions)) * self._chance.uniform(0.93, 1.07)
        self._at_time(self.now + seconds, partial(self._end, stage, portions, seconds))

    def _end(self, stage: int, portions: list[Portion[PendingStep]], seconds: float) -> None:
        self._busy[stage] = False
        self._free_at[stage], self._last_s[stage] = self.now, seconds
        self.schedulers[stage].finish_round(portions, seconds, self.now)
        for portion in portions:
            if portion.step.remaining:
                continue
            number = int(portion.step.session)
            waiting, writer = self._at[stage][number], self.writers[number]
            waiting.popleft()
            if waiting:
                self._add(stage, number)
            following, delay = stage + 1, 0.0005
            if following == len(self.schedulers):
                self.steps[number] += 1
                pause = writer.pause_s if self.steps[number] % 10 == 0 else 0.0
                following, delay = writer.first, writer.away_s + pause
            self._later(delay, partial(self._arrive, following, number))


def speed(line: Line, seconds: float = 4.0) -> float:
    """Steps a second."""
    line.run(seconds)
    return line.steps.total() / seconds


@pytest.mark.parametrize("users", [2, 8, 16, 32])
def test_users_who_come_together_are_spread_over_both_stages_in_batches_that_stay_whole(users: int) -> None:
    assert speed(Line(2, [Writer()] * users)) > 0.9 * users / 2 / (BASE_S + EACH_S * users / 2)


@pytest.mark.parametrize("users", [2, 8])
def test_who_has_a_step_at_every_stage_is_in_every_batch(users: int) -> None:
    """Two windows of drafts under way over two stages: each has one at each stage. In batches of half of them they get
    0.65 of this."""
    line = Line(2, [Writer(under_way=2, tokens=4)] * users)
    assert speed(line) > 0.8 * users / (BASE_S + EACH_S * 4 * users)


def test_users_of_fewer_hops_and_far_ones_cost_the_others_no_batches() -> None:
    writers = [*[Writer()] * 8, *[Writer(first=1)] * 4, *[Writer(away_s=0.2)] * 4]
    line = Line(2, writers)
    line.run(4.0)
    near = sum(line.steps[number] for number in range(8)) / 8
    far = sum(line.steps[number] for number in range(12, 16)) / 4
    assert near > 4.0 / (4 * (BASE_S + EACH_S * 10))
    assert far > 4.0 / (0.2 + 4 * (BASE_S + EACH_S * 10))


any_writer = st.builds(
    Writer,
    client=st.sampled_from("abc"),
    first=st.integers(0, 1),
    under_way=st.integers(1, 4),
    tokens=st.sampled_from([1, 1, 1, 5, 16, 40, 130]),
    away_s=st.sampled_from([0.0, 0.001, 0.05, 0.3]),
    pause_s=st.sampled_from([0.0, 0.0, 0.7]),
)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 4), st.lists(any_writer, min_size=1, max_size=12))
def test_whoever_waits_is_served_within_a_few_rounds_and_no_stage_idles_beside_work(
    stages: int, writers: list[Writer]
) -> None:
    line = Line(stages, writers)
    line.run(1.0)
    assert max(line.passed_over, default=0) <= len(writers)
    assert all(line.steps[number] for number in range(len(writers)) if writers[number].tokens <= MAX_SHORT_TOKENS)

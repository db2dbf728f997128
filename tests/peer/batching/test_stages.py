"""Schedulers of consecutive stages, in simulated time: no stage idles while steps wait, no step waits long, batches
stay large if steps wait at all stages, and spread over the stages if not."""

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
"""Seconds of a stage for an inference, and for each of its tokens."""


@dataclass(frozen=True, kw_only=True)
class Writer:
    """A session over the stages from `first` on. It has `windows` steps of `tokens` under way; `return_s` pass from the
    last stage back to the first, and `pause_s` more after every tenth step."""

    client: str = "one"
    first: int = 0
    windows: int = 1
    tokens: int = 1
    return_s: float = 0.001
    pause_s: float = 0.0


class Pipeline:
    """`writers` at `stages` stages, each with a scheduler of its own."""

    def __init__(self, stages: int, writers: Sequence[Writer]) -> None:
        self.now = 0.0
        self.schedulers: list[BatchScheduler[PendingStep]] = [
            BatchScheduler(BlockTables(BlockPool(1, 32))) for _ in range(stages)
        ]
        self.writers = writers
        self.steps: Counter[int] = Counter()
        self.rounds: list[list[int]] = [[] for _ in range(stages)]
        self.rounds_missed: list[int] = []  # consecutive rounds that a short step was not in
        self._waiting = [[deque[int]() for _ in writers] for _ in range(stages)]  # only the first is in the scheduler
        self._busy = [False] * stages
        self._free_at, self._last_s = [0.0] * stages, [0.0] * stages
        self._rounds_waited: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._event_numbers = itertools.count()
        self._random = random.Random(3)

    def run(self, seconds: float) -> None:
        for number, writer in enumerate(self.writers):
            for _ in range(writer.windows):
                self._schedule_after(0.0, partial(self._arrive, writer.first, number))
        while self._events[0][0] < seconds:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] == self.now:
                heapq.heappop(self._events)[2]()
            for stage in range(len(self.schedulers)):
                self._start_round(stage)

    def _schedule_after(self, delay: float, action: Callable[[], None]) -> None:
        """With some jitter: sessions must not stay synchronous only because all delays are exact."""
        self._schedule_at(self.now + delay * self._random.uniform(0.93, 1.07), action)

    def _schedule_at(self, at: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._event_numbers), action))

    def _arrive(self, stage: int, number: int) -> None:
        waiting = self._waiting[stage][number]
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

    def _start_round(self, stage: int) -> None:
        scheduler = self.schedulers[stage]
        if self._busy[stage] or not len(scheduler):
            return
        wait = scheduler.linger_s(self.now)
        if wait > 1e-9:  # less is a rounding error
            self._schedule_at(self.now + wait, lambda: None)
            return
        since = max(self._free_at[stage], min(step.queued_at for step in scheduler._pending))
        assert self.now - since <= LINGER_SHARE * self._last_s[stage] + 1e-6, "the device idles while steps wait"
        portions = scheduler.next_round(self.now)
        assert portions, "the device idles while a step could run"
        assert len(portions) <= MAX_STEPS
        self.rounds[stage].append(len(portions))
        self._busy[stage] = True
        chosen = {portion.step.session for portion in portions}
        for step in scheduler._pending:
            place = stage, int(step.session)
            self._rounds_waited[place] = 0 if step.session in chosen else self._rounds_waited[place] + 1
            if step.remaining <= MAX_SHORT_TOKENS:
                self.rounds_missed.append(self._rounds_waited[place])
        seconds = (BASE_S + EACH_S * sum(portion.count for portion in portions)) * self._random.uniform(0.93, 1.07)
        self._schedule_at(self.now + seconds, partial(self._end_round, stage, portions, seconds))

    def _end_round(self, stage: int, portions: list[Portion[PendingStep]], seconds: float) -> None:
        self._busy[stage] = False
        self._free_at[stage], self._last_s[stage] = self.now, seconds
        self.schedulers[stage].finish_round(portions, seconds, self.now)
        for portion in portions:
            if portion.step.remaining:
                continue
            number = int(portion.step.session)
            waiting, writer = self._waiting[stage][number], self.writers[number]
            waiting.popleft()
            if waiting:
                self._add(stage, number)
            following, delay = stage + 1, 0.0005
            if following == len(self.schedulers):
                self.steps[number] += 1
                pause = writer.pause_s if self.steps[number] % 10 == 0 else 0.0
                following, delay = writer.first, writer.return_s + pause
            self._schedule_after(delay, partial(self._arrive, following, number))


def steps_per_second(pipeline: Pipeline, seconds: float = 4.0) -> float:
    pipeline.run(seconds)
    return pipeline.steps.total() / seconds


@pytest.mark.parametrize("users", [2, 8, 16, 32])
def test_users_who_start_together_are_spread_over_both_stages_in_batches_that_stay_whole(users: int) -> None:
    assert steps_per_second(Pipeline(2, [Writer()] * users)) > 0.9 * users / 2 / (BASE_S + EACH_S * users / 2)


@pytest.mark.parametrize("users", [2, 8])
def test_a_session_with_a_step_at_every_stage_is_in_every_batch(users: int) -> None:
    """Two windows of drafts are under way over two stages: each session has one at each stage. Batches of half the
    sessions would give 0.65 of this."""
    pipeline = Pipeline(2, [Writer(windows=2, tokens=4)] * users)
    assert steps_per_second(pipeline) > 0.8 * users / (BASE_S + EACH_S * 4 * users)


def test_users_with_fewer_hops_and_distant_ones_do_not_break_up_the_batches_of_others() -> None:
    writers = [*[Writer()] * 8, *[Writer(first=1)] * 4, *[Writer(return_s=0.2)] * 4]
    pipeline = Pipeline(2, writers)
    pipeline.run(4.0)
    near = sum(pipeline.steps[number] for number in range(8)) / 8
    far = sum(pipeline.steps[number] for number in range(12, 16)) / 4
    assert near > 4.0 / (4 * (BASE_S + EACH_S * 10))
    assert far > 4.0 / (0.2 + 4 * (BASE_S + EACH_S * 10))


random_writers = st.builds(
    Writer,
    client=st.sampled_from("abc"),
    first=st.integers(0, 1),
    windows=st.integers(1, 4),
    tokens=st.sampled_from([1, 1, 1, 5, 16, 40, 130]),
    return_s=st.sampled_from([0.0, 0.001, 0.05, 0.3]),
    pause_s=st.sampled_from([0.0, 0.0, 0.7]),
)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 4), st.lists(random_writers, min_size=1, max_size=12))
def test_a_waiting_step_runs_within_a_few_rounds_and_no_stage_idles_while_steps_wait(
    stages: int, writers: list[Writer]
) -> None:
    pipeline = Pipeline(stages, writers)
    pipeline.run(1.0)
    assert max(pipeline.rounds_missed, default=0) <= len(writers)
    assert all(pipeline.steps[number] for number in range(len(writers)) if writers[number].tokens <= MAX_SHORT_TOKENS)

"""Decides which of the waiting steps run next, and how much of each. Pure: no clock, no device, no model.

There is no prefill and no decode here, only known tokens that are not computed yet. Short steps come first, many
in one inference. The tokens of long steps in the same round are limited by how much longer they make it::

    waiting       a: 1 token    b: 2000 tokens    c: 5 tokens    d: 800 tokens
    round 1       a 1, c 5, and as many of b's as make the round at most `MAX_SLOWDOWN` times as long
    round 2       new short steps, then d: its client has been served fewer tokens than b's
    b alone       `MAX_LONG_TOKENS` tokens of b

Sessions that run together once come back together. If a stage took all waiting steps, all sessions of the swarm would
soon be in one batch, and this stage would stand idle while the next one has it. A round therefore takes at most its
fair share, in which a session over h hops counts as 1/h. That alone splits sixteen sessions over two stages into two
batches of eight, one in each stage::

    stage 1   [ 1-8 ] [ 9-16 ] [ 1-8 ] [ 9-16 ]
    stage 2           [ 1-8  ] [ 9-16] [ 1-8  ]

A session counts as 1 if its steps come back sooner than the other stages can have computed them: it has several windows
of drafts under way, and one of them is always at this stage.

A batch that breaks up, because a round begins just before its last step arrives, stays broken up, and an inference for
three sessions costs nearly as much as one for eight. If fewer short steps than the fair share wait, no long one, and
another session's step may arrive any moment, the worker therefore lingers for a tenth of the last round's time.

Sessions take blocks of KV cache as their steps need them. When no block is free, one session at a time is evicted:
first idle sessions, the longest idle first (a session whose tokens always take that long is not idle); then sessions
younger than the step's, the youngest first. Otherwise the step waits. The oldest session therefore always
advances. An evicted session's next step fails, and its client sends the known tokens again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from peer.batching.cost_model import CostModel
from peer.batching.sequence import ScheduledSequence

MAX_SHORT_TOKENS = 16
"""A step of at most this many tokens is short: the next token of a text, perhaps with drafts. All others are long."""
MAX_LONG_TOKENS = 128
"""Tokens of long steps in one round: steps that arrive during an inference wait until it ends."""
MIN_PORTION = 3
"""Tokens that a round takes at least of a long step. With one short step that makes four: the CPU plugin needs a
quarter more time for four than for one, and twice as much for five."""
MAX_SLOWDOWN = 1.3
"""How many times as long a round of short steps may take because of the long steps in it."""
MAX_STEPS = 64
IDLE_AFTER_S = 3.0
MAX_BLOCK_WAIT_S = 10.0
LINGER_SHARE = 0.1
"""How long the worker lingers for more steps, as a part of the last round's time. In simulated time (test_stages.py)
4, 8 and 16 sessions over two stages get 0.9 of the throughput of two full batches with any value between 0.1 and 0.3;
without lingering 0.7."""


class KvBlocks(Protocol):
    """The blocks of KV cache, as `swarm.engine.paged.block_tables.BlockTables` provides them."""

    @property
    def free(self) -> int: ...

    def missing_blocks(self, session: str, start: int, n: int) -> int:
        """Blocks that `n` tokens from `start` still need; 0 for an unknown session."""

    def fitting_tokens(self, session: str, start: int, *, reserved: int) -> int:
        """Tokens from `start` that fit into the free blocks when `reserved` of these are reserved for others."""

    def exclusive_blocks(self, session: str) -> int:
        """Blocks that evicting the session would free."""

    def sharing(self, sessions: Collection[str]) -> list[str]:
        """Those of the sessions that hold blocks which no session outside of `sessions` holds."""

    def evict(self, session: str) -> None: ...


@dataclass(eq=False, kw_only=True)
class PendingStep:
    """A waiting step: `tokens` from position `start`, of which `computed` are computed.

    Fairness counts tokens by `client`; `opened_at` is the session's age; all steps of a round have the same `engine`;
    `hops` is the number of stages on the session's route.
    """

    session: str
    client: Hashable
    opened_at: float
    engine: object
    start: int
    tokens: int
    queued_at: float
    hops: int = 1
    computed: int = 0
    blocked_at: float | None = None  # since when no blocks are free for it

    @property
    def remaining(self) -> int:
        return self.tokens - self.computed

    @property
    def next_position(self) -> int:
        """The position of the first token that is not computed yet."""
        return self.start + self.computed


S = TypeVar("S", bound=PendingStep)


@dataclass(frozen=True)
class Portion(Generic[S]):
    """The next `count` tokens of a step, to run in one round."""

    step: S
    count: int


class Scheduler(Protocol[S]):
    """Takes steps, gives rounds."""

    def __len__(self) -> int: ...

    def add(self, step: S) -> None: ...

    def remove(self, step: S) -> None:
        """Forget a step that failed or was dropped."""

    def clear(self) -> None:
        """Forget all steps."""

    def linger_s(self, now: float) -> float:
        """Seconds to wait for more steps before the next round."""

    def next_round(self, now: float) -> list[Portion[S]]:
        """What runs now: at most one step of each session, all of one engine. Empty if every step must wait."""

    def pop_starved(self, now: float) -> list[S]:
        """Remove and return the steps that have waited too long for blocks: their clients should use another peer."""

    def finish_round(self, portions: list[Portion[S]], seconds: float, now: float) -> None:
        """Count these portions as computed. Steps that are complete are removed, the others wait on."""

    def add_session(self, session: str, *, client: Hashable, engine: object, opened_at: float, now: float) -> None:
        """A session was opened; it may hold blocks before its first step."""

    def remove_session(self, session: str) -> None:
        """A session was closed."""


class SerialScheduler(Generic[S]):
    """First come, first served, each step whole: for an engine that runs steps one after another.

    Up to `batch` steps of different sessions make a round.
    """

    def __init__(self, batch: int = 1) -> None:
        self._batch = batch
        self._pending: list[S] = []

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, step: S) -> None:
        self._pending.append(step)

    def remove(self, step: S) -> None:
        self._pending.remove(step)

    def clear(self) -> None:
        self._pending.clear()

    def linger_s(self, now: float) -> float:
        return 0.0

    def next_round(self, now: float) -> list[Portion[S]]:
        portions: list[Portion[S]] = []
        sessions: set[str] = set()
        for step in self._pending[: self._batch]:
            if step.engine is not self._pending[0].engine or step.session in sessions:
                break  # no step overtakes another
            sessions.add(step.session)
            portions.append(Portion(step, step.remaining))
        return portions

    def finish_round(self, portions: list[Portion[S]], seconds: float, now: float) -> None:
        for portion in portions:
            portion.step.computed += portion.count
            self.remove(portion.step)

    def pop_starved(self, now: float) -> list[S]:
        return []

    def add_session(self, session: str, *, client: Hashable, engine: object, opened_at: float, now: float) -> None:
        """Sessions need no bookkeeping here."""

    def remove_session(self, session: str) -> None:
        """Sessions need no bookkeeping here."""


@dataclass
class _Plan(Generic[S]):
    """A round in the making; its portions will take `blocks` free blocks."""

    portions: list[Portion[S]] = field(default_factory=list)
    sessions: set[str] = field(default_factory=set)
    blocks: int = 0


class BatchScheduler(Generic[S]):
    """Rounds for engines that compute many sessions at once, whose caches share `kv`."""

    def __init__(self, kv: KvBlocks) -> None:
        self._kv = kv
        self._pending: list[S] = []
        self._sequences: dict[str, ScheduledSequence] = {}
        self._served_tokens: dict[Hashable, float] = {}  # tokens, by client
        self._served_floor = 0.0  # the least that a client of the last round had been served; newcomers start there
        self._cost = CostModel()
        self._last_round_s, self._last_round_end = 0.0, float("-inf")
        self._last_rounds: dict[object, int] = {}  # the number of each engine's last round
        self._round_numbers = itertools.count(1)
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, step: S) -> None:
        self._pending.append(step)
        sequence = self._sequences.get(step.session)
        if sequence is None:
            sequence = self._sequences[step.session] = ScheduledSequence(
                step.client, step.engine, step.opened_at, step.queued_at
            )
        sequence.used_at, sequence.hops = step.queued_at, step.hops
        if step.tokens <= MAX_SHORT_TOKENS:
            sequence.record_arrival(step.queued_at)
        # a client that was away does not catch up on the tokens that it might have had
        self._served_tokens[step.client] = max(self._served_tokens.get(step.client, 0.0), self._served_floor)

    def remove(self, step: S) -> None:
        self._pending.remove(step)

    def clear(self) -> None:
        self._pending.clear()

    def add_session(self, session: str, *, client: Hashable, engine: object, opened_at: float, now: float) -> None:
        self._sequences[session] = ScheduledSequence(client, engine, opened_at, now)

    def remove_session(self, session: str) -> None:
        sequence = self._sequences.pop(session, None)
        if sequence is None:
            return
        if all(other.client != sequence.client for other in self._sequences.values()):
            self._served_tokens.pop(sequence.client, None)
        if all(other.engine is not sequence.engine for other in self._sequences.values()):
            self._last_rounds.pop(sequence.engine, None)  # a reference here would keep an unused engine in memory

    def linger_s(self, now: float) -> float:
        steps = self._pending
        if not steps or any(step.remaining > MAX_SHORT_TOKENS or step.engine is not steps[0].engine for step in steps):
            return 0.0
        since = max(self._last_round_end, min(step.queued_at for step in steps))
        until = since + LINGER_SHARE * self._last_round_s
        if now >= until or len(steps) >= self._fair_share(steps, now):
            return 0.0
        waiting = {step.session for step in steps}
        others = (sequence for session, sequence in self._sequences.items() if session not in waiting)
        return until - now if any(sequence.is_expected(until) for sequence in others) else 0.0

    def next_round(self, now: float) -> list[Portion[S]]:
        engines = dict.fromkeys(step.engine for step in self._pending)
        for engine in sorted(engines, key=lambda engine: self._last_rounds.get(engine, 0)):
            if portions := self._plan_round(engine, now):
                self._last_rounds[engine] = next(self._round_numbers)
                return portions
        return []

    def _plan_round(self, engine: object, now: float) -> list[Portion[S]]:
        steps = sorted((step for step in self._pending if step.engine is engine), key=self._priority)
        plan: _Plan[S] = _Plan()
        self._add_short_steps(steps, plan, now)
        budget = self._long_budget(sum(portion.count for portion in plan.portions), steps, now)
        for step in (step for step in steps if step.remaining > MAX_SHORT_TOKENS):
            if budget <= 0 or len(plan.portions) >= MAX_STEPS:
                break
            budget -= self._add_portion(step, min(step.remaining, budget), plan, now)
        return plan.portions

    def finish_round(self, portions: list[Portion[S]], seconds: float, now: float) -> None:
        if not portions:
            return
        self._cost.observe(sum(portion.count for portion in portions), seconds)
        self._last_round_s, self._last_round_end = seconds, now
        least_served = min(self._served_tokens.get(portion.step.client, 0.0) for portion in portions)
        self._served_floor = max(self._served_floor, least_served)
        for portion in portions:
            step = portion.step
            step.computed += portion.count
            self._served_tokens[step.client] = self._served_tokens.get(step.client, 0.0) + portion.count
            sequence = self._sequences.get(step.session)
            if sequence is not None:
                sequence.used_at = now
                if step.tokens <= MAX_SHORT_TOKENS:
                    sequence.short_at, sequence.round_s = now, seconds
            if step.remaining <= 0:
                self.remove(step)

    def pop_starved(self, now: float) -> list[S]:
        starved = [s for s in self._pending if s.blocked_at is not None and now - s.blocked_at > MAX_BLOCK_WAIT_S]
        for step in starved:
            self.remove(step)
        return starved

    def _add_short_steps(self, steps: list[S], plan: _Plan[S], now: float) -> None:
        """As many as the fair share, of the least served clients first, then the longest waiting. If no block is free
        for one of them, the next takes its place."""
        short = [step for step in steps if step.remaining <= MAX_SHORT_TOKENS]
        max_steps = min(self._fair_share(short, now), MAX_STEPS - (len(short) < len(steps)))
        short.sort(key=lambda step: (self._served_tokens.get(step.client, 0.0), step.queued_at))
        while short and len(plan.portions) < max_steps:
            chosen = short[: max_steps - len(plan.portions)]
            del short[: len(chosen)]
            # the oldest session first: none takes blocks that an older one needs in this round
            for step in sorted(chosen, key=lambda step: (step.opened_at, step.queued_at)):
                self._add_portion(step, step.remaining, plan, now)

    def _fair_share(self, waiting: Iterable[S], now: float) -> int:
        """How many of the sessions that write would be at this stage if they were spread evenly over their hops."""
        here = {step.session for step in waiting}
        writing = (one for session, one in self._sequences.items() if session in here or one.is_writing(now))
        return max(1, math.ceil(sum(sequence.stage_share for sequence in writing) - 1e-9))

    def _priority(self, step: S) -> tuple[float, float, float]:
        """The least served client first, then its oldest session."""
        return self._served_tokens.get(step.client, 0.0), step.opened_at, step.queued_at

    def _long_budget(self, short_tokens: int, steps: list[S], now: float) -> int:
        """Tokens of long steps for a round with `short_tokens` tokens of short ones."""
        long = {step.session for step in steps if step.remaining > MAX_SHORT_TOKENS}
        expected = any(sequence.is_writing(now) for session, sequence in self._sequences.items() if session not in long)
        if not short_tokens and not expected:
            return MAX_LONG_TOKENS
        extra = self._cost.extra_tokens(max(short_tokens, 1), MAX_SLOWDOWN)
        return MAX_SHORT_TOKENS if extra is None else min(max(extra, MIN_PORTION), MAX_LONG_TOKENS)

    def _add_portion(self, step: S, count: int, plan: _Plan[S], now: float) -> int:
        """Add up to `count` tokens of `step` to the plan, as many as there are blocks for; returns how many."""
        if step.session in plan.sessions:
            return 0
        kv, reserved = self._kv, plan.blocks + self._blocks_for_older(step)
        while (missing_blocks := kv.missing_blocks(step.session, step.next_position, count)) > kv.free - reserved:
            victim = self._choose_victim(step, plan.sessions, now)
            if victim is None:
                break
            kv.evict(victim)
            self.evictions += 1
        if missing_blocks > kv.free - reserved:
            count = min(count, kv.fitting_tokens(step.session, step.next_position, reserved=reserved))
            if count < min(step.remaining, MIN_PORTION):
                step.blocked_at = now if step.blocked_at is None else step.blocked_at
                return 0
        step.blocked_at = None
        plan.portions.append(Portion(step, count))
        plan.sessions.add(step.session)
        plan.blocks += kv.missing_blocks(step.session, step.next_position, count)
        return count

    def _blocks_for_older(self, step: S) -> int:
        """Free blocks that a session without any leaves to older ones, one for each: they need one soon, and would
        evict the newcomer at once."""
        if self._kv.exclusive_blocks(step.session):
            return 0
        return sum(
            sequence.opened_at < step.opened_at and self._kv.exclusive_blocks(session) > 0
            for session, sequence in self._sequences.items()
        )

    def _choose_victim(self, step: S, running: set[str], now: float) -> str | None:
        """The session to evict for `step`; None if none may be."""
        waiting = {pending.session for pending in self._pending}
        others = [(name, one) for name, one in self._sequences.items() if name != step.session and name not in running]
        idle = [
            (sequence.used_at, session)
            for session, sequence in others
            if session not in waiting and now - sequence.used_at > IDLE_AFTER_S and not sequence.is_writing(now)
        ]
        if candidates := [one for one in idle if self._kv.exclusive_blocks(one[1])]:
            return min(candidates)[1]
        younger = [(sequence.opened_at, session) for session, sequence in others if sequence.opened_at > step.opened_at]
        if candidates := [one for one in younger if self._kv.exclusive_blocks(one[1])]:
            return max(candidates)[1]
        # evicting one holder of a shared prefix frees nothing; evicting all of them does
        sharing = self._kv.sharing({session for _, session in (*idle, *younger)})
        return max(sharing, key=lambda session: self._sequences[session].opened_at, default=None)

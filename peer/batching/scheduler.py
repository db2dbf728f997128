"""Which of the steps that wait run next, and how much of each. Pure: no clock, no device, no model.

There is no prefill and no decode here, only known tokens that are not computed yet. Short steps come first, many
in one inference; what a long one gets beside them is bounded by how much longer they may take for it::

    waiting       a: 1 token    b: 2000 tokens    c: 5 tokens    d: 800 tokens
    round 1       a 1, c 5, and as many of b's as make the round no more than `STRETCH` times as long
    round 2       ... what has arrived meanwhile, and more of d's: its client had less so far
    nobody else   `ALONE` tokens of b

Sessions that once ran together come back together, so a stage that took all that wait would soon have all sessions of
the swarm in one batch, and stand idle while the next stage has it. A round therefore takes no more of them than are due
to it, if all stages work: a session over h hops counts as 1/h. Sixteen sessions over two stages fall into two batches
of eight by that alone, one in each stage::

    stage 1   [ 1-8 ] [ 9-16 ] [ 1-8 ] [ 9-16 ]
    stage 2           [ 1-8  ] [ 9-16] [ 1-8  ]

Batches fall to pieces where a round begins just before the last of them has come, and stay so: an inference for three
costs nearly as much as one for eight. So where fewer short steps than those wait, nothing else does, and somebody may
be back any moment, a round waits for more, a tenth of what the last one took.

A session whose steps come back sooner than the other stages can have taken (windows of drafts, several under way at
once) is never away, and counts as 1.

A session's blocks are taken as its steps need them. Where none are left, sessions that pause (not those whose every
token takes so long) lose theirs, the one that paused longest first; then younger sessions do, the youngest first; then
the step waits. So the oldest always gets on, whoever else is there. Who lost its blocks is told at its next step, and
feeds its tokens again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from peer.batching.cost_model import CostModel
from peer.batching.sequence import ScheduledSequence

SHORT = 16
"""Tokens up to which a step is taken for a token of a text that is being written (or a few drafts of it)."""
ALONE = 128
"""Tokens of one inference where no short step waits or is about to come: what comes meanwhile waits for it."""
MIN_PORTION = 3
"""Tokens of a prompt that a round takes at least. Beside one short step these are four: the CPU plugin takes four
for a quarter more than one, and five for twice as much."""
STRETCH = 1.3
MAX_STEPS = 64
PAUSE_S = 3.0
PATIENCE_S = 10.0
LINGER = 0.1
"""The part of the last round's time for which a device waits for those who are about to come. In pretended time
(tests/peer/batching/test_stages.py) 4, 8 and 16 sessions over two stages get 0.9 of what two full batches would,
anywhere between 0.1 and 0.3; without it 0.7.
"""


class KvRoom(Protocol):
    """The blocks of KV cache, as `swarm.engine.paged.block_tables.BlockTables` has them."""

    @property
    def free(self) -> int: ...

    def missing(self, session: str, start: int, n: int) -> int:
        """Blocks to be taken for `n` tokens from `start`; 0 where there is no such session."""

    def fitting(self, session: str, start: int, *, beside: int) -> int:
        """Tokens from `start` for which there are blocks when `beside` of those that are free are somebody else's."""

    def held(self, session: str) -> int:
        """Blocks that would be free if the session lost its cache."""

    def sharing(self, sessions: Collection[str]) -> list[str]:
        """Those of the sessions that hold blocks which nobody but these sessions holds."""

    def evict(self, session: str) -> None: ...


@dataclass(eq=False, kw_only=True)
class PendingStep:
    """A step that waits: `tokens` from `start`, of which `done` are computed.

    `client` is who must not crowd out others, `opened_at` the session's age, `engine` what runs it: one a round,
    `hops` how many stages the session goes through.
    """

    session: str
    client: Hashable
    opened_at: float
    engine: object
    start: int
    tokens: int
    put_at: float
    hops: int = 1
    done: int = 0
    blocked_at: float | None = None  # since when there have been no blocks for it

    @property
    def left(self) -> int:
        return self.tokens - self.done

    @property
    def next(self) -> int:
        """The position of the first token that is not computed yet."""
        return self.start + self.done


D = TypeVar("D", bound=PendingStep)


@dataclass(frozen=True)
class Portion(Generic[D]):
    """`count` tokens of a step, in the next inference."""

    due: D
    count: int


class Scheduler(Protocol[D]):
    """Steps in, rounds out."""

    def __len__(self) -> int: ...

    def add(self, due: D) -> None: ...

    def remove(self, due: D) -> None:
        """It is over, or nobody wants it any more."""

    def clear(self) -> None:
        """Nobody waits any more."""

    def worth_waiting(self, now: float) -> float:
        """Seconds to wait for more steps before the next round."""

    def round(self, now: float) -> list[Portion[D]]:
        """What runs now, at most one step of a session, all of one engine; nothing where all must wait."""

    def hopeless(self, now: float) -> list[D]:
        """Steps that have waited for blocks too long, removed: their clients had better go elsewhere."""

    def ran(self, portions: list[Portion[D]], seconds: float, now: float) -> None:
        """A round has run. What it finished is removed, the rest waits on."""

    def opened(self, session: str, *, client: Hashable, engine: object, opened_at: float, now: float) -> None:
        """The session is there, and may hold blocks before its first step comes."""

    def forget(self, session: str) -> None:
        """The session is closed."""


class SerialScheduler(Generic[D]):
    """First come, first served, each step whole: for an engine that runs steps one after another.

    `batch` steps of different sessions make a round.
    """

    def __init__(self, batch: int = 1) -> None:
        self._batch = batch
        self._due: list[D] = []

    def __len__(self) -> int:
        return len(self._due)

    def add(self, due: D) -> None:
        self._due.append(due)

    def remove(self, due: D) -> None:
        self._due.remove(due)

    def clear(self) -> None:
        self._due.clear()

    def worth_waiting(self, now: float) -> float:
        return 0.0

    def round(self, now: float) -> list[Portion[D]]:
        together: list[Portion[D]] = []
        sessions: set[str] = set()
        for due in self._due[: self._batch]:
            if due.engine is not self._due[0].engine or due.session in sessions:
                break  # nothing overtakes
            sessions.add(due.session)
            together.append(Portion(due, due.left))
        return together

    def ran(self, portions: list[Portion[D]], seconds: float, now: float) -> None:
        for portion in portions:
            portion.due.done += portion.count
            self.remove(portion.due)

    def hopeless(self, now: float) -> list[D]:
        return []

    def opened(self, session: str, *, client: Hashable, engine: object, opened_at: float, now: float) -> None:
        """Nothing is known of sessions here."""

    def forget(self, session: str) -> None:
        """Nothing is known of sessions here."""


@dataclass
class _Plan(Generic[D]):
    """A round in the making; `blocks` are those that it is going to take."""

    portions: list[Portion[D]] = field(default_factory=list)
    sessions: set[str] = field(default_factory=set)
    blocks: int = 0


class BatchScheduler(Generic[D]):
    """Rounds for an engine that computes many sessions at once, whose caches share `room`."""

    def __init__(self, room: KvRoom) -> None:
        self._room = room
        self._due: list[D] = []
        self._sequences: dict[str, ScheduledSequence] = {}
        self._served: dict[Hashable, float] = {}  # tokens, by client
        self._level = 0.0  # what the least served client of the last round had: who comes is given no less
        self._cost = CostModel()
        self._last_s, self._last_at = 0.0, float("-inf")  # how long the last round took, and its end
        self._turns: dict[object, int] = {}  # the last round of each engine
        self._counter = itertools.count(1)
        self.preempted = 0

    def __len__(self) -> int:
        return len(self._due)

    def add(self, due: D) -> None:
        self._due.append(due)
        sequence = self._sequences.get(due.session)
        if sequence is None:
            sequence = self._sequences[due.session] = ScheduledSequence(
                due.client, due.engine, due.opened_at, due.put_at
            )
        sequence.used_at, sequence.hops = due.put_at, due.hops
        if due.tokens <= SHORT:
            sequence.back(due.put_at)
        # who was away has no claim to what it might have had
        self._served[due.client] = max(self._served.get(due.client, 0.0), self._level)

    def remove(self, due: D) -> None:
        self._due.remove(due)

    def clear(self) -> None:
        self._due.clear()

    def opened(self, session: str, *, client: Hashable, engine: object, opened_at: float, now: float) -> None:
        self._sequences[session] = ScheduledSequence(client, engine, opened_at, now)

    def forget(self, session: str) -> None:
        sequence = self._sequences.pop(session, None)
        if sequence is None:
            return
        if all(other.client != sequence.client for other in self._sequences.values()):
            self._served.pop(sequence.client, None)
        if all(other.engine is not sequence.engine for other in self._sequences.values()):
            self._turns.pop(sequence.engine, None)  # it may be given up, and must not be held here

    def worth_waiting(self, now: float) -> float:
        due = self._due
        if not due or any(one.left > SHORT or one.engine is not due[0].engine for one in due):
            return 0.0
        since = max(self._last_at, min(one.put_at for one in due))
        until = since + LINGER * self._last_s
        if now >= until or len(due) >= self._due_to_a_round(due, now):
            return 0.0
        here = {one.session for one in due}
        others = (sequence for session, sequence in self._sequences.items() if session not in here)
        return until - now if any(sequence.is_nearly_back(until) for sequence in others) else 0.0

    def round(self, now: float) -> list[Portion[D]]:
        engines = dict.fromkeys(one.engine for one in self._due)
        for engine in sorted(engines, key=lambda each: self._turns.get(each, 0)):
            if portions := self._round_of(engine, now):
                self._turns[engine] = next(self._counter)
                return portions
        return []

    def _round_of(self, engine: object, now: float) -> list[Portion[D]]:
        due = sorted((d for d in self._due if d.engine is engine), key=self._rank)
        plan: _Plan[D] = _Plan()
        self._place_short(due, plan, now)
        left = self._beside(sum(portion.count for portion in plan.portions), due, now)
        for one in (d for d in due if d.left > SHORT):
            if left <= 0 or len(plan.portions) >= MAX_STEPS:
                break
            left -= self._place(one, min(one.left, left), plan, now)
        return plan.portions

    def ran(self, portions: list[Portion[D]], seconds: float, now: float) -> None:
        if not portions:
            return
        self._cost.observe(sum(portion.count for portion in portions), seconds)
        self._last_s, self._last_at = seconds, now
        self._level = max(self._level, min(self._served.get(portion.due.client, 0.0) for portion in portions))
        for portion in portions:
            due = portion.due
            due.done += portion.count
            self._served[due.client] = self._served.get(due.client, 0.0) + portion.count
            sequence = self._sequences.get(due.session)
            if sequence is not None:
                sequence.used_at = now
                if due.tokens <= SHORT:
                    sequence.short_at, sequence.round_s = now, seconds
            if due.left <= 0:
                self.remove(due)

    def hopeless(self, now: float) -> list[D]:
        gone = [due for due in self._due if due.blocked_at is not None and now - due.blocked_at > PATIENCE_S]
        for due in gone:
            self.remove(due)
        return gone

    def _place_short(self, due: list[D], plan: _Plan[D], now: float) -> None:
        """As many as are due to a round; among clients who had least so far, then who waits longest. Where there are no
        blocks for one, the next has its place."""
        waiting = [one for one in due if one.left <= SHORT]
        most = min(self._due_to_a_round(waiting, now), MAX_STEPS - (len(waiting) < len(due)))
        waiting.sort(key=lambda one: (self._served.get(one.client, 0.0), one.put_at))
        while waiting and len(plan.portions) < most:
            chosen = waiting[: most - len(plan.portions)]
            del waiting[: len(chosen)]
            # blocks are given by age: nobody younger takes what an older one needs in this round
            for one in sorted(chosen, key=lambda one: (one.opened_at, one.put_at)):
                self._place(one, one.left, plan, now)

    def _due_to_a_round(self, waiting: Iterable[D], now: float) -> int:
        """How many of the sessions that write would be at this stage if they were spread evenly over their hops."""
        here = {one.session for one in waiting}
        writing = (sequence for session, sequence in self._sequences.items() if session in here or sequence.writes(now))
        return max(1, math.ceil(sum(sequence.share for sequence in writing) - 1e-9))

    def _rank(self, due: D) -> tuple[float, float, float]:
        """Among clients who had least so far; among sessions of one the oldest."""
        return self._served.get(due.client, 0.0), due.opened_at, due.put_at

    def _beside(self, short: int, due: list[D], now: float) -> int:
        """Tokens of long steps for a round with `short` tokens of short ones."""
        long = {one.session for one in due if one.left > SHORT}
        expected = any(sequence.writes(now) for session, sequence in self._sequences.items() if session not in long)
        if not short and not expected:
            return ALONE
        beside = self._cost.beside(max(short, 1), STRETCH)
        return SHORT if beside is None else min(max(beside, MIN_PORTION), ALONE)

    def _place(self, due: D, count: int, plan: _Plan[D], now: float) -> int:
        """Put up to `count` tokens of `due`, for which there are blocks, into the plan; how many."""
        if due.session in plan.sessions:
            return 0
        room, spoken_for = self._room, plan.blocks + self._kept_back(due)
        while (missing := room.missing(due.session, due.next, count)) > room.free - spoken_for:
            victim = self._victim(due, plan.sessions, now)
            if victim is None:
                break
            room.evict(victim)
            self.preempted += 1
        if missing > room.free - spoken_for:
            count = min(count, room.fitting(due.session, due.next, beside=spoken_for))
            if count < min(due.left, MIN_PORTION):
                due.blocked_at = now if due.blocked_at is None else due.blocked_at
                return 0
        due.blocked_at = None
        plan.portions.append(Portion(due, count))
        plan.sessions.add(due.session)
        plan.blocks += room.missing(due.session, due.next, count)
        return count

    def _kept_back(self, due: D) -> int:
        """Blocks that a session which begins leaves to older ones, each of which soon needs one: what it took
        else would be taken from it again at once."""
        if self._room.held(due.session):
            return 0
        return sum(
            sequence.opened_at < due.opened_at and self._room.held(session) > 0
            for session, sequence in self._sequences.items()
        )

    def _victim(self, due: D, running: set[str], now: float) -> str | None:
        """Whose blocks `due` may have."""
        waiting = {one.session for one in self._due}
        others = [(name, one) for name, one in self._sequences.items() if name != due.session and name not in running]
        paused = [
            (sequence.used_at, session)
            for session, sequence in others
            if session not in waiting and now - sequence.used_at > PAUSE_S and not sequence.writes(now)
        ]
        if giving := [one for one in paused if self._room.held(one[1])]:
            return min(giving)[1]
        younger = [(sequence.opened_at, session) for session, sequence in others if sequence.opened_at > due.opened_at]
        if giving := [one for one in younger if self._room.held(one[1])]:
            return max(giving)[1]
        # a prefix that several of them hold is given by none alone
        sharing = self._room.sharing({session for _, session in (*paused, *younger)})
        return max(sharing, key=lambda session: self._sequences[session].opened_at, default=None)

"""The table of a peer's sessions: how much KV cache each reserves, and which connections may send its steps.

::

    event                            before  after   effect
    ───────────────────────────────  ──────  ──────  ──────────────────────────────────────────────────
    admit, new name                  —       open    max_tokens are reserved, or PeerBusy
    admit, by its opener             open    open    next epoch: cache and steps are forgotten, the
                                                     reservation is kept or changed, none is attached
    admit, by another connection     open    open    PeerBusy
    attach with the secret           open    open    that connection too may send steps
    enqueue a step                   open    open    the step waits; the waiting steps that it makes void
                                                     are dropped. Of an earlier epoch: it is dropped itself
    close by its opener, expiry,
    end of the opener's connection   open    —       everything is given back, exactly once
    end of an attached connection    open    open    none is attached

A waiting step is *void* once a later step of its session starts at its start or before it: the later step forgets what
it would cache, and its client no longer wants its answer. Chunks of a prompt and windows of drafts follow each other,
so none of them is void until a draft was wrong.

A session *reserves* its `max_tokens` if its cache cannot be evicted. If it can (`limits.reserves` is False), that would
leave most of the memory unused, for few texts become as long as they may. Such a session reserves the share of its
`max_tokens` that sessions used lately, plus a quarter, and at least its cached tokens and one block. While it is paused
(without a step for half a minute) it reserves nothing, for others may evict it. If sessions need more than that after
all, the scheduler evicts the youngest (`peer/batching/scheduler.py`). All of them stay open.

No I/O, and the clock is a parameter. A *connection* is any hashable that identifies one.
"""

from __future__ import annotations

import hmac
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from peer.config import SessionLimits
from swarm.errors import BadStep, ContextExceeded, PeerBusy, UnknownSession
from swarm.model.spans import LayerRange
from swarm.wire.messages import Attach, Forward, OpenSession

_MIN_RETRY_S = 1.0
_INITIAL_LIFETIME_S = 30.0
_INITIAL_USED_SHARE = 0.4
_AVERAGE_WEIGHT = 0.1
_SHARE_MARGIN = 1.25
_BLOCK_TOKENS = 32
_PAUSED_AFTER_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A waiting step, and when it arrived (the table's clock)."""

    forward: Forward
    at: float

    @property
    def nbytes(self) -> int:
        hidden = self.forward.hidden
        return self.forward.tokens.nbytes + (hidden.nbytes if hidden is not None else 0)


@dataclass(eq=False, kw_only=True)
class Session:
    """One client's KV cache over `span` on this peer, one of the `hops` of its route.

    `history` [max_tokens] int32 holds the ids of the `length` cached positions. `received`, `computed` and `sent` (to
    the next hop, or as an answer) count the steps of this epoch; failed and void steps count as computed.
    """

    name: str
    opener: Hashable
    secret: bytes = field(repr=False)
    epoch: int
    span: LayerRange
    max_tokens: int
    dtype: str
    hops: int
    opened_at: float
    used_at: float
    history: NDArray[np.int32]
    attached: Hashable | None = None
    length: int = 0
    received: int = 0
    computed: int = 0
    sent: int = 0
    queue: deque[Arrival] = field(default_factory=deque)
    queued_bytes: int = 0
    running: bool = False

    def write_history(self, forward: Forward) -> None:
        """Write the step's ids over those from `start` on."""
        self.history[forward.start : forward.start + len(forward.tokens)] = forward.tokens


class SessionTable:
    """Every change of a session happens here; the caller acts on the result."""

    def __init__(self, limits: SessionLimits, *, context_length: int, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._context_length = context_length
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._per_connection: Counter[Hashable] = Counter()
        self._used_share = _INITIAL_USED_SHARE
        self._lifetime_s = _INITIAL_LIFETIME_S
        self._queued_bytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: object) -> bool:
        return isinstance(session, Session) and self._sessions.get(session.name) is session

    @property
    def kv_total(self) -> int:
        return self._limits.kv_total

    @property
    def kv_free(self) -> int:
        """Tokens that no session reserves."""
        return max(0, self._limits.kv_total - sum(map(self._reserved, self._sessions.values())))

    @property
    def max_admissible(self) -> int:
        """The largest `max_tokens` with which a session would be admitted now."""
        free, share = self.kv_free, self._used_share * _SHARE_MARGIN
        if self._limits.reserves or share >= 1 or free < _BLOCK_TOKENS:
            return free
        return self.kv_total if free >= self.kv_total * share else int(free / share)

    @property
    def steps(self) -> int:
        """Steps that wait or run, over all sessions."""
        return sum(len(session.queue) + session.running for session in self._sessions.values())

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    def sessions(self) -> list[Session]:
        return list(self._sessions.values())

    def openers(self) -> set[Hashable]:
        return {session.opener for session in self._sessions.values()}

    def has_session(self, connection: Hashable) -> bool:
        """Whether it is the opener of a session, or attached to one."""
        return connection in self._per_connection or any(s.attached == connection for s in self._sessions.values())

    # -- opening and closing

    def admit(self, connection: Hashable, message: OpenSession) -> Session:
        """Reserve cache for a session, or start its next epoch.

        Raises PeerBusy (with `retry_after`) if too little is free now, ContextExceeded if it never will be enough,
        BadStep if the epoch does not follow.
        """
        if message.max_tokens < 1:
            raise BadStep(f"session {message.session} asks for {message.max_tokens} tokens; ask for at least 1")
        limit = min(self._context_length, self._limits.kv_total)
        if message.max_tokens > limit:
            raise ContextExceeded(f"{message.max_tokens} tokens are more than the {limit} that a session can have here")
        known = self._sessions.get(message.session)
        if known is None:
            self._check_admission(connection, message.max_tokens)
        elif known.opener != connection:
            raise PeerBusy(
                f"session {message.session} is open on another connection; close that one, or take another name",
                retry_after=_MIN_RETRY_S,
            )
        elif message.epoch <= known.epoch:
            raise BadStep(
                f"session {message.session} is in epoch {known.epoch}; epoch {message.epoch} does not follow it"
            )
        else:
            # Its own reservation counts as free, even if it is paused: a session that was admitted stays admitted.
            self._check_budget(message.max_tokens, self._reservation(known.max_tokens, known.length))
            self._remove(known)
        return self._add(connection, message, opened_at=self._clock() if known is None else known.opened_at)

    def close(self, connection: Hashable, name: str) -> Session | None:
        """Forget the session if `connection` opened it; otherwise None, and nothing happens."""
        session = self._sessions.get(name)
        if session is None or session.opener != connection:
            return None
        self.drop(session)
        return session

    def drop(self, session: Session) -> bool:
        """Forget a session; False if it is not in the table any more."""
        if session not in self:
            return False
        self._remove(session)
        lived_s = max(0.0, self._clock() - session.opened_at)
        self._lifetime_s += _AVERAGE_WEIGHT * (lived_s - self._lifetime_s)
        self._used_share += _AVERAGE_WEIGHT * (session.length / session.max_tokens - self._used_share)
        return True

    def drop_connection(self, connection: Hashable) -> list[Session]:
        """Forget a connection that ended: its sessions are dropped and returned, its attachments end."""
        dropped = [session for session in self._sessions.values() if session.opener == connection]
        for session in dropped:
            self.drop(session)
        for session in self._sessions.values():
            if session.attached == connection:
                session.attached = None
        return dropped

    def expire(self) -> list[Session]:
        """Drop and return the sessions that have been idle for longer than the limit."""
        now, idle_s = self._clock(), self._limits.idle_s
        idle = [session for session in self._sessions.values() if self._idle_at(session, idle_s) <= now]
        for session in idle:
            self.drop(session)
        return idle

    # -- steps

    def find(self, name: str, *, epoch: int | None = None, opener: Hashable | None = None) -> Session:
        """Raises UnknownSession, also for a session of another opener: it is not revealed that it exists."""
        session = self._sessions.get(name)
        if session is None or (opener is not None and session.opener != opener):
            raise UnknownSession(f"session {name} is not open here: open it again and feed the known tokens")
        if epoch is not None and session.epoch != epoch:
            raise UnknownSession(f"session {name} is in epoch {session.epoch} here, not in {epoch}: open it again")
        return session

    def attach(self, connection: Hashable, message: Attach) -> Session:
        """Let `connection` send the session's steps, instead of the one attached before. Raises UnknownSession."""
        session = self._sessions.get(message.session)
        # compared for unknown sessions too: the time taken must not reveal which sessions exist
        expected = session.secret if session is not None else bytes(16)
        if not hmac.compare_digest(expected, message.secret) or session is None:
            raise UnknownSession(f"session {message.session} is not open here under this secret: open it again")
        self.find(message.session, epoch=message.epoch)
        session.attached = connection
        session.used_at = self._clock()
        return session

    def enqueue(self, connection: Hashable, forward: Forward) -> Session | None:
        """Queue a step; None if it belongs to an earlier epoch and was dropped.

        Raises UnknownSession (no such session for this connection), BadStep or PeerBusy (too many steps wait).
        """
        session = self._sessions.get(forward.session)
        if session is None or connection not in (session.opener, session.attached):
            raise UnknownSession(f"session {forward.session} is not open here: open it again and feed the known tokens")
        if forward.epoch < session.epoch:
            return None
        self.find(forward.session, epoch=forward.epoch)
        self._drop_void(session, forward)
        arrival = Arrival(forward=forward, at=self._clock())
        self._check_queue(session, arrival)
        session.queue.append(arrival)
        session.queued_bytes += arrival.nbytes
        self._queued_bytes += arrival.nbytes
        session.received += 1
        session.used_at = arrival.at
        return session

    def start_next(self, session: Session) -> Arrival | None:
        """Take the session's next step out of its queue: it runs from now on. None if none waits."""
        if session not in self or not session.queue:
            return None
        arrival = session.queue.popleft()
        self._unqueue(session, arrival)
        session.running = True
        return arrival

    def is_void(self, session: Session, forward: Forward) -> bool:
        """Whether the next waiting step makes `forward`, which was just computed, void."""
        return bool(session.queue) and session.queue[0].forward.start <= forward.start

    def finish(self, session: Session, *, length: int | None) -> None:
        """The running step is over; `length` positions are cached now, None if it failed."""
        session.running = False
        session.computed += 1
        session.used_at = self._clock()
        if length is not None:
            session.length = length

    # -- decisions

    def _check_queue(self, session: Session, arrival: Arrival) -> None:
        limits = self._limits
        if session.queue and (
            len(session.queue) >= limits.queue_steps or session.queued_bytes + arrival.nbytes > limits.queue_bytes
        ):
            raise BadStep(
                f"{len(session.queue)} steps of session {session.name} wait already; "
                f"send at most {limits.queue_steps} ahead"
            )
        if self._queued_bytes and self._queued_bytes + arrival.nbytes > limits.all_queue_bytes:
            raise PeerBusy("too many steps wait on this peer; send again later", retry_after=_MIN_RETRY_S)

    def _check_admission(self, connection: Hashable, tokens: int) -> None:
        limits = self._limits
        if len(self._sessions) >= limits.sessions:
            raise PeerBusy(
                f"all {limits.sessions} sessions of this peer are taken; try again later, or another peer",
                retry_after=self._retry_after(1),
            )
        if self._per_connection[connection] >= limits.per_connection:
            raise PeerBusy(
                f"this connection has its {limits.per_connection} sessions open; close one first",
                retry_after=_MIN_RETRY_S,
            )
        self._check_budget(tokens, 0)

    def _check_budget(self, max_tokens: int, already_reserved: int) -> None:
        tokens, free = self._reservation(max_tokens), self.kv_free + already_reserved
        if tokens > free:
            wait_s = self._retry_after(tokens)
            raise PeerBusy(
                f"{tokens} tokens of KV cache were asked for and {free} are free; "
                f"room is expected in {wait_s:.0f} s, or on another peer now",
                retry_after=wait_s,
            )

    def _reserved(self, session: Session) -> int:
        paused = not self._limits.reserves and self._idle_at(session, _PAUSED_AFTER_S) <= self._clock()
        return 0 if paused else self._reservation(session.max_tokens, session.length)

    def _reservation(self, max_tokens: int, length: int = 0) -> int:
        """Tokens that a session of `max_tokens` with `length` cached ones reserves, if it is not paused."""
        if self._limits.reserves:
            return max_tokens
        return min(max_tokens, max(length + _BLOCK_TOKENS, int(max_tokens * self._used_share * _SHARE_MARGIN)))

    def _retry_after(self, tokens: int) -> float:
        """Seconds until `tokens` are expected to be free, from how long sessions lived and when idle ones expire."""
        now, free = self._clock(), self.kv_free
        ends = sorted((self._expected_end(session), self._reserved(session)) for session in self._sessions.values())
        for end, reserved in ends:
            free += reserved
            if free >= tokens:
                return max(_MIN_RETRY_S, end - now)
        return _MIN_RETRY_S

    def _expected_end(self, session: Session) -> float:
        idle_s = self._limits.idle_s if self._limits.reserves else min(_PAUSED_AFTER_S, self._limits.idle_s)
        return min(session.opened_at + self._lifetime_s, session.used_at + idle_s)

    def _idle_at(self, session: Session, seconds: float) -> float:
        """When it will have been idle for `seconds`; infinity while it has a step."""
        busy = session.running or session.queue
        return float("inf") if busy else session.used_at + seconds

    # -- bookkeeping

    def _add(self, connection: Hashable, message: OpenSession, *, opened_at: float) -> Session:
        session = Session(
            name=message.session,
            opener=connection,
            secret=message.secret,
            epoch=message.epoch,
            span=LayerRange(message.first, message.last),
            max_tokens=message.max_tokens,
            dtype=message.dtype,
            hops=message.hops,
            opened_at=opened_at,
            used_at=self._clock(),
            history=np.zeros(message.max_tokens, np.int32),
        )
        self._sessions[session.name] = session
        self._per_connection[connection] += 1
        return session

    def _drop_void(self, session: Session, forward: Forward) -> None:
        # starts ascend within a queue, so the void steps are at its end
        while session.queue and session.queue[-1].forward.start >= forward.start:
            self._unqueue(session, session.queue.pop())
            session.computed += 1

    def _unqueue(self, session: Session, arrival: Arrival) -> None:
        session.queued_bytes -= arrival.nbytes
        self._queued_bytes -= arrival.nbytes

    def _remove(self, session: Session) -> None:
        del self._sessions[session.name]
        self._per_connection[session.opener] -= 1
        if not self._per_connection[session.opener]:
            del self._per_connection[session.opener]
        self._queued_bytes -= session.queued_bytes
        session.queue.clear()
        session.queued_bytes = 0

"""The table of a peer's sessions: who holds how much KV cache, and whose steps are taken.

::

    event                       before        after     effect
    ──────────────────────────  ────────────  ────────  ─────────────────────────────────────────────
    admit, new name             —             open      reserves max_tokens, or PeerBusy
    admit, by its opener        open          open      next epoch: cache and steps forgotten, the
                                                        reservation kept or changed, nobody attached
    admit, by anybody else      open          open      PeerBusy
    attach with the secret      open          open      that connection too may bring steps
    accept a step               open          open      queued; an earlier epoch's is dropped, and so are
                                                        the steps that wait and that it makes void
    close by its opener, expiry,
    loss of the opener          open          —         everything given back, exactly once
    loss of who is attached     open          open      nobody attached

A step is *void* once a later one of its session starts where it starts, or before: whatever it would cache is
forgotten by that one, and by sending it the client has said that it wants the answer no more. Chunks of a prompt and
windows of drafts follow each other, so none of them is void until a draft was wrong.

What a session *reserves* is its `max_tokens` where its cache cannot be taken from it. Where it can (`limits.reserves`
is False), that would leave most of the memory unused, for few texts end where they might: it is the share of that which
sessions took lately, with a quarter added, and at least what it has and a block more; nothing once it has paused for
half a minute, as whoever comes may have its blocks. Should they all need more than that after all, the youngest are
told to begin again (`schedule`); nobody is turned out.

No I/O and no clock of its own. A *connection* is any hashable that stands for one.
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

_SOONEST_RETRY_S = 1.0
_TYPICAL_S = 30.0
_LIFETIME_WEIGHT = 0.1
_TYPICAL_SHARE = 0.4
_MARGIN = 1.25
_NEXT_BLOCK = 32
_PAUSE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A step that waits, and when it came (the table's clock)."""

    forward: Forward
    at: float

    @property
    def nbytes(self) -> int:
        hidden = self.forward.hidden
        return self.forward.tokens.nbytes + (hidden.nbytes if hidden is not None else 0)


@dataclass(eq=False, kw_only=True)
class Session:
    """One client's KV cache over `span` on this peer, one of the `hops` of its route.

    `history` [max_tokens] int32 holds the ids of the `length` positions that are cached. `received`, `computed` and
    `sent` (onward, or as an answer) count the steps of this epoch; one that failed or was void counts as computed.
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
    touched_at: float
    history: NDArray[np.int32]
    attached: Hashable | None = None
    length: int = 0
    received: int = 0
    computed: int = 0
    sent: int = 0
    waiting: deque[Arrival] = field(default_factory=deque)
    waiting_bytes: int = 0
    running: bool = False

    def remember(self, forward: Forward) -> NDArray[np.int32]:
        """Write the step's ids over what was known from `start` on; all ids up to its end, a view."""
        end = forward.start + len(forward.tokens)
        self.history[forward.start : end] = forward.tokens
        return self.history[:end]


class SessionTable:
    """Every change of a session happens here; the caller acts on what it returns."""

    def __init__(self, limits: SessionLimits, *, context_length: int, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._context_length = context_length
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._per_connection: Counter[Hashable] = Counter()
        self._share_taken = _TYPICAL_SHARE
        self._queued_bytes = 0
        self._lifetime_s = _TYPICAL_S

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: object) -> bool:
        return isinstance(session, Session) and self._sessions.get(session.name) is session

    @property
    def kv_total(self) -> int:
        return self._limits.kv_total

    @property
    def kv_free(self) -> int:
        """Tokens that no session has reserved."""
        return max(0, self._limits.kv_total - sum(map(self._reserved, self._sessions.values())))

    @property
    def longest(self) -> int:
        """Tokens that the longest session may ask for which would be let in now."""
        free, share = self.kv_free, self._share_taken * _MARGIN
        if self._limits.reserves or share >= 1 or free < _NEXT_BLOCK:
            return free
        return self.kv_total if free >= self.kv_total * share else int(free / share)

    @property
    def waiting(self) -> int:
        """Steps that wait or run, over all sessions."""
        return sum(len(session.waiting) + session.running for session in self._sessions.values())

    @property
    def waiting_bytes(self) -> int:
        return self._queued_bytes

    def sessions(self) -> list[Session]:
        return list(self._sessions.values())

    def openers(self) -> set[Hashable]:
        return {session.opener for session in self._sessions.values()}

    def knows(self, connection: Hashable) -> bool:
        """It is the opener of a session, or attached to one."""
        return connection in self._per_connection or any(s.attached == connection for s in self._sessions.values())

    # -- opening and closing

    def admit(self, connection: Hashable, ask: OpenSession) -> Session:
        """Reserve room for a session, or start its next epoch.

        Raises PeerBusy (with `retry_after`) where there is no room now, ContextExceeded where there never
        will be, BadStep where the epoch does not follow.
        """
        if ask.max_tokens < 1:
            raise BadStep(f"session {ask.session} asks for {ask.max_tokens} tokens; ask for at least 1")
        most = min(self._context_length, self._limits.kv_total)
        if ask.max_tokens > most:
            raise ContextExceeded(f"{ask.max_tokens} tokens are more than the {most} that a session can have here")
        known = self._sessions.get(ask.session)
        if known is None:
            self._check_room(connection, ask.max_tokens)
        elif known.opener != connection:
            raise PeerBusy(
                f"session {ask.session} is open on another connection; close that one, or take another name",
                retry_after=_SOONEST_RETRY_S,
            )
        elif ask.epoch <= known.epoch:
            raise BadStep(f"session {ask.session} is in epoch {known.epoch}; epoch {ask.epoch} does not follow it")
        else:
            # also one that paused: who was let in once comes back in
            self._check_budget(ask.max_tokens, self._expected(known.max_tokens, known.length))
            self._remove(known)
        return self._add(connection, ask, opened_at=self._clock() if known is None else known.opened_at)

    def close(self, connection: Hashable, name: str) -> Session | None:
        """Forget the session if `connection` opened it; None (and nothing happens) otherwise."""
        session = self._sessions.get(name)
        if session is None or session.opener != connection:
            return None
        self.drop(session)
        return session

    def drop(self, session: Session) -> bool:
        """Forget a session, whatever the reason; False where it is gone already."""
        if session not in self:
            return False
        self._remove(session)
        lived = max(0.0, self._clock() - session.opened_at)
        self._lifetime_s += _LIFETIME_WEIGHT * (lived - self._lifetime_s)
        self._share_taken += _LIFETIME_WEIGHT * (session.length / session.max_tokens - self._share_taken)
        return True

    def lose(self, connection: Hashable) -> list[Session]:
        """The connection ended: its sessions are dropped (and returned), its attachments end."""
        lost = [session for session in self._sessions.values() if session.opener == connection]
        for session in lost:
            self.drop(session)
        for session in self._sessions.values():
            if session.attached == connection:
                session.attached = None
        return lost

    def expire(self) -> list[Session]:
        """Drop the sessions without a step for longer than the limit."""
        idle = [session for session in self._sessions.values() if self._expires_at(session) <= self._clock()]
        for session in idle:
            self.drop(session)
        return idle

    # -- steps

    def find(self, name: str, *, epoch: int | None = None, opener: Hashable | None = None) -> Session:
        """Raises UnknownSession; another's session is as unknown as one that never was."""
        session = self._sessions.get(name)
        if session is None or (opener is not None and session.opener != opener):
            raise UnknownSession(f"session {name} is not open here: open it again and feed the known tokens")
        if epoch is not None and session.epoch != epoch:
            raise UnknownSession(f"session {name} is in epoch {session.epoch} here, not in {epoch}: open it again")
        return session

    def attach(self, connection: Hashable, ask: Attach) -> Session:
        """Let `connection` bring the session's steps, instead of who did before. Raises UnknownSession."""
        session = self._sessions.get(ask.session)
        # compared even where there is nothing to compare with: the time taken tells nothing
        expected = session.secret if session is not None else bytes(16)
        if not hmac.compare_digest(expected, ask.secret) or session is None:
            raise UnknownSession(f"session {ask.session} is not open here under this secret: open it again")
        self.find(ask.session, epoch=ask.epoch)
        session.attached = connection
        session.touched_at = self._clock()
        return session

    def accept(self, connection: Hashable, forward: Forward) -> Session | None:
        """Queue a step; None where it belongs to an epoch that is over.

        Raises UnknownSession (no such session for this connection) or BadStep (too many wait).
        """
        session = self._sessions.get(forward.session)
        if session is None or connection not in (session.opener, session.attached):
            raise UnknownSession(f"session {forward.session} is not open here: open it again and feed the known tokens")
        if forward.epoch < session.epoch:
            return None
        self.find(forward.session, epoch=forward.epoch)
        arrival = Arrival(forward=forward, at=self._clock())
        limits = self._limits
        while session.waiting and session.waiting[-1].forward.start >= forward.start:
            # what is left waits in the order of its positions: where the last is not void, nothing is
            self._unqueue(session, session.waiting.pop())
            session.computed += 1
        if session.waiting and (
            len(session.waiting) >= limits.queue_steps or session.waiting_bytes + arrival.nbytes > limits.queue_bytes
        ):
            raise BadStep(
                f"{len(session.waiting)} steps of session {session.name} wait already; "
                f"send at most {limits.queue_steps} ahead"
            )
        if self._queued_bytes and self._queued_bytes + arrival.nbytes > limits.all_queue_bytes:
            raise PeerBusy("too many steps wait on this peer; send again later", retry_after=_SOONEST_RETRY_S)
        session.waiting.append(arrival)
        session.waiting_bytes += arrival.nbytes
        self._queued_bytes += arrival.nbytes
        session.received += 1
        session.touched_at = arrival.at
        return session

    def take(self, session: Session) -> Arrival | None:
        """The next step of the session, in order; it runs from now on. None if none waits."""
        if session not in self or not session.waiting:
            return None
        arrival = session.waiting.popleft()
        self._unqueue(session, arrival)
        session.running = True
        return arrival

    def is_void(self, session: Session, forward: Forward) -> bool:
        """Whether a step that waits makes void what `forward`, the one before it, has just computed."""
        return bool(session.waiting) and session.waiting[0].forward.start <= forward.start

    def finish(self, session: Session, *, length: int | None) -> None:
        """The step that ran is over; `length` positions are cached now, None if it failed."""
        session.running = False
        session.computed += 1
        session.touched_at = self._clock()
        if length is not None:
            session.length = length

    # -- decisions

    def retry_after(self, tokens: int) -> float:
        """Seconds until room for `tokens` is expected, from how long sessions lived and when idle ones expire."""
        now, room = self._clock(), self.kv_free
        ends = sorted((self._expected_end(session), self._reserved(session)) for session in self._sessions.values())
        for end, freed in ends:
            room += freed
            if room >= tokens:
                return max(_SOONEST_RETRY_S, end - now)
        return _SOONEST_RETRY_S

    def _check_room(self, connection: Hashable, tokens: int) -> None:
        limits = self._limits
        if len(self._sessions) >= limits.sessions:
            raise PeerBusy(
                f"all {limits.sessions} sessions of this peer are taken; try again later, or another peer",
                retry_after=self.retry_after(1),
            )
        if self._per_connection[connection] >= limits.per_connection:
            raise PeerBusy(
                f"this connection has its {limits.per_connection} sessions open; close one first",
                retry_after=_SOONEST_RETRY_S,
            )
        self._check_budget(tokens, 0)

    def _reserved(self, session: Session) -> int:
        return 0 if self._pauses_at(session) <= self._clock() else self._expected(session.max_tokens, session.length)

    def _expected(self, max_tokens: int, length: int = 0) -> int:
        """Tokens of cache that a session of `max_tokens`, now at `length`, is counted for."""
        if self._limits.reserves:
            return max_tokens
        return min(max_tokens, max(length + _NEXT_BLOCK, int(max_tokens * self._share_taken * _MARGIN)))

    def _check_budget(self, max_tokens: int, held: int) -> None:
        tokens = self._expected(max_tokens)
        if tokens > self.kv_free + held:
            wait = self.retry_after(tokens)
            raise PeerBusy(
                f"{tokens} tokens of KV cache were asked for and {self.kv_free + held} are free; "
                f"room is expected in {wait:.0f} s, or on another peer now",
                retry_after=wait,
            )

    def _expected_end(self, session: Session) -> float:
        idle_s = self._limits.idle_s if self._limits.reserves else min(_PAUSE_S, self._limits.idle_s)
        return min(session.opened_at + self._lifetime_s, session.touched_at + idle_s)

    def _expires_at(self, session: Session) -> float:
        return self._idle_at(session, self._limits.idle_s)

    def _pauses_at(self, session: Session) -> float:
        """When its cache counts no more, as others may have it."""
        return float("inf") if self._limits.reserves else self._idle_at(session, _PAUSE_S)

    def _idle_at(self, session: Session, seconds: float) -> float:
        busy = session.running or session.waiting
        return float("inf") if busy else session.touched_at + seconds

    # -- bookkeeping

    def _add(self, connection: Hashable, ask: OpenSession, *, opened_at: float) -> Session:
        session = Session(
            name=ask.session,
            opener=connection,
            secret=ask.secret,
            epoch=ask.epoch,
            span=LayerRange(ask.first, ask.last),
            max_tokens=ask.max_tokens,
            dtype=ask.dtype,
            hops=ask.hops,
            opened_at=opened_at,
            touched_at=self._clock(),
            history=np.zeros(ask.max_tokens, np.int32),
        )
        self._sessions[session.name] = session
        self._per_connection[connection] += 1
        return session

    def _unqueue(self, session: Session, arrival: Arrival) -> None:
        session.waiting_bytes -= arrival.nbytes
        self._queued_bytes -= arrival.nbytes

    def _remove(self, session: Session) -> None:
        del self._sessions[session.name]
        self._per_connection[session.opener] -= 1
        if not self._per_connection[session.opener]:
            del self._per_connection[session.opener]
        self._queued_bytes -= session.waiting_bytes
        session.waiting.clear()
        session.waiting_bytes = 0

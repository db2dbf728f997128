from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from peer.config import SessionLimits
from peer.sessions.table import Session, SessionTable
from swarm.errors import BadStep, ConfigError, ContextExceeded, PeerBusy, UnknownSession
from swarm.wire.messages import Attach, Forward, OpenSession

SECRET = b"s" * 16
CONTEXT = 100


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_table(clock: Clock | None = None, **limits: Any) -> SessionTable:
    return SessionTable(SessionLimits(**{"kv_total": 100, **limits}), context_length=CONTEXT, clock=clock or Clock())


def opening(session: str = "session-1", *, epoch: int = 0, max_tokens: int = 10, secret: bytes = SECRET) -> OpenSession:
    return OpenSession(request=1, session=session, epoch=epoch, secret=secret, first=0, last=3, max_tokens=max_tokens)


def forward(session: str = "session-1", *, epoch: int = 0, step: int = 0, start: int = 0, n: int = 1) -> Forward:
    return Forward(session=session, epoch=epoch, step=step, start=start, rows=0, tokens=np.zeros(n, np.int32))


def attach(session: str = "session-1", *, epoch: int = 0, secret: bytes = SECRET) -> Attach:
    return Attach(request=1, session=session, epoch=epoch, secret=secret)


def test_a_reservation_is_counted_and_given_back_once() -> None:
    table = make_table()
    session = table.admit("a", opening(max_tokens=60))
    assert (len(table), table.kv_free) == (1, 40)
    assert table.close("a", "session-1") is session
    assert table.close("a", "session-1") is None
    assert not table.drop(session)
    assert (len(table), table.kv_free) == (0, 100)


def test_a_refusal_names_the_time_when_room_is_expected() -> None:
    clock = Clock()
    table = make_table(clock, idle_s=20.0)
    table.admit("a", opening(max_tokens=90))
    clock.now += 5
    with pytest.raises(PeerBusy, match="20 tokens of KV cache were asked for and 10 are free") as refused:
        table.admit("b", opening("session-2", max_tokens=20))
    assert refused.value.retry_after == 15.0
    assert refused.value.retryable
    assert len(table) == 1


def test_sessions_that_can_be_evicted_reserve_the_share_that_sessions_used_lately() -> None:
    table = make_table(kv_total=100, reserves=False)
    for number in range(2):
        table.admit("a", opening(f"session-{number}", max_tokens=100))  # each reserves half of what it asks for
    assert table.kv_free == 0
    with pytest.raises(PeerBusy):
        table.admit("a", opening("session-2", max_tokens=100))
    session = table.find("session-0")
    for step in range(20):  # sessions that end without a token
        table.close("a", f"session-{step}")
        table.admit("a", opening(f"session-{step + 2}", max_tokens=100))
    assert table.kv_free > 0
    session = table.find("session-21")
    session.length = 90
    assert table.kv_free == 0
    with pytest.raises(ContextExceeded):
        table.admit("a", opening("too-long-", max_tokens=101))


def test_a_paused_session_keeps_no_other_out_and_may_start_its_next_epoch() -> None:
    clock = Clock()
    table = make_table(clock, kv_total=100, reserves=False)
    paused = [table.admit("a", opening(f"paused-{number}", max_tokens=100)) for number in range(2)]
    with pytest.raises(PeerBusy) as refused:
        table.admit("b", opening("session-1", max_tokens=100))
    assert refused.value.retry_after == 30.0
    clock.now += 29
    table.enqueue("a", forward("paused-1"))  # this one goes on
    clock.now += 1
    table.admit("b", opening("session-1", max_tokens=100))
    assert table.kv_free == 0
    assert paused[0] in table
    for session in paused:
        assert table.admit("a", opening(session.name, epoch=1, max_tokens=100)) in table
    never = make_table(clock)
    never.admit("a", opening(max_tokens=100))
    clock.now += 200
    assert never.kv_free == 0


@pytest.mark.parametrize("share", [0.0, 1e-300, 0.1, 0.33, 0.5, 0.7, 0.9, None])
def test_the_announced_maximum_is_admitted_and_nothing_much_longer(share: float | None) -> None:
    def at_share() -> SessionTable:
        if share is not None:
            table._used_share = share
        return table

    table = make_table(kv_total=100, reserves=share is None)
    for number in range(101):
        max_admissible = at_share().max_admissible
        assert max_admissible >= table.kv_free
        if max_admissible <= 90:
            with pytest.raises(PeerBusy):
                table.admit("a", opening("too-long", max_tokens=max_admissible + 10))
        if not max_admissible:
            break
        table.close("a", table.admit("a", opening("probing-", max_tokens=max_admissible)).name)
        at_share().admit("a", opening(f"session-{number}", max_tokens=min(max_admissible, 17)))
    assert table.max_admissible == table.kv_free == 0


def test_a_session_that_never_fits_is_not_told_to_retry() -> None:
    with pytest.raises(ContextExceeded, match="101 tokens are more than the 100"):
        make_table(kv_total=500).admit("a", opening(max_tokens=101))
    with pytest.raises(ContextExceeded, match="51 tokens are more than the 50"):
        make_table(kv_total=50).admit("a", opening(max_tokens=51))
    with pytest.raises(BadStep, match="asks for 0 tokens"):
        make_table().admit("a", opening(max_tokens=0))


def test_sessions_are_limited_in_total_and_for_each_connection() -> None:
    table = make_table(sessions=3, per_connection=2)
    table.admit("a", opening("session-1"))
    table.admit("a", opening("session-2"))
    with pytest.raises(PeerBusy, match="this connection has its 2 sessions open"):
        table.admit("a", opening("session-3"))
    table.admit("b", opening("session-3"))
    with pytest.raises(PeerBusy, match="all 3 sessions"):
        table.admit("c", opening("session-4"))


def test_the_next_epoch_forgets_the_cache_and_keeps_the_reservation() -> None:
    table = make_table(sessions=1, kv_total=60)
    first = table.admit("a", opening(max_tokens=40))
    table.attach("hop", attach())
    table.enqueue("a", forward(n=3))
    assert table.start_next(first) is not None
    table.finish(first, length=3)
    table.enqueue("a", forward(start=3))
    second = table.admit("a", opening(epoch=1, max_tokens=40))
    assert (second.length, second.received, second.computed, second.attached) == (0, 0, 0, None)
    assert (len(table), table.kv_free, table.steps, table.queued_bytes) == (1, 20, 0, 0)
    assert first not in table
    assert second in table
    assert table.start_next(first) is None


def test_an_epoch_may_change_the_reservation_within_the_budget() -> None:
    table = make_table()
    table.admit("a", opening(max_tokens=40))
    table.admit("b", opening("session-2", max_tokens=40))
    with pytest.raises(PeerBusy):
        table.admit("a", opening(epoch=1, max_tokens=61))
    assert table.find("session-1").epoch == 0
    table.admit("a", opening(epoch=1, max_tokens=60))
    assert table.kv_free == 0


def test_an_epoch_that_does_not_follow_is_refused() -> None:
    table = make_table()
    table.admit("a", opening(epoch=3))
    for epoch in (2, 3):
        with pytest.raises(BadStep, match=f"is in epoch 3; epoch {epoch} does not follow"):
            table.admit("a", opening(epoch=epoch))


def test_no_other_connection_opens_closes_or_steps_a_session() -> None:
    table = make_table()
    session = table.admit("a", opening())
    with pytest.raises(PeerBusy, match="open on another connection"):
        table.admit("b", opening(epoch=1))
    assert table.close("b", "session-1") is None
    with pytest.raises(UnknownSession):
        table.enqueue("b", forward())
    with pytest.raises(UnknownSession):
        table.find("session-1", opener="b")
    assert session in table


def test_the_secret_lets_another_connection_send_steps() -> None:
    table = make_table()
    session = table.admit("a", opening())
    for wrong in (attach(secret=b"x" * 16), attach(secret=b""), attach("session-9"), attach(epoch=1)):
        with pytest.raises(UnknownSession):
            table.attach("hop", wrong)
    table.attach("hop", attach())
    assert table.enqueue("hop", forward()) is session
    table.attach("other hop", attach())
    with pytest.raises(UnknownSession):
        table.enqueue("hop", forward())


def test_no_secret_attaches_to_an_unknown_session() -> None:
    with pytest.raises(UnknownSession):
        make_table().attach("hop", attach(secret=bytes(16)))


def test_steps_of_an_earlier_epoch_are_dropped_and_of_a_later_one_refused() -> None:
    table = make_table()
    table.admit("a", opening(epoch=1))
    assert table.enqueue("a", forward(epoch=0)) is None
    assert table.steps == 0
    with pytest.raises(UnknownSession, match="is in epoch 1 here, not in 2"):
        table.enqueue("a", forward(epoch=2))


def test_too_many_steps_ahead_are_refused_and_the_rest_goes_on() -> None:
    table = make_table(queue_steps=2)
    session = table.admit("a", opening())
    table.enqueue("a", forward(step=0, start=0))
    table.enqueue("a", forward(step=1, start=1))
    with pytest.raises(BadStep, match="2 steps of session session-1 wait already"):
        table.enqueue("a", forward(step=2, start=2))
    taken = table.start_next(session)
    assert taken is not None
    assert taken.forward.step == 0
    table.enqueue("a", forward(step=2, start=2))


def test_waiting_bytes_are_bounded_for_each_session_and_for_all() -> None:
    table = make_table(queue_bytes=40, all_queue_bytes=60)
    table.admit("a", opening())
    table.admit("a", opening("session-2"))
    table.enqueue("a", forward(n=20))  # one step always fits
    with pytest.raises(BadStep):
        table.enqueue("a", forward(start=20, n=1))
    with pytest.raises(PeerBusy, match="too many steps wait"):
        table.enqueue("a", forward("session-2"))


def test_steps_come_in_order_and_are_counted() -> None:
    table = make_table()
    session = table.admit("a", opening())
    for step in range(3):
        table.enqueue("a", forward(step=step, start=step))
    assert (session.received, session.computed, table.steps) == (3, 0, 3)
    for step in range(3):
        arrival = table.start_next(session)
        assert arrival is not None
        assert arrival.forward.step == step
        table.finish(session, length=step)
    assert table.start_next(session) is None
    assert (session.received, session.computed, table.steps) == (3, 3, 0)


def starts_that_wait(session: Session) -> list[int]:
    return [arrival.forward.start for arrival in session.queue]


def test_a_step_makes_void_what_waits_from_its_start_on() -> None:
    table = make_table()
    session = table.admit("a", opening())
    for step, start in enumerate((0, 2, 4, 6)):
        table.enqueue("a", forward(step=step, start=start, n=2))
    running = table.start_next(session)
    assert running is not None
    table.enqueue("a", forward(step=4, start=4))
    assert starts_that_wait(session) == [2, 4]
    assert (session.received, session.computed, table.steps) == (5, 2, 3)
    assert table.queued_bytes == sum(arrival.nbytes for arrival in session.queue)
    assert not table.is_void(session, running.forward)
    table.enqueue("a", forward(step=5, start=0))
    assert starts_that_wait(session) == [0]
    assert table.is_void(session, running.forward)  # no client waits for its result


def test_the_steps_of_an_earlier_epoch_make_nothing_void() -> None:
    table = make_table()
    session = table.admit("a", opening(epoch=1))
    table.enqueue("a", forward(epoch=1, start=0))
    table.enqueue("a", forward(epoch=0, start=0))
    assert starts_that_wait(session) == [0]


def test_the_history_follows_a_rewind() -> None:
    table = make_table()
    session = table.admit("a", opening())
    first = Forward(session="session-1", epoch=0, step=0, start=0, rows=0, tokens=np.arange(5, dtype=np.int32))
    again = Forward(session="session-1", epoch=0, step=1, start=2, rows=0, tokens=np.array([9, 8], np.int32))
    session.write_history(first)
    assert session.history[:5].tolist() == [0, 1, 2, 3, 4]
    session.write_history(again)
    assert session.history[:4].tolist() == [0, 1, 9, 8]


def test_idle_sessions_expire_and_busy_ones_do_not() -> None:
    clock = Clock()
    table = make_table(clock, idle_s=10.0)
    idle = table.admit("a", opening("session-1"))
    busy = table.admit("a", opening("session-2"))
    clock.now += 5
    table.enqueue("a", forward("session-2"))
    assert table.start_next(busy) is not None
    clock.now += 50
    assert table.expire() == [idle]
    table.finish(busy, length=1)
    clock.now += 9.9
    assert table.expire() == []
    clock.now += 0.1
    assert table.expire() == [busy]
    assert table.kv_free == table.kv_total


def test_the_end_of_the_opener_drops_its_sessions_and_that_of_a_hop_only_its_attachment() -> None:
    table = make_table()
    mine = table.admit("a", opening("session-1"))
    other = table.admit("b", opening("session-2"))
    table.attach("a", attach("session-2"))
    assert table.drop_connection("a") == [mine]
    assert other.attached is None
    assert table.drop_connection("a") == []
    assert table.sessions() == [other]


def test_limits_out_of_range_are_named() -> None:
    with pytest.raises(ConfigError, match="queue_steps is 0"):
        SessionLimits(kv_total=1, queue_steps=0)
    with pytest.raises(ConfigError, match="kv_total is -1"):
        SessionLimits(kv_total=-1)


NAMES = [f"session-{i}" for i in range(4)]
CONNECTIONS = ["a", "b", "c"]


class TableMachine(RuleBasedStateMachine):
    """Random events in random order: the limits hold, and everything is given back."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.table = make_table(
            self.clock, sessions=3, per_connection=2, idle_s=10.0, queue_steps=3, queue_bytes=60, all_queue_bytes=100
        )
        self.running: list[Session] = []

    @rule(
        connection=st.sampled_from(CONNECTIONS),
        name=st.sampled_from(NAMES),
        epoch=st.integers(0, 5),
        tokens=st.integers(0, 120),
    )
    def open(self, connection: str, name: str, epoch: int, tokens: int) -> None:
        free, known = self.table.kv_free, {s.name: s for s in self.table.sessions()}
        try:
            session = self.table.admit(connection, opening(name, epoch=epoch, max_tokens=tokens))
        except (PeerBusy, ContextExceeded, BadStep) as error:
            assert self.table.kv_free == free
            assert {s.name: s for s in self.table.sessions()} == known
            assert not isinstance(error, PeerBusy) or error.retry_after >= 1.0  # noqa: PT017 - a rule, not a test
            return
        assert session.max_tokens == tokens
        assert name not in known or (known[name].opener == connection and known[name].epoch < epoch)

    @rule(connection=st.sampled_from(CONNECTIONS), name=st.sampled_from(NAMES))
    def close(self, connection: str, name: str) -> None:
        session = self.table.close(connection, name)
        assert session is None or session.opener == connection
        assert self.table.close(connection, name) is None

    @rule(connection=st.sampled_from(CONNECTIONS))
    def drop_connection(self, connection: str) -> None:
        self.table.drop_connection(connection)
        assert connection not in self.table.openers()
        assert all(session.attached != connection for session in self.table.sessions())

    @rule(connection=st.sampled_from(CONNECTIONS), name=st.sampled_from(NAMES), epoch=st.integers(0, 5))
    def attach(self, connection: str, name: str, epoch: int) -> None:
        try:
            assert self.table.attach(connection, attach(name, epoch=epoch)).epoch == epoch
        except UnknownSession:
            assert all(s.name != name or s.epoch != epoch for s in self.table.sessions())

    @rule(
        connection=st.sampled_from(CONNECTIONS),
        name=st.sampled_from(NAMES),
        epoch=st.integers(0, 5),
        start=st.integers(0, 30),
        n=st.integers(1, 20),
    )
    def step(self, connection: str, name: str, epoch: int, start: int, n: int) -> None:
        try:
            session = self.table.enqueue(connection, forward(name, epoch=epoch, start=start, n=n))
        except (UnknownSession, BadStep, PeerBusy):
            return
        assert session is None or connection in (session.opener, session.attached)

    @rule(data=st.data())
    @precondition(lambda self: len(self.table) > 0)
    def start_next(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.table.sessions()))
        if not session.running and self.table.start_next(session) is not None:
            self.running.append(session)

    @rule()
    @precondition(lambda self: self.running)
    def finish(self) -> None:
        self.table.finish(self.running.pop(), length=1)

    @rule(seconds=st.floats(0, 12))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        for session in self.table.expire():
            assert not session.running

    @invariant()
    def the_budget_holds(self) -> None:
        sessions = self.table.sessions()
        assert self.table.kv_free == self.table.kv_total - sum(s.max_tokens for s in sessions) >= 0
        assert len(sessions) <= 3
        assert all(sum(s.opener == c for s in sessions) <= 2 for c in CONNECTIONS)
        assert self.table.queued_bytes == sum(a.nbytes for s in sessions for a in s.queue) <= 100
        assert all(0 <= s.computed + len(s.queue) + s.running == s.received for s in sessions)
        waiting = [starts_that_wait(session) for session in sessions]
        assert all(starts == sorted(set(starts)) for starts in waiting)

    def teardown(self) -> None:
        for connection in CONNECTIONS:
            self.table.drop_connection(connection)
        assert (len(self.table), self.table.kv_free) == (0, self.table.kv_total)
        assert (self.table.steps, self.table.queued_bytes) == (0, 0)


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

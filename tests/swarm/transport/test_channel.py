from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from swarm.errors import (
    LocalProtocolError,
    NotCovered,
    PeerBusy,
    PeerFailed,
    PeerLost,
    PeerStalled,
    PeerUnreachable,
    RemoteProtocolError,
    SwarmError,
    UnknownSession,
)
from swarm.transport.address import Address
from swarm.transport.channel import Channel
from swarm.transport.identity import Identity
from swarm.transport.limits import Limits
from swarm.transport.link import measure_link
from swarm.transport.stream import Stream, listen
from swarm.wire.failures import error_to_failure
from swarm.wire.message import Message
from swarm.wire.messages import Failure, Forward, Leaving, Linked, Output
from swarm.wire.queries import AskDht, AskTopic, DhtAddresses, Ping, Pong, Topic
from tests.swarm.event_loops import in_loop, until
from tests.swarm.transport.memory_transport import CALLER_HELLO, PEER_HELLO, MemoryTransport, memory_pair

LIMITS = Limits(close_timeout_s=0.1)
LONG_S = 30.0
SHORT_S = 0.05


class Talk:
    """A channel, the peer's stream at its other end, and what the channel's owner heard."""

    def __init__(self, stream: Stream, peer: Stream, near: MemoryTransport, far: MemoryTransport) -> None:
        self.peer, self.near, self.far = peer, near, far
        self.messages: list[Message] = []
        self.lost: list[SwarmError] = []
        self.channel = Channel(stream, on_message=self.messages.append, on_lost=self.lost.append)

    @classmethod
    async def begin(cls, limits: Limits = LIMITS) -> Talk:
        return cls(*await memory_pair(limits))

    def ask(self, timeout: float = LONG_S) -> asyncio.Task[DhtAddresses]:
        question = AskDht(request=self.channel.next_request())
        return asyncio.create_task(self.channel.ask(question, DhtAddresses, timeout=timeout))

    async def heard(self) -> Any:
        return await self.peer.receive()


def answer(request: int) -> DhtAddresses:
    return DhtAddresses(request=request, addresses=(str(request),))


@in_loop
async def test_answers_find_their_questions_in_any_order() -> None:
    talk = await Talk.begin()
    tasks = [talk.ask() for _ in range(5)]
    requests = [(await talk.heard()).request for _ in tasks]
    assert len(set(requests)) == 5
    for request in reversed(requests):
        talk.peer.send(answer(request))
    assert [await task for task in tasks] == [answer(request) for request in requests]
    await talk.channel.close()


@pytest.mark.parametrize(
    "error",
    [
        PeerBusy("no room", retry_after=3.0),
        UnknownSession("session s has expired"),
        NotCovered("layers 3:5 are missing", [(3, 5)]),
        PeerFailed("the disk is full"),
    ],
    ids=lambda error: error.code,
)
def test_a_failure_is_raised_as_its_error(error: SwarmError) -> None:
    @in_loop
    async def scenario() -> None:
        talk = await Talk.begin()
        bad, good = talk.ask(), talk.ask()
        first, second = await talk.heard(), await talk.heard()
        talk.peer.send(error_to_failure(error, request=first.request))
        talk.peer.send(answer(second.request))
        with pytest.raises(type(error), match=str(error)) as caught:
            await bad
        assert getattr(caught.value, "retry_after", 0) == getattr(error, "retry_after", 0)
        assert getattr(caught.value, "missing", ()) == getattr(error, "missing", ())
        assert await good == answer(second.request)
        await talk.channel.close()

    scenario()


@in_loop
async def test_what_is_no_answer_is_passed_on_in_order() -> None:
    talk = await Talk.begin()
    step = Failure(code="bad_step", text="", session="session-1", step=4)
    output = Output(session="session-1", epoch=0, step=3, ids=np.array([7], np.int32))
    for message in (output, step, Leaving(grace_s=5.0)):
        talk.peer.send(message)
    await until(lambda: len(talk.messages) == 3)
    assert [type(message) for message in talk.messages] == [Output, Failure, Leaving]
    assert talk.lost == []
    await talk.channel.close()


@in_loop
async def test_a_peer_that_does_not_answer_has_stalled_and_its_late_answer_is_dropped() -> None:
    talk = await Talk.begin()
    with pytest.raises(PeerStalled, match=r"does not answer AskDht within 0.05 s"):
        await talk.ask(SHORT_S)
    late = await talk.heard()
    talk.peer.send(answer(late.request))
    task = talk.ask()
    talk.peer.send(answer((await talk.heard()).request))
    assert (await task).request != late.request
    assert not talk.channel.closed
    assert talk.messages == []
    await talk.channel.close()


@in_loop
async def test_an_answer_of_another_kind_is_nonsense_and_ends_the_channel() -> None:
    talk = await Talk.begin()
    task = talk.ask()
    talk.peer.send(Linked(request=(await talk.heard()).request))
    with pytest.raises(RemoteProtocolError, match="answers with Linked where DhtAddresses was asked for"):
        await task
    assert [type(error) for error in talk.lost] == [RemoteProtocolError]
    with pytest.raises(LocalProtocolError, match="refused what it was sent"):
        await talk.peer.receive()


@in_loop
async def test_a_request_number_is_used_by_one_question_at_a_time() -> None:
    talk = await Talk.begin()
    with pytest.raises(LocalProtocolError, match="next_request"):
        await talk.channel.ask(AskDht(request=0), DhtAddresses, timeout=LONG_S)
    task = talk.ask()
    await talk.heard()
    with pytest.raises(LocalProtocolError, match="next_request"):
        await talk.channel.ask(AskTopic(request=1, topic="models"), Topic, timeout=LONG_S)
    talk.peer.send(answer(1))
    await task
    await talk.channel.close()


@in_loop
async def test_the_end_of_the_connection_reaches_all_who_wait() -> None:
    talk = await Talk.begin()
    tasks = [talk.ask() for _ in range(3)]
    for _ in tasks:
        await talk.heard()
    await talk.peer.close()
    for task in tasks:
        with pytest.raises(PeerLost):
            await task
    await until(lambda: len(talk.lost) == 1)
    assert talk.channel.closed
    for call in (lambda: talk.channel.send(AskDht(request=1)), talk.ask):
        with pytest.raises(PeerLost):
            await as_task(call)
    with pytest.raises(PeerLost):
        await talk.channel.drain()
    await talk.channel.close()
    assert len(talk.lost) == 1


async def as_task(call: Callable[[], Any]) -> None:
    result = call()
    if isinstance(result, asyncio.Task):
        await result


@in_loop
async def test_a_failure_of_the_whole_connection_is_why_it_was_lost() -> None:
    talk = await Talk.begin()
    task = talk.ask()
    await talk.heard()
    talk.peer.fail(PeerFailed("the device is gone"))
    await talk.peer.close()
    with pytest.raises(PeerFailed, match="the device is gone"):
        await task
    assert [type(error) for error in talk.lost] == [PeerFailed]


@in_loop
async def test_nonsense_from_the_peer_is_its_fault() -> None:
    talk = await Talk.begin()
    task = talk.ask()
    await talk.heard()
    talk.far.write(bytes(8))
    with pytest.raises(RemoteProtocolError, match="header has 0 bytes"):
        await task
    assert [type(error) for error in talk.lost] == [RemoteProtocolError]


@in_loop
async def test_a_bug_of_the_owner_ends_the_channel_and_blames_nobody(caplog: pytest.LogCaptureFixture) -> None:
    caller, peer, _, _ = await memory_pair(LIMITS)
    lost: list[SwarmError] = []

    def trip(message: Message) -> None:
        raise ZeroDivisionError("in the owner")

    channel = Channel(caller, on_message=trip, on_lost=lost.append)
    peer.send(Leaving(grace_s=1.0))
    await until(lambda: bool(lost))
    assert [type(error) for error in lost] == [LocalProtocolError]
    assert "in the owner" in caplog.text
    await channel.close()


@in_loop
async def test_an_owner_that_refuses_a_message_says_why_the_channel_ends() -> None:
    caller, peer, _, _ = await memory_pair(LIMITS)
    lost: list[SwarmError] = []

    def refuse(message: Message) -> None:
        raise RemoteProtocolError("an Output for a session that was never opened")

    channel = Channel(caller, on_message=refuse, on_lost=lost.append)
    peer.send(Output(session="session-1", epoch=0, step=0, ids=np.zeros(0, np.int32)))
    await until(lambda: bool(lost))
    assert str(lost[0]) == "an Output for a session that was never opened"
    await channel.close()


@in_loop
async def test_closing_is_no_loss_and_ends_those_who_wait() -> None:
    talk = await Talk.begin()
    task = talk.ask()
    await talk.heard()
    await talk.channel.close()
    await talk.channel.close()
    with pytest.raises(PeerLost, match="closed here"):
        await task
    assert talk.lost == []
    assert talk.channel.closed
    with pytest.raises(PeerLost, match="closed here"):
        talk.channel.send(AskDht(request=1))


@in_loop
async def test_steps_are_sent_beside_questions() -> None:
    talk = await Talk.begin()
    step = Forward(session="session-1", epoch=0, step=1, start=0, rows=1, tokens=np.array([5], np.int32))
    talk.channel.send(step)
    await talk.channel.drain()
    received = await talk.heard()
    assert isinstance(received, Forward)
    assert received.tokens.tolist() == [5]
    await talk.channel.close()


@in_loop
async def test_cancelling_a_question_leaves_the_channel_as_it_was() -> None:
    talk = await Talk.begin()
    task, other = talk.ask(), talk.ask()
    request = (await talk.heard()).request
    second = (await talk.heard()).request
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    talk.peer.send(answer(request))
    talk.peer.send(answer(second))
    assert await other == answer(second)
    await talk.channel.close()


@in_loop
async def test_cancelling_close_still_closes() -> None:
    talk = await Talk.begin(Limits(close_timeout_s=LONG_S))
    talk.near.held = True
    talk.channel.send(Ping(request=1))
    task = asyncio.create_task(talk.channel.close())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert talk.channel.closed
    assert talk.near.is_closing()


@in_loop
async def test_a_channel_opens_to_whichever_address_works() -> None:
    identity = Identity.generate()

    async def handle(stream: Stream) -> None:
        while True:
            message: Any = await stream.receive()
            stream.send(Pong(request=message.request, time=time.time()))

    listener = await listen("127.0.0.1", 0, identity, lambda: PEER_HELLO, handle)
    addresses = [Address("127.0.0.1", 1), Address("127.0.0.1", listener.port, identity.peer_id)]
    channel = await Channel.open(addresses, CALLER_HELLO)
    assert channel.peer_id == identity.peer_id
    assert channel.hello == PEER_HELLO
    assert channel.remote == f"127.0.0.1:{listener.port}"
    link = await measure_link(channel, payload=100_000)
    assert 0 < link.rtt_s < LONG_S
    assert link.bytes_per_s > 0
    await channel.close()
    with pytest.raises(PeerUnreachable):
        await Channel.open(addresses[:1], CALLER_HELLO)
    await listener.close()


# ── measure_link ──


async def pong(talk: Talk, clock: list[float], seconds: Callable[[Ping], float]) -> None:
    """Answer pings; each takes its seconds on `clock`."""
    while True:
        ping = await talk.heard()
        clock[0] += seconds(ping)
        talk.peer.send(Pong(request=ping.request, time=0.0))


def measured(seconds: Callable[[Ping], float], payload: int) -> tuple[float, float]:
    links: list[tuple[float, float]] = []

    @in_loop
    async def scenario() -> None:
        talk, clock = await Talk.begin(), [0.0]
        answering = asyncio.create_task(pong(talk, clock, seconds))
        link = await measure_link(talk.channel, payload=payload, clock=lambda: clock[0])
        links.append((link.rtt_s, link.bytes_per_s))
        answering.cancel()
        await talk.channel.close()

    scenario()
    return links[0]


def test_the_round_trip_is_the_best_of_a_few_pings() -> None:
    times = iter([0.5, 0.02, 0.3])
    rtt_s, bytes_per_s = measured(lambda _: next(times), 0)
    assert rtt_s == pytest.approx(0.02)
    assert bytes_per_s == 0.0


def test_bandwidth_is_what_the_payload_takes_beyond_the_round_trip() -> None:
    rtt_s, bytes_per_s = measured(lambda ping: 0.01 + len(ping.payload) / 2e6, 200_000)
    assert rtt_s == pytest.approx(0.01)
    assert bytes_per_s == pytest.approx(2e6)


def test_bandwidth_is_not_made_up_where_the_payload_takes_no_longer() -> None:
    _, bytes_per_s = measured(lambda _: 0.01, 200_000)
    assert bytes_per_s == pytest.approx(200_000 / 0.01)


@in_loop
async def test_a_link_to_a_silent_peer_is_not_measured() -> None:
    talk = await Talk.begin()
    with pytest.raises(PeerStalled):
        await measure_link(talk.channel, timeout=SHORT_S)
    await talk.channel.close()

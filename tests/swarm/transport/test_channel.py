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
from swarm.wire.base_message import Message
from swarm.wire.failures import error_to_failure
from swarm.wire.messages import Failure, Forward, Leaving, Linked, Output
from swarm.wire.queries import AskDht, AskTopic, DhtAddresses, Ping, Pong, Topic
from tests.swarm.event_loops import in_loop, until
from tests.swarm.transport.memory_transport import CALLER_HELLO, PEER_HELLO, MemoryTransport, memory_pair

LIMITS = Limits(close_timeout_s=0.1)
LONG_S = 30.0
SHORT_S = 0.05


class ChannelPair:
    """A channel, the peer's stream at its other end, and what the channel's callbacks received."""

    def __init__(self, stream: Stream, peer: Stream, near: MemoryTransport, far: MemoryTransport) -> None:
        self.peer, self.near, self.far = peer, near, far
        self.messages: list[Message] = []
        self.lost: list[SwarmError] = []
        self.channel = Channel(stream, on_message=self.messages.append, on_lost=self.lost.append)

    @classmethod
    async def create(cls, limits: Limits = LIMITS) -> ChannelPair:
        return cls(*await memory_pair(limits))

    def ask(self, timeout: float = LONG_S) -> asyncio.Task[DhtAddresses]:
        query = AskDht(request=self.channel.next_request())
        return asyncio.create_task(self.channel.ask(query, DhtAddresses, timeout=timeout))

    async def receive(self) -> Any:
        return await self.peer.receive()


def answer(request: int) -> DhtAddresses:
    return DhtAddresses(request=request, addresses=(str(request),))


@in_loop
async def test_answers_in_any_order_reach_their_requests() -> None:
    pair = await ChannelPair.create()
    tasks = [pair.ask() for _ in range(5)]
    requests = [(await pair.receive()).request for _ in tasks]
    assert len(set(requests)) == 5
    for request in reversed(requests):
        pair.peer.send(answer(request))
    assert [await task for task in tasks] == [answer(request) for request in requests]
    await pair.channel.close()


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
        pair = await ChannelPair.create()
        bad, good = pair.ask(), pair.ask()
        first, second = await pair.receive(), await pair.receive()
        pair.peer.send(error_to_failure(error, request=first.request))
        pair.peer.send(answer(second.request))
        with pytest.raises(type(error), match=str(error)) as caught:
            await bad
        assert getattr(caught.value, "retry_after", 0) == getattr(error, "retry_after", 0)
        assert getattr(caught.value, "missing", ()) == getattr(error, "missing", ())
        assert await good == answer(second.request)
        await pair.channel.close()

    scenario()


@in_loop
async def test_messages_that_are_no_answers_are_passed_on_in_order() -> None:
    pair = await ChannelPair.create()
    step = Failure(code="bad_step", text="", session="session-1", step=4)
    output = Output(session="session-1", epoch=0, step=3, ids=np.array([7], np.int32))
    for message in (output, step, Leaving(grace_s=5.0)):
        pair.peer.send(message)
    await until(lambda: len(pair.messages) == 3)
    assert [type(message) for message in pair.messages] == [Output, Failure, Leaving]
    assert pair.lost == []
    await pair.channel.close()


@in_loop
async def test_a_request_times_out_and_its_late_answer_is_dropped() -> None:
    pair = await ChannelPair.create()
    with pytest.raises(PeerStalled, match=r"does not answer AskDht within 0.05 s"):
        await pair.ask(SHORT_S)
    late = await pair.receive()
    pair.peer.send(answer(late.request))
    task = pair.ask()
    pair.peer.send(answer((await pair.receive()).request))
    assert (await task).request != late.request
    assert not pair.channel.closed
    assert pair.messages == []
    await pair.channel.close()


@in_loop
async def test_an_answer_of_another_kind_ends_the_channel() -> None:
    pair = await ChannelPair.create()
    task = pair.ask()
    pair.peer.send(Linked(request=(await pair.receive()).request))
    with pytest.raises(RemoteProtocolError, match="answers with Linked, not DhtAddresses"):
        await task
    assert [type(error) for error in pair.lost] == [RemoteProtocolError]
    with pytest.raises(LocalProtocolError, match="refused what it was sent"):
        await pair.peer.receive()


@in_loop
async def test_a_request_number_is_used_by_one_request_at_a_time() -> None:
    pair = await ChannelPair.create()
    with pytest.raises(LocalProtocolError, match="next_request"):
        await pair.channel.ask(AskDht(request=0), DhtAddresses, timeout=LONG_S)
    task = pair.ask()
    await pair.receive()
    with pytest.raises(LocalProtocolError, match="next_request"):
        await pair.channel.ask(AskTopic(request=1, topic="models"), Topic, timeout=LONG_S)
    pair.peer.send(answer(1))
    await task
    await pair.channel.close()


@in_loop
async def test_the_end_of_the_connection_fails_all_waiting_requests() -> None:
    pair = await ChannelPair.create()
    tasks = [pair.ask() for _ in range(3)]
    for _ in tasks:
        await pair.receive()
    await pair.peer.close()
    for task in tasks:
        with pytest.raises(PeerLost):
            await task
    await until(lambda: len(pair.lost) == 1)
    assert pair.channel.closed
    for call in (lambda: pair.channel.send(AskDht(request=1)), pair.ask):
        with pytest.raises(PeerLost):
            await as_task(call)
    with pytest.raises(PeerLost):
        await pair.channel.drain()
    await pair.channel.close()
    assert len(pair.lost) == 1


async def as_task(call: Callable[[], Any]) -> None:
    result = call()
    if isinstance(result, asyncio.Task):
        await result


@in_loop
async def test_a_failure_of_the_connection_reaches_on_lost() -> None:
    pair = await ChannelPair.create()
    task = pair.ask()
    await pair.receive()
    pair.peer.send_failure(PeerFailed("the device is gone"))
    await pair.peer.close()
    with pytest.raises(PeerFailed, match="the device is gone"):
        await task
    assert [type(error) for error in pair.lost] == [PeerFailed]


@in_loop
async def test_invalid_data_is_a_remote_protocol_error() -> None:
    pair = await ChannelPair.create()
    task = pair.ask()
    await pair.receive()
    pair.far.write(bytes(8))
    with pytest.raises(RemoteProtocolError, match="header has 0 bytes"):
        await task
    assert [type(error) for error in pair.lost] == [RemoteProtocolError]


@in_loop
async def test_a_bug_in_on_message_ends_the_channel_with_a_local_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caller, peer, _, _ = await memory_pair(LIMITS)
    lost: list[SwarmError] = []

    def fail(message: Message) -> None:
        raise ZeroDivisionError("in the callback")

    channel = Channel(caller, on_message=fail, on_lost=lost.append)
    peer.send(Leaving(grace_s=1.0))
    await until(lambda: bool(lost))
    assert [type(error) for error in lost] == [LocalProtocolError]
    assert "in the callback" in caplog.text
    await channel.close()


@in_loop
async def test_an_error_of_on_message_ends_the_channel_with_that_error() -> None:
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
async def test_close_fails_waiting_requests_and_does_not_call_on_lost() -> None:
    pair = await ChannelPair.create()
    task = pair.ask()
    await pair.receive()
    await pair.channel.close()
    await pair.channel.close()
    with pytest.raises(PeerLost, match="closed here"):
        await task
    assert pair.lost == []
    assert pair.channel.closed
    with pytest.raises(PeerLost, match="closed here"):
        pair.channel.send(AskDht(request=1))


@in_loop
async def test_steps_are_sent_over_the_channel() -> None:
    pair = await ChannelPair.create()
    step = Forward(session="session-1", epoch=0, step=1, start=0, rows=1, tokens=np.array([5], np.int32))
    pair.channel.send(step)
    await pair.channel.drain()
    received = await pair.receive()
    assert isinstance(received, Forward)
    assert received.tokens.tolist() == [5]
    await pair.channel.close()


@in_loop
async def test_cancelling_a_request_does_not_affect_the_channel() -> None:
    pair = await ChannelPair.create()
    task, other = pair.ask(), pair.ask()
    request = (await pair.receive()).request
    second = (await pair.receive()).request
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    pair.peer.send(answer(request))
    pair.peer.send(answer(second))
    assert await other == answer(second)
    await pair.channel.close()


@in_loop
async def test_cancelling_close_still_closes() -> None:
    pair = await ChannelPair.create(Limits(close_timeout_s=LONG_S))
    pair.near.blocked = True
    pair.channel.send(Ping(request=1))
    task = asyncio.create_task(pair.channel.close())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pair.channel.closed
    assert pair.near.is_closing()


@in_loop
async def test_a_channel_opens_to_an_address_that_works() -> None:
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


async def answer_pings(pair: ChannelPair, clock: list[float], seconds: Callable[[Ping], float]) -> None:
    """Answer pings. Each advances `clock` by its `seconds`."""
    while True:
        ping = await pair.receive()
        clock[0] += seconds(ping)
        pair.peer.send(Pong(request=ping.request, time=0.0))


def measure(seconds: Callable[[Ping], float], payload: int) -> tuple[float, float]:
    links: list[tuple[float, float]] = []

    @in_loop
    async def scenario() -> None:
        pair, clock = await ChannelPair.create(), [0.0]
        answering = asyncio.create_task(answer_pings(pair, clock, seconds))
        link = await measure_link(pair.channel, payload=payload, clock=lambda: clock[0])
        links.append((link.rtt_s, link.bytes_per_s))
        answering.cancel()
        await pair.channel.close()

    scenario()
    return links[0]


def test_the_round_trip_is_the_fastest_of_a_few_pings() -> None:
    times = iter([0.5, 0.02, 0.3])
    rtt_s, bytes_per_s = measure(lambda _: next(times), 0)
    assert rtt_s == pytest.approx(0.02)
    assert bytes_per_s == 0.0


def test_bandwidth_is_measured_without_the_round_trip() -> None:
    rtt_s, bytes_per_s = measure(lambda ping: 0.01 + len(ping.payload) / 2e6, 200_000)
    assert rtt_s == pytest.approx(0.01)
    assert bytes_per_s == pytest.approx(2e6)


def test_bandwidth_is_a_lower_estimate_if_the_payload_takes_no_longer() -> None:
    _, bytes_per_s = measure(lambda _: 0.01, 200_000)
    assert bytes_per_s == pytest.approx(200_000 / 0.01)


@in_loop
async def test_measuring_a_link_to_a_silent_peer_raises_peer_stalled() -> None:
    pair = await ChannelPair.create()
    with pytest.raises(PeerStalled):
        await measure_link(pair.channel, timeout=SHORT_S)
    await pair.channel.close()

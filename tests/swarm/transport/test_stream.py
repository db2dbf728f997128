from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
import ssl
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from swarm.errors import (
    BadStep,
    ConfigError,
    DirectoryError,
    EngineError,
    LocalProtocolError,
    PeerBusy,
    PeerFailed,
    PeerLost,
    PeerStalled,
    PeerUnreachable,
    RemoteProtocolError,
    SwarmError,
    UnknownModel,
    WrongPeer,
)
from swarm.transport.address import Address
from swarm.transport.identity import Identity
from swarm.transport.limits import Limits
from swarm.transport.listener import Listener
from swarm.transport.stream import Stream, connect, connect_any, listen
from swarm.transport.tls import caller_context, peer_context
from swarm.wire.framing import PREFIX
from swarm.wire.messages import Failure, Forward, Hello, Output
from swarm.wire.protocol import Connection, Role
from swarm.wire.queries import MAX_PING_PAYLOAD, AskDht, FilePiece, Ping, Pong
from tests.swarm.event_loops import in_loop, until
from tests.swarm.transport.memory_transport import CALLER_HELLO, PEER_HELLO, memory_pair

LIMITS = Limits(handshake_timeout_s=0.3, close_timeout_s=0.5)
IDENTITY = Identity.generate()
NO_IDS = np.zeros(0, np.int32)


async def echo(stream: Stream) -> None:
    """Answer a Ping with Pong, and a Forward with an Output of its hidden states."""
    while True:
        message = await stream.receive()
        if isinstance(message, Ping):
            stream.send(Pong(request=message.request, time=float(len(message.payload))))
        elif isinstance(message, Forward):
            stream.send(Output(session=message.session, epoch=0, step=message.step, ids=NO_IDS, hidden=message.hidden))
        await stream.drain()


@contextlib.asynccontextmanager
async def listening(
    handle: Callable[[Stream], Awaitable[None]] = echo,
    *,
    hello: Hello = PEER_HELLO,
    limits: Limits = LIMITS,
    max_connections: int = 16,
) -> AsyncIterator[Listener]:
    listener = await listen(
        "127.0.0.1", 0, IDENTITY, lambda: hello, handle, limits=limits, max_connections=max_connections
    )
    try:
        yield listener
    finally:
        await listener.close()


def at(listener: Listener, peer_id: str = "") -> Address:
    return Address("127.0.0.1", listener.port, peer_id)


async def call(listener: Listener) -> Stream:
    return await connect(at(listener), CALLER_HELLO, limits=LIMITS)


async def raw_tls(listener: Listener) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A caller that speaks TLS and sends raw bytes over it."""
    return await asyncio.open_connection("127.0.0.1", listener.port, ssl=caller_context(), server_hostname="")


async def read_failure(reader: asyncio.StreamReader) -> Failure:
    """The Failure that a peer sends to a caller without a Hello, before it closes the connection."""
    connection = Connection(Role.CALLER)
    connection.data_to_send(CALLER_HELLO)
    (failure,) = connection.receive_data(await reader.read())
    assert isinstance(failure, Failure)
    return failure


async def assert_serving(listener: Listener) -> None:
    stream = await call(listener)
    stream.send(Ping(request=1))
    assert isinstance(await stream.receive(), Pong)
    await stream.close()


# ── handshake ──


@pytest.mark.parametrize("refusal", [UnknownModel, DirectoryError, BadStep, RemoteProtocolError, EngineError])
@in_loop
async def test_a_refusal_of_a_hello_with_any_error_is_the_peers_failure(refusal: type[SwarmError]) -> None:
    def refuse() -> Hello:
        raise refusal("refused for a test")

    listener = await listen("127.0.0.1", 0, IDENTITY, refuse, echo, limits=LIMITS)
    for connecting in (
        connect(at(listener), CALLER_HELLO, limits=LIMITS),
        connect_any([at(listener)], CALLER_HELLO, limits=LIMITS),
    ):
        with pytest.raises(PeerFailed, match="refused for a test") as caught:
            await connecting
        assert caught.value.peer == IDENTITY.peer_id
    await listener.close()


@in_loop
async def test_both_sides_know_each_other() -> None:
    accepted: list[Stream] = []

    async def handle(stream: Stream) -> None:
        accepted.append(stream)
        await echo(stream)

    async with listening(handle, hello=replace(PEER_HELLO, model="m" * 64, incarnation=7)) as listener:
        stream = await connect(at(listener, IDENTITY.peer_id), CALLER_HELLO)
        assert stream.peer_id == IDENTITY.peer_id
        assert stream.hello.incarnation == 7
        assert stream.remote == f"127.0.0.1:{listener.port}"
        await until(lambda: bool(accepted))
        assert accepted[0].hello == CALLER_HELLO
        assert accepted[0].peer_id == ""
        assert accepted[0].remote.startswith("127.0.0.1:")
        await stream.close()


@in_loop
async def test_another_peer_at_the_address_raises_wrong_peer() -> None:
    other = Identity.generate().peer_id
    async with listening() as listener:
        with pytest.raises(WrongPeer, match=f"{IDENTITY.peer_id}, not {other}") as caught:
            await connect(at(listener, other), CALLER_HELLO)
        assert caught.value.peer == other
        await until(lambda: listener.connections == 0)


@in_loop
async def test_a_port_without_a_listener_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(PeerUnreachable, match=rf"127\.0\.0\.1:{port} cannot be reached"):
        await connect(Address("127.0.0.1", port), CALLER_HELLO)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "x" * 64 + ".invalid"])
def test_a_host_without_an_address_is_unreachable(host: str) -> None:
    @in_loop
    async def scenario() -> None:
        with pytest.raises(PeerUnreachable, match=r"cannot be reached|does not answer"):
            await connect(Address(host, 1), CALLER_HELLO)

    scenario()


@in_loop
async def test_a_server_that_does_not_speak_tls_is_unreachable() -> None:
    async def smtp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.org ESMTP\r\n")
        await reader.read(10)
        writer.close()

    async with await asyncio.start_server(smtp, "127.0.0.1", 0) as server:
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        with pytest.raises(PeerUnreachable, match="does not speak TLS"):
            await connect(address, CALLER_HELLO)


@in_loop
async def test_a_silent_server_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address("127.0.0.1", silent.getsockname()[1])
        with pytest.raises(PeerUnreachable, match=r"does not answer within 0.2 s"):
            await connect(address, CALLER_HELLO, timeout=0.2)


@in_loop
async def test_a_peer_that_closes_before_its_hello_is_unreachable() -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(close, "127.0.0.1", 0, ssl=peer_context(IDENTITY)) as server:
        with pytest.raises(PeerUnreachable, match="closed the connection before its Hello"):
            await connect(Address("127.0.0.1", server.sockets[0].getsockname()[1]), CALLER_HELLO)


@in_loop
async def test_another_protocol_version_is_refused_and_both_are_named() -> None:
    async with listening() as listener:
        with pytest.raises(RemoteProtocolError, match=r"version 1, the caller version 99"):
            await connect(at(listener), replace(CALLER_HELLO, protocol=99))
        await assert_serving(listener)


@in_loop
async def test_a_client_of_another_model_is_refused() -> None:
    async with listening(hello=replace(PEER_HELLO, model="a" * 64)) as listener:
        with pytest.raises(PeerFailed, match="serves model aaaaaaaaaaaa, not bbbbbbbbbbbb") as caught:
            await connect(at(listener), replace(CALLER_HELLO, model="b" * 64))
        assert caught.value.peer == IDENTITY.peer_id
        for caller in (replace(CALLER_HELLO, model="a" * 64), replace(PEER_HELLO, model="b" * 64)):
            await (await connect(at(listener), caller)).close()


@in_loop
async def test_a_caller_without_a_hello_gets_a_failure_and_is_disconnected() -> None:
    async with listening() as listener:
        reader, writer = await raw_tls(listener)
        failure = await read_failure(reader)
        assert failure.code == "remote_protocol"
        assert "no Hello arrived within 0.3 s" in failure.text
        writer.close()
        await until(lambda: listener.connections == 0)


@in_loop
async def test_a_caller_that_does_not_speak_tls_is_disconnected() -> None:
    async with listening() as listener:
        silent = await asyncio.open_connection("127.0.0.1", listener.port)
        http = await asyncio.open_connection("127.0.0.1", listener.port)
        http[1].write(b"GET / HTTP/1.1\r\n\r\n")
        for reader, writer in (silent, http):
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
            writer.close()
        await until(lambda: listener.connections == 0)
        await assert_serving(listener)


@in_loop
async def test_a_caller_over_max_connections_gets_peer_busy_with_retry_after() -> None:
    async with listening(max_connections=2) as listener:
        streams = [await call(listener), await call(listener)]
        with pytest.raises(PeerBusy, match="all 2 connections are taken") as caught:
            await call(listener)
        assert caught.value.retry_after > 0
        await streams[0].close()
        await until(lambda: listener.connections == 1)
        streams.append(await call(listener))
        for stream in streams:
            await stream.close()


@in_loop
async def test_connections_over_twice_the_limit_are_closed_at_once() -> None:
    async with listening(max_connections=1) as listener:
        opened = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(2)]
        await until(lambda: listener.connections == 2)
        with pytest.raises(PeerUnreachable):
            await call(listener)
        for _, writer in opened:
            writer.close()


# ── hostile bytes ──


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (PREFIX.pack(10, 2 << 30), "payload has 2147483648 bytes"),
        (PREFIX.pack(2 << 30, 0), "header has 2147483648 bytes"),
        (PREFIX.pack(1, 0) + b"\xc1", "header"),
        (b"\x00" * 8, "header has 0 bytes"),
    ],
)
def test_a_caller_that_sends_invalid_data_gets_a_failure_with_the_reason(data: bytes, named: str) -> None:
    @in_loop
    async def scenario() -> None:
        async with listening() as listener:
            bystander = await call(listener)
            reader, writer = await raw_tls(listener)
            writer.write(data)
            failure = await read_failure(reader)
            assert failure.code == "remote_protocol"
            assert named in failure.text
            writer.close()
            bystander.send(Ping(request=1))
            assert isinstance(await bystander.receive(), Pong)
            await bystander.close()

    scenario()


@in_loop
async def test_invalid_data_after_hello_reaches_the_handler_as_remote_protocol_error() -> None:
    errors: list[SwarmError] = []

    async def handle(stream: Stream) -> None:
        try:
            await echo(stream)
        except SwarmError as error:
            errors.append(error)
            raise

    async with listening(handle) as listener:
        reader, writer = await raw_tls(listener)
        connection = Connection(Role.CALLER)
        writer.write(b"".join(connection.data_to_send(CALLER_HELLO)))
        connection.receive_data(await reader.read(1 << 16))
        ping = b"".join(connection.data_to_send(Ping(request=5)))
        writer.write(ping + PREFIX.pack(3, 0) + b"abc")
        pong, failure = connection.receive_data(await reader.read())
        assert isinstance(pong, Pong)
        assert isinstance(failure, Failure)
        assert failure.code == "remote_protocol"
        assert [type(error) for error in errors] == [RemoteProtocolError]
        writer.close()


@in_loop
async def test_an_end_in_the_middle_of_a_message_is_reported() -> None:
    errors: list[SwarmError] = []

    async def handle(stream: Stream) -> None:
        try:
            await stream.receive()
        except SwarmError as error:
            errors.append(error)

    async with listening(handle) as listener:
        reader, writer = await raw_tls(listener)
        writer.write(b"".join(Connection(Role.CALLER).data_to_send(CALLER_HELLO)) + PREFIX.pack(30, 0) + b"half")
        await reader.read(1 << 16)
        writer.close()
        await until(lambda: bool(errors))
    assert isinstance(errors[0], PeerLost)
    assert "in the middle of a message" in str(errors[0])


@in_loop
async def test_a_fuzzed_listener_continues_to_serve_other_callers() -> None:
    rng = random.Random(7)
    async with listening() as listener:
        bystander = await call(listener)
        for attempt in range(40):
            reader, writer = await raw_tls(listener)
            data = bytearray(b"".join(Connection(Role.CALLER).data_to_send(CALLER_HELLO)))
            if attempt % 2:
                data[rng.randrange(len(data))] = rng.randrange(256)
            data += rng.randbytes(rng.randrange(200))
            writer.write(data)
            writer.write_eof() if writer.can_write_eof() else None
            with contextlib.suppress(TimeoutError, ConnectionError, ssl.SSLError):
                await asyncio.wait_for(reader.read(), 1.0 if attempt % 4 == 0 else 0.05)
            writer.close()
            bystander.send(Ping(request=attempt + 1))
            assert isinstance(await bystander.receive(), Pong)
        await bystander.close()
        await until(lambda: listener.connections == 0)


# ── messages ──


@in_loop
async def test_large_messages_are_sent_in_both_directions() -> None:
    hidden = np.arange(2048 * 600, dtype=np.float32).reshape(2048, 600)
    step = Forward(
        session="session-1", epoch=0, step=1, start=0, rows=1, tokens=np.zeros(2048, np.int32), hidden=hidden
    )
    async with listening() as listener:
        stream = await call(listener)
        for _ in range(3):
            stream.send(step)
            await stream.drain()
            answer = await stream.receive()
            assert isinstance(answer, Output)
            assert answer.hidden is not None
            assert np.array_equal(answer.hidden, hidden)
        await stream.close()


@in_loop
async def test_an_array_can_be_reused_after_send() -> None:
    hidden = np.ones((64, 1024), np.float32)
    async with listening() as listener:
        stream = await call(listener)
        tokens = np.zeros(64, np.int32)
        stream.send(Forward(session="session-1", epoch=0, step=1, start=0, rows=0, tokens=tokens, hidden=hidden))
        hidden[:] = 0
        answer = await stream.receive()
        assert isinstance(answer, Output)
        assert answer.hidden is not None
        assert (answer.hidden == 1).all()
        await stream.close()


@in_loop
async def test_messages_keep_their_order_for_any_split_of_the_bytes() -> None:
    caller, peer, near, _ = await memory_pair(LIMITS)
    for near.chunk in (1, 2, 7, 1000):
        for request in range(20):
            caller.send(Ping(request=request, payload=bytes(request)))
        for request in range(20):
            assert await peer.receive() == Ping(request=request, payload=bytes(request))
    await caller.close()


@in_loop
async def test_small_messages_of_one_turn_are_sent_together_or_at_once() -> None:
    caller, peer, near, _ = await memory_pair(LIMITS)
    near.blocked = True
    caller.send(Ping(request=1))
    assert near.get_write_buffer_size() == 0
    caller.send(Ping(request=2), flush=True)  # Sends the queued message too.
    written = near.get_write_buffer_size()
    assert written > 0
    await asyncio.sleep(0)
    assert near.get_write_buffer_size() == written  # Nothing is sent twice.
    caller.send(Ping(request=3))
    await asyncio.sleep(0)
    assert near.get_write_buffer_size() > written
    near.release()
    assert [await peer.receive() for _ in range(3)] == [Ping(request=request) for request in (1, 2, 3)]
    await caller.close()


@in_loop
async def test_a_message_of_the_wrong_side_is_not_sent() -> None:
    caller, peer, _, _ = await memory_pair(LIMITS)
    with pytest.raises(LocalProtocolError):
        caller.send(Pong(request=1, time=0.0))
    caller.send(AskDht(request=1))
    assert await peer.receive() == AskDht(request=1)
    await caller.close()


# ── handlers ──


@in_loop
async def test_an_error_of_the_handler_is_sent_to_its_caller_only() -> None:
    async def handle(stream: Stream) -> None:
        message = await stream.receive()
        if isinstance(message, AskDht):
            raise BadStep("start is 7, the session has 5")
        await echo(stream)

    async with listening(handle) as listener:
        good, bad = await call(listener), await call(listener)
        bad.send(AskDht(request=1))
        with pytest.raises(BadStep, match="start is 7"):
            await bad.receive()
        with pytest.raises(BadStep, match="start is 7"):
            bad.send(Ping(request=1))
        good.send(Ping(request=1))
        good.send(Ping(request=2))
        assert isinstance(await good.receive(), Pong)
        await good.close()
        await bad.close()


@in_loop
async def test_a_bug_in_the_handler_is_logged_and_ends_only_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def handle(stream: Stream) -> None:
        if isinstance(await stream.receive(), AskDht):
            raise ZeroDivisionError("a bug")
        await echo(stream)

    async with listening(handle) as listener:
        stream = await call(listener)
        stream.send(AskDht(request=1))
        with pytest.raises(PeerFailed, match="unexpected error") as caught:
            await stream.receive()
        assert caught.value.peer == IDENTITY.peer_id
        assert "bug" not in str(caught.value)
        await stream.close()
        other = await call(listener)
        other.send(Ping(request=1))
        other.send(Ping(request=2))
        assert isinstance(await other.receive(), Pong)
        await other.close()
    assert [record.levelname for record in caplog.records if record.exc_info] == ["ERROR"]


@in_loop
async def test_a_connection_ends_when_its_handler_returns() -> None:
    async def handle(stream: Stream) -> None:
        await stream.receive()

    async with listening(handle) as listener:
        stream = await call(listener)
        stream.send(AskDht(request=1))
        with pytest.raises(PeerLost):
            await stream.receive()
        with pytest.raises(PeerLost):
            stream.send(AskDht(request=2))
        await stream.close()
        await until(lambda: listener.connections == 0)


@in_loop
async def test_closing_the_listener_ends_all_connections_and_frees_the_port() -> None:
    ended: list[bool] = []

    async def handle(stream: Stream) -> None:
        try:
            await echo(stream)
        finally:
            ended.append(True)

    listener = await listen("127.0.0.1", 0, IDENTITY, lambda: PEER_HELLO, handle, limits=LIMITS)
    streams = [await call(listener) for _ in range(3)]
    half_open = await asyncio.open_connection("127.0.0.1", listener.port)
    port = listener.port
    await listener.close()
    await listener.close()
    assert ended == [True] * 3
    for stream in streams:
        with pytest.raises(PeerLost):
            await stream.receive()
        await stream.close()
    half_open[1].close()
    assert listener.port == port
    again = await listen("127.0.0.1", port, IDENTITY, lambda: PEER_HELLO, echo, limits=LIMITS)
    await again.close()


@in_loop
async def test_a_port_that_is_taken_is_named() -> None:
    async with listening() as listener:
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{listener.port}: .*in use"):
            await listen("127.0.0.1", listener.port, IDENTITY, lambda: PEER_HELLO, echo)
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1:0"):
        await listen("203.0.113.1", 0, IDENTITY, lambda: PEER_HELLO, echo)


@in_loop
async def test_all_addresses_of_a_host_share_one_port() -> None:
    listener = await listen("", 0, IDENTITY, lambda: PEER_HELLO, echo, limits=LIMITS)
    await assert_serving(listener)
    await listener.close()


# ── flow control ──


@in_loop
async def test_a_side_that_does_not_read_makes_the_other_wait() -> None:
    limits = Limits(max_unread=100_000, high_water=50_000)
    caller, peer, near, far = await memory_pair(limits)
    sent = 0
    while near.get_write_buffer_size() < 50_000:
        caller.send(Ping(request=sent, payload=bytes(10_000)))
        sent += 1
        await asyncio.sleep(0)
    assert not far.reading
    waiting = asyncio.create_task(caller.drain())
    await asyncio.sleep(0)
    assert not waiting.done()
    for request in range(sent):
        message = await peer.receive()
        assert isinstance(message, Ping)
        assert message.request == request
        await asyncio.sleep(0)
    await waiting
    assert far.reading
    await caller.close()


@in_loop
async def test_drain_raises_peer_stalled_if_the_peer_does_not_read() -> None:
    caller, peer, near, _ = await memory_pair(Limits(high_water=1000, write_timeout_s=0.05, close_timeout_s=0.05))
    near.blocked = True
    caller.send(Ping(request=1, payload=bytes(5000)))
    with pytest.raises(PeerStalled, match=r"read too little in 0.05 s"):
        await caller.drain()
    with pytest.raises(PeerStalled):
        caller.send(Ping(request=2))
    near.release()
    with pytest.raises(PeerLost):
        await peer.receive()
    await caller.close()


@in_loop
async def test_send_raises_peer_stalled_over_max_unsent() -> None:
    caller, _, near, _ = await memory_pair(Limits(max_unsent=3 * MAX_PING_PAYLOAD, close_timeout_s=0.05))
    near.blocked = True
    ping = Ping(request=1, payload=bytes(MAX_PING_PAYLOAD))
    caller.send(ping)
    caller.send(ping)
    with pytest.raises(PeerStalled, match="are unsent"):
        caller.send(ping)
    assert caller.closed


@in_loop
async def test_a_real_socket_that_is_not_read_stalls() -> None:
    async def sleep(stream: Stream) -> None:
        await asyncio.Event().wait()

    limits = Limits(max_unread=1 << 16, write_timeout_s=0.2, close_timeout_s=0.2)
    async with listening(sleep, limits=limits) as listener:
        stream = await connect(at(listener), CALLER_HELLO, limits=limits)

        async def flood() -> None:
            while True:
                stream.send(Ping(request=1, payload=bytes(MAX_PING_PAYLOAD)))
                await stream.drain()

        with pytest.raises(PeerStalled):
            await flood()
        await stream.close()


# ── closing ──


@in_loop
async def test_close_sends_queued_messages() -> None:
    received: list[int] = []

    async def handle(stream: Stream) -> None:
        while True:
            message = await stream.receive()
            assert isinstance(message, Ping)
            received.append(message.request)

    async with listening(handle) as listener:
        stream = await call(listener)
        for request in range(20):
            stream.send(Ping(request=request, payload=bytes(100_000)))
        await stream.close()
        await stream.close()
        await until(lambda: len(received) == 20)
        with pytest.raises(PeerLost, match="closed here"):
            stream.send(Ping(request=1))
        with pytest.raises(PeerLost, match="closed here"):
            await stream.drain()
        with pytest.raises(PeerLost, match="closed here"):
            await stream.receive()


@in_loop
async def test_close_is_bounded_if_the_peer_does_not_read() -> None:
    caller, _, near, _ = await memory_pair(Limits(close_timeout_s=0.05))
    near.blocked = True
    caller.send(Ping(request=1))
    await caller.close()
    assert caller.closed


@in_loop
async def test_the_end_of_the_connection_wakes_all_waiting_tasks() -> None:
    caller, _, near, _ = await memory_pair(Limits(high_water=10))
    near.blocked = True
    caller.send(Ping(request=1, payload=bytes(100)))
    waiting = [asyncio.create_task(caller.drain()), asyncio.create_task(caller.receive())]
    await asyncio.sleep(0)
    near.break_connection(ConnectionResetError("reset by peer"))
    for task in waiting:
        with pytest.raises(PeerLost, match="closed the connection: reset by peer"):
            await task


@in_loop
async def test_a_half_closed_connection_is_noticed_by_the_write_timeout() -> None:
    """This side never learns that the other side has ended: it continues to send."""
    caller, peer, near, far = await memory_pair(Limits(high_water=1000, write_timeout_s=0.05, close_timeout_s=0.05))
    far.break_connection()
    with pytest.raises(PeerLost):
        await peer.receive()
    caller.send(Ping(request=1, payload=bytes(2000)))
    with pytest.raises(PeerStalled):
        await caller.drain()
    assert near.is_closing()


@in_loop
async def test_dropped_bytes_are_a_protocol_error_and_not_a_wrong_message() -> None:
    caller, peer, near, _ = await memory_pair(LIMITS)
    near.chunk = 5
    near.dropping = True
    caller.send(Ping(request=1))
    near.dropping = False
    near.write(b"\xff" * 9)
    with pytest.raises(RemoteProtocolError, match="header has"):
        await peer.receive()
    peer.send_failure(RemoteProtocolError("invalid data"))
    with pytest.raises(LocalProtocolError, match=r"refused what it was sent: invalid data"):
        await caller.receive()
    await peer.close()
    await caller.close()


@in_loop
async def test_a_bug_in_reading_is_a_local_error() -> None:
    caller, _, near, _ = await memory_pair(LIMITS)
    near.break_connection(ZeroDivisionError("in a codec"))
    with pytest.raises(LocalProtocolError, match="a bug ended the connection"):
        await caller.receive()


# ── cancellation: one test for each await ──


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@in_loop
async def test_cancelling_receive_loses_no_message() -> None:
    caller, peer, near, _ = await memory_pair(LIMITS)
    near.chunk = 3
    for request in range(30):
        task = asyncio.create_task(peer.receive())
        if request % 3 == 0:
            await asyncio.sleep(0)
        caller.send(Ping(request=request))
        for _ in range(request % 4):
            await asyncio.sleep(0)
        task.cancel()
        try:
            message = await task
        except asyncio.CancelledError:
            message = await peer.receive()
        assert message == Ping(request=request)
    await caller.close()


@in_loop
async def test_cancelling_drain_leaves_the_connection_open() -> None:
    caller, peer, near, _ = await memory_pair(Limits(high_water=10))
    near.blocked = True
    caller.send(Ping(request=1, payload=bytes(100)))
    task = asyncio.create_task(caller.drain())
    await asyncio.sleep(0)
    await cancel(task)
    near.release()
    assert await peer.receive() == Ping(request=1, payload=bytes(100))
    await caller.drain()
    await caller.close()


@in_loop
async def test_cancelling_close_ends_at_once() -> None:
    caller, _, near, _ = await memory_pair(Limits(close_timeout_s=60))
    near.blocked = True
    caller.send(Ping(request=1))
    task = asyncio.create_task(caller.close())
    await asyncio.sleep(0)
    await cancel(task)
    assert near.get_write_buffer_size() == 0
    assert caller.closed


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 21, 34])
def test_cancelling_connect_leaves_no_connection(turns: int) -> None:
    @in_loop
    async def scenario() -> None:
        async with listening() as listener:
            task = asyncio.create_task(connect(at(listener), CALLER_HELLO))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await task).close()
            await until(lambda: listener.connections == 0)

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        scenario()
        gc.collect()


@in_loop
async def test_cancelling_connect_before_the_peers_hello_leaves_no_connection() -> None:
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.put_nowait(await reader.read(1 << 16))
        received.put_nowait(await reader.read())
        writer.close()

    async with await asyncio.start_server(stay_silent, "127.0.0.1", 0, ssl=peer_context(IDENTITY)) as server:
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        task = asyncio.create_task(connect(address, CALLER_HELLO))
        assert await received.get() != b""
        await cancel(task)
        assert await received.get() == b""


@in_loop
async def test_a_handler_that_is_cancelled_closes_its_connection() -> None:
    async def handle(stream: Stream) -> None:
        raise asyncio.CancelledError

    async with listening(handle) as listener:
        stream = await call(listener)
        with pytest.raises(PeerLost):
            await stream.receive()
        await stream.close()
        await until(lambda: listener.connections == 0)


# ── connect_any ──


@in_loop
async def test_the_first_connection_that_works_is_kept_and_the_others_are_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        slow = Address("127.0.0.1", silent.getsockname()[1])
        async with listening() as listener:
            addresses = [slow, Address("127.0.0.1", 1), at(listener), at(listener)]
            stream = await connect_any(addresses, CALLER_HELLO)
            assert stream.peer_id == IDENTITY.peer_id
            await until(lambda: listener.connections == 1)
            stream.send(Ping(request=1))
            assert isinstance(await stream.receive(), Pong)
            await stream.close()


@in_loop
async def test_if_no_address_works_all_are_named() -> None:
    with pytest.raises(PeerUnreachable, match=r"127\.0\.0\.1:1 .*127\.0\.0\.1:2 "):
        await connect_any([Address("127.0.0.1", 1), Address("127.0.0.1", 2)], CALLER_HELLO)
    with pytest.raises(PeerUnreachable, match="no address"):
        await connect_any([], CALLER_HELLO)


@in_loop
async def test_the_error_of_a_single_address_is_raised_unchanged() -> None:
    async with listening() as listener:
        with pytest.raises(WrongPeer):
            await connect_any([at(listener, "a" * 32)], CALLER_HELLO)


@pytest.mark.parametrize("turns", [0, 1, 4, 16, 64])
def test_cancelling_connect_any_leaves_no_connection(turns: int) -> None:
    @in_loop
    async def scenario() -> None:
        async with listening() as listener:
            task = asyncio.create_task(connect_any([at(listener)] * 3, CALLER_HELLO))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await task).close()
            await until(lambda: listener.connections == 0)

    scenario()


def test_invalid_limits_are_named() -> None:
    with pytest.raises(ConfigError, match="max_payload is 0"):
        Limits(max_payload=0)


def test_the_largest_file_piece_fits_the_default_limits() -> None:
    FilePiece(request=1, data=bytes(4 << 20))
    assert Limits().max_unread >= 4 << 20

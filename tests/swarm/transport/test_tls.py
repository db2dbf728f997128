from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from swarm.errors import WrongPeer
from swarm.process import event_loop
from swarm.transport.identity import Identity
from swarm.transport.tls import SecureTransport, accept_tls, caller_context, connect_tls, peer_context
from tests.swarm.event_loops import in_loop, until

IDENTITY = Identity.generate()
LARGE = bytes(range(256)) * (3 << 12)  # More than the socket buffers.


class Collector(asyncio.Protocol):
    """Records what it receives."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.received = bytearray()
        self.ends: list[Exception | None] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.ends.append(exc)


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[tuple[SecureTransport, Collector, SecureTransport, Collector]]:
    """A caller and a peer over a real connection."""
    caller, peer = Collector(), Collector()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dialling = asyncio.create_task(connect_tls("127.0.0.1", listening.getsockname()[1], caller))
        listening.setblocking(False)
        accepted, _ = await asyncio.get_running_loop().sock_accept(listening)
        answering = await accept_tls(accepted, peer, peer_context(IDENTITY))
        calling = await dialling
    yield calling, caller, answering, peer
    calling.abort()
    answering.abort()
    await until(lambda: len(caller.ends) == len(peer.ends) == 1)


@pytest.mark.parametrize("make_loop", [event_loop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_data_that_arrives_before_tls_starts_is_not_lost(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    arrived, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = caller_context().wrap_bio(arrived, leaving)
    with contextlib.suppress(ssl.SSLWantReadError):
        caller.do_handshake()

    async def main() -> None:
        peer = Collector()
        with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as early:
            early.connect(listening.getsockname())
            early.sendall(leaving.read())
            accepted, _ = listening.accept()
            early.setblocking(False)
            taking = asyncio.create_task(accept_tls(accepted, peer, peer_context(IDENTITY)))
            arrived.write(await asyncio.get_running_loop().sock_recv(early, 1 << 14))
            caller.do_handshake()
            caller.write(b"hello")
            early.sendall(leaving.read())
            (await taking).set_write_buffer_limits(high=1)
            await until(lambda: peer.received == b"hello")
        await until(lambda: peer.ends == [None])

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(asyncio.wait_for(main(), 20))


@in_loop
async def test_the_peer_is_certified_and_data_of_any_size_is_sent() -> None:
    async with pair() as (calling, caller, answering, peer):
        assert calling.certified_peer == IDENTITY.peer_id
        with pytest.raises(WrongPeer):
            _ = answering.certified_peer  # A caller shows no certificate.
        calling.write(b"one")
        answering.writelines([b"two", memoryview(LARGE), b""])
        calling.write(LARGE)
        await until(lambda: len(caller.received) == 3 + len(LARGE) == len(peer.received))
        assert caller.received == b"two" + LARGE
        assert peer.received == b"one" + LARGE


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no such limit")
@in_loop
async def test_a_dead_machine_is_noticed_within_a_minute_with_and_without_unsent_data() -> None:
    async with pair() as ends:
        for transport in ends[::2]:
            assert isinstance(transport, SecureTransport)
            connected = transport._tcp.get_extra_info("socket")
            options = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            idle_s, interval_s, count, unsent_ms = (
                connected.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in options
            )
            assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert idle_s + interval_s * count == 60 == unsent_ms / 1000


@in_loop
async def test_while_reading_is_paused_nothing_is_received_and_nothing_lost() -> None:
    async with pair() as (calling, caller, answering, _):

        def receive(data: bytes) -> None:
            assert calling._reading
            caller.received += data
            calling.pause_reading()
            asyncio.get_running_loop().call_later(0, calling.resume_reading)

        caller.data_received = receive  # type: ignore[method-assign]
        for _ in range(50):
            answering.write(b"x" * 1000)  # Several records arrive at once.
        await until(lambda: len(caller.received) == 50_000)


@in_loop
async def test_queued_data_arrives_after_close_and_both_sides_can_close_at_once() -> None:
    async with pair() as (calling, caller, answering, peer):
        calling.write(LARGE)
        calling.close()
        await until(lambda: bool(caller.ends and peer.ends))
        assert peer.received == LARGE
        assert caller.ends == peer.ends == [None]
        answering.write(b"too late")
    async with pair() as (calling, caller, answering, peer):
        calling.close()
        answering.close()
        await until(lambda: caller.ends == peer.ends == [None])


@in_loop
async def test_a_tampered_record_ends_the_connection_with_the_reason() -> None:
    async with pair() as (calling, caller, answering, peer):
        calling._tcp.write(b"\x17\x03\x03\x00\x20" + bytes(32))
        await until(lambda: bool(peer.ends))
        assert isinstance(peer.ends[0], ssl.SSLError)
        assert answering.is_closing()
        assert peer.received == b""
        await until(lambda: bool(caller.ends))


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5])
def test_a_cancelled_handshake_leaves_no_connection(turns: int) -> None:
    @in_loop
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            task = asyncio.create_task(connect_tls("127.0.0.1", silent.getsockname()[1], Collector()))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0)

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        scenario()
        gc.collect()


def test_the_temporary_key_file_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    peer_context(IDENTITY)
    assert list(tmp_path.iterdir()) == []

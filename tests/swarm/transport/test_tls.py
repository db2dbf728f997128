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
from swarm.transport.tls import SecureTransport, caller_context, dial, peer_context, take
from tests.swarm.event_loops import in_loop, until

IDENTITY = Identity.generate()
LARGE = bytes(range(256)) * (3 << 12)  # more than the sockets hold


class Collector(asyncio.Protocol):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.heard = bytearray()
        self.ends: list[Exception | None] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.ends.append(exc)


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[tuple[SecureTransport, Collector, SecureTransport, Collector]]:
    """Caller and peer over a real connection."""
    caller, peer = Collector(), Collector()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dialling = asyncio.create_task(dial("127.0.0.1", listening.getsockname()[1], caller))
        listening.setblocking(False)
        accepted, _ = await asyncio.get_running_loop().sock_accept(listening)
        answering = await take(accepted, peer, peer_context(IDENTITY))
        calling = await dialling
    yield calling, caller, answering, peer
    calling.abort()
    answering.abort()
    await until(lambda: len(caller.ends) == len(peer.ends) == 1)


@pytest.mark.parametrize("make_loop", [event_loop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_what_came_before_the_connection_was_taken_is_not_lost(
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
            taking = asyncio.create_task(take(accepted, peer, peer_context(IDENTITY)))
            arrived.write(await asyncio.get_running_loop().sock_recv(early, 1 << 14))
            caller.do_handshake()
            caller.write(b"hello")
            early.sendall(leaving.read())
            (await taking).set_write_buffer_limits(high=1)
            await until(lambda: peer.heard == b"hello")
        await until(lambda: peer.ends == [None])

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(asyncio.wait_for(main(), 20))


@in_loop
async def test_the_peer_is_known_and_messages_of_any_size_pass() -> None:
    async with pair() as (calling, caller, answering, peer):
        assert calling.certified_peer == IDENTITY.peer_id
        with pytest.raises(WrongPeer):
            _ = answering.certified_peer  # a caller shows no certificate
        calling.write(b"one")
        answering.writelines([b"two", memoryview(LARGE), b""])
        calling.write(LARGE)
        await until(lambda: len(caller.heard) == 3 + len(LARGE) == len(peer.heard))
        assert caller.heard == b"two" + LARGE
        assert peer.heard == b"one" + LARGE


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no such limit")
@in_loop
async def test_who_is_gone_without_a_word_is_noticed_within_a_minute_whether_or_not_something_is_unsent() -> None:
    async with pair() as ends:
        for transport in ends[::2]:
            assert isinstance(transport, SecureTransport)
            connected = transport._below.get_extra_info("socket")
            options = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            idle, again, count, unsent_ms = (
                connected.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in options
            )
            assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert idle + again * count == 60 == unsent_ms / 1000


@in_loop
async def test_who_pauses_hears_nothing_and_misses_nothing() -> None:
    async with pair() as (calling, caller, answering, _):

        def hear(data: bytes) -> None:
            assert calling._reading
            caller.heard += data
            calling.pause_reading()
            asyncio.get_running_loop().call_later(0, calling.resume_reading)

        caller.data_received = hear  # type: ignore[method-assign]
        for _ in range(50):
            answering.write(b"x" * 1000)  # several records arrive at once
        await until(lambda: len(caller.heard) == 50_000)


@in_loop
async def test_both_may_close_at_once_and_what_was_queued_arrives() -> None:
    async with pair() as (calling, caller, answering, peer):
        calling.write(LARGE)
        calling.close()
        await until(lambda: bool(caller.ends and peer.ends))
        assert peer.heard == LARGE
        assert caller.ends == peer.ends == [None]
        answering.write(b"too late")
    async with pair() as (calling, caller, answering, peer):
        calling.close()
        answering.close()
        await until(lambda: caller.ends == peer.ends == [None])


@in_loop
async def test_a_record_that_was_tampered_with_ends_the_connection_with_the_reason() -> None:
    async with pair() as (calling, caller, answering, peer):
        calling._below.write(b"\x17\x03\x03\x00\x20" + bytes(32))
        await until(lambda: bool(peer.ends))
        assert isinstance(peer.ends[0], ssl.SSLError)
        assert answering.is_closing()
        assert peer.heard == b""
        await until(lambda: bool(caller.ends))


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5])
def test_a_handshake_that_is_cancelled_leaves_no_connection(turns: int) -> None:
    @in_loop
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            task = asyncio.create_task(dial("127.0.0.1", silent.getsockname()[1], Collector()))
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


def test_the_key_is_on_no_disk_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    peer_context(IDENTITY)
    assert list(tmp_path.iterdir()) == []

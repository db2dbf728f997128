"""Malformed and hostile bytes on a peer's socket: that connection gets a Failure and ends, all others go on."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import ssl
import struct
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from peer.config import SessionLimits
from peer.connections.caller_connection import Connection
from peer.serving.queries import SharedFiles
from peer.sessions.service import ServedSpan, SpanService
from swarm.errors import PeerBusy
from swarm.model.manifest import describe_file
from swarm.model.spans import LayerRange
from swarm.wire.base_message import Message
from swarm.wire.codec import encode
from swarm.wire.framing import PREFIX
from swarm.wire.messages import MAX_STEP_TOKENS, Attach, Forward, OpenSession
from swarm.wire.queries import MAX_FILE_PIECE, MAX_PING_PAYLOAD, AskFile, FilePiece, Ping
from tests.peer.toy_engine import HIDDEN, LAYERS, ToyEngine, toy_manifest, toy_text
from tests.peer.toy_swarm import PATIENCE_S, SECRET, Caller, Host, calling, client_hello, generate, toy_peer, until

PROMPT = [3, 1, 4]


class RawConnection:
    """TLS, and any bytes that a test sends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def stop_reading(self) -> None:
        self.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's

    async def greet(self) -> None:
        await self.send(frame_of(client_hello()))
        header, _ = await self.frame()
        assert header["kind"] == "hello"

    async def frame(self) -> tuple[dict[str, Any], bytes]:
        async with asyncio.timeout(PATIENCE_S):
            header, payload = PREFIX.unpack(await self._reader.readexactly(PREFIX.size))
            return msgpack.unpackb(await self._reader.readexactly(header)), await self._reader.readexactly(payload)

    async def last_header(self) -> dict[str, Any]:
        """The header of the last frame before the peer ends the connection; empty if there is none."""
        header: dict[str, Any] = {}
        try:
            while True:
                header, _ = await self.frame()
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            return header


@asynccontextmanager
async def raw_connection(host: Host, *, at: str = "127.0.0.1") -> AsyncIterator[RawConnection]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(
        host.address.host, host.address.port, ssl=context, server_hostname="", local_addr=(at, 0)
    )
    try:
        yield RawConnection(reader, writer)
    finally:
        writer.transport.abort()


def frame_of(message: Message) -> bytes:
    header, payload = encode(message)
    return frame(header, b"".join(bytes(piece) for piece in payload))


def frame(header: bytes, payload: bytes = b"") -> bytes:
    return PREFIX.pack(len(header), len(payload)) + header + payload


def forged(payload: bytes | None = None, **changes: Any) -> bytes:
    """A Forward with `changes` in its header, and another payload if given."""
    honest = Forward(
        session="session-1",
        epoch=0,
        step=0,
        start=0,
        rows=1,
        tokens=np.ones(2, np.int32),
        hidden=np.ones((2, HIDDEN), np.float32),
    )
    header, pieces = encode(honest)
    plain = {**msgpack.unpackb(header), **changes}
    return frame(msgpack.packb(plain), b"".join(bytes(piece) for piece in pieces) if payload is None else payload)


MALFORMED: dict[str, Callable[[], bytes]] = {
    "random bytes": lambda: random.Random(1).randbytes(4096),
    "a header of 2 GiB": lambda: struct.pack(">II", 1 << 31, 0),
    "a payload of 2 GiB": lambda: struct.pack(">II", 10, 1 << 31) + bytes(10),
    "no header": lambda: frame(b""),
    "a header that is not a map": lambda: frame(msgpack.packb([1, 2])),
    "a header that is not msgpack": lambda: frame(b"\xc1" * 20),
    "deep nesting": lambda: frame(b"\x91" * 4000),
    "an unknown kind": lambda: frame(msgpack.packb({"kind": "format-disk"})),
    "a peer's message": lambda: frame(msgpack.packb({"kind": "pong", "request": 1, "time": 1.0})),
    "a second Hello": lambda: frame_of(client_hello()),
    "a wrong dtype": lambda: forged(dtype="f128"),
    "a dtype that does not fit": lambda: forged(dtype="f16"),
    "a huge shape": lambda: forged(hidden=[1 << 40, 1 << 40]),
    "a negative shape": lambda: forged(hidden=[-1, HIDDEN]),
    "a shape that is a string": lambda: forged(hidden="many"),
    "too many tokens": lambda: forged(tokens=[100_000], payload=bytes(400_000)),
    "no tokens": lambda: forged(tokens=[0], hidden=None, payload=b""),
    "rows beyond the tokens": lambda: forged(rows=3),
    "a negative position": lambda: forged(start=-1),
    "a payload too long": lambda: forged(payload=bytes(10_000)),
    "a payload too short": lambda: forged(payload=bytes(5)),
    "an invalid sampling": lambda: forged(sampling=[float("nan"), 0, 1.0, 0.0, 1.0, 0, None]),
    "an invalid session name": lambda: forged(session="../../etc/passwd"),
}


@asynccontextmanager
async def peer_with_honest_client() -> AsyncIterator[tuple[Host, Caller]]:
    """A peer, and an honest client whose text must be right at the end."""
    async with toy_peer() as host, calling(host) as caller:
        await caller.open("honest-session")
        yield host, caller
        assert await generate(caller, caller, PROMPT, 6, "honest-session") == toy_text(PROMPT, 6)
        assert caller.messages == []
        assert caller.lost == []


@pytest.mark.parametrize("after_hello", [False, True], ids=["before Hello", "after Hello"])
@pytest.mark.parametrize("malformed", MALFORMED)
def test_malformed_bytes_end_only_their_connection(malformed: str, after_hello: bool) -> None:
    async def main() -> None:
        async with peer_with_honest_client() as (host, _), raw_connection(host) as raw:
            if after_hello:
                await raw.greet()
            elif malformed == "a second Hello":
                return
            await raw.send(MALFORMED[malformed]())
            words = await raw.last_header()
            assert words["kind"] == "failure"
            assert words["code"] == "remote_protocol"
            await until(lambda: host.server.connections == 1)

    asyncio.run(main())


def test_bytes_that_are_not_tls_end_only_their_connection() -> None:
    async def main() -> None:
        async with peer_with_honest_client() as (host, _):
            for data in (b"GET / HTTP/1.1\r\n\r\n", random.Random(2).randbytes(5000), b""):
                reader, writer = await asyncio.open_connection(host.address.host, host.address.port)
                writer.write(data)
                writer.write_eof()
                async with asyncio.timeout(PATIENCE_S):
                    await reader.read()
                writer.close()

    asyncio.run(main())


def test_an_incomplete_frame_holds_up_no_other_connection() -> None:
    async def main() -> None:
        async with peer_with_honest_client() as (host, _), raw_connection(host) as raw:
            await raw.greet()
            whole = frame_of(Ping(request=1, payload=bytes(1000)))
            await raw.send(whole[:500])
            async with calling(host) as other:
                await other.ping()
            await raw.send(whole[500:])
            header, _ = await raw.frame()
            assert header["kind"] == "pong"

    asyncio.run(main())


def test_well_formed_but_wrong_messages_get_a_failure_and_the_connection_goes_on() -> None:
    async def main() -> None:
        async with peer_with_honest_client() as (host, _), raw_connection(host) as raw:
            await raw.greet()
            for data, code in (
                (forged(session="session-9"), "unknown_session"),
                (forged(session="honest-session"), "unknown_session"),
                (
                    frame(
                        msgpack.packb(
                            {"kind": "attach", "request": 1, "session": "honest-session", "epoch": 0, "secret": b"?"}
                        )
                    ),
                    "unknown_session",
                ),
                (frame(msgpack.packb({"kind": "ask_manifest", "request": 2, "model": "0" * 64})), "unknown_model"),
                (
                    frame(
                        msgpack.packb({"kind": "ask_file", "request": 3, "sha256": "0" * 64, "offset": 0, "length": 9})
                    ),
                    "unknown_model",
                ),
                (
                    frame(
                        msgpack.packb(
                            {
                                "kind": "open",
                                "request": 4,
                                "session": "session-2",
                                "epoch": 0,
                                "secret": SECRET,
                                "first": 0,
                                "last": LAYERS,
                                "max_tokens": 1 << 60,
                            }
                        )
                    ),
                    "context_exceeded",
                ),
            ):
                await raw.send(data)
                header, _ = await raw.frame()
                assert (header["kind"], header["code"]) == ("failure", code)
            await raw.send(frame_of(Ping(request=9)))
            header, _ = await raw.frame()
            assert header["kind"] == "pong"

    asyncio.run(main())


def test_a_position_beyond_the_cache_and_invalid_numbers_fail_only_their_step() -> None:
    async def main() -> None:
        back = LayerRange(3, LAYERS)
        async with toy_peer(back) as host, raw_connection(host) as raw:
            await raw.greet()
            opening = {"kind": "open", "request": 1, "session": "session-1", "epoch": 0, "secret": SECRET}
            await raw.send(frame(msgpack.packb({**opening, "first": 3, "last": LAYERS, "max_tokens": 50})))
            assert (await raw.frame())[0]["kind"] == "opened"
            not_finite = np.full((2, HIDDEN), np.nan, np.float32).tobytes()
            ids = np.ones(2, np.int32).tobytes()
            for data in (
                forged(start=1),
                forged(start=1 << 40),
                forged(tokens=[2], payload=np.array([-5, 1 << 30], np.int32).tobytes() + bytes(8 * HIDDEN)),
                forged(payload=ids + not_finite),
                forged(hidden=None, payload=ids),
                forged(hidden=[2, 4], payload=ids + bytes(32)),
            ):
                await raw.send(data)
                header, _ = await raw.frame()
                assert (header["kind"], header["code"], header["session"]) == ("failure", "bad_step", "session-1")
            await raw.send(forged())
            assert (await raw.frame())[0]["kind"] == "output"

    asyncio.run(main())


def test_a_thousand_mutated_frames_change_nothing_and_cost_no_memory() -> None:
    async def main() -> None:
        rng = random.Random(31337)
        honest = [forged(), forged(session="honest-session"), frame_of(Ping(request=1, payload=b"x" * 50))]

        async def attack(host: Host, rounds: int) -> None:
            for _ in range(rounds):
                async with raw_connection(host) as raw:
                    await raw.greet()
                    for _ in range(10):
                        data = bytearray(rng.choice(honest))
                        for _ in range(rng.randint(1, 4)):
                            data[rng.randrange(len(data))] = rng.randrange(256)
                        raw.writer.write(bytes(data[: rng.randint(1, len(data))]))
            await until(lambda: host.server.connections == 1)

        async with peer_with_honest_client() as (host, _):
            await attack(host, 20)
            gc.collect()
            tracemalloc.start()
            try:
                await attack(host, 20)
                gc.collect()
                before, _ = tracemalloc.get_traced_memory()
                await attack(host, 60)
                gc.collect()
                after, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert after - before < 1 << 20
            assert host.service.load().sessions == 1

    asyncio.run(main())


def test_a_caller_without_a_session_may_send_no_more_than_a_ping() -> None:
    async def main() -> None:
        async with peer_with_honest_client() as (host, _), raw_connection(host) as raw:
            await raw.greet()
            await raw.send(frame_of(Ping(request=1, payload=bytes(MAX_PING_PAYLOAD))))
            assert (await raw.frame())[0]["kind"] == "pong"
            await raw.send(struct.pack(">II", 10, MAX_PING_PAYLOAD + 1))
            assert (await raw.last_header())["code"] == "remote_protocol"

    asyncio.run(main())


def test_a_caller_with_a_session_may_send_the_largest_step() -> None:
    hidden_size = 1024
    manifest = dataclasses.replace(toy_manifest(), hidden_size=hidden_size)
    serving = ServedSpan(manifest=manifest, engine=ToyEngine(LayerRange(0, LAYERS)), limits=SessionLimits(kv_total=100))
    service = SpanService(serving, peer_id="", hello=lambda: client_hello())
    allowed: list[int] = []

    class RecordingConnection(Connection):
        def __init__(self) -> None:
            """Without a stream."""

        def allow_payload(self, size: int) -> None:
            allowed.append(size)

    opening = OpenSession(request=1, session="session-1", epoch=0, secret=SECRET, first=0, last=LAYERS, max_tokens=9)
    service.open(RecordingConnection(), opening).close()
    service.attach(RecordingConnection(), Attach(request=1, session="session-1", epoch=0, secret=SECRET))
    assert allowed == [MAX_STEP_TOKENS * (4 + 4 * hidden_size)] * 2


def test_no_host_has_all_connections_and_none_with_a_session_is_ended() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            host = await stack.enter_async_context(toy_peer(max_connections=4))
            greedy = [await stack.enter_async_context(raw_connection(host, at="127.0.0.2")) for _ in range(4)]
            for one in greedy:
                await one.greet()
            ask = OpenSession(
                request=1, session="session-1", epoch=0, secret=SECRET, first=0, last=LAYERS, max_tokens=10
            )
            await greedy[0].send(frame_of(ask))
            assert (await greedy[0].frame())[0]["kind"] == "opened"
            callers = [await stack.enter_async_context(calling(host)) for _ in range(2)]
            for gone in greedy[1:3]:
                assert await gone.last_header() == {}
            with pytest.raises(PeerBusy, match="all 4 connections are taken"):  # both hosts have two each now
                await stack.enter_async_context(calling(host))
            await until(lambda: host.server.connections == 4)
            await callers[1].ping()
            await greedy[3].send(frame_of(Ping(request=1)))
            assert (await greedy[3].frame())[0]["kind"] == "pong"
            assert host.service.load().sessions == 1

    asyncio.run(main())


def test_callers_that_request_files_and_do_not_read_take_little_memory(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "layer_000.bin"
        path.write_bytes(bytes(MAX_FILE_PIECE))
        entry = describe_file(path)
        shared_files = SharedFiles(package=tmp_path, manifest=toy_manifest(), entries=(entry,))
        async with toy_peer(shared_files=shared_files) as host, AsyncExitStack() as raw_connections:
            tracemalloc.start()
            try:
                for _ in range(3):
                    raw = await raw_connections.enter_async_context(raw_connection(host))
                    await raw.greet()
                    raw.stop_reading()
                    for request in range(1, 41):
                        question = AskFile(request=request, sha256=entry.sha256, offset=0, length=MAX_FILE_PIECE)
                        await raw.send(frame_of(question))
                async with calling(host) as other:
                    for _ in range(20):
                        question = AskFile(
                            request=other.channel.next_request(), sha256=entry.sha256, offset=0, length=MAX_FILE_PIECE
                        )
                        await other.channel.ask(question, FilePiece, timeout=PATIENCE_S)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            # a few copies of one piece for each caller: the piece itself, its TLS records, unsent bytes
            assert peak < 4 * 4 * MAX_FILE_PIECE

    asyncio.run(main())


def test_announced_payloads_that_never_arrive_take_no_memory() -> None:
    async def main() -> None:
        async with peer_with_honest_client() as (host, _):
            tracemalloc.start()
            try:
                raw_connections = []
                for _ in range(20):
                    reader = raw_connection(host)
                    raw = await reader.__aenter__()
                    raw_connections.append(reader)
                    await raw.greet()
                    await raw.send(struct.pack(">II", 10, MAX_PING_PAYLOAD) + bytes(10))
                async with calling(host) as other:
                    await other.ping()
                # numpy reports what it reserves; the pages of payloads that never arrive are never touched
                resident, _ = tracemalloc.get_traced_memory()
                assert resident < 20 * (2 << 20)
                for reader in raw_connections:
                    await reader.__aexit__(None, None, None)
                await until(lambda: host.server.connections == 1)
                gc.collect()
                left, _ = tracemalloc.get_traced_memory()
                assert left < 8 << 20
            finally:
                tracemalloc.stop()

    asyncio.run(main())

"""Hostile input to a real peer while a session runs there: the session continues, and memory does not grow."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgpack
import numpy as np
import psutil
import pytest

from client import GenerationConfig, SwarmClient
from swarm.app.local_swarm import LocalSwarm
from swarm.discovery.records import PeerRecord
from swarm.transport.address import Address
from swarm.wire.messages import Forward
from swarm.wire.queries import Ping
from tests.cases.observer import assert_healthy, digest_of, eventually, nothing_is_reserved, records_at
from tests.conftest import ChatIds, GreedyReference
from tests.harness import MAX_WAIT_S
from tests.peer.serving.test_hostile import MALFORMED, RawConnection, frame, frame_of
from tests.peer.toy_swarm import SECRET, client_hello

PROMPT = "Name three things that bees do."
TOKENS = 24
HIDDEN = 576
MAX_GROWTH = 32 << 20
MAX_AT_ONCE = 256 << 20
"""A peer takes 512 connections, including those before the Hello; TLS takes 0.3 MB for each."""
HALF_OPEN = 1000


class Target:
    """The peer in the middle of the route, which any caller can reach too."""

    def __init__(self, swarm: LocalSwarm) -> None:
        member = swarm.members[1]
        self.record: PeerRecord = records_at(member, digest_of(swarm))[member.name]
        self.address = Address.parse(self.record.addresses[0])
        self._process = psutil.Process(member.process.pid)

    @property
    def resident(self) -> int:
        """Resident memory in bytes."""
        size: int = self._process.memory_info().rss
        return size

    @contextlib.asynccontextmanager
    async def raw_connection(self, *, send_hello: bool) -> AsyncIterator[RawConnection]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        reader, writer = await asyncio.open_connection(self.address.host, self.address.port, ssl=context)
        try:
            raw = RawConnection(reader, writer)
            if send_hello:
                await raw.greet()
            yield raw
        finally:
            writer.transport.abort()


@pytest.fixture
def target(standing_swarm: LocalSwarm) -> Target:
    return Target(standing_swarm)


@pytest.fixture
def expected(chat_ids: ChatIds, greedy_reference: GreedyReference) -> list[int]:
    return greedy_reference(chat_ids(PROMPT), TOKENS)


@contextlib.asynccontextmanager
async def client_generates(swarm: LocalSwarm, expected: Sequence[int]) -> AsyncIterator[None]:
    """In the background, a client generates the same text repeatedly; each must be exact and without a repair."""
    finished = asyncio.Event()

    async def write(client: SwarmClient) -> None:
        while True:
            last_round = finished.is_set()
            received: list[int] = []
            async for piece in client.generate(PROMPT, GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True)):
                received.extend(piece.token_ids)
                if piece.metrics is not None:
                    assert piece.metrics.repairs == 0
            assert received == list(expected)
            if last_round:
                return

    async with (
        await SwarmClient.connect(digest_of(swarm), initial_peers=swarm.addresses) as client,
        asyncio.timeout(MAX_WAIT_S),
        asyncio.TaskGroup() as group,
    ):
        group.create_task(write(client))
        yield
        finished.set()


async def send_invalid_messages(target: Target) -> None:
    """Send each invalid message, before and after the Hello."""
    for name, nonsense in MALFORMED.items():
        for send_hello in (False, True):
            if name == "a second Hello" and not send_hello:
                continue
            async with target.raw_connection(send_hello=send_hello) as raw:
                await raw.send(nonsense())
                failure = await raw.last_header()
                assert (failure.get("kind"), failure.get("code")) == ("failure", "remote_protocol"), (name, send_hello)


async def send_no_tls(target: Target) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", random.Random(2).randbytes(5000), b""):
        reader, writer = await asyncio.open_connection(target.address.host, target.address.port)
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(MAX_WAIT_S):
            await reader.read()
        writer.close()


def message(kind: str, **fields: Any) -> bytes:
    return frame(msgpack.packb({"kind": kind, **fields}))


def step(session: str, *, start: int = 0, width: int = HIDDEN, token: int = 1, value: float = 0.01) -> bytes:
    """A frame with a step of two tokens."""
    return frame_of(
        Forward(
            session=session,
            epoch=0,
            step=0,
            start=start,
            rows=0,
            tokens=np.full(2, token, np.int32),
            hidden=np.full((2, width), value, np.float32),
        )
    )


async def send_wrong_steps(target: Target) -> None:
    """Send well-formed but wrong messages: each gets a Failure, and the connection and its session continue."""
    session, span = secrets.token_hex(8), target.record.span
    opening = {"session": session, "epoch": 0, "secret": SECRET, "first": span.first, "last": span.last}
    async with target.raw_connection(send_hello=True) as raw:
        await raw.send(message("open", request=1, **opening, max_tokens=16))
        assert (await raw.frame())[0]["kind"] == "opened"
        for data, code in (
            (step("an-unknown-session"), "unknown_session"),
            (message("attach", request=2, session=session, epoch=0, secret=b"?" * 16), "unknown_session"),
            (message("open", request=3, **opening | {"session": "other-one"}, max_tokens=1 << 60), "context_exceeded"),
            (
                message("open", request=4, **opening | {"session": "other-one", "last": 31}, max_tokens=16),
                "peer_failed",
            ),
            (message("ask_file", request=5, sha256="0" * 64, offset=0, length=9), "unknown_model"),
            (step(session, start=1), "bad_step"),
            (step(session, start=1 << 40), "bad_step"),
            (step(session, width=HIDDEN + 1), "bad_step"),
            (step(session, width=1), "bad_step"),
            (step(session, token=-5), "bad_step"),
            (step(session, token=49152), "bad_step"),
            (step(session, value=float("nan")), "bad_step"),
            (step(session, value=float("inf")), "bad_step"),
        ):
            await raw.send(data)
            header, _ = await raw.frame()
            assert (header["kind"], header.get("code")) == ("failure", code), header
        for start in range(0, 16, 2):
            await raw.send(step(session, start=start))
            header, _ = await raw.frame()
            assert (header["kind"], header["hidden"]) == ("output", [2, HIDDEN])
        await raw.send(step(session, start=16))  # Beyond the KV cache.
        header, _ = await raw.frame()
        assert (header["kind"], header["code"]) == ("failure", "context_exceeded")


def test_invalid_messages_and_wrong_steps_affect_no_other_session(
    standing_swarm: LocalSwarm, target: Target, expected: list[int]
) -> None:
    async def attack() -> None:
        await send_invalid_messages(target)
        await send_no_tls(target)
        await send_wrong_steps(target)

    async def main() -> None:
        async with client_generates(standing_swarm, expected):
            await attack()
            before = target.resident
            for _ in range(5):
                await attack()
            assert target.resident - before < MAX_GROWTH
        await eventually(lambda: nothing_is_reserved(target.record), "no session reserves KV cache")

    asyncio.run(main())
    assert_healthy(standing_swarm)


def test_frames_that_are_never_completed_take_no_memory(
    standing_swarm: LocalSwarm, target: Target, expected: list[int]
) -> None:
    whole = frame_of(Ping(request=1, payload=bytes(1000)))

    async def main() -> None:
        before = target.resident
        async with contextlib.AsyncExitStack() as stack, client_generates(standing_swarm, expected):
            for number in range(100):
                raw = await stack.enter_async_context(target.raw_connection(send_hello=True))
                await raw.send(struct.pack(">II", 10, 60 << 20) + bytes(10 + number) if number % 2 else whole[:500])
            async with target.raw_connection(send_hello=True) as other:
                await other.send(whole)
                assert (await other.frame())[0]["kind"] == "pong"
            assert target.resident - before < MAX_GROWTH

    asyncio.run(main())
    assert_healthy(standing_swarm)


def test_many_half_open_connections_stop_no_session_and_are_closed(
    standing_swarm: LocalSwarm, target: Target, expected: list[int]
) -> None:
    async def half_open() -> socket.socket | None:
        caller = socket.socket()
        caller.setblocking(False)
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await asyncio.get_running_loop().sock_connect(caller, (target.address.host, target.address.port))
            caller.send(b"\x16\x03\x01\x02\x00")  # The start of a TLS handshake that is never completed.
        except OSError:
            caller.close()
            return None
        return caller

    async def main() -> None:
        with contextlib.ExitStack() as connections:

            async def grow() -> None:
                callers = [caller for _ in range(HALF_OPEN) if (caller := await half_open()) is not None]
                for caller in callers:
                    connections.enter_context(caller)
                assert len(callers) > HALF_OPEN / 2

            before = target.resident
            async with client_generates(standing_swarm, expected):
                await grow()
                # The test closes none of them: the peer must close them and accept new callers.
                await eventually(lambda: answers(target), "the peer accepts new callers")
                first = target.resident
                assert first - before < MAX_AT_ONCE
                await grow()
            assert target.resident - first < MAX_GROWTH

    asyncio.run(main())
    assert_healthy(standing_swarm)


async def answers(target: Target) -> bool:
    """Whether the peer accepts another caller; a full one answers `peer_busy` or nothing."""
    try:
        async with target.raw_connection(send_hello=False) as raw:
            await raw.send(frame_of(client_hello()))
            header, _ = await raw.frame()
            assert header["kind"] == "hello" or header["code"] == "peer_busy", header
            return bool(header["kind"] == "hello")
    except (OSError, EOFError, ssl.SSLError):
        return False

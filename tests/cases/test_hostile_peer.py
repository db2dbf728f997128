"""Case 10: nonsense for a real peer while somebody's session runs there: that one goes on, memory does not grow."""

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
from tests.cases.conftest import ChatIds
from tests.cases.observer import assert_well, digest_of, eventually, nothing_is_reserved, records_at
from tests.conftest import GreedyReference
from tests.harness import PATIENCE_S
from tests.peer.serving.test_hostile import NONSENSE, Socket, frame, frame_of
from tests.peer.toy_swarm import SECRET, client_hello

PROMPT = "Name three things that bees do."
TOKENS = 24
HIDDEN = 576
MAX_GROWTH = 32 << 20
MAX_AT_ONCE = 256 << 20
"""A peer takes 512 connections, those included that have not greeted; TLS takes 0.3 MB for each."""
HALF_OPEN = 1000


class Victim:
    """The peer in the middle: it hears the peer before it, and whoever else finds its port."""

    def __init__(self, swarm: LocalSwarm) -> None:
        member = swarm.members[1]
        self.record: PeerRecord = records_at(member, digest_of(swarm))[member.name]
        self.address = Address.parse(self.record.addresses[0])
        self._process = psutil.Process(member.process.pid)

    @property
    def resident(self) -> int:
        """Bytes."""
        size: int = self._process.memory_info().rss
        return size

    @contextlib.asynccontextmanager
    async def stranger(self, *, greets: bool) -> AsyncIterator[Socket]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        reader, writer = await asyncio.open_connection(self.address.host, self.address.port, ssl=context)
        try:
            guest = Socket(reader, writer)
            if greets:
                await guest.greet()
            yield guest
        finally:
            writer.transport.abort()


@pytest.fixture
def victim(standing_swarm: LocalSwarm) -> Victim:
    return Victim(standing_swarm)


@pytest.fixture
def expected(chat_ids: ChatIds, greedy_reference: GreedyReference) -> list[int]:
    return greedy_reference(chat_ids(PROMPT), TOKENS)


@contextlib.asynccontextmanager
async def somebody_writes(swarm: LocalSwarm, expected: Sequence[int]) -> AsyncIterator[None]:
    """Meanwhile a client writes the same text again and again, exactly and without a repair."""
    over = asyncio.Event()

    async def write(client: SwarmClient) -> None:
        while True:
            last_round = over.is_set()
            got: list[int] = []
            async for piece in client.generate(PROMPT, GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True)):
                got.extend(piece.token_ids)
                if piece.metrics is not None:
                    assert piece.metrics.repairs == 0
            assert got == list(expected)
            if last_round:
                return

    async with (
        await SwarmClient.connect(digest_of(swarm), initial_peers=swarm.addresses) as client,
        asyncio.timeout(PATIENCE_S),
        asyncio.TaskGroup() as group,
    ):
        group.create_task(write(client))
        yield
        over.set()


async def send_nonsense(victim: Victim) -> None:
    """Everything that is no message, from one who has greeted and from one who has not."""
    for name, nonsense in NONSENSE.items():
        for greets in (False, True):
            if name == "a second greeting" and not greets:
                continue
            async with victim.stranger(greets=greets) as guest:
                await guest.send(nonsense())
                words = await guest.last_words()
                assert (words.get("kind"), words.get("code")) == ("failure", "remote_protocol"), (name, greets)


async def send_no_tls(victim: Victim) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", random.Random(2).randbytes(5000), b""):
        reader, writer = await asyncio.open_connection(victim.address.host, victim.address.port)
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(PATIENCE_S):
            await reader.read()
        writer.close()


def message(kind: str, **fields: Any) -> bytes:
    return frame(msgpack.packb({"kind": kind, **fields}))


def step(session: str, *, start: int = 0, width: int = HIDDEN, token: int = 1, value: float = 0.01) -> bytes:
    """A step of two tokens."""
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


async def send_wrong_steps(victim: Victim) -> None:
    """Well-formed and wrong: each gets its Failure, and the connection and its session go on."""
    session, span = secrets.token_hex(8), victim.record.span
    opening = {"session": session, "epoch": 0, "secret": SECRET, "first": span.first, "last": span.last}
    async with victim.stranger(greets=True) as guest:
        await guest.send(message("open", request=1, **opening, max_tokens=16))
        assert (await guest.frame())[0]["kind"] == "opened"
        for data, code in (
            (step("a-session-of-nobody"), "unknown_session"),
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
            await guest.send(data)
            header, _ = await guest.frame()
            assert (header["kind"], header.get("code")) == ("failure", code), header
        for start in range(0, 16, 2):
            await guest.send(step(session, start=start))
            header, _ = await guest.frame()
            assert (header["kind"], header["hidden"]) == ("output", [2, HIDDEN])
        await guest.send(step(session, start=16))  # beyond the cache
        header, _ = await guest.frame()
        assert (header["kind"], header["code"]) == ("failure", "context_exceeded")


def test_nonsense_and_wrong_steps_touch_nobody_else(
    standing_swarm: LocalSwarm, victim: Victim, expected: list[int]
) -> None:
    async def attack() -> None:
        await send_nonsense(victim)
        await send_no_tls(victim)
        await send_wrong_steps(victim)

    async def main() -> None:
        async with somebody_writes(standing_swarm, expected):
            await attack()
            before = victim.resident
            for _ in range(5):
                await attack()
            assert victim.resident - before < MAX_GROWTH
        await eventually(lambda: nothing_is_reserved(victim.record), "no session holds any room")

    asyncio.run(main())
    assert_well(standing_swarm)


def test_frames_that_are_announced_and_never_come_take_no_memory(
    standing_swarm: LocalSwarm, victim: Victim, expected: list[int]
) -> None:
    whole = frame_of(Ping(request=1, payload=bytes(1000)))

    async def main() -> None:
        before = victim.resident
        async with contextlib.AsyncExitStack() as stack, somebody_writes(standing_swarm, expected):
            for number in range(100):
                guest = await stack.enter_async_context(victim.stranger(greets=True))
                await guest.send(struct.pack(">II", 10, 60 << 20) + bytes(10 + number) if number % 2 else whole[:500])
            async with victim.stranger(greets=True) as other:
                await other.send(whole)
                assert (await other.frame())[0]["kind"] == "pong"
            assert victim.resident - before < MAX_GROWTH

    asyncio.run(main())
    assert_well(standing_swarm)


def test_a_crowd_of_half_open_connections_stops_no_session_and_goes_away(
    standing_swarm: LocalSwarm, victim: Victim, expected: list[int]
) -> None:
    async def half_open() -> socket.socket | None:
        caller = socket.socket()
        caller.setblocking(False)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.get_running_loop().sock_connect(caller, (victim.address.host, victim.address.port))
            caller.send(b"\x16\x03\x01\x02\x00")  # a handshake of which no more will come
        except OSError:
            caller.close()
            return None
        return caller

    async def main() -> None:
        with contextlib.ExitStack() as crowd:

            async def grow() -> None:
                callers = [caller for _ in range(HALF_OPEN) if (caller := await half_open()) is not None]
                for caller in callers:
                    crowd.enter_context(caller)
                assert len(callers) > HALF_OPEN / 2

            before = victim.resident
            async with somebody_writes(standing_swarm, expected):
                await grow()
                # none of them is closed here: the peer gets rid of them, and hears who comes then
                await eventually(lambda: answers(victim), "it takes new callers")
                first = victim.resident
                assert first - before < MAX_AT_ONCE
                await grow()
            assert victim.resident - first < MAX_GROWTH

    asyncio.run(main())
    assert_well(standing_swarm)


async def answers(victim: Victim) -> bool:
    """Whether it takes one more caller; while it is crowded it says so, or nothing at all."""
    try:
        async with victim.stranger(greets=False) as guest:
            await guest.send(frame_of(client_hello()))
            header, _ = await guest.frame()
            assert header["kind"] == "hello" or header["code"] == "peer_busy", header
            return bool(header["kind"] == "hello")
    except (OSError, EOFError, ssl.SSLError):
        return False

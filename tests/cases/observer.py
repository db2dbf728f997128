"""What a stranger sees of a swarm: who serves what, and how much room its peers have at this moment."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import psutil
import pytest

from swarm.app.local_swarm import LocalSwarm, Member
from swarm.discovery.records import PeerRecord
from swarm.discovery.remote_directory import PeerDirectory, find_peers
from swarm.transport.address import Address
from swarm.transport.channel import Channel
from swarm.transport.hello import client_hello
from swarm.wire.messages import OpenSession, SessionOpened
from tests.harness import PATIENCE_S, family_of, still_running, wait_until

T = TypeVar("T")


async def eventually(condition: Callable[[], Awaitable[T]], what: str, timeout: float = PATIENCE_S) -> T:
    """What `condition` says, as soon as it says something true. Fails naming `what`."""
    deadline = time.monotonic() + timeout
    while not (value := await condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"after {timeout:.0f} s still not: {what}")
        await asyncio.sleep(0.05)
    return value


async def look_up(address: str, digest: str) -> dict[str, PeerRecord]:
    """What the peer at `address` says of who serves the model, by name."""
    directory = PeerDirectory([Address.parse(address)], hello=client_hello())
    try:
        return {record.name: record for record in await find_peers(directory, digest, now=time.time())}
    finally:
        await directory.close()


def records_at(member: Member, digest: str) -> dict[str, PeerRecord]:
    """`look_up` for tests without an event loop."""
    return asyncio.run(look_up(member.address, digest))


async def kv_free(record: PeerRecord) -> int:
    """Tokens of KV cache that nobody has reserved there now: its record is up to ten seconds old."""
    addresses = [Address(a.host, a.port, record.peer_id) for a in map(Address.parse, record.addresses)]
    channel = await Channel.open(addresses, client_hello(record.model))
    try:
        question = OpenSession(
            request=channel.next_request(),
            session=secrets.token_hex(8),
            epoch=0,
            secret=bytes(16),
            first=record.span.first,
            last=record.span.last,
            max_tokens=1,
        )
        return (await channel.ask(question, SessionOpened, timeout=30.0)).kv_free + 1
    finally:
        await channel.close()


async def reserved(records: Iterable[PeerRecord]) -> dict[str, int]:
    """Tokens of KV cache that sessions hold, by the name of the peer; those that hold none are left out."""
    held = {record.name: record.kv_total - await kv_free(record) for record in records}
    return {name: tokens for name, tokens in held.items() if tokens}


async def nothing_is_reserved(*records: PeerRecord) -> bool:
    """Whether no session holds any KV cache on these peers."""
    return not await reserved(records)


def digest_of(swarm: LocalSwarm) -> str:
    """Of the model that its first member serves."""
    announced = swarm.members[0].event("announced")
    assert announced is not None
    digest: str = announced["model"]["digest"]
    return digest


def wait_for_end(member: Member) -> int:
    """Its exit code. Fails where a process that was its child is left, or where it ends with a traceback."""
    family: set[psutil.Process] = set()

    def ended() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            family.update(family_of(member))
        return not member.alive

    wait_until(ended, f"{member.name} has ended")
    wait_until(lambda: not still_running(list(family)), f"no child of {member.name} is left")
    assert "Traceback" not in member.log.read_text(), member.log.read_text()
    member.poll()
    return member.process.wait()


def assert_well(swarm: LocalSwarm) -> None:
    """Every member lives, and none has said anything of a bug."""
    for member in swarm.members:
        assert still_running([psutil.Process(member.process.pid)]), member.log_tail()
        log = member.log.read_text()
        assert "Traceback" not in log, log
        assert "bug" not in log, log

"""Questions to a running swarm: the records of its peers, their free KV cache, the state of their processes."""

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
from swarm.discovery.peer_directory import PeerDirectory, find_peers
from swarm.discovery.records import PeerRecord
from swarm.transport.address import Address
from swarm.transport.channel import Channel
from swarm.transport.hello import client_hello
from swarm.wire.messages import OpenSession, SessionOpened
from tests.harness import MAX_WAIT_S, process_tree, still_running, wait_until

T = TypeVar("T")


async def eventually(condition: Callable[[], Awaitable[T]], description: str, timeout: float = MAX_WAIT_S) -> T:
    """The first true value of `condition`. Fails with `description` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := await condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"after {timeout:.0f} s still not: {description}")
        await asyncio.sleep(0.05)
    return value


async def look_up(address: str, digest: str) -> dict[str, PeerRecord]:
    """The records of the model's peers that the peer at `address` returns, by name."""
    directory = PeerDirectory([Address.parse(address)], hello=client_hello())
    try:
        return {record.name: record for record in await find_peers(directory, digest, now=time.time())}
    finally:
        await directory.close()


def records_at(member: Member, digest: str) -> dict[str, PeerRecord]:
    """`look_up` for tests without an event loop."""
    return asyncio.run(look_up(member.address, digest))


async def kv_free(record: PeerRecord) -> int:
    """Tokens of KV cache that no session has reserved, asked from the peer: its record is up to 10 s old."""
    addresses = [Address(a.host, a.port, record.peer_id) for a in map(Address.parse, record.addresses)]
    channel = await Channel.open(addresses, client_hello(record.model))
    try:
        request = OpenSession(
            request=channel.next_request(),
            session=secrets.token_hex(8),
            epoch=0,
            secret=bytes(16),
            first=record.span.first,
            last=record.span.last,
            max_tokens=1,
        )
        return (await channel.ask(request, SessionOpened, timeout=30.0)).kv_free + 1
    finally:
        await channel.close()


async def reserved(records: Iterable[PeerRecord]) -> dict[str, int]:
    """Tokens of KV cache that sessions reserve, by the name of the peer; only peers with any."""
    tokens_by_peer = {record.name: record.kv_total - await kv_free(record) for record in records}
    return {name: tokens for name, tokens in tokens_by_peer.items() if tokens}


async def nothing_is_reserved(*records: PeerRecord) -> bool:
    """Whether no session reserves KV cache on these peers."""
    return not await reserved(records)


def digest_of(swarm: LocalSwarm) -> str:
    """The digest of the model that the first member serves."""
    announced = swarm.members[0].event("announced")
    assert announced is not None
    digest: str = announced["model"]["digest"]
    return digest


def wait_for_exit(member: Member) -> int:
    """The exit code of `member`. Fails if a child process is left or its log has a traceback."""
    processes: set[psutil.Process] = set()

    def ended() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.update(process_tree(member))
        return not member.alive

    wait_until(ended, f"{member.name} has ended")
    wait_until(lambda: not still_running(list(processes)), f"no child of {member.name} is left")
    assert "Traceback" not in member.log.read_text(), member.log.read_text()
    member.poll()
    return member.process.wait()


def assert_healthy(swarm: LocalSwarm) -> None:
    """Every member runs, and no log reports a bug."""
    for member in swarm.members:
        assert still_running([psutil.Process(member.process.pid)]), member.log_tail()
        log = member.log.read_text()
        assert "Traceback" not in log, log
        assert "bug" not in log, log

"""Ctrl-C once, Ctrl-C twice, SIGKILL: peers release their ports and processes, and sessions move on.

`swarm demo` and Ctrl-C: tests/swarm/app/test_demo.py.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from client import GenerationConfig, SwarmClient
from client.events import Event, Stage
from swarm.app.local_swarm import LocalSwarm, Member
from swarm.discovery.records import LEAVING
from tests.cases.observer import digest_of, eventually, look_up, records_at
from tests.cases.raw_client import RawRoute
from tests.conftest import ChatIds, GreedyReference
from tests.harness import (
    MAX_WAIT_S,
    is_listening,
    listening_ports,
    local_swarm,
    process_tree,
    still_running,
    wait_until,
)

PROMPT = "Name three things that bees do."
TOKENS = 60
GRACE_S = 600.0
"""Longer than any test waits: a peer that ends earlier ends because its sessions moved on."""
MAX_SHUTDOWN_S = 10.0


@pytest.fixture(scope="module")
def swarm(smollm2_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    """One peer for the front, two for the shorter back. The tests run in order and end peers."""
    folder = tmp_path_factory.mktemp("endings")
    with local_swarm(folder, smollm2_package, ("0:22", "22:30", "22:30"), "--grace", str(GRACE_S)) as swarm:
        yield swarm


class Resources:
    """The processes and ports of a running peer."""

    def __init__(self, member: Member) -> None:
        self.processes = process_tree(member)
        self.ports = listening_ports(self.processes)

    def remaining(self) -> list[object]:
        return [*still_running(self.processes), *(port for port in self.ports if is_listening(port))]

    def assert_released(self) -> None:
        wait_until(lambda: not self.remaining(), "no process and no port is left", MAX_SHUTDOWN_S)


def test_ctrl_c_announces_leaving_at_once_and_sessions_move_on_with_the_exact_text(
    swarm: LocalSwarm, chat_ids: ChatIds, greedy_reference: GreedyReference
) -> None:
    front, *backs = swarm.members
    digest = digest_of(swarm)
    resources: list[Resources] = []

    routes: list[str] = []

    def on_event(event: Event) -> None:
        if event.stage is Stage.CONNECTED:
            routes.append(event.text)

    async def main() -> tuple[list[int], int, Member]:
        received: list[int] = []
        repairs = 0
        config = GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True)
        async with (
            await SwarmClient.connect(digest, initial_peers=[front.address], on_event=on_event) as client,
            aclosing(client.generate(PROMPT, config)) as pieces,
            asyncio.TaskGroup() as group,
        ):
            async for piece in pieces:
                received.extend(piece.token_ids)
                if not resources:
                    leaving_peer = next(member for member in backs if member.name in routes[-1])
                    resources.append(Resources(leaving_peer))
                    leaving_peer.signal(signal.SIGINT)
                    group.create_task(wait_until_leaving(front.address, digest, leaving_peer.name))
                if piece.metrics is not None:
                    repairs = piece.metrics.repairs
        return received, repairs, leaving_peer

    received, repairs, leaving_peer = asyncio.run(main())
    assert received == greedy_reference(chat_ids(PROMPT), TOKENS)
    assert repairs == 1
    assert leaving_peer.name in routes[0]
    assert leaving_peer.name not in routes[-1]
    assert leaving_peer.process.wait(timeout=MAX_WAIT_S) == 0  # Long before the grace period ends.
    resources[0].assert_released()
    assert "Traceback" not in leaving_peer.log.read_text()


async def wait_until_leaving(address: str, digest: str, name: str) -> None:
    async def is_leaving() -> bool:
        return (await look_up(address, digest))[name].state == LEAVING

    await eventually(is_leaving, f"the record of {name} says that it leaves", MAX_SHUTDOWN_S)


def test_ctrl_c_twice_ends_a_peer_with_an_open_session(swarm: LocalSwarm) -> None:
    front, *_ = swarm.members
    (leaving_peer,) = [member for member in swarm.members[1:] if member.alive]
    record = records_at(front, digest_of(swarm))[leaving_peer.name]
    resources = Resources(leaving_peer)

    async def main() -> None:
        async with RawRoute.open([record], [1]):
            leaving_peer.signal(signal.SIGINT)
            await wait_until_leaving(front.address, record.model, leaving_peer.name)
            assert leaving_peer.alive
            leaving_peer.signal(signal.SIGINT)
            await asyncio.to_thread(leaving_peer.process.wait, MAX_SHUTDOWN_S)

    asyncio.run(main())
    resources.assert_released()
    assert leaving_peer.process.returncode == 0
    assert "Traceback" not in leaving_peer.log.read_text()


def test_after_sigkill_no_port_and_no_child_is_left(swarm: LocalSwarm, smollm2_package: Path, tmp_path: Path) -> None:
    """While it serves, and while its self-test runs in a child."""
    front = swarm.members[0]
    other = swarm.join(smollm2_package, "0:4", name="other", options=["--cache-dir", str(tmp_path / "cache")])
    swarm.wait([other], phase="checked")
    wait_until(lambda: runs_self_test(other), "its self-test runs")
    resources = [Resources(member) for member in (front, other)]
    assert len(resources[0].ports) >= 2  # Its own and that of its daemon.
    for member in (front, other):
        member.process.kill()
    for used in resources:
        used.assert_released()


def runs_self_test(member: Member) -> bool:
    return any("peer.loading.self_test" in " ".join(child.cmdline()) for child in process_tree(member))

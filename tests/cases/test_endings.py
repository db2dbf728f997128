"""Case 9: Ctrl-C once, Ctrl-C twice, SIGKILL: what peers leave behind, and what becomes of their sessions.

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
from tests.cases.conftest import ChatIds
from tests.cases.observer import digest_of, eventually, look_up, records_at
from tests.cases.rawclient import RawRoute
from tests.conftest import GreedyReference
from tests.harness import PATIENCE_S, family_of, listens, local_swarm, ports_of, still_running, wait_until

PROMPT = "Name three things that bees do."
TOKENS = 60
GRACE_S = 600.0
"""Longer than any test waits: a peer that ends sooner does so because its sessions moved on."""
ENDED_S = 10.0


@pytest.fixture(scope="module")
def swarm(smollm2_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    """The front once, the back, which is shorter, twice. Its tests run in order and take peers away."""
    folder = tmp_path_factory.mktemp("endings")
    with local_swarm(folder, smollm2_package, ("0:22", "22:30", "22:30"), "--grace", str(GRACE_S)) as swarm:
        yield swarm


class Remains:
    """What belonged to a peer while it lived."""

    def __init__(self, member: Member) -> None:
        self.family = family_of(member)
        self.ports = ports_of(self.family)

    def left(self) -> list[object]:
        return [*still_running(self.family), *(port for port in self.ports if listens(port))]

    def assert_gone(self) -> None:
        wait_until(lambda: not self.left(), "neither process nor port is left", ENDED_S)


def test_ctrl_c_says_leaving_at_once_and_sessions_move_on_with_the_exact_text(
    swarm: LocalSwarm, chat_ids: ChatIds, greedy_reference: GreedyReference
) -> None:
    front, *backs = swarm.members
    digest = digest_of(swarm)
    remains: list[Remains] = []

    routes: list[str] = []

    def hear(event: Event) -> None:
        if event.stage is Stage.CONNECTED:
            routes.append(event.text)

    async def main() -> tuple[list[int], int, Member]:
        got: list[int] = []
        repairs = 0
        config = GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True)
        async with (
            await SwarmClient.connect(digest, initial_peers=[front.address], on_event=hear) as client,
            aclosing(client.generate(PROMPT, config)) as pieces,
            asyncio.TaskGroup() as group,
        ):
            async for piece in pieces:
                got.extend(piece.token_ids)
                if not remains:
                    leaver = next(member for member in backs if member.name in routes[-1])
                    remains.append(Remains(leaver))
                    leaver.signal(signal.SIGINT)
                    group.create_task(says_leaving(front.address, digest, leaver.name))
                if piece.metrics is not None:
                    repairs = piece.metrics.repairs
        return got, repairs, leaver

    got, repairs, leaver = asyncio.run(main())
    assert got == greedy_reference(chat_ids(PROMPT), TOKENS)
    assert repairs == 1
    assert leaver.name in routes[0]
    assert leaver.name not in routes[-1]
    assert leaver.process.wait(timeout=PATIENCE_S) == 0  # long before its grace is over
    remains[0].assert_gone()
    assert "Traceback" not in leaver.log.read_text()


async def says_leaving(address: str, digest: str, name: str) -> None:
    async def says() -> bool:
        return (await look_up(address, digest))[name].state == LEAVING

    await eventually(says, f"the record of {name} says that it leaves", ENDED_S)


def test_ctrl_c_twice_ends_a_peer_whose_session_stays(swarm: LocalSwarm) -> None:
    front, *_ = swarm.members
    (leaver,) = [member for member in swarm.members[1:] if member.alive]
    record = records_at(front, digest_of(swarm))[leaver.name]
    remains = Remains(leaver)

    async def main() -> None:
        async with RawRoute.open([record], [1]):
            leaver.signal(signal.SIGINT)
            await says_leaving(front.address, record.model, leaver.name)
            assert leaver.alive
            leaver.signal(signal.SIGINT)
            await asyncio.to_thread(leaver.process.wait, ENDED_S)

    asyncio.run(main())
    remains.assert_gone()
    assert leaver.process.returncode == 0
    assert "Traceback" not in leaver.log.read_text()


def test_after_a_sigkill_no_port_and_no_child_is_left(swarm: LocalSwarm, smollm2_package: Path, tmp_path: Path) -> None:
    """While it serves, and while its self-test runs in a child."""
    front = swarm.members[0]
    other = swarm.join(smollm2_package, "0:4", name="other", options=["--cache-dir", str(tmp_path / "cache")])
    swarm.wait([other], phase="checked")
    wait_until(lambda: runs_its_self_test(other), "its self-test runs")
    remains = [Remains(member) for member in (front, other)]
    assert len(remains[0].ports) >= 2  # its own and its daemon's
    for member in (front, other):
        member.process.kill()
    for each in remains:
        each.assert_gone()


def runs_its_self_test(member: Member) -> bool:
    return any("peer.loading.self_test" in " ".join(child.cmdline()) for child in family_of(member))

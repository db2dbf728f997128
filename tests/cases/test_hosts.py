"""Peers on separate hosts: files are fetched by model name, a fetch resumes, and two peers cannot reach each other.

::

    anna 0:11 ──── ben 11:19
       │  \\        ╳            between ben and carla every packet is lost
    dora   carla 19:30           client
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.app.local_swarm import LocalSwarm, Member
from swarm.model.manifest import TOKENIZER, Manifest, check_files, load_manifest
from swarm.model.spans import LayerRange
from tests.cases.observer import wait_for_exit
from tests.conftest import ChatIds, GreedyReference
from tests.harness import Hosts, run_swarm, wait_until

MODEL = "smollm2-135m-instruct"
PROMPT = "Name three things that bees do."
TOKENS = 24
SPANS = {"anna": "0:11", "ben": "11:19", "carla": "19:30"}


def drop_packets_between(hosts: Hosts, one: str, other: str) -> None:
    """Drop all packets between two hosts."""
    for here, there in ((one, other), (other, one)):
        command = [*hosts.command(here), "ip", "route", "add", "blackhole", f"{hosts.addresses[there]}/32"]
        subprocess.run(command, check=True, capture_output=True)


class HostSwarm:
    """Three peers and a client, each on its own host. Only anna has the package."""

    def __init__(self, hosts: Hosts, swarm: LocalSwarm, package: Path, folder: Path) -> None:
        self.package = package
        self._hosts = hosts
        self._swarm = swarm
        self._folder = folder

    def cache_of(self, name: str) -> Path:
        return self._folder / f"cache-{name}"

    def join(self, name: str, model: str | Path, *initial: Member) -> Member:
        return self._swarm.join(
            model,
            SPANS[name],
            name=name,
            initial=[member.address for member in initial],
            options=["--cache-dir", str(self.cache_of(name))],
            prefix=self._hosts.command(name),
            listen=f"{self._hosts.addresses[name]}:31337",
        )

    def wait(self, *members: Member) -> None:
        self._swarm.wait(members)

    def fetched(self, name: str) -> dict[Path, int]:
        """The complete layer files of a peer, and when they were written."""
        return {path: path.stat().st_mtime_ns for path in self.cache_of(name).rglob("layer_*.bin")}

    def run_on_dora(self, *arguments: str, initial: Member) -> dict[str, Any]:
        done = run_swarm(*arguments, "--initial-peer", initial.address, "--json", prefix=self._hosts.command("dora"))
        assert done.returncode == 0, done.stderr
        output: dict[str, Any] = json.loads(done.stdout)
        return output


@pytest.fixture
def host_swarm(smollm2_package: Path, tmp_path: Path) -> Iterator[HostSwarm]:
    with Hosts.open("anna", "ben", "carla", "dora") as hosts, LocalSwarm(tmp_path, options=["--threads", "1"]) as swarm:
        drop_packets_between(hosts, "ben", "carla")
        yield HostSwarm(hosts, swarm, smollm2_package, tmp_path)


def test_files_are_fetched_by_name_and_unreachable_neighbours_are_relayed(
    host_swarm: HostSwarm, chat_ids: ChatIds, greedy_reference: GreedyReference
) -> None:
    manifest = load_manifest(host_swarm.package)
    anna = host_swarm.join("anna", host_swarm.package)
    host_swarm.wait(anna)

    carla = host_swarm.join("carla", MODEL, anna)
    broken = host_swarm.join("ben", MODEL, anna)
    wait_until(lambda: host_swarm.fetched("ben") or not broken.alive, "its first layer is complete")
    broken.process.kill()
    wait_for_exit(broken)
    before = host_swarm.fetched("ben")
    ben = host_swarm.join("ben", MODEL, anna)
    host_swarm.wait(ben, carla)
    after = host_swarm.fetched("ben")
    assert {path: after[path] for path in before} == before  # Complete files are not fetched again.
    for name in ("ben", "carla"):
        assert_only_its_files(host_swarm.cache_of(name), manifest, LayerRange.parse(SPANS[name]))

    (model,) = host_swarm.run_on_dora("models", initial=carla)["models"]
    assert (model["name"], model["layers_covered"], model["peers"]) == (MODEL, 30, 3)
    output = host_swarm.run_on_dora("generate", MODEL, PROMPT, "--max-new-tokens", str(TOKENS), initial=ben)
    assert output["token_ids"] == greedy_reference(chat_ids(PROMPT), TOKENS)
    assert output["route"] == "anna 0:11 → ben 11:19 ⇢ carla 19:30"

    def hops() -> list[tuple[str, str, bool]]:
        route = host_swarm.run_on_dora("routes", MODEL, initial=ben)["route"]
        return [(hop["name"], hop["span"], hop["relayed"]) for hop in route["hops"]]

    relayed = [("anna", "0:11", False), ("ben", "11:19", False), ("carla", "19:30", True)]
    wait_until(lambda: hops() == relayed, "ben announces that it does not reach carla, and the route shows it")


def assert_only_its_files(cache: Path, manifest: Manifest, span: LayerRange) -> None:
    (package,) = (cache / "packages").iterdir()
    entries = manifest.files([*manifest.span_parts(span), TOKENIZER])
    check_files(package, entries)
    files = {path.name for path in package.iterdir() if not path.name.startswith(".fetch")}
    assert files == {entry.path for entry in entries} | {"manifest.json"}

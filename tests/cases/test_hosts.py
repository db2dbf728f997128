"""Hosts of their own: files come by name from peers, a broken fetch goes on, and two peers that cannot meet.

::

    anna 0:11 ──── ben 11:19
       │  \\        ╳            between ben and carla every packet is lost
    dora   carla 19:30           dora asks
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
from tests.cases.conftest import ChatIds
from tests.cases.observer import wait_for_end
from tests.conftest import GreedyReference
from tests.harness import Hosts, run_swarm, wait_until

MODEL = "smollm2-135m-instruct"
PROMPT = "Name three things that bees do."
TOKENS = 24
SPANS = {"anna": "0:11", "ben": "11:19", "carla": "19:30"}


def part(hosts: Hosts, one: str, other: str) -> None:
    """From now on neither reaches the other."""
    for here, there in ((one, other), (other, one)):
        command = [*hosts.command(here), "ip", "route", "add", "blackhole", f"{hosts.addresses[there]}/32"]
        subprocess.run(command, check=True, capture_output=True)


class Walk:
    """Three volunteers and a client, each on a host of its own; only anna has the package."""

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
        """Whole layers that are there, and when they were written."""
        return {path: path.stat().st_mtime_ns for path in self.cache_of(name).rglob("layer_*.bin")}

    def on_dora(self, *words: str, initial: Member) -> dict[str, Any]:
        done = run_swarm(*words, "--initial-peer", initial.address, "--json", prefix=self._hosts.command("dora"))
        assert done.returncode == 0, done.stderr
        said: dict[str, Any] = json.loads(done.stdout)
        return said


@pytest.fixture
def walk(smollm2_package: Path, tmp_path: Path) -> Iterator[Walk]:
    with Hosts.open("anna", "ben", "carla", "dora") as hosts, LocalSwarm(tmp_path, options=["--threads", "1"]) as swarm:
        part(hosts, "ben", "carla")
        yield Walk(hosts, swarm, smollm2_package, tmp_path)


def test_files_come_by_name_and_two_peers_that_cannot_meet_are_relayed_between(
    walk: Walk, chat_ids: ChatIds, greedy_reference: GreedyReference
) -> None:
    manifest = load_manifest(walk.package)
    anna = walk.join("anna", walk.package)
    walk.wait(anna)

    carla = walk.join("carla", MODEL, anna)
    broken = walk.join("ben", MODEL, anna)
    wait_until(lambda: walk.fetched("ben") or not broken.alive, "its first layer is there")
    broken.process.kill()
    wait_for_end(broken)
    kept = walk.fetched("ben")
    ben = walk.join("ben", MODEL, anna)
    walk.wait(ben, carla)
    after = walk.fetched("ben")
    assert {path: after[path] for path in kept} == kept  # what was there has not been fetched again
    for name in ("ben", "carla"):
        assert_only_its_files(walk.cache_of(name), manifest, LayerRange.parse(SPANS[name]))

    (model,) = walk.on_dora("models", initial=carla)["models"]
    assert (model["name"], model["layers_covered"], model["peers"]) == (MODEL, 30, 3)
    said = walk.on_dora("generate", MODEL, PROMPT, "--max-new-tokens", str(TOKENS), initial=ben)
    assert said["token_ids"] == greedy_reference(chat_ids(PROMPT), TOKENS)
    assert said["route"] == "anna 0:11 → ben 11:19 ⇢ carla 19:30"

    def hops() -> list[tuple[str, str, bool]]:
        route = walk.on_dora("routes", MODEL, initial=ben)["route"]
        return [(hop["name"], hop["span"], hop["relayed"]) for hop in route["hops"]]

    relayed = [("anna", "0:11", False), ("ben", "11:19", False), ("carla", "19:30", True)]
    wait_until(lambda: hops() == relayed, "ben says that it does not reach carla, and the route shows it")


def assert_only_its_files(cache: Path, manifest: Manifest, span: LayerRange) -> None:
    (package,) = (cache / "packages").iterdir()
    entries = manifest.files([*manifest.span_parts(span), TOKENIZER])
    check_files(package, entries)
    files = {path.name for path in package.iterdir() if not path.name.startswith(".fetch")}
    assert files == {entry.path for entry in entries} | {"manifest.json"}

"""Case 4: a peer whose weights are missing or damaged, then a good one on the same span."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from swarm.app.local_swarm import LocalSwarm, Member
from swarm.model.manifest import MANIFEST, load_manifest
from tests.cases.conftest import ChatIds
from tests.cases.observer import records_at, wait_for_end
from tests.conftest import GreedyReference
from tests.harness import local_swarm, run_swarm

PROMPT = "Name three things that bees do."
TOKENS = 16
GIVEN, WANTED = "0:22", "22:30"


def copy_of(package: Path, folder: Path) -> Path:
    """Links to its files: replace one, never write into it."""
    shutil.copytree(package, folder, copy_function=os.symlink)
    return folder


def damage(file: Path) -> None:
    """One bit, the size stays."""
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.unlink()
    file.write_bytes(raw)


def names_of(member: Member, digest: str) -> set[str]:
    return set(records_at(member, digest))


def test_bad_files_are_named_and_never_served_and_a_good_peer_takes_the_span(
    smollm2_package: Path, chat_ids: ChatIds, greedy_reference: GreedyReference, tmp_path: Path
) -> None:
    manifest = load_manifest(smollm2_package)
    giving = copy_of(smollm2_package, tmp_path / "giving")
    flipped, gone, torn = (copy_of(smollm2_package, tmp_path / name) for name in ("flipped", "gone", "torn"))
    (torn / MANIFEST).unlink()
    (torn / MANIFEST).write_text("{")
    damage(flipped / "layer_024.bin")
    (gone / "layer_022.bin").unlink()
    cache = tmp_path / "cache"
    with local_swarm(tmp_path / "swarm", giving, [GIVEN]) as swarm:
        (giver,) = swarm.members
        damage(giving / "layer_028.bin")  # it goes on to serve its own layers well, and to give this file away

        def bad(package: Path | str, name: str, span: str = WANTED, *options: str) -> Member:
            return swarm.join(package, span, name=name, initial=[giver.address], options=options)

        expected = [
            (bad(flipped, "flipped"), 4, f"{flipped / 'layer_024.bin'} is damaged"),
            (bad(torn, "torn"), 4, f"{torn / MANIFEST} is no manifest of use"),
            (bad(gone, "gone", "auto", "--max-memory", "1GB"), 4, f"{gone / 'layer_022.bin'} cannot be read"),
            # what is wrong there is what the peer gave it
            (bad(manifest.name, "fetcher", WANTED, "--cache-dir", str(cache)), 7, "wrong bytes for layer_028.bin"),
        ]
        for member, code, text in expected:
            assert wait_for_end(member) == code, member.log_tail()
            *_, last = member.log.read_text().splitlines()
            assert last.startswith("error: "), member.log_tail()
            assert text in last
            assert member.event("announced") is None
        assert names_of(giver, manifest.digest) == {giver.name}

        good = swarm.join(smollm2_package, WANTED, name="good", initial=[giver.address])
        swarm.wait([good])
        assert names_of(giver, manifest.digest) == {giver.name, "good"}
        said = generate(swarm, manifest.digest)
        assert said["token_ids"] == greedy_reference(chat_ids(PROMPT), TOKENS)
        assert [hop["name"] for hop in said["hops"]] == [giver.name, "good"]

        # with a good source beside the bad one the fetch goes on where it was broken off
        kept = {path: path.stat().st_mtime_ns for path in cache.rglob("layer_*.bin")}
        assert kept
        (next(iter(kept)).parent / MANIFEST).write_bytes(b"")  # as a machine that lost its power leaves it
        again = swarm.join(
            manifest.name, WANTED, name="again", initial=[giver.address], options=["--cache-dir", str(cache)]
        )
        swarm.wait([again])
        assert {path: path.stat().st_mtime_ns for path in kept} == kept
        for entry in manifest.files([f"layer_{layer:03d}" for layer in range(22, 30)]):
            (path,) = cache.rglob(entry.path)
            assert hashlib.sha256(path.read_bytes()).hexdigest() == entry.sha256
        assert names_of(giver, manifest.digest) == {giver.name, "good", "again"}


def generate(swarm: LocalSwarm, digest: str) -> dict[str, Any]:
    done = run_swarm(
        *("generate", digest, PROMPT, "--max-new-tokens", str(TOKENS), "--json"),
        *("--initial-peer", swarm.members[0].address),
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said

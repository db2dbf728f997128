"""Peers with missing or damaged weights, then an intact peer on the same span."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from swarm.app.local_swarm import LocalSwarm, Member
from swarm.model.manifest import MANIFEST, load_manifest
from tests.cases.observer import records_at, wait_for_exit
from tests.conftest import ChatIds, GreedyReference
from tests.harness import local_swarm, run_swarm

PROMPT = "Name three things that bees do."
TOKENS = 16
SOURCE_SPAN, TARGET_SPAN = "0:22", "22:30"


def copy_of(package: Path, folder: Path) -> Path:
    """A copy of `package` with links to its files: replace a file, never write into it."""
    shutil.copytree(package, folder, copy_function=os.symlink)
    return folder


def damage(file: Path) -> None:
    """Flip one bit of the file; its size stays."""
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.unlink()
    file.write_bytes(raw)


def names_of(member: Member, digest: str) -> set[str]:
    return set(records_at(member, digest))


def test_damaged_files_are_named_and_never_served_and_an_intact_peer_serves_the_span(
    smollm2_package: Path, chat_ids: ChatIds, greedy_reference: GreedyReference, tmp_path: Path
) -> None:
    manifest = load_manifest(smollm2_package)
    source_package = copy_of(smollm2_package, tmp_path / "giving")
    flipped, missing, torn = (copy_of(smollm2_package, tmp_path / name) for name in ("flipped", "gone", "torn"))
    (torn / MANIFEST).unlink()
    (torn / MANIFEST).write_text("{")
    damage(flipped / "layer_024.bin")
    (missing / "layer_022.bin").unlink()
    cache = tmp_path / "cache"
    with local_swarm(tmp_path / "swarm", source_package, [SOURCE_SPAN]) as swarm:
        (source,) = swarm.members
        damage(source_package / "layer_028.bin")  # The source serves its own layers unharmed and shares this file.

        def join(package: Path | str, name: str, span: str = TARGET_SPAN, *options: str) -> Member:
            return swarm.join(package, span, name=name, initial=[source.address], options=options)

        expected = [
            (join(flipped, "flipped"), 4, f"{flipped / 'layer_024.bin'} is damaged"),
            (join(torn, "torn"), 4, f"{torn / MANIFEST} is no manifest of use"),
            (
                join(missing, "gone", "auto", "--max-memory", "1GB"),
                4,
                f"{missing / 'layer_022.bin'} cannot be read",
            ),
            # This peer fetches the damaged file from the source.
            (
                join(manifest.name, "fetcher", TARGET_SPAN, "--cache-dir", str(cache)),
                7,
                "wrong bytes for layer_028.bin",
            ),
        ]
        for member, code, text in expected:
            assert wait_for_exit(member) == code, member.log_tail()
            *_, last = member.log.read_text().splitlines()
            assert last.startswith("error: "), member.log_tail()
            assert text in last
            assert member.event("announced") is None
        assert names_of(source, manifest.digest) == {source.name}

        good = swarm.join(smollm2_package, TARGET_SPAN, name="good", initial=[source.address])
        swarm.wait([good])
        assert names_of(source, manifest.digest) == {source.name, "good"}
        output = generate(swarm, manifest.digest)
        assert output["token_ids"] == greedy_reference(chat_ids(PROMPT), TOKENS)
        assert [hop["name"] for hop in output["hops"]] == [source.name, "good"]

        # With an intact source beside the damaged one the fetch continues where it stopped.
        before = {path: path.stat().st_mtime_ns for path in cache.rglob("layer_*.bin")}
        assert before
        (next(iter(before)).parent / MANIFEST).write_bytes(b"")  # As after a power failure.
        again = swarm.join(
            manifest.name, TARGET_SPAN, name="again", initial=[source.address], options=["--cache-dir", str(cache)]
        )
        swarm.wait([again])
        assert {path: path.stat().st_mtime_ns for path in before} == before
        for entry in manifest.files([f"layer_{layer:03d}" for layer in range(22, 30)]):
            (path,) = cache.rglob(entry.path)
            assert hashlib.sha256(path.read_bytes()).hexdigest() == entry.sha256
        assert names_of(source, manifest.digest) == {source.name, "good", "again"}


def generate(swarm: LocalSwarm, digest: str) -> dict[str, Any]:
    done = run_swarm(
        *("generate", digest, PROMPT, "--max-new-tokens", str(TOKENS), "--json"),
        *("--initial-peer", swarm.members[0].address),
    )
    assert done.returncode == 0, done.stderr
    output: dict[str, Any] = json.loads(done.stdout)
    return output

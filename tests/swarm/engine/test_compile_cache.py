"""Entries of the cache of compiled graphs: sealed, damaged, incomplete."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swarm.engine.compile_cache import discard_if_damaged, entry_path, evict, locked, seal


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    entry = entry_path(tmp_path, "digest", "0:10", "CPU")
    entry.mkdir()
    (entry / "1.blob").write_bytes(b"compiled")
    seal(entry)
    return entry


def test_each_part_of_the_key_matters(tmp_path: Path) -> None:
    keys = [("a", "b"), ("ab",), ("a", "b", ""), ("b", "a")]
    assert len({entry_path(tmp_path, *key) for key in keys}) == len(keys)


def test_a_sealed_entry_stays(entry: Path) -> None:
    discard_if_damaged(entry)
    assert (entry / "1.blob").read_bytes() == b"compiled"


def test_a_changed_added_or_unsealed_file_deletes_the_entry(entry: Path) -> None:
    for damage in (
        lambda: (entry / "1.blob").write_bytes(b"compilex"),
        lambda: (entry / "2.blob").write_bytes(b"more"),
        lambda: (entry / "1.blob").unlink(),
        lambda: (entry / "sealed.json").unlink(),
        lambda: (entry / "sealed.json").write_text("{"),
        lambda: (entry / "sealed.json").write_text("[1]"),
    ):
        damage()
        discard_if_damaged(entry)
        assert not entry.exists()
        entry.mkdir()
        (entry / "1.blob").write_bytes(b"compiled")
        seal(entry)


def test_a_second_graph_in_an_entry_is_sealed_too(entry: Path) -> None:
    (entry / "2.blob").write_bytes(b"more")
    seal(entry)
    discard_if_damaged(entry)
    assert (entry / "2.blob").exists()


def test_a_missing_entry_is_no_error(tmp_path: Path) -> None:
    discard_if_damaged(entry_path(tmp_path, "none"))
    with locked(entry_path(tmp_path / "new", "none")):
        assert (tmp_path / "new").is_dir()


def entry_names(cache_dir: Path) -> set[str]:
    return {path.parent.name for path in cache_dir.glob("*/sealed.json")}


def test_recently_used_and_locked_entries_are_not_evicted(tmp_path: Path) -> None:
    entries = [entry_path(tmp_path, str(number)) for number in range(5)]
    for age, entry in enumerate(entries):
        entry.mkdir()
        (entry / "1.blob").write_bytes(b"compiled")
        seal(entry)
        os.utime(entry / "sealed.json", (1000 - age, 1000 - age))
    seal(entries[4])  # the oldest is used again
    with locked(entries[3]):
        evict(tmp_path, keep=2)
    assert entry_names(tmp_path) == {entries[0].name, entries[4].name, entries[3].name}
    evict(tmp_path, keep=2)
    assert entry_names(tmp_path) == {entries[0].name, entries[4].name}

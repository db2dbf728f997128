"""Spilled caches are restored unchanged, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import psutil
import pytest

from swarm.engine.paged.block_tables import BlockTables
from swarm.engine.paged.blocks import BlockPool
from swarm.engine.paged.spill import Spill
from swarm.errors import ConfigError, DamagedFile, UnknownSession


def parts(seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.normal(size=(2, 3)).astype(np.float32), random.integers(0, 9, (4,)).astype(np.uint8)]


def empty() -> list[np.ndarray]:
    return [np.zeros_like(part) for part in parts(0)]


SIZE = sum(part.nbytes for part in parts(0))


def test_a_saved_cache_is_loaded_once(tmp_path: Path) -> None:
    spill = Spill(tmp_path, max_bytes=1000)
    assert spill.save("../a/session", parts(1))
    loaded = empty()
    spill.load("../a/session", loaded)
    assert all(map(np.array_equal, loaded, parts(1)))
    assert spill.used_bytes == 0
    with pytest.raises(DamagedFile):
        spill.load("../a/session", loaded)


def test_the_oldest_cache_is_dropped_first_and_one_that_is_too_large_is_refused(tmp_path: Path) -> None:
    spill = Spill(tmp_path, max_bytes=2 * SIZE)
    for seed in range(3):
        assert spill.save(str(seed), parts(seed))
    assert spill.used_bytes == 2 * SIZE
    with pytest.raises(DamagedFile):
        spill.load("0", empty())
    spill.load("1", empty())
    assert not spill.save("large", parts(0) * 3)


def test_a_damaged_file_is_noticed(tmp_path: Path) -> None:
    spill = Spill(tmp_path, max_bytes=1000)
    for name, end in (("flipped", bytes([parts(1)[1][-1] ^ 1])), ("short", b"")):
        spill.save(name, parts(1))
        (path,) = (path for path in tmp_path.glob("*/*") if path.name != "lock")
        path.write_bytes(path.read_bytes()[:-1] + end)
        with pytest.raises(DamagedFile):
            spill.load(name, empty())


def test_folders_of_dead_processes_are_removed_and_of_running_ones_left(tmp_path: Path) -> None:
    alive = Spill(tmp_path, max_bytes=1000)
    alive.save("a", parts(1))
    dead = tmp_path / "aipc-swarm-kv-dead"
    dead.mkdir()
    (dead / "something").write_text("a cache")
    Spill(tmp_path, max_bytes=1000)
    assert not dead.exists()
    alive.load("a", empty())


def test_looking_for_stale_folders_leaves_no_file_open(tmp_path: Path) -> None:
    living = Spill(tmp_path, max_bytes=1000)
    before = psutil.Process().num_fds()
    other = Spill(tmp_path, max_bytes=1000)
    assert psutil.Process().num_fds() == before + 1  # its own lock
    del living, other


def test_a_directory_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--kv-spill"):
        Spill(tmp_path / "file", max_bytes=1)


class Memory:
    """A store whose blocks are rows of an array."""

    def __init__(self, pool: BlockPool, spill: Spill) -> None:
        self.rows = np.zeros((pool.count, pool.size), np.int32)
        self._spill = spill

    def save(self, session: str, blocks: list[int]) -> bool:
        return self._spill.save(session, [self.rows[block] for block in blocks])

    def load(self, session: str, blocks: list[int]) -> None:
        self._spill.load(session, [self.rows[block] for block in blocks])

    def drop(self, session: str) -> None:
        self._spill.drop(session)


def test_an_evicted_session_is_restored_before_its_next_step_or_must_start_again(tmp_path: Path) -> None:
    pool = BlockPool(4, 4)
    tables, spill = BlockTables(pool), Spill(tmp_path, max_bytes=10_000)
    memory = Memory(pool, spill)
    tables.disk = memory  # type: ignore[assignment]  # `Disk` takes sequences
    for name in ("one", "other"):
        tables.open(name, 16)
    one = tables.check("one", 0, 6)
    one.prepare(0, 6)
    for position in range(6):
        memory.rows[one.blocks[position // 4], position % 4] = position
    one.commit(np.arange(6, dtype=np.int32))
    tables.evict("one")
    assert (tables.free, tables.missing_blocks("one", 6, 1), tables.exclusive_blocks("one")) == (4, 2, 0)
    assert tables.fitting_tokens("one", 6, reserved=3) == 0
    other = tables.check("other", 0, 8)
    other.prepare(0, 8)
    memory.rows[other.blocks] = 99
    one = tables.check("one", 6, 1)
    assert [int(memory.rows[one.blocks[p // 4], p % 4]) for p in range(6)] == list(range(6))
    assert (one.length, tables.free, spill.used_bytes) == (6, 0, 0)

    tables.evict("one")
    for path in tmp_path.glob("*/*"):
        if path.name != "lock":
            os.truncate(path, 40)
    with pytest.raises(UnknownSession, match="needed for older sessions"):
        tables.check("one", 6, 1)
    assert tables.free == 2
    tables.check("one", 0, 1)
    tables.close("one")
    tables.close("other")
    assert tables.free == 4

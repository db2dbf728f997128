"""Invariants of the pool and its tables: no block is lost, sharing is counted, equal names mean equal prefixes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swarm.engine.paged.blocks import BlockPool, BlockTable, block_names, root_name
from swarm.errors import BadStep, ContextExceeded, EngineError, PeerBusy

SIZE, COUNT, ROOM = 4, 12, 30
FIRST = root_name("model", "f32/f32")


class Blocks(RuleBasedStateMachine):
    """Sessions write tokens of an alphabet of two, so that prefixes are often equal; memory is a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(COUNT, SIZE)
        self.memory: list[list[tuple[int, ...] | None]] = [[None] * SIZE for _ in range(COUNT)]
        self.tables: list[BlockTable] = []
        self.texts: list[list[int]] = []

    @rule(text=st.lists(st.integers(0, 1), max_size=ROOM), shares=st.booleans())
    def open(self, text: list[int], shares: bool) -> None:
        if len(self.tables) == 4:
            return
        table, shared = BlockTable(self.pool, max_tokens=ROOM), 0
        if shares:
            ids = table.reuse_prefix(FIRST, block_names(np.array(text, np.int32), first=FIRST, size=SIZE))
            shared = len(ids)
            assert ids.tolist() == text[:shared]
        assert shared <= len(text)
        self.tables.append(table)
        self.texts.append(text[:shared])

    @rule(which=st.integers(0, 3), back=st.integers(0, 9), ids=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def step(self, which: int, back: int, ids: list[int]) -> None:
        if which >= len(self.tables):
            return
        table, text = self.tables[which], self.texts[which]
        start = max(len(text) - back, 0)
        if start + len(ids) > ROOM:
            with pytest.raises(ContextExceeded):
                table.check(start, len(ids))
            return
        table.check(start, len(ids))
        before, free = (list(table.blocks), table.length), self.pool.free
        missing_blocks = table.missing_blocks(start, len(ids))
        try:
            copy = table.prepare(start, len(ids))
        except PeerBusy:
            assert missing_blocks > free
            assert before == (table.blocks, table.length)
            return
        assert self.pool.free >= free - missing_blocks
        if copy is not None:
            self.memory[copy[1]] = list(self.memory[copy[0]])
        known = text[:start] + ids
        for position in range(start, len(known)):
            # The content of a cache depends on all tokens before it.
            self.memory[table.blocks[position // SIZE]][position % SIZE] = tuple(known[: position + 1])
        table.commit(np.array(ids, np.int32))
        self.texts[which] = known

    @rule(which=st.integers(0, 3))
    def close(self, which: int) -> None:
        if which < len(self.tables):
            self.tables.pop(which).clear()
            self.texts.pop(which)

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        assert self.pool.cached == 0

    @invariant()
    def every_session_reads_what_it_wrote(self) -> None:
        for table, text in zip(self.tables, self.texts, strict=True):
            assert table.length == len(text)
            for position in range(len(text)):
                block = table.blocks[position // SIZE]
                assert self.memory[block][position % SIZE] == tuple(text[: position + 1])

    @invariant()
    def reference_counts_are_right_and_no_block_is_lost(self) -> None:
        held = Counter(block for table in self.tables for block in table.blocks)
        for block in range(COUNT):
            assert self.pool.ref_count(block) == held[block]
        assert self.pool.used == len(held)
        assert self.pool.used + self.pool.free == COUNT
        for table in self.tables:
            assert len(set(table.blocks)) == len(table.blocks)

    @invariant()
    def a_name_finds_the_prefix_that_it_names(self) -> None:
        for block in range(COUNT):
            name = self.pool.name(block)
            if name is not None:
                last = self.memory[block][SIZE - 1]
                assert last is not None
                assert block_names(np.array(last, np.int32), first=FIRST, size=SIZE)[-1] == name
                assert self.pool.find(name) == block


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def sharing(pool: BlockPool, *text: int) -> BlockTable:
    table = BlockTable(pool, max_tokens=16)
    table.reuse_prefix(FIRST, block_names(np.array(text, np.int32), first=FIRST, size=SIZE))
    return table


def put(table: BlockTable, start: int, *ids: int) -> None:
    table.prepare(start, len(ids))
    table.commit(np.array(ids, np.int32))


def test_blocks_are_reused_in_the_order_of_release_and_the_beginning_of_a_text_last() -> None:
    pool = BlockPool(4, SIZE)
    old, new = sharing(pool), sharing(pool)
    put(old, 0, *range(8))
    put(new, 0, *range(50, 58))
    old.clear()
    new.clear()
    assert (pool.cached, pool.free) == (4, 4)
    put(BlockTable(pool, max_tokens=16), 0, 1)
    assert sharing(pool, *range(8)).length == 4
    assert sharing(pool, *range(50, 58)).length == 8


@given(st.binary(max_size=9), st.binary(max_size=9))
def test_chains_with_different_starts_have_no_name_in_common(one: bytes, other: bytes) -> None:
    ids = np.arange(12, dtype=np.int32)
    names = [block_names(ids, first=root_name("model", salt), size=SIZE) for salt in (one, other)]
    assert [len(each) for each in names] == [3, 3]
    assert bool(set(names[0]) & set(names[1])) == (one == other)
    assert root_name("ab", "c") != root_name("a", "bc")


def test_wrong_steps_and_sizes_are_named() -> None:
    table = BlockTable(BlockPool(2, SIZE), max_tokens=8)
    with pytest.raises(BadStep, match="0 tokens"):
        table.check(0, 0)
    with pytest.raises(BadStep, match="start 1"):
        table.check(1, 1)
    with pytest.raises(EngineError, match="0 blocks"):
        BlockPool(0, SIZE)


def test_the_number_of_cached_blocks_is_limited() -> None:
    pool = BlockPool(8, SIZE, max_cached=2)
    table = sharing(pool)
    put(table, 0, *range(16))
    table.clear()
    assert (pool.cached, pool.free) == (2, 8)
    assert sharing(pool, *range(16)).length == 8

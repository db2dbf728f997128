"""The blocks of a KV cache: which sessions hold them, and which unused ones stay cached for reuse. Pure.

::

    session A   length 70        [4]──[1]──[7]            positions 0..31, 32..63, 64..69
    session B   length 64        [4]──[1]                 the same first 64 tokens: reference count 2
    pool        reference counts 4: 2, 1: 2, 7: 1         cached: 9, 3 (oldest first)    empty: 0, 2, 5, 6, 8

A block holds the keys and values of `size` consecutive positions in every layer. Tables share blocks whose
tokens are the same from position 0 on. A full block has a *name*: the hash of its tokens and of the previous block's
name. Equal names therefore mean equal prefixes. A named block without references stays cached until a block is
needed; the block that was released first is reused first. A session that writes into a shared block copies it
first. Writing into a named block removes the name.

A session that is opened with a prefix (`peer/sessions/service.py`) shares its blocks by `BlockTables.reuse_prefix`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from swarm.engine.steps import check_position
from swarm.errors import EngineError, PeerBusy

Ids = NDArray[np.int32]
Name = bytes
NAME_BYTES = 16
BLOCK_TOKENS = 32
"""Tokens in a named block: the unit that clients hash, and the block size of OpenVINO's CPU plugin."""


def root_name(*parts: str | bytes) -> Name:
    """The start of a chain of names: a hash of everything besides tokens that equal caches have in common."""
    digest = hashlib.blake2b(digest_size=NAME_BYTES)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(4, "big") + raw)
    return digest.digest()


def next_name(before: Name, ids: Ids) -> Name:
    """The name of the full block with the tokens `ids` [size] after the block named `before`."""
    raw = np.ascontiguousarray(ids, "<i4").tobytes()
    return hashlib.blake2b(before + raw, digest_size=NAME_BYTES).digest()


def pack_names(first: Name, names: Sequence[Name], *, max_bytes: int) -> bytes:
    """Serialize `first` and as many of `names` as fit in `max_bytes` bytes."""
    return b"".join([first, *names])[: max_bytes - max_bytes % NAME_BYTES]


def unpack_names(packed: bytes) -> tuple[Name, list[Name]]:
    """The inverse of `pack_names`: the first name of `packed`, which must not be empty, and the others."""
    first, *names = (packed[at : at + NAME_BYTES] for at in range(0, len(packed), NAME_BYTES))
    return first, names


def block_names(ids: Ids, *, first: Name, size: int = BLOCK_TOKENS) -> list[Name]:
    """The names of all full blocks of a text `ids` [n]."""
    names = [first]
    for start in range(0, len(ids) - size + 1, size):
        names.append(next_name(names[-1], ids[start : start + size]))
    return names[1:]


class BlockPool:
    """`count` blocks of `size` positions. Each is referenced, cached or empty. Does not allocate their memory.

    `max_cached` limits the number of cached blocks; None sets no limit.
    """

    def __init__(self, count: int, size: int, *, max_cached: int | None = None) -> None:
        if count < 1 or size < 1:
            raise EngineError(f"{count} blocks of {size} tokens are no KV cache: give it more memory")
        self.count = count
        self.size = size
        self._max_cached = count if max_cached is None else max_cached
        self.ids = np.zeros((count, size), np.int32)  # [block, offset]: the token at each position
        self._ref_counts = [0] * count
        self._names: list[Name | None] = [None] * count
        self._named: dict[Name, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._empty = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks that can be allocated: empty and cached ones."""
        return len(self._empty) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that sessions hold."""
        return self.count - self.free

    @property
    def cached(self) -> int:
        return len(self._cached)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def name(self, block: int) -> Name | None:
        return self._names[block]

    def allocate(self) -> int:
        """Allocate a block, with one reference. Raises PeerBusy if sessions hold all blocks."""
        if self._empty:
            block = self._empty.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self.clear_name(block)
        else:
            raise PeerBusy(f"all {self.count} blocks of the KV cache are in use", retry_after=1.0)
        self._ref_counts[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Add a reference to a block that is referenced or cached."""
        if not self._ref_counts[block]:
            del self._cached[block]
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Remove a reference. Without references, a named block becomes cached and another one empty."""
        self._ref_counts[block] -= 1
        if self._ref_counts[block]:
            return
        if self._names[block] is not None:
            self._cached[block] = None
            while len(self._cached) > self._max_cached:
                oldest, _ = self._cached.popitem(last=False)
                self.clear_name(oldest)
                self._empty.append(oldest)
        else:
            self._empty.append(block)

    def find(self, name: Name) -> int | None:
        return self._named.get(name)

    def set_name(self, block: int, name: Name) -> None:
        """Name a full block that is referenced. If another block has the name already, this one stays without."""
        if name not in self._named:
            self._named[name] = block
            self._names[block] = name

    def clear_name(self, block: int) -> None:
        name = self._names[block]
        if name is not None:
            del self._named[name]
            self._names[block] = None

    def forget(self) -> None:
        """Empty all cached blocks."""
        for block in self._cached:
            self.clear_name(block)
            self._empty.append(block)
        self._cached.clear()


class BlockTable:
    """One session's blocks, in order. They are shared only after `reuse_prefix` has started a chain of names."""

    def __init__(self, pool: BlockPool, *, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.blocks: list[int] = []
        self.length = 0
        self._pool = pool
        self._names: list[Name] = []  # the start of the chain, then the names of the full blocks
        self._tag = b""
        self._spilled_ids: Ids | None = None  # [blocks, size]: the tokens of spilled blocks

    def reuse_prefix(self, first: Name, names: Sequence[Name], *, tag: bytes = b"") -> Ids:
        """Share the blocks of the longest prefix of `names` that the pool still has. Returns the prefix's tokens.

        `first` starts the chain, also for blocks written later. `tag` distinguishes caches that have equal names on
        the client's side, such as caches of different layers. Call it at most once, before the first step.
        """
        self._names, self._tag = [first], tag
        for name in names:
            block = self._pool.find(name + tag)
            if block is None or (len(self.blocks) + 1) * self._pool.size > self.max_tokens:
                break
            self._pool.retain(block)
            self.blocks.append(block)
            self._names.append(name)
        self.length = len(self.blocks) * self._pool.size
        return self._pool.ids[self.blocks].reshape(-1)

    @property
    def is_spilled(self) -> bool:
        """Whether the blocks were spilled. Length and names are unchanged then."""
        return self._spilled_ids is not None

    def release_spilled(self) -> None:
        """Release the blocks. The caller has saved their content."""
        self._spilled_ids = self._pool.ids[self.blocks]
        for block in reversed(self.blocks):
            self._pool.release(block)
        self.blocks.clear()

    def allocate_spilled(self) -> list[int]:
        """Allocate blocks for the spilled ones, which the caller fills. Raises PeerBusy if too few are free."""
        assert self._spilled_ids is not None
        ids = self._spilled_ids
        if len(ids) > self._pool.free:
            raise PeerBusy(f"{len(ids)} blocks of KV cache are needed and {self._pool.free} are free", retry_after=1.0)
        self.blocks = [self._pool.allocate() for _ in ids]
        self._pool.ids[self.blocks] = ids
        self._spilled_ids = None
        for block, name in zip(self.blocks, self._names[1:], strict=False):
            self._pool.set_name(block, name + self._tag)
        return self.blocks

    def check(self, start: int, n: int) -> None:
        """Raises BadStep for a step that leaves a gap or is empty, ContextExceeded for a step that is too long."""
        check_position(start, n, length=self.length, max_tokens=self.max_tokens)

    def missing_blocks(self, start: int, n: int) -> int:
        """Blocks to allocate for `n` tokens from `start`: new ones, and copies of shared ones."""
        size = self._pool.size
        first, needed = start // size, -(-(start + n) // size)
        if self._spilled_ids is not None:
            return max(len(self._spilled_ids), needed)
        shared = sum(self._pool.ref_count(block) > 1 for block in self.blocks[first:needed])
        return max(0, needed - len(self.blocks)) + shared

    def fitting_tokens(self, start: int, more: int) -> int:
        """Tokens from `start` that fit in the table's blocks and `more` blocks from the pool."""
        pool, size = self._pool, self._pool.size
        if self._spilled_ids is not None:
            return max(0, more * size - start) if len(self._spilled_ids) <= more else 0
        shared = sum(pool.ref_count(block) > 1 for block in self.blocks[start // size :])
        return max(0, (len(self.blocks) + more - shared) * size - start) if shared <= more else 0

    def prepare(self, start: int, n: int) -> tuple[int, int] | None:
        """Rewind to `start` and allocate blocks for `n` tokens from there.

        Returns (source, target) if the caller must copy a block first. Raises PeerBusy if the pool has too few blocks;
        nothing has changed then.
        """
        pool, size = self._pool, self._pool.size
        first, needed = start // size, -(-(start + n) // size)
        if (missing_blocks := self.missing_blocks(start, n)) > pool.free:
            raise PeerBusy(f"{missing_blocks} blocks of KV cache are needed and {pool.free} are free", retry_after=1.0)
        while len(self.blocks) > needed:
            pool.release(self.blocks.pop())
        copy = None
        for index in range(first, len(self.blocks)):
            block = self.blocks[index]
            if pool.ref_count(block) == 1:
                pool.clear_name(block)
                continue
            self.blocks[index] = new = pool.allocate()
            if index == first and start % size:
                copy = (block, new)
                pool.ids[new] = pool.ids[block]
            pool.release(block)
        while len(self.blocks) < needed:
            self.blocks.append(pool.allocate())
        del self._names[first + 1 :]
        self.length = start
        return copy

    def commit(self, ids: Ids) -> None:
        """Record that the tokens `ids` [n], announced to `prepare`, have been computed."""
        pool, size = self._pool, self._pool.size
        position, end = self.length, self.length + len(ids)
        self.length = end
        while position < end:
            index, offset = divmod(position, size)
            count = min(size - offset, end - position)
            block = self.blocks[index]
            pool.ids[block, offset : offset + count] = ids[len(ids) - (end - position) :][:count]
            position += count
            if position % size == 0 and len(self._names) == index + 1:
                self._names.append(next_name(self._names[index], pool.ids[block]))
                pool.set_name(block, self._names[-1] + self._tag)

    def clear(self) -> None:
        """Release all blocks, the last first: the first blocks of a text are the most likely to be shared again."""
        for block in reversed(self.blocks):
            self._pool.release(block)
        self.blocks.clear()
        self._spilled_ids = None
        del self._names[1:]
        self.length = 0

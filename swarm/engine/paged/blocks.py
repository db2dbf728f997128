"""The KV cache in blocks: who holds which, and which still hold a text that somebody may want. Pure.

::

    session A   length 70        [4]──[1]──[7]            positions 0..31, 32..63, 64..69
    session B   length 64        [4]──[1]                 the same first 64 tokens: two holders each
    pool        4: 2 holders     1: 2 holders    7: 1     kept: 9, 3 (oldest first)    empty: 0, 2, 5, 6, 8

A block holds the keys and values of `size` consecutive positions in every layer. Tables share blocks whose
tokens are the same from position 0 on. A full block has a *name*: the hash of its tokens and of the name before it,
so that equal names mean equal prefixes. A named block that nobody holds any more is kept until its room is
needed, the one that was let go of first going first. Who writes into a block that others hold, copies it; who
writes into a named one takes the name away.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from swarm.engine.steps import check_place
from swarm.errors import EngineError, PeerBusy

Ids = NDArray[np.int32]
Name = bytes
NAME_BYTES = 16
BLOCK_TOKENS = 32
"""Tokens a named block: what a client hashes, and the block size of OpenVINO's CPU plugin."""


def first_name(*parts: str | bytes) -> Name:
    """What the chain of names begins with: everything besides tokens that two caches must have in common."""
    digest = hashlib.blake2b(digest_size=NAME_BYTES)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(4, "big") + raw)
    return digest.digest()


def next_name(before: Name, ids: Ids) -> Name:
    """The name of the full block with the tokens `ids` [size] after the block named `before`."""
    raw = np.ascontiguousarray(ids, "<i4").tobytes()
    return hashlib.blake2b(before + raw, digest_size=NAME_BYTES).digest()


def pack_names(first: Name, names: Sequence[Name], *, most: int) -> bytes:
    """A chain as it travels: its beginning and as many of its names as `most` bytes hold."""
    return b"".join([first, *names])[: most - most % NAME_BYTES]


def unpack_names(packed: bytes) -> tuple[Name, list[Name]]:
    """What `pack_names` made. The first of `packed`, which is not empty, and the others."""
    first, *names = (packed[at : at + NAME_BYTES] for at in range(0, len(packed), NAME_BYTES))
    return first, names


def names_of(ids: Ids, *, first: Name, size: int = BLOCK_TOKENS) -> list[Name]:
    """The names of all full blocks of a text `ids` [n]."""
    names = [first]
    for start in range(0, len(ids) - size + 1, size):
        names.append(next_name(names[-1], ids[start : start + size]))
    return names[1:]


class BlockPool:
    """`count` blocks of `size` positions. Every block is held, kept or empty; nothing here allocates memory.

    `max_kept` bounds what lies there only because somebody may want it; None: until its room is needed.
    """

    def __init__(self, count: int, size: int, *, max_kept: int | None = None) -> None:
        if count < 1 or size < 1:
            raise EngineError(f"{count} blocks of {size} tokens are no KV cache: give it more memory")
        self.count = count
        self.size = size
        self._max_kept = count if max_kept is None else max_kept
        self.ids = np.zeros((count, size), np.int32)  # [block, offset]: the token at each position
        self._holders = [0] * count
        self._names: list[Name | None] = [None] * count
        self._named: dict[Name, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._empty = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks that can be taken: empty ones, and those that are only kept."""
        return len(self._empty) + len(self._kept)

    @property
    def used(self) -> int:
        """Blocks that sessions hold."""
        return self.count - self.free

    @property
    def kept(self) -> int:
        return len(self._kept)

    def holders(self, block: int) -> int:
        return self._holders[block]

    def name(self, block: int) -> Name | None:
        return self._names[block]

    def take(self) -> int:
        """An empty block, held once. Raises PeerBusy where all are held."""
        if self._empty:
            block = self._empty.pop()
        elif self._kept:
            block, _ = self._kept.popitem(last=False)
            self.unname(block)
        else:
            raise PeerBusy(f"all {self.count} blocks of the KV cache are held", retry_after=1.0)
        self._holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One holder more of a block that is held or kept."""
        if not self._holders[block]:
            del self._kept[block]
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """One holder fewer; without any, a named block is kept and another one is empty."""
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if self._names[block] is not None:
            self._kept[block] = None
            while len(self._kept) > self._max_kept:
                oldest, _ = self._kept.popitem(last=False)
                self.unname(oldest)
                self._empty.append(oldest)
        else:
            self._empty.append(block)

    def find(self, name: Name) -> int | None:
        return self._named.get(name)

    def entitle(self, block: int, name: Name) -> None:
        """Name a full block that is held. Where another bears the name already, this one stays nameless."""
        if name not in self._named:
            self._named[name] = block
            self._names[block] = name

    def unname(self, block: int) -> None:
        name = self._names[block]
        if name is not None:
            del self._named[name]
            self._names[block] = None

    def forget(self) -> None:
        """Keep nothing that nobody holds."""
        for block in self._kept:
            self.unname(block)
            self._empty.append(block)
        self._kept.clear()


class BlockTable:
    """One session's blocks, in order. They are nobody else's until `adopt` begins their chain of names."""

    def __init__(self, pool: BlockPool, *, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.blocks: list[int] = []
        self.length = 0
        self._pool = pool
        self._names: list[Name] = []  # what the chain begins with, then those of the full blocks
        self._tag = b""
        self._away: Ids | None = None  # [blocks, size]: the tokens of blocks that are somewhere else

    def adopt(self, first: Name, names: Sequence[Name], *, tag: bytes = b"") -> Ids:
        """Begin with the longest prefix of `names` that the pool still has; its tokens.

        `first` begins the chain, of this and of what is written later. `tag` tells caches apart that whoever made the
        names does not know of: the layers that they are of. Once, before the first step.
        """
        self._names, self._tag = [first], tag
        for name in names:
            block = self._pool.find(name + tag)
            if block is None or (len(self.blocks) + 1) * self._pool.size > self.max_tokens:
                break
            self._pool.hold(block)
            self.blocks.append(block)
            self._names.append(name)
        self.length = len(self.blocks) * self._pool.size
        return self._pool.ids[self.blocks].reshape(-1)

    @property
    def is_away(self) -> bool:
        """Its blocks are somewhere else; its length and names are as they were."""
        return self._away is not None

    def send_away(self) -> None:
        """Let go of the blocks, whose content somebody has saved."""
        self._away = self._pool.ids[self.blocks]
        for block in reversed(self.blocks):
            self._pool.release(block)
        self.blocks.clear()

    def bring_back(self) -> list[int]:
        """Blocks for what was sent away, to be filled with it. Raises PeerBusy where there are not enough."""
        assert self._away is not None
        away = self._away
        if len(away) > self._pool.free:
            raise PeerBusy(f"{len(away)} blocks of KV cache are needed and {self._pool.free} are free", retry_after=1.0)
        self.blocks = [self._pool.take() for _ in away]
        self._pool.ids[self.blocks] = away
        self._away = None
        for block, name in zip(self.blocks, self._names[1:], strict=False):
            self._pool.entitle(block, name + self._tag)
        return self.blocks

    def check(self, start: int, n: int) -> None:
        """Raises BadStep for a step that leaves a gap or is empty, ContextExceeded for one too long."""
        check_place(start, n, length=self.length, max_tokens=self.max_tokens)

    def missing(self, start: int, n: int) -> int:
        """Blocks to be taken from the pool for `n` tokens from `start`: new ones, and copies of shared ones."""
        size = self._pool.size
        first, needed = start // size, -(-(start + n) // size)
        if self._away is not None:
            return max(len(self._away), needed)
        shared = sum(self._pool.holders(block) > 1 for block in self.blocks[first:needed])
        return max(0, needed - len(self.blocks)) + shared

    def fitting(self, start: int, more: int) -> int:
        """Tokens from `start` for which there is room in the table's blocks and `more` from the pool."""
        pool, size = self._pool, self._pool.size
        if self._away is not None:
            return max(0, more * size - start) if len(self._away) <= more else 0
        shared = sum(pool.holders(block) > 1 for block in self.blocks[start // size :])
        return max(0, (len(self.blocks) + more - shared) * size - start) if shared <= more else 0

    def prepare(self, start: int, n: int) -> tuple[int, int] | None:
        """Rewind to `start` and have blocks for `n` tokens from there. (from, to) where a block is to be copied first.

        Raises PeerBusy where the pool has not enough; nothing has changed then.
        """
        pool, size = self._pool, self._pool.size
        first, needed = start // size, -(-(start + n) // size)
        if (missing := self.missing(start, n)) > pool.free:
            raise PeerBusy(f"{missing} blocks of KV cache are needed and {pool.free} are free", retry_after=1.0)
        while len(self.blocks) > needed:
            pool.release(self.blocks.pop())
        copy = None
        for place in range(first, len(self.blocks)):
            block = self.blocks[place]
            if pool.holders(block) == 1:
                pool.unname(block)
                continue
            self.blocks[place] = new = pool.take()
            if place == first and start % size:
                copy = (block, new)
                pool.ids[new] = pool.ids[block]
            pool.release(block)
        while len(self.blocks) < needed:
            self.blocks.append(pool.take())
        del self._names[first + 1 :]
        self.length = start
        return copy

    def commit(self, ids: Ids) -> None:
        """`ids` [n], for which `prepare` made room, have been computed."""
        pool, size = self._pool, self._pool.size
        at, end = self.length, self.length + len(ids)
        self.length = end
        while at < end:
            place, offset = divmod(at, size)
            count = min(size - offset, end - at)
            block = self.blocks[place]
            pool.ids[block, offset : offset + count] = ids[len(ids) - (end - at) :][:count]
            at += count
            if at % size == 0 and len(self._names) == place + 1:
                self._names.append(next_name(self._names[place], pool.ids[block]))
                pool.entitle(block, self._names[-1] + self._tag)

    def clear(self) -> None:
        """Let go of everything, the end first: the beginning of a text is what others have in common with it."""
        for block in reversed(self.blocks):
            self._pool.release(block)
        self.blocks.clear()
        self._away = None
        del self._names[1:]
        self.length = 0

"""The block tables of all sessions in one pool of blocks, over all engines that share the pool. Pure.

An *evicted* session stays open. With a disk, its blocks are saved there and restored before its next step. Without a
disk its cache is lost: a step that needs it is refused, a step from position 0 fills it again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

from swarm.engine.paged.blocks import BLOCK_TOKENS, BlockPool, BlockTable, Ids, unpack_names
from swarm.engine.steps import Sessions
from swarm.errors import DamagedFile, UnknownSession

_log = logging.getLogger(__name__)


class Disk(Protocol):
    """Stores the blocks of evicted sessions."""

    def save(self, session: str, blocks: Sequence[int]) -> bool:
        """Returns False if the blocks cannot be saved."""

    def load(self, session: str, blocks: Sequence[int]) -> None:
        """Raises DamagedFile; the content of the blocks is undefined then."""

    def drop(self, session: str) -> None: ...


class BlockTables:
    """Block tables by session. Session names are unique over all engines that share the pool."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.disk: Disk | None = None
        self._tables: Sessions[BlockTable] = Sessions()
        self._evicted: set[str] = set()

    @property
    def tokens(self) -> int:
        """The number of positions of the longest possible session."""
        return self.pool.count * self.pool.size

    @property
    def free(self) -> int:
        """Blocks that no session holds."""
        return self.pool.free

    def open(self, session: str, max_tokens: int) -> None:
        """Raises EngineError if the session exists."""
        self._tables.check_unused(session)
        self._tables[session] = BlockTable(self.pool, max_tokens=max_tokens)

    def reuse_prefix(self, session: str, packed: bytes, *, tag: bytes) -> Ids:
        """Let a newly opened session share cached blocks; returns their tokens: see `BlockTable.reuse_prefix`.

        `packed` comes from `pack_names`. Names cover `BLOCK_TOKENS` tokens: blocks of another size are not shared.
        Raises UnknownSession.
        """
        table = self.find(session)
        if self.pool.size != BLOCK_TOKENS or not packed:
            return np.empty(0, np.int32)
        first, names = unpack_names(packed)
        return table.reuse_prefix(first, names, tag=tag)

    def close(self, session: str) -> None:
        """Release the session's blocks. Does nothing if the session does not exist."""
        table = self._tables.pop(session, None)
        self._evicted.discard(session)
        if table is not None:
            if table.is_spilled and self.disk is not None:
                self.disk.drop(session)
            table.clear()

    def evict(self, session: str) -> None:
        """Release the session's blocks, saved on disk if possible; it stays open. Does nothing if it has none."""
        table = self._tables.get(session)
        if table is None or not table.blocks:
            return
        if self.disk is not None and self.disk.save(session, table.blocks):
            table.release_spilled()
        else:
            table.clear()
            self._evicted.add(session)

    def find(self, session: str) -> BlockTable:
        """Raises UnknownSession."""
        return self._tables.find(session)

    def check(self, session: str, start: int, n: int) -> BlockTable:
        """The table for a step of `n` tokens from `start`; restores its blocks from disk.

        Raises UnknownSession (also if the session's cache is lost), BadStep, ContextExceeded, PeerBusy.
        """
        table = self.find(session)
        if table.is_spilled:
            self._restore(session, table)
        if session in self._evicted:
            if start > 0:
                raise UnknownSession(
                    f"the cache of session {session!r} was needed for older sessions: open it again and feed its "
                    "known tokens"
                )
            self._evicted.discard(session)
        table.check(start, n)
        return table

    def _restore(self, session: str, table: BlockTable) -> None:
        assert self.disk is not None  # The blocks were saved there.
        blocks = table.allocate_spilled()
        try:
            self.disk.load(session, blocks)
        except DamagedFile as error:
            _log.warning("a session's cache is lost and will be computed again: %s", error)
            for block in blocks:
                self.pool.clear_name(block)
            table.clear()
            self._evicted.add(session)

    # -- queries of the scheduler

    def missing_blocks(self, session: str, start: int, n: int) -> int:
        """Blocks to allocate for `n` tokens from `start`; 0 if such a step will be refused."""
        table = self._tables.get(session)
        return 0 if table is None or start > table.length else table.missing_blocks(start, n)

    def fitting_tokens(self, session: str, start: int, *, reserved: int) -> int:
        """Tokens from `start` for which there are blocks if `reserved` of the free ones are kept for other steps."""
        table = self._tables.get(session)
        return 0 if table is None else table.fitting_tokens(start, self.free - reserved)

    def exclusive_blocks(self, session: str) -> int:
        """Blocks that only this session holds: its eviction frees this many."""
        table = self._tables.get(session)
        return 0 if table is None else sum(self.pool.ref_count(block) == 1 for block in table.blocks)

    def sharing(self, sessions: Collection[str]) -> list[str]:
        """The sessions among `sessions` with a block that no session outside of `sessions` holds."""
        tables = {session: self._tables[session] for session in sessions if session in self._tables}
        counts = Counter(block for table in tables.values() for block in table.blocks)
        exclusive = {block for block, count in counts.items() if count == self.pool.ref_count(block)}
        return [session for session, table in tables.items() if not exclusive.isdisjoint(table.blocks)]

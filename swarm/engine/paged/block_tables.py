"""All sessions whose caches lie in one pool of blocks, whichever engine computes them. Pure.

A session that is *evicted* stays open. Where there is a disk, its blocks go there and come back with its next step.
Else it is empty: a step that counts on what it had is refused, one from position 0 fills it again.
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
    """Where blocks can wait."""

    def save(self, session: str, blocks: Sequence[int]) -> bool:
        """False where that is not possible."""

    def load(self, session: str, blocks: Sequence[int]) -> None:
        """Raises DamagedFile; the blocks hold nothing of use then."""

    def drop(self, session: str) -> None: ...


class BlockTables:
    """Names of sessions to their blocks. Names are unique over all engines that share the pool."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.disk: Disk | None = None
        self._tables: Sessions[BlockTable] = Sessions()
        self._evicted: set[str] = set()

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def tokens(self) -> int:
        """The longest session that can be."""
        return self.pool.count * self.pool.size

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return self.pool.free

    def open(self, session: str, max_tokens: int) -> None:
        """Raises EngineError if it exists."""
        self._tables.claim(session)
        self._tables[session] = BlockTable(self.pool, max_tokens=max_tokens)

    def adopt(self, session: str, packed: bytes, *, tag: bytes) -> Ids:
        """Let a session that has just been opened share blocks; what is cached of it: see `BlockTable.adopt`.

        `packed` as `pack_names` makes it. Names are of `BLOCK_TOKENS` tokens: blocks of another size are not shared.
        Raises UnknownSession.
        """
        table = self.find(session)
        if self.pool.size != BLOCK_TOKENS or not packed:
            return np.empty(0, np.int32)
        first, names = unpack_names(packed)
        return table.adopt(first, names, tag=tag)

    def close(self, session: str) -> None:
        """Give everything back. Closing one that is not there does nothing."""
        table = self._tables.pop(session, None)
        self._evicted.discard(session)
        if table is not None:
            if table.is_away and self.disk is not None:
                self.disk.drop(session)
            table.clear()

    def evict(self, session: str) -> None:
        """Take the session's blocks; it stays open. Nothing happens where it has none."""
        table = self._tables.get(session)
        if table is None or not table.blocks:
            return
        if self.disk is not None and self.disk.save(session, table.blocks):
            table.send_away()
        else:
            table.clear()
            self._evicted.add(session)

    def find(self, session: str) -> BlockTable:
        """Raises UnknownSession."""
        return self._tables.find(session)

    def check(self, session: str, start: int, n: int) -> BlockTable:
        """The table that `n` tokens from `start` may be written to.

        Raises UnknownSession (also where it was evicted), BadStep, ContextExceeded.
        """
        table = self.find(session)
        if table.is_away:
            self._bring_back(session, table)
        if session in self._evicted:
            if start > 0:
                raise UnknownSession(
                    f"the cache of session {session!r} was needed for older sessions: open it again and feed its "
                    "known tokens"
                )
            self._evicted.discard(session)
        table.check(start, n)
        return table

    def _bring_back(self, session: str, table: BlockTable) -> None:
        assert self.disk is not None  # it went there
        blocks = table.bring_back()
        try:
            self.disk.load(session, blocks)
        except DamagedFile as error:
            _log.warning("a session begins again: %s", error)
            for block in blocks:
                self.pool.unname(block)
            table.clear()
            self._evicted.add(session)

    # -- what a schedule asks

    def missing(self, session: str, start: int, n: int) -> int:
        """Blocks to be taken for `n` tokens from `start`; 0 where such a step is going to be refused."""
        table = self._tables.get(session)
        return 0 if table is None or start > table.length else table.missing(start, n)

    def fitting(self, session: str, start: int, *, beside: int) -> int:
        """Tokens from `start` for which there are blocks when `beside` of those that are free are somebody else's."""
        table = self._tables.get(session)
        return 0 if table is None else table.fitting(start, self.free - beside)

    def held(self, session: str) -> int:
        """Blocks that are this session's alone: so many are free when it is evicted."""
        table = self._tables.get(session)
        return 0 if table is None else sum(self.pool.holders(block) == 1 for block in table.blocks)

    def sharing(self, sessions: Collection[str]) -> list[str]:
        """Those of the sessions that hold blocks which nobody but these sessions holds."""
        tables = {session: self._tables[session] for session in sessions if session in self._tables}
        holding = Counter(block for table in tables.values() for block in table.blocks)
        theirs = {block for block, count in holding.items() if count == self.pool.holders(block)}
        return [session for session, table in tables.items() if not theirs.isdisjoint(table.blocks)]

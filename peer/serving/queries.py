"""The desk answers questions: who serves what, files by hash, whether the asker can be reached.

Nothing here touches sessions or the device. Files are read in the executor; every answer is bounded.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm.discovery.directory import Directory
from swarm.errors import DamagedFile, DirectoryError, PeerFailed, SwarmError, UnknownModel
from swarm.model.manifest import FileEntry, Manifest
from swarm.transport.address import Address
from swarm.transport.stream import connect
from swarm.wire.messages import Hello
from swarm.wire.queries import (
    MAX_NOTICES,
    AskDht,
    AskFile,
    AskManifest,
    AskReach,
    AskTopic,
    DhtAddresses,
    FilePiece,
    ManifestFile,
    Ping,
    Pong,
    Reach,
    Topic,
)

_DIRECTORY_TIMEOUT_S = 10.0
_REACH_TIMEOUT_S = 3.0
_MAX_TOPIC_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class SharedFiles:
    """The package whose files this peer gives away. `entries` are those that are there and were checked."""

    package: Path
    manifest: Manifest
    entries: tuple[FileEntry, ...]


class QueryHandler:
    """Answers of one peer. Until `open_directory` it knows nobody, until `share_files` it has no files."""

    def __init__(self, *, hello: Callable[[], Hello], wall_clock: Callable[[], float] = time.time) -> None:
        self._hello = hello
        self._wall_clock = wall_clock
        self._directory: Directory | None = None
        self._dht_addresses: Callable[[], Sequence[str]] = tuple
        self._shared_files: SharedFiles | None = None
        self._by_hash: dict[str, FileEntry] = {}

    def open_directory(self, directory: Directory, dht_addresses: Callable[[], Sequence[str]]) -> None:
        """Answer look-ups from `directory`, and tell joiners to start from these multiaddresses."""
        self._directory = directory
        self._dht_addresses = dht_addresses

    def share_files(self, shared_files: SharedFiles) -> None:
        """Give away these files."""
        self._shared_files = shared_files
        self._by_hash = {entry.sha256: entry for entry in shared_files.entries}

    def ping(self, ask: Ping, *, received: int = 0, computed: int = 0, sent: int = 0) -> Pong:
        return Pong(request=ask.request, time=self._wall_clock(), received=received, computed=computed, sent=sent)

    def dht(self, ask: AskDht) -> DhtAddresses:
        return DhtAddresses(request=ask.request, addresses=tuple(self._dht_addresses())[:64])

    def manifest(self, ask: AskManifest) -> ManifestFile:
        """Raises UnknownModel."""
        if self._shared_files is None or ask.model != self._shared_files.manifest.digest:
            has = self._shared_files.manifest.digest[:12] if self._shared_files is not None else "none"
            raise UnknownModel(f"this peer has no manifest of {ask.model[:12]!r} (it has {has}); ask another")
        return ManifestFile(request=ask.request, raw=self._shared_files.manifest.to_json())

    async def topic(self, ask: AskTopic) -> Topic:
        """Raises DirectoryError where this peer's own directory is out of reach, or not there yet."""
        if self._directory is None:
            raise DirectoryError("this peer has just started and knows nobody yet; ask again, or another peer")
        try:
            async with asyncio.timeout(_DIRECTORY_TIMEOUT_S):
                notices = await self._directory.collect(ask.topic)
        except TimeoutError as error:
            raise DirectoryError(
                f"the directory did not answer within {_DIRECTORY_TIMEOUT_S:.0f} s; ask again, or another peer"
            ) from error
        sealed: list[bytes] = []
        room = _MAX_TOPIC_BYTES
        for notice in notices[:MAX_NOTICES]:
            room -= len(notice.sealed)
            if room < 0:
                break
            sealed.append(notice.sealed)
        return Topic(request=ask.request, notices=tuple(sealed))

    async def file(self, ask: AskFile) -> FilePiece:
        """Raises UnknownModel where this peer does not have the file, PeerFailed where its disk fails."""
        entry = self._by_hash.get(ask.sha256)
        if entry is None or self._shared_files is None:
            raise UnknownModel(f"this peer has no file with SHA-256 {ask.sha256[:12]}…; ask another")
        path = self._shared_files.package / entry.path
        length = max(0, min(ask.length, entry.size - ask.offset))
        try:
            data = await asyncio.to_thread(_read_piece, path, ask.offset, length)
        except OSError as error:
            raise PeerFailed(f"this peer cannot read {entry.path} any more: {error.strerror}") from error
        except DamagedFile as error:
            raise PeerFailed(str(error)) from error
        return FilePiece(request=ask.request, data=data)

    async def reach(self, ask: AskReach, remote: str) -> Reach:
        """Connect to the asker's own IP, which `remote` ("ip:port") says; nobody sends us anywhere else."""
        address = Address(Address.parse(remote).host, ask.port, ask.peer_id)
        try:
            stream = await connect(address, self._hello(), timeout=_REACH_TIMEOUT_S)
        except SwarmError as error:
            return Reach(request=ask.request, address=address.place, problem=str(error))
        await stream.close()
        return Reach(request=ask.request, address=address.place)


def _read_piece(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        data = os.pread(file.fileno(), length, offset)
    if len(data) != length:
        raise DamagedFile(f"{path.name} is shorter than it was: {len(data)} of {length} bytes at {offset}")
    return data

"""Answers queries: notices of a topic, files by hash, whether the caller can be reached.

Queries touch neither sessions nor the device. Files are read in a thread; the size of every answer is bounded.
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
    """The package whose files this peer sends. `entries` are the files that it has and has checked."""

    package: Path
    manifest: Manifest
    entries: tuple[FileEntry, ...]


class QueryHandler:
    """The answers of one peer: without a directory until `open_directory`, without files until `share_files`."""

    def __init__(self, *, hello: Callable[[], Hello]) -> None:
        self._hello = hello
        self._directory: Directory | None = None
        self._dht_addresses: Callable[[], Sequence[str]] = tuple
        self._shared_files: SharedFiles | None = None
        self._by_hash: dict[str, FileEntry] = {}

    def open_directory(self, directory: Directory, dht_addresses: Callable[[], Sequence[str]]) -> None:
        """Answer look-ups from `directory`, and name these multiaddresses to peers that join the DHT."""
        self._directory = directory
        self._dht_addresses = dht_addresses

    def share_files(self, shared_files: SharedFiles) -> None:
        """Send these files when asked."""
        self._shared_files = shared_files
        self._by_hash = {entry.sha256: entry for entry in shared_files.entries}

    def ping(self, query: Ping, *, received: int, computed: int, sent: int, rounds: int) -> Pong:
        return Pong(
            request=query.request, time=time.time(), received=received, computed=computed, sent=sent, rounds=rounds
        )

    def dht(self, query: AskDht) -> DhtAddresses:
        return DhtAddresses(request=query.request, addresses=tuple(self._dht_addresses())[:64])

    def manifest(self, query: AskManifest) -> ManifestFile:
        """Raises UnknownModel if this peer serves another model, or none yet."""
        if self._shared_files is None or query.model != self._shared_files.manifest.digest:
            known = self._shared_files.manifest.digest[:12] if self._shared_files is not None else "none"
            raise UnknownModel(f"this peer has no manifest of {query.model[:12]!r} (it has {known}); ask another")
        return ManifestFile(request=query.request, raw=self._shared_files.manifest.to_json())

    async def topic(self, query: AskTopic) -> Topic:
        """Raises DirectoryError if this peer's directory does not answer, or was not opened yet."""
        if self._directory is None:
            raise DirectoryError("this peer has just started and has no directory yet; ask again, or another peer")
        try:
            async with asyncio.timeout(_DIRECTORY_TIMEOUT_S):
                notices = await self._directory.collect(query.topic)
        except TimeoutError as error:
            raise DirectoryError(
                f"the directory did not answer within {_DIRECTORY_TIMEOUT_S:.0f} s; ask again, or another peer"
            ) from error
        signed_bytes: list[bytes] = []
        bytes_left = _MAX_TOPIC_BYTES
        for notice in notices[:MAX_NOTICES]:
            bytes_left -= len(notice.signed_bytes)
            if bytes_left < 0:
                break
            signed_bytes.append(notice.signed_bytes)
        return Topic(request=query.request, notices=tuple(signed_bytes))

    async def file(self, query: AskFile) -> FilePiece:
        """Raises UnknownModel if this peer does not have the file, PeerFailed if its disk fails."""
        entry = self._by_hash.get(query.sha256)
        if entry is None or self._shared_files is None:
            raise UnknownModel(f"this peer has no file with SHA-256 {query.sha256[:12]}…; ask another")
        path = self._shared_files.package / entry.path
        length = max(0, min(query.length, entry.size - query.offset))
        try:
            data = await asyncio.to_thread(_read_piece, path, query.offset, length)
        except OSError as error:
            raise PeerFailed(f"this peer cannot read {entry.path} any more: {error.strerror}") from error
        except DamagedFile as error:
            raise PeerFailed(str(error)) from error
        return FilePiece(request=query.request, data=data)

    async def reach(self, query: AskReach, remote: str) -> Reach:
        """Connect to the caller's own IP, from `remote` ("ip:port"): no query makes this peer connect elsewhere."""
        address = Address(Address.parse(remote).host, query.port, query.peer_id)
        try:
            stream = await connect(address, self._hello(), timeout=_REACH_TIMEOUT_S)
        except SwarmError as error:
            return Reach(request=query.request, address=address.host_port, problem=str(error))
        await stream.close()
        return Reach(request=query.request, address=address.host_port)


def _read_piece(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        data = os.pread(file.fileno(), length, offset)
    if len(data) != length:
        raise DamagedFile(f"{path.name} is shorter than it was: {len(data)} of {length} bytes at {offset}")
    return data

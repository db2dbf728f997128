"""Download the manifest and the files of a package from peers: by hash, several files at once, resumable.

::

    manifest.files(parts) ──► complete in the target? ──► done
                    └──► a source that holds it ──► .NAME.HASH.part ──► right hash? ──► NAME
                               ▲                        │ source lost, stalled or without the file: another, same offset
                               └────────────────────────┘ wrong hash: from the start, without the source that sent it

`manifest.json` is written last: a directory that has one has all files of the requested parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import stat
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swarm.discovery.records import LEAVING, PeerRecord
from swarm.errors import PackageError, PeerError, RemoteProtocolError, SwarmError, UnknownModel, first_error
from swarm.model.manifest import (
    EMBED,
    HEAD,
    MANIFEST,
    TOKENIZER,
    FileEntry,
    Manifest,
    layer_part,
    load_manifest,
    sha256_of,
    static_part,
)
from swarm.transport.channel import Channel
from swarm.wire.messages import Hello
from swarm.wire.queries import AskFile, AskManifest, FilePiece, ManifestFile

PIECE_BYTES = 1 << 20
_MAX_IN_FLIGHT = 2
"""Pieces of a file that are requested at a time, which hides the round trip."""
_MANIFEST_TIMEOUT_S = 15.0
_LOCK_FILE = ".fetch.lock"
_LOCK_RETRY_S = 0.2

Progress = Callable[[int, int], None]

_log = logging.getLogger(__name__)


async def fetch_manifest(channel: Channel, digest: str) -> Manifest:
    """The manifest with this digest. Raises RemoteProtocolError for another, UnknownModel if the peer has none."""
    query = AskManifest(request=channel.next_request(), model=digest)
    answer = await channel.ask(query, ManifestFile, timeout=_MANIFEST_TIMEOUT_S)
    if hashlib.sha256(answer.raw).hexdigest() != digest:
        raise RemoteProtocolError(f"peer {channel.peer_id[:8]} sent another manifest than that of {digest[:12]}")
    manifest = Manifest.from_json(answer.raw)
    if manifest.digest != digest:
        raise PackageError(f"the manifest of {digest[:12]} is not in canonical form; export the model again")
    return manifest


async def fetch_parts(
    manifest: Manifest,
    parts: Iterable[str],
    records: Sequence[PeerRecord],
    target: Path,
    *,
    hello: Hello,
    progress: Progress = lambda done, total: None,
    connections: int = 4,
    timeout: float = 30.0,
) -> None:
    """Download the files of `parts`, and then `manifest.json`, to the directory `target`.

    The sources are the peers of `records`: for a layer those that hold it, for the embedding and the head those that
    hold the first and the last layer, for the tokenizer any. `connections` files are downloaded at once; `progress`
    receives the bytes done and the bytes in all; a piece must arrive within `timeout` seconds.

    Another call resumes an interrupted one. Processes with the same target take turns.

    Raises PeerError naming a file that no source gives; PackageError for errors of this machine or of the target.
    """
    wanted = _wanted_files(manifest, parts)
    async with _locked(target):
        _check_target(manifest, target)
        fetch = _Fetch(
            target=target,
            sources=[
                _Source(record, hello)
                for record in sorted(records, key=lambda r: r.state == LEAVING)
                if record.addresses
            ],
            progress=progress,
            total=sum(item.entry.size for item in wanted),
            timeout=timeout,
        )
        try:
            await fetch.run(wanted, connections)
        finally:
            await fetch.close()
        await asyncio.to_thread(_write_manifest, manifest, target)


@dataclass(frozen=True)
class _WantedFile:
    """A file, and the layer whose holders have it; None where all peers have it."""

    entry: FileEntry
    layer: int | None


def _wanted_files(manifest: Manifest, parts: Iterable[str]) -> list[_WantedFile]:
    layers = {layer_part(layer): layer for layer in manifest.span}
    layers |= {static_part(layer): layer for layer in manifest.span} | {EMBED: 0, HEAD: manifest.span.last - 1}
    found: dict[str, _WantedFile] = {}
    for part in parts:
        if part not in manifest.parts:
            raise PackageError(f"{manifest.name} has no part {part!r}; it has {EMBED}, layers, {HEAD}, {TOKENIZER}")
        for entry in manifest.parts[part]:
            if entry.path.startswith(".") or not entry.path.isprintable():
                raise PackageError(
                    f"{manifest.name} has a file {entry.path!r}, which is not a valid name for a file of a package"
                )
            found.setdefault(entry.path, _WantedFile(entry, layers.get(part)))
    return list(found.values())


class _Source:
    """A peer that gives files. Once it has failed, `failure` says why, and this download does not use it again."""

    def __init__(self, record: PeerRecord, hello: Hello) -> None:
        self.record = record
        self.downloads = 0
        self.failure = ""
        self._hello = hello
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()

    def holds(self, wanted: _WantedFile) -> bool:
        return wanted.layer is None or any(wanted.layer in span for span in self.record.holds)

    def __str__(self) -> str:
        return f"{self.record.name or 'peer'} {self.record.peer_id[:8]}"

    async def read_piece(self, entry: FileEntry, offset: int, length: int, timeout: float) -> bytes:
        """Raises UnknownModel where the peer lacks the file, or any other error of the peer, never PackageError."""
        channel = await self._open()
        query = AskFile(request=channel.next_request(), sha256=entry.sha256, offset=offset, length=length)
        data = (await channel.ask(query, FilePiece, timeout=timeout)).data
        if len(data) != length:
            raise RemoteProtocolError(f"{self} sent {len(data)} of {length} bytes of {entry.path}")
        return data

    async def close(self, reason: str) -> None:
        self.failure = self.failure or reason
        if self._channel is not None:
            await self._channel.close()

    async def _open(self) -> Channel:
        async with self._opening:
            if self.failure:
                raise PeerError(f"{self} is no longer a source: {self.failure}", peer=self.record.peer_id)
            if self._channel is None:
                self._channel = await Channel.open(self.record.pinned_addresses, self._hello)
                if self.failure:  # it was closed while the channel was opened
                    await self.close(self.failure)
                    raise PeerError(f"{self} is no longer a source: {self.failure}", peer=self.record.peer_id)
            return self._channel


@dataclass(kw_only=True)
class _Fetch:
    """One call of fetch_parts."""

    target: Path
    sources: list[_Source]
    progress: Progress
    total: int
    timeout: float
    _done: dict[str, int] = field(default_factory=dict)

    async def run(self, wanted: Sequence[_WantedFile], connections: int) -> None:
        missing = [item for item in wanted if not await asyncio.to_thread(self._is_complete, item.entry)]
        for item in wanted:
            self._report_progress(item.entry, 0 if item in missing else item.entry.size)
        await asyncio.to_thread(self._check_disk_space, missing)
        slots = asyncio.Semaphore(connections)

        async def fetch(item: _WantedFile) -> None:
            async with slots:
                await self._fetch_file(item)

        try:
            async with asyncio.TaskGroup() as group:
                for item in missing:
                    group.create_task(fetch(item))
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None

    async def close(self) -> None:
        await asyncio.gather(*(source.close("the download has ended") for source in self.sources))

    async def _fetch_file(self, item: _WantedFile) -> None:
        """Download a file from one source after the other, until the hash is right."""
        entry = item.entry
        part = self.target / f".{entry.path}.{entry.sha256[:16]}.part"
        lacking: dict[_Source, str] = {}
        while True:
            source = self._choose(item, lacking)
            source.downloads += 1
            try:
                resumed_at = await self._download(entry, part, source)
                if await asyncio.to_thread(_move_if_correct, part, self.target / entry.path, entry):
                    return
                self._report_progress(entry, 0)
                # Bytes from another source, or from an earlier run, may be the wrong ones.
                if resumed_at == 0:
                    await self._drop_source(source, f"it sent wrong bytes for {entry.path}")
            except UnknownModel as error:
                _log.info("%s does not have %s: %s", source, entry.path, error)
                lacking[source] = str(error)
            except PackageError:
                raise  # an error of this machine: peers cannot send it
            except SwarmError as error:
                await self._drop_source(source, str(error))
            finally:
                source.downloads -= 1

    def _choose(self, item: _WantedFile, lacking: dict[_Source, str]) -> _Source:
        """The holder with the fewest downloads. Raises PeerError with the reasons where no source is left."""
        holders = [source for source in self.sources if source.holds(item)]
        usable = [source for source in holders if not source.failure and source not in lacking]
        if usable:
            return min(usable, key=lambda source: source.downloads)
        reasons = "; ".join(f"{source}: {source.failure or lacking[source]}" for source in holders)
        raise PeerError(
            f"no peer is left that gives {item.entry.path}: {reasons or 'none holds it'}; try again later, "
            "the files downloaded so far are kept"
        )

    async def _drop_source(self, source: _Source, reason: str) -> None:
        if not source.failure:
            _log.warning("no more files from %s: %s", source, reason)
        await source.close(reason)

    async def _download(self, entry: FileEntry, part: Path, source: _Source) -> int:
        """Download the rest of `part`. Returns the offset at which it started."""
        start = offset = await asyncio.to_thread(_part_size, part, entry.size)
        self._report_progress(entry, offset)
        in_flight: list[asyncio.Task[bytes]] = []
        requested = offset
        try:
            while offset < entry.size:
                while requested < entry.size and len(in_flight) < _MAX_IN_FLIGHT:
                    length = min(PIECE_BYTES, entry.size - requested)
                    piece = source.read_piece(entry, requested, length, self.timeout)
                    in_flight.append(asyncio.create_task(piece))
                    requested += length
                data = await in_flight[0]
                in_flight.pop(0)
                await asyncio.to_thread(_write_at, part, offset, data)
                offset += len(data)
                self._report_progress(entry, offset)
        finally:
            for task in in_flight:
                task.cancel()
            await asyncio.gather(*in_flight, return_exceptions=True)
        return start

    def _report_progress(self, entry: FileEntry, done: int) -> None:
        self._done[entry.path] = done
        self.progress(sum(self._done.values()), self.total)

    def _is_complete(self, entry: FileEntry) -> bool:
        path = self.target / entry.path
        try:
            return path.stat().st_size == entry.size and sha256_of(path) == entry.sha256
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _disk_error(path, "cannot be read", error) from error

    def _check_disk_space(self, missing: Sequence[_WantedFile]) -> None:
        need, free = sum(item.entry.size for item in missing), shutil.disk_usage(self.target).free
        if need > free:
            raise PackageError(
                f"{self.target} needs {need / 1e6:,.0f} MB more, but its disk has {free / 1e6:,.0f} MB free; "
                "free disk space or name another directory"
            )


def _part_size(part: Path, size: int) -> int:
    """Bytes of `part` that can be kept. A part that is too long or not a regular file is removed."""
    try:
        found = part.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > size:
            part.unlink()
            return 0
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise _disk_error(part, "cannot be read", error) from error
    return found.st_size


def _write_at(part: Path, offset: int, data: bytes) -> None:
    try:
        # O_NOFOLLOW: a symbolic link planted in the target must not lead out of it.
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            view = memoryview(data)
            while view:
                written = os.pwrite(file, view, offset)
                view, offset = view[written:], offset + written
        finally:
            os.close(file)
    except (OSError, ValueError) as error:
        raise _disk_error(part, "cannot be written", error) from error


def _move_if_correct(part: Path, path: Path, entry: FileEntry) -> bool:
    """Move a complete part to `path` if its hash is right; else remove it."""
    try:
        if entry.size == 0:
            _write_at(part, 0, b"")
        if sha256_of(part) == entry.sha256:
            os.replace(part, path)
            return True
        part.unlink()
    except (OSError, ValueError) as error:
        raise _disk_error(path, "cannot be written", error) from error
    return False


def _check_target(manifest: Manifest, target: Path) -> None:
    """Raises PackageError where `target` holds another model."""
    try:
        other = load_manifest(target)
    except PackageError:
        return  # no manifest or a damaged one: it is written again
    if other.digest != manifest.digest:
        raise PackageError(
            f"{target} holds another model, {other.name} ({other.digest[:12]}): name another directory, or remove it"
        )


def _write_manifest(manifest: Manifest, target: Path) -> None:
    part = target / f".{MANIFEST}.part"
    try:
        part.unlink(missing_ok=True)
        _write_at(part, 0, manifest.to_json())
        os.replace(part, target / MANIFEST)
    except OSError as error:
        raise _disk_error(target / MANIFEST, "cannot be written", error) from error


@contextlib.asynccontextmanager
async def _locked(target: Path) -> AsyncIterator[None]:
    """Lock the target for this process; wait for another process that downloads there."""
    file = _open_lock(target)
    try:
        warned = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not warned:
                    _log.warning("another process downloads to %s; waiting for it", target)
                warned = True
                await asyncio.sleep(_LOCK_RETRY_S)
        yield
    finally:
        os.close(file)


def _open_lock(target: Path) -> int:
    path = target / _LOCK_FILE
    try:
        target.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _disk_error(path, "cannot be written", error) from error


def _disk_error(path: Path, what: str, error: Exception) -> PackageError:
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return PackageError(f"{path} {what}: {reason}; this is no peer's fault")

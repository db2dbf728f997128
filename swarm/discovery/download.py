"""Manifest and files of a package from peers: by hash, several at once, resumed after a break.

::

    manifest.files(parts) ──► there already, with the right hash? ──► done
                    └── a source that holds it ──► .NAME.HASH.part ──► hash right? ──► NAME
                               ▲                        │ source lost, stalled, has it not: another, same place
                               └────────────────────────┘ hash wrong: from the start, without who sent it

`manifest.json` is written last: a directory with one is whole for the parts that were asked for.
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
_AHEAD = 2
"""Pieces of a file that are asked for before the first of them is there: hides the round trip."""
_MANIFEST_TIMEOUT_S = 15.0
_LOCK = ".fetch.lock"
_LOCK_TICK_S = 0.2

Progress = Callable[[int, int], None]

_log = logging.getLogger(__name__)


async def fetch_manifest(channel: Channel, digest: str) -> Manifest:
    """The manifest with this digest. Raises RemoteProtocolError for any other, UnknownModel where the peer has none."""
    question = AskManifest(request=channel.next_request(), model=digest)
    answer = await channel.ask(question, ManifestFile, timeout=_MANIFEST_TIMEOUT_S)
    if hashlib.sha256(answer.raw).hexdigest() != digest:
        raise RemoteProtocolError(f"peer {channel.peer_id[:8]} sent another manifest than that of {digest[:12]}")
    manifest = Manifest.from_json(answer.raw)
    if manifest.digest != digest:
        raise PackageError(f"the manifest of {digest[:12]} is not in its canonical form; export the model again")
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
    """Bring the files of `parts`, and then `manifest.json`, to the directory `target`.

    `records` are the peers to ask: for a layer those that hold it, for the embedding and the head those
    that hold the first and the last layer, for the tokenizer any. `connections` files come at once;
    `progress` hears bytes done and bytes in all; no piece may take longer than `timeout` seconds.

    Calling it again goes on where it was broken off. Two processes with one target take turns.

    Raises PeerError naming the file that no peer gives; PackageError for what is wrong on this machine.
    """
    wanted = _wanted(manifest, parts)
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
class _Wanted:
    """A file, and the layer whose holders have it; None where all have it."""

    entry: FileEntry
    layer: int | None


def _wanted(manifest: Manifest, parts: Iterable[str]) -> list[_Wanted]:
    layers = {layer_part(layer): layer for layer in manifest.span}
    layers |= {static_part(layer): layer for layer in manifest.span} | {EMBED: 0, HEAD: manifest.span.last - 1}
    found: dict[str, _Wanted] = {}
    for part in parts:
        if part not in manifest.parts:
            raise PackageError(f"{manifest.name} has no part {part!r}; it has {EMBED}, layers, {HEAD}, {TOKENIZER}")
        for entry in manifest.parts[part]:
            if entry.path.startswith(".") or not entry.path.isprintable():
                raise PackageError(
                    f"{manifest.name} has a file {entry.path!r}, which is no name for a file of a package"
                )
            found.setdefault(entry.path, _Wanted(entry, layers.get(part)))
    return list(found.values())


class _Source:
    """One peer that may give files. Once `dead`, it is asked for nothing more in this fetch."""

    def __init__(self, record: PeerRecord, hello: Hello) -> None:
        self.record = record
        self.busy = 0
        self.dead = ""
        self._hello = hello
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()

    def holds(self, wanted: _Wanted) -> bool:
        return wanted.layer is None or any(wanted.layer in span for span in self.record.holds)

    def __str__(self) -> str:
        return f"{self.record.name or 'peer'} {self.record.peer_id[:8]}"

    async def piece(self, entry: FileEntry, offset: int, length: int, timeout: float) -> bytes:
        """Raises UnknownModel where it has no such file, or any other error that it chooses but PackageError."""
        channel = await self._open()
        question = AskFile(request=channel.next_request(), sha256=entry.sha256, offset=offset, length=length)
        data = (await channel.ask(question, FilePiece, timeout=timeout)).data
        if len(data) != length:
            raise RemoteProtocolError(f"{self} sent {len(data)} of {length} bytes of {entry.path}")
        return data

    async def drop(self, reason: str) -> None:
        self.dead = self.dead or reason
        if self._channel is not None:
            await self._channel.close()

    async def _open(self) -> Channel:
        async with self._opening:
            if self.dead:
                raise PeerError(f"{self} is no source any more: {self.dead}", peer=self.record.peer_id)
            if self._channel is None:
                self._channel = await Channel.open(self.record.places, self._hello)
                if self.dead:  # since we began
                    await self.drop(self.dead)
                    raise PeerError(f"{self} is no source any more: {self.dead}", peer=self.record.peer_id)
            return self._channel


@dataclass(kw_only=True)
class _Fetch:
    """One call of fetch_parts under way."""

    target: Path
    sources: list[_Source]
    progress: Progress
    total: int
    timeout: float
    _done: dict[str, int] = field(default_factory=dict)

    async def run(self, wanted: Sequence[_Wanted], connections: int) -> None:
        missing = [item for item in wanted if not await asyncio.to_thread(self._is_there, item.entry)]
        for item in wanted:
            self._note(item.entry, 0 if item in missing else item.entry.size)
        await asyncio.to_thread(self._check_room, missing)
        at_once = asyncio.Semaphore(connections)

        async def one(item: _Wanted) -> None:
            async with at_once:
                await self._fetch(item)

        try:
            async with asyncio.TaskGroup() as group:
                for item in missing:
                    group.create_task(one(item))
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None

    async def close(self) -> None:
        await asyncio.gather(*(source.drop("the fetch is over") for source in self.sources))

    async def _fetch(self, item: _Wanted) -> None:
        """From one source after the other, until the hash is right."""
        entry = item.entry
        part = self.target / f".{entry.path}.{entry.sha256[:16]}.part"
        without: dict[_Source, str] = {}
        while True:
            source = self._choose(item, without)
            source.busy += 1
            try:
                begun = await self._download(entry, part, source)
                if await asyncio.to_thread(_finish, part, self.target / entry.path, entry):
                    return
                self._note(entry, 0)
                # what came from elsewhere, now or in an earlier run, may be what is wrong
                if begun == 0:
                    await self._blame(source, f"it sent wrong bytes for {entry.path}")
            except UnknownModel as error:
                _log.info("%s does not have %s: %s", source, entry.path, error)
                without[source] = str(error)
            except PackageError:
                raise  # this machine's own disk: no peer can say that
            except SwarmError as error:
                await self._blame(source, str(error))
            finally:
                source.busy -= 1

    def _choose(self, item: _Wanted, without: dict[_Source, str]) -> _Source:
        """The least busy source that has the file. Raises PeerError where none is left, saying why."""
        holders = [source for source in self.sources if source.holds(item)]
        left = [source for source in holders if not source.dead and source not in without]
        if left:
            return min(left, key=lambda source: source.busy)
        reasons = "; ".join(f"{source}: {source.dead or without[source]}" for source in holders)
        raise PeerError(
            f"no peer is left that gives {item.entry.path}: {reasons or 'none holds it'}; try again later, "
            "what is here already is kept"
        )

    async def _blame(self, source: _Source, reason: str) -> None:
        if not source.dead:
            _log.warning("no more files from %s: %s", source, reason)
        await source.drop(reason)

    async def _download(self, entry: FileEntry, part: Path, source: _Source) -> int:
        """Fill `part` up from where it is. Returns where that was."""
        begin = at = await asyncio.to_thread(_part_size, part, entry.size)
        self._note(entry, at)
        ahead: list[asyncio.Task[bytes]] = []
        asked = at
        try:
            while at < entry.size:
                while asked < entry.size and len(ahead) < _AHEAD:
                    length = min(PIECE_BYTES, entry.size - asked)
                    ahead.append(asyncio.create_task(source.piece(entry, asked, length, self.timeout)))
                    asked += length
                data = await ahead[0]
                ahead.pop(0)
                await asyncio.to_thread(_write_at, part, at, data)
                at += len(data)
                self._note(entry, at)
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)
        return begin

    def _note(self, entry: FileEntry, done: int) -> None:
        self._done[entry.path] = done
        self.progress(sum(self._done.values()), self.total)

    def _is_there(self, entry: FileEntry) -> bool:
        path = self.target / entry.path
        try:
            return path.stat().st_size == entry.size and sha256_of(path) == entry.sha256
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _local(path, "cannot be read", error) from error

    def _check_room(self, missing: Sequence[_Wanted]) -> None:
        need, free = sum(item.entry.size for item in missing), shutil.disk_usage(self.target).free
        if need > free:
            raise PackageError(
                f"{self.target} needs {need / 1e6:,.0f} MB more, but its disk has {free / 1e6:,.0f} MB free; "
                "make room or name another directory"
            )


def _part_size(part: Path, size: int) -> int:
    """What can be gone on with. A part that is too long, or a link, is thrown away."""
    try:
        found = part.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > size:
            part.unlink()
            return 0
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise _local(part, "cannot be read", error) from error
    return found.st_size


def _write_at(part: Path, offset: int, data: bytes) -> None:
    try:
        # a link planted in the target would lead out of it
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            view = memoryview(data)
            while view:
                written = os.pwrite(file, view, offset)
                view, offset = view[written:], offset + written
        finally:
            os.close(file)
    except (OSError, ValueError) as error:
        raise _local(part, "cannot be written", error) from error


def _finish(part: Path, path: Path, entry: FileEntry) -> bool:
    """Put a whole part in its place if its hash is right; throw it away if not."""
    try:
        if entry.size == 0:
            _write_at(part, 0, b"")
        if sha256_of(part) == entry.sha256:
            os.replace(part, path)
            return True
        part.unlink()
    except (OSError, ValueError) as error:
        raise _local(path, "cannot be written", error) from error
    return False


def _check_target(manifest: Manifest, target: Path) -> None:
    """Raises PackageError where another model is there already."""
    try:
        other = load_manifest(target)
    except PackageError:
        return  # none, or a damaged one: it is written again
    if other.digest != manifest.digest:
        raise PackageError(
            f"{target} holds another model, {other.name} ({other.digest[:12]}): name another directory, or remove it"
        )


def _write_manifest(manifest: Manifest, target: Path) -> None:
    fresh = target / f".{MANIFEST}.part"
    try:
        fresh.unlink(missing_ok=True)
        _write_at(fresh, 0, manifest.to_json())
        os.replace(fresh, target / MANIFEST)
    except OSError as error:
        raise _local(target / MANIFEST, "cannot be written", error) from error


@contextlib.asynccontextmanager
async def _locked(target: Path) -> AsyncIterator[None]:
    """The target for this process alone; waits for another that fetches there."""
    file = _open_lock(target)
    try:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    _log.warning("another process fetches to %s; waiting for it", target)
                told = True
                await asyncio.sleep(_LOCK_TICK_S)
        yield
    finally:
        os.close(file)


def _open_lock(target: Path) -> int:
    path = target / _LOCK
    try:
        target.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _local(path, "cannot be written", error) from error


def _local(path: Path, what: str, error: Exception) -> PackageError:
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return PackageError(f"{path} {what}: {reason}; this is no peer's fault")

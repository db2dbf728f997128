"""A peer that only answers queries, on a real socket in this process. Tests make it lie, stall or die."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from swarm.discovery.directory import MemoryDirectory
from swarm.discovery.records import SERVING, ModelRecord, PeerRecord
from swarm.errors import SwarmError, UnknownModel
from swarm.model.manifest import EMBED, HEAD, TOKENIZER, FileEntry, LayerSpec, Manifest, layer_part
from swarm.model.numerics import Numerics
from swarm.model.spans import LayerRange
from swarm.transport.address import Address
from swarm.transport.identity import Identity
from swarm.transport.listener import Listener
from swarm.transport.stream import Stream, listen
from swarm.wire.failures import error_to_failure
from swarm.wire.messages import PROTOCOL_VERSION, Hello
from swarm.wire.queries import AskFile, AskManifest, AskTopic, FilePiece, ManifestFile, Ping, Pong, Topic

LAYERS = 3
HELLO = Hello(protocol=PROTOCOL_VERSION, software="test", role="client")

Piece = Callable[[AskFile, bytes], Awaitable[bytes]]


async def honest(ask: AskFile, data: bytes) -> bytes:
    return data


async def lying(ask: AskFile, data: bytes) -> bytes:
    return bytes(len(data))


async def short(ask: AskFile, data: bytes) -> bytes:
    return data[:-1]


async def stalling(ask: AskFile, data: bytes) -> bytes:
    await asyncio.Event().wait()
    return data


async def dying(ask: AskFile, data: bytes) -> bytes:
    raise ConnectionError("as if the process were killed")


def dying_at(offset: int) -> Piece:
    async def die(ask: AskFile, data: bytes) -> bytes:
        if ask.offset >= offset:
            raise ConnectionError("as if the process were killed")
        return data

    return die


@dataclass(kw_only=True)
class QueryPeer:
    """One peer. `requests` lists the pieces of files that it was asked for, as (SHA-256, offset)."""

    identity: Identity
    listener: Listener
    directory: MemoryDirectory
    name: str = ""
    span: LayerRange = field(default_factory=lambda: LayerRange(0, LAYERS))
    requests: list[tuple[str, int]] = field(default_factory=list)
    topics: list[str] = field(default_factory=list)
    connections: int = 0

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.listener.port)

    @property
    def pinned(self) -> Address:
        return Address("127.0.0.1", self.listener.port, self.identity.peer_id)

    def record(self, model: str, **changes: object) -> PeerRecord:
        own: dict[str, object] = {"name": self.name, "span": self.span, "holds": (self.span,)}
        return peer_record(self.identity, model, address=self.address, **(own | changes))

    async def announce(self, model: str, **changes: object) -> PeerRecord:
        record = self.record(model, **changes)
        await self.directory.publish(record.sign(self.identity))
        return record


@contextlib.asynccontextmanager
async def query_peer(
    directory: MemoryDirectory | None = None,
    *,
    identity: Identity | None = None,
    name: str = "",
    span: LayerRange | None = None,
    port: int = 0,
    incarnation: int = 1,
    manifest: bytes = b"",
    files: Mapping[str, bytes] | None = None,
    piece: Piece = honest,
    topic: Callable[[Topic], Awaitable[Topic]] | None = None,
) -> AsyncIterator[QueryPeer]:
    """A peer that answers every AskManifest with `manifest`. `files` are by SHA-256."""
    identity, published, shared_files = identity or Identity.generate(), directory or MemoryDirectory(), files or {}

    async def handle(stream: Stream) -> None:
        peer.connections += 1
        answers: set[asyncio.Task[None]] = set()
        try:
            while True:
                answers.add(asyncio.create_task(answer(stream, await stream.receive())))
        finally:
            for task in answers:
                task.cancel()
            await asyncio.gather(*answers, return_exceptions=True)

    async def answer(stream: Stream, query: object) -> None:
        try:
            match query:
                case Ping():
                    stream.send(Pong(request=query.request, time=time.time()))
                case AskTopic():
                    peer.topics.append(query.topic)
                    notices = tuple(notice.signed_bytes for notice in await published.collect(query.topic))
                    found = Topic(request=query.request, notices=notices)
                    stream.send(await topic(found) if topic else found)
                case AskManifest():
                    stream.send(ManifestFile(request=query.request, raw=manifest))
                case AskFile():
                    peer.requests.append((query.sha256, query.offset))
                    if query.sha256 not in shared_files:
                        raise UnknownModel("no such file here")
                    data = shared_files[query.sha256][query.offset : query.offset + query.length]
                    stream.send(FilePiece(request=query.request, data=await piece(query, data)))
                    await stream.drain()
        except SwarmError as error:
            assert isinstance(query, AskTopic | AskFile)
            stream.send(error_to_failure(error, request=query.request))
        except ConnectionError:
            await peer.listener.close()

    def hello() -> Hello:
        return Hello(protocol=PROTOCOL_VERSION, software="test", role="peer", incarnation=incarnation)

    listener = await listen("127.0.0.1", port, identity, hello, handle)
    peer = QueryPeer(identity=identity, listener=listener, directory=published, name=name)
    peer.span = span or peer.span
    try:
        yield peer
    finally:
        await listener.close()


def toy_files(scale: int = 1) -> dict[str, bytes]:
    """Contents by file name of a package with three layers of a little more than `scale` KiB each."""
    contents = {"embed.bin": b"E" * 100, "head.bin": b"H" * 70, "openvino_tokenizer.xml": b"", "tokenizer.bin": b"T"}
    for layer in range(LAYERS):
        contents[f"{layer_part(layer)}.bin"] = bytes([65 + layer]) * (scale << 10) + b"end"
    return contents


def toy_manifest(contents: Mapping[str, bytes]) -> Manifest:
    def entries(*names: str) -> tuple[FileEntry, ...]:
        return tuple(
            FileEntry(path=name, size=len(contents[name]), sha256=hashlib.sha256(contents[name]).hexdigest())
            for name in names
        )

    return Manifest(
        name="toy",
        architecture="toy",
        source="a test",
        licence="none",
        weights="f32",
        hidden_size=8,
        vocab_size=16,
        context_length=64,
        eos_token_ids=(0,),
        layers=(LayerSpec(kv_heads=1, key_size=4, value_size=4),) * LAYERS,
        grid=(0, 1, LAYERS),
        parts={
            EMBED: entries("embed.bin"),
            HEAD: entries("head.bin"),
            TOKENIZER: entries("openvino_tokenizer.xml", "tokenizer.bin"),
        }
        | {layer_part(layer): entries(f"{layer_part(layer)}.bin") for layer in range(LAYERS)},
    )


def by_hash(contents: Mapping[str, bytes]) -> dict[str, bytes]:
    return {hashlib.sha256(data).hexdigest(): data for data in contents.values()}


def peer_record(identity: Identity, model: str, *, address: Address, **changes: object) -> PeerRecord:
    now = time.time()
    fields: dict[str, object] = {
        "model": model,
        "peer_id": identity.peer_id,
        "name": "",
        "incarnation": 1,
        "span": LayerRange(0, LAYERS),
        "holds": (LayerRange(0, LAYERS),),
        "addresses": (address.host_port,),
        "device": "CPU",
        "numerics": Numerics(inference="f32", kv="f32"),
        "layer_time_s": 0.001,
        "prefill_time_s": 0.0001,
        "kv_free": 1000,
        "kv_total": 1000,
        "sessions": 0,
        "queue": 0,
        "state": SERVING,
        "software": "test",
        "announced_at": now,
        "expires_at": now + 30,
    }
    return PeerRecord(**(fields | changes))  # type: ignore[arg-type]


def model_record(digest: str, name: str = "toy", **changes: object) -> ModelRecord:
    fields: dict[str, object] = {
        "digest": digest,
        "name": name,
        "source": "a test",
        "licence": "none",
        "weights": "f32",
        "layers": LAYERS,
        "layer_bytes": 1000,
        "kv_layer_elements": 8,
        "expires_at": time.time() + 30,
    }
    return ModelRecord(**(fields | changes))  # type: ignore[arg-type]

"""`PeerRecord` and `ModelRecord`: what a peer announces about itself and its model, to and from plain dictionaries.

A record travels as the body of a signed `directory.Notice`. Received records are untrusted: every field is checked,
and a record about another peer than the notice's author is dropped.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgpack

from swarm.discovery.directory import MODELS_TOPIC, Notice
from swarm.errors import DirectoryError, SwarmError
from swarm.model.manifest import MAX_LAYERS
from swarm.model.numerics import Numerics
from swarm.model.spans import LayerRange
from swarm.transport.address import Address
from swarm.transport.identity import Identity
from swarm.transport.link import LinkQuality

SERVING, LEAVING = "serving", "leaving"
_STATES = (SERVING, LEAVING)
MAX_ADDRESSES = 16
MAX_LINKS = 256
MAX_TEXT = 256
_MAX_S = 3600.0
"""Limit on measured times, which keeps sums of them finite."""
_MAX_BYTES_PER_S = 1e12


@dataclass(frozen=True, kw_only=True)
class PeerLoad:
    """A peer's load over the last seconds: `batch` is the mean number of steps in one inference.

    Sessions hold `blocks_used` of the `blocks` of KV cache; both are 0 where `engine` has no blocks.
    """

    engine: str
    batch: float = 0.0
    tokens_per_s: float = 0.0
    blocks: int = 0
    blocks_used: int = 0

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> PeerLoad:
        """Raises DirectoryError that names the invalid field."""
        read = _Reader(plain)
        return cls(
            engine=read.text("engine"),
            batch=read.number("batch"),
            tokens_per_s=read.number("tokens_per_s"),
            blocks=read.integer("blocks"),
            blocks_used=read.integer("blocks_used"),
        )


@dataclass(frozen=True, kw_only=True)
class PeerRecord:
    """What one peer serves, and how.

    incarnation     a number drawn at each start of the process
    span            the layers that the peer computes, as one graph
    entries         boundaries inside the span at which a route may also enter or leave
    holds           layers whose files the peer gives to others
    layer_time_s    seconds a layer for one decoded token, measured by the self-test and refreshed since
    prefill_time_s  seconds a layer for one token of a prompt, measured likewise
    kv_free         tokens of KV cache that the next session may reserve
    queue           waiting steps
    attends_to      tokens that the peer attends to, 0 for all. It is the longest prompt that the peer takes; in a
                    longer text the attention slides
    links           measured links to other peers, by peer id
    work            the peer's load; None from peers of earlier versions
    """

    model: str
    peer_id: str
    name: str
    incarnation: int
    span: LayerRange
    holds: tuple[LayerRange, ...]
    addresses: tuple[str, ...]
    device: str
    numerics: Numerics
    layer_time_s: float
    prefill_time_s: float
    kv_free: int
    kv_total: int
    sessions: int
    queue: int
    state: str
    software: str
    announced_at: float
    expires_at: float
    entries: tuple[int, ...] = ()
    attends_to: int = 0
    links: Mapping[str, LinkQuality] = field(default_factory=dict)
    work: PeerLoad | None = None

    @property
    def pinned_addresses(self) -> tuple[Address, ...]:
        """The addresses at which the peer listens, each pinned to its id; addresses of other ids are left out."""
        return tuple(
            replace(address, peer_id=self.peer_id)
            for address in map(Address.parse, self.addresses)
            if address.peer_id in ("", self.peer_id)
        )

    def sign(self, identity: Identity) -> Notice:
        return Notice.sign(identity, topic=self.model, body=_pack(self.to_plain()), expires_at=self.expires_at)

    def to_plain(self) -> dict[str, Any]:
        """A dictionary of msgpack and JSON types only."""
        return {
            "model": self.model,
            "peer_id": self.peer_id,
            "name": self.name,
            "incarnation": self.incarnation,
            "span": str(self.span),
            "holds": [str(span) for span in self.holds],
            "addresses": list(self.addresses),
            "device": self.device,
            "numerics": str(self.numerics),
            "layer_time_s": self.layer_time_s,
            "prefill_time_s": self.prefill_time_s,
            "kv_free": self.kv_free,
            "kv_total": self.kv_total,
            "sessions": self.sessions,
            "queue": self.queue,
            "state": self.state,
            "software": self.software,
            "announced_at": self.announced_at,
            "expires_at": self.expires_at,
            "entries": list(self.entries),
            "attends_to": self.attends_to,
            "links": {
                peer_id: [link.rtt_s if link.reachable else -1.0, link.bytes_per_s]
                for peer_id, link in self.links.items()
            },
            "work": self.work.to_plain() if self.work is not None else None,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> PeerRecord:
        """Raises DirectoryError that names the invalid field."""
        read = _Reader(plain)
        addresses = tuple(read.texts("addresses", MAX_ADDRESSES))
        for address in addresses:
            Address.parse(address)
        span = LayerRange.parse(read.text("span"))
        state = read.text("state")
        if state not in _STATES:
            raise DirectoryError(f"record: state is {state!r}")
        entries = tuple(read.integers("entries", 64))
        if not all(span.first < entry < span.last for entry in entries):
            raise DirectoryError(f"record: entries {entries} are not inside the span {span}")
        return cls(
            model=read.text("model"),
            peer_id=read.text("peer_id"),
            name=read.text("name"),
            incarnation=read.integer("incarnation"),
            span=span,
            holds=tuple(LayerRange.parse(text) for text in read.texts("holds", 64)),
            addresses=addresses,
            device=read.text("device"),
            numerics=Numerics.parse(read.text("numerics")),
            layer_time_s=read.number("layer_time_s", _MAX_S),
            prefill_time_s=read.number("prefill_time_s", _MAX_S),
            kv_free=read.integer("kv_free"),
            kv_total=read.integer("kv_total"),
            sessions=read.integer("sessions"),
            queue=read.integer("queue"),
            state=state,
            software=read.text("software"),
            announced_at=read.number("announced_at"),
            expires_at=read.number("expires_at"),
            entries=entries,
            attends_to=read.integer("attends_to"),
            links=read.links("links"),
            work=PeerLoad.from_plain(read.map("work")) if plain.get("work") is not None else None,
        )


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """A model of which its author serves a part. `layer_bytes` and `kv_layer_elements` are means over the layers."""

    digest: str
    name: str
    source: str
    licence: str
    weights: str
    layers: int
    layer_bytes: int
    kv_layer_elements: int
    expires_at: float

    def sign(self, identity: Identity) -> Notice:
        body = _pack(asdict(self))
        return Notice.sign(identity, topic=MODELS_TOPIC, body=body, expires_at=self.expires_at, label=self.digest)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ModelRecord:
        read = _Reader(plain)
        return cls(
            digest=read.text("digest"),
            name=read.text("name"),
            source=read.text("source"),
            licence=read.text("licence"),
            weights=read.text("weights"),
            layers=read.integer("layers", 1, MAX_LAYERS),
            layer_bytes=read.integer("layer_bytes"),
            kv_layer_elements=read.integer("kv_layer_elements"),
            expires_at=read.number("expires_at"),
        )


def peer_records(notices: Iterable[Notice], model: str) -> list[PeerRecord]:
    """The records of `model` in untrusted notices. Malformed records, and records about another peer, are left out."""
    records = []
    for notice in notices:
        try:
            record = PeerRecord.from_plain(_unpack(notice.body))
        except SwarmError:
            continue  # any peer may publish garbage in a public directory
        if record.peer_id == notice.author and record.model == model == notice.topic:
            records.append(record)
    return records


def model_records(notices: Iterable[Notice]) -> list[ModelRecord]:
    """The models in untrusted notices, one record for each digest and author. Malformed records are left out."""
    records = []
    for notice in notices:
        try:
            records.append(ModelRecord.from_plain(_unpack(notice.body)))
        except SwarmError:
            continue
    return records


def _pack(plain: Mapping[str, Any]) -> bytes:
    return bytes(msgpack.packb(plain))


def _unpack(body: bytes) -> Mapping[str, Any]:
    try:
        plain = msgpack.unpackb(body, max_map_len=MAX_LINKS, max_array_len=MAX_LINKS, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise DirectoryError(f"record cannot be read: {error}") from error
    if not isinstance(plain, dict):
        raise DirectoryError(f"record is a {type(plain).__name__}, not a map")
    return plain


def _invalid(name: str, value: Any) -> DirectoryError:
    # repr() recurses, and the author of a container chooses its depth.
    shown = f"a {type(value).__name__}" if isinstance(value, (list, dict)) else repr(value)[:100]
    return DirectoryError(f"record: {name} is {shown}")


class _Reader:
    """Reads fields of an untrusted map. Each method checks type and size and raises DirectoryError."""

    def __init__(self, plain: Mapping[str, Any]) -> None:
        self._plain = plain

    def _get(self, name: str, kind: type | tuple[type, ...]) -> Any:
        value = self._plain.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise _invalid(name, value)
        return value

    def text(self, name: str) -> str:
        value: str = self._get(name, str)
        if len(value) > MAX_TEXT or not value.isprintable():
            raise DirectoryError(f"record: {name} is {value[:60]!r}")
        return value

    def integer(self, name: str, minimum: int = 0, maximum: int = (1 << 63) - 1) -> int:
        value: int = self._get(name, int)
        if not minimum <= value <= maximum:
            raise DirectoryError(f"record: {name} is {value!r}")
        return value

    def number(self, name: str, maximum: float = sys.float_info.max) -> float:
        value = float(self._get(name, (int, float)))
        if not 0 <= value <= maximum:  # false for NaN
            raise DirectoryError(f"record: {name} is {value!r}")
        return value

    def texts(self, name: str, max_count: int) -> list[str]:
        values = self._get(name, list)
        if len(values) > max_count or not all(isinstance(v, str) and len(v) <= MAX_TEXT for v in values):
            raise _invalid(name, values)
        return list(values)

    def integers(self, name: str, max_count: int) -> list[int]:
        values = self._get(name, list)
        if len(values) > max_count or not all(isinstance(v, int) and 0 <= v < 1 << 31 for v in values):
            raise _invalid(name, values)
        return list(values)

    def map(self, name: str) -> Mapping[str, Any]:
        value: Mapping[str, Any] = self._get(name, dict)
        return value

    def links(self, name: str) -> dict[str, LinkQuality]:
        links = {}
        for peer_id, pair in self._get(name, dict).items():
            if not (
                isinstance(peer_id, str)
                and isinstance(pair, list)
                and len(pair) == 2
                and all(isinstance(x, (int, float)) for x in pair)
                and pair[0] <= _MAX_S
                and not math.isnan(pair[1])
            ):
                raise DirectoryError(f"record: {name} has an invalid entry for {peer_id!r}"[:200])
            bytes_per_s = min(max(0.0, float(pair[1])), _MAX_BYTES_PER_S)
            links[peer_id] = LinkQuality(rtt_s=float(pair[0]) if pair[0] >= 0 else math.inf, bytes_per_s=bytes_per_s)
        return links

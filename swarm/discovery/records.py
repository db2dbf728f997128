"""What peers say of themselves: `PeerRecord` and `ModelRecord`, to and from plain dictionaries.

Records travel as the body of a signed `directory.Notice`. Whatever comes in is hostile: every field is
checked, and the record must be about its author.
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
"""No measured time is longer; sums of such times stay finite."""
_MAX_BYTES_PER_S = 1e12


@dataclass(frozen=True, kw_only=True)
class PeerLoad:
    """What a peer has been doing these seconds: `batch` steps in an inference, on average, and `tokens_per_s`.

    `blocks_used` of its `blocks` of KV cache are held by sessions; both 0 where `engine` has no blocks.
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
        """Raises DirectoryError that names the field which is wrong."""
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
    """One peer's offer.

    `span` is what it computes (one fused graph); `entries` the boundaries inside it at which it also
    lets a route in or out; `holds` the layers whose files it gives away; `incarnation` differs at
    every start of the process. `layer_time_s` is seconds a layer for one decoded token,
    `prefill_time_s` seconds a layer for one token of a prompt (both measured by its self-test and
    refreshed), `kv_free` the tokens of KV cache that the next session may ask for, `queue` the steps that wait.
    `attends_to` is how many tokens it attends to, and so the longest prompt that it takes; a longer text slides. 0
    stands for all. `work` is None from peers of an earlier version.
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
    def places(self) -> tuple[Address, ...]:
        """Where it listens, each pinned to its own id: nobody else is accepted there."""
        return tuple(
            replace(address, peer_id=self.peer_id)
            for address in map(Address.parse, self.addresses)
            if address.peer_id in ("", self.peer_id)
        )

    def seal(self, identity: Identity) -> Notice:
        return Notice.seal(identity, topic=self.model, body=_pack(self.to_plain()), expires_at=self.expires_at)

    def to_plain(self) -> dict[str, Any]:
        """Only msgpack and JSON types."""
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
                peer: [link.rtt_s if link.reachable else -1.0, link.bytes_per_s] for peer, link in self.links.items()
            },
            "work": self.work.to_plain() if self.work is not None else None,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> PeerRecord:
        """Raises DirectoryError that names the field which is wrong."""
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
    """One model that its author serves a part of. `layer_bytes` and `kv_layer_elements` are averages."""

    digest: str
    name: str
    source: str
    licence: str
    weights: str
    layers: int
    layer_bytes: int
    kv_layer_elements: int
    expires_at: float

    def seal(self, identity: Identity) -> Notice:
        plain = {
            "digest": self.digest,
            "name": self.name,
            "source": self.source,
            "licence": self.licence,
            "weights": self.weights,
            "layers": self.layers,
            "layer_bytes": self.layer_bytes,
            "kv_layer_elements": self.kv_layer_elements,
            "expires_at": self.expires_at,
        }
        return Notice.seal(
            identity, topic=MODELS_TOPIC, body=_pack(plain), expires_at=self.expires_at, label=self.digest
        )

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
    """The records of `model` among hostile notices: malformed ones and ones about others are left out."""
    records = []
    for notice in notices:
        try:
            record = PeerRecord.from_plain(_unpack(notice.body))
        except SwarmError:
            continue  # somebody's garbage on a public board is nobody's error here
        if record.peer_id == notice.author and record.model == model == notice.topic:
            records.append(record)
    return records


def model_records(notices: Iterable[Notice]) -> list[ModelRecord]:
    """The models among hostile notices, one for each digest and author."""
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


def _wrong(name: str, value: Any) -> DirectoryError:
    # the depth of a container is its author's choice, and repr() recurses
    shown = f"a {type(value).__name__}" if isinstance(value, (list, dict)) else repr(value)[:100]
    return DirectoryError(f"record: {name} is {shown}")


class _Reader:
    """Fields of an untrusted map, each checked for its type and size."""

    def __init__(self, plain: Mapping[str, Any]) -> None:
        self._plain = plain

    def _get(self, name: str, kind: type | tuple[type, ...]) -> Any:
        value = self._plain.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise _wrong(name, value)
        return value

    def text(self, name: str) -> str:
        value: str = self._get(name, str)
        if len(value) > MAX_TEXT or not value.isprintable():
            raise DirectoryError(f"record: {name} is {value[:60]!r}")
        return value

    def integer(self, name: str, least: int = 0, most: int = (1 << 63) - 1) -> int:
        value: int = self._get(name, int)
        if not least <= value <= most:
            raise DirectoryError(f"record: {name} is {value!r}")
        return value

    def number(self, name: str, most: float = sys.float_info.max) -> float:
        value = float(self._get(name, (int, float)))
        if not 0 <= value <= most:  # NaN is neither
            raise DirectoryError(f"record: {name} is {value!r}")
        return value

    def texts(self, name: str, most: int) -> list[str]:
        values = self._get(name, list)
        if len(values) > most or not all(isinstance(v, str) and len(v) <= MAX_TEXT for v in values):
            raise _wrong(name, values)
        return list(values)

    def integers(self, name: str, most: int) -> list[int]:
        values = self._get(name, list)
        if len(values) > most or not all(isinstance(v, int) and 0 <= v < 1 << 31 for v in values):
            raise _wrong(name, values)
        return list(values)

    def map(self, name: str) -> Mapping[str, Any]:
        value: Mapping[str, Any] = self._get(name, dict)
        return value

    def links(self, name: str) -> dict[str, LinkQuality]:
        links = {}
        for peer, pair in self._get(name, dict).items():
            if not (
                isinstance(peer, str)
                and isinstance(pair, list)
                and len(pair) == 2
                and all(isinstance(x, (int, float)) for x in pair)
                and pair[0] <= _MAX_S
                and not math.isnan(pair[1])
            ):
                raise DirectoryError(f"record: {name} has a wrong entry for {peer!r}"[:200])
            bytes_per_s = min(max(0.0, float(pair[1])), _MAX_BYTES_PER_S)
            links[peer] = LinkQuality(rtt_s=float(pair[0]) if pair[0] >= 0 else math.inf, bytes_per_s=bytes_per_s)
        return links

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.discovery.directory import MODELS_TOPIC, Notice
from swarm.discovery.records import ModelRecord, PeerLoad, PeerRecord, model_records, peer_records
from swarm.errors import DirectoryError, SwarmError
from swarm.model.numerics import Numerics
from swarm.model.spans import LayerRange
from swarm.transport.identity import Identity
from swarm.transport.link import LinkQuality

IDENTITY = Identity.generate()
MODEL = "d" * 64
RECORD = PeerRecord(
    model=MODEL,
    peer_id=IDENTITY.peer_id,
    name="desk",
    incarnation=3,
    span=LayerRange(4, 12),
    holds=(LayerRange(0, 12),),
    addresses=("10.0.0.1:31337", "[::1]:31337"),
    device="CPU",
    numerics=Numerics(inference="f32", kv="f32"),
    layer_time_s=0.001,
    prefill_time_s=0.0001,
    kv_free=1000,
    kv_total=2000,
    sessions=2,
    queue=1,
    state="serving",
    software="0.1.0",
    announced_at=1000.0,
    expires_at=1060.0,
    entries=(8,),
    links={"p" * 32: LinkQuality(rtt_s=0.01, bytes_per_s=1e6), "q" * 32: LinkQuality(rtt_s=math.inf)},
)
MODEL_RECORD = ModelRecord(
    digest=MODEL,
    name="smollm2",
    source="file.gguf",
    licence="Apache-2.0",
    weights="int4",
    layers=30,
    layer_bytes=2_000_000,
    kv_layer_elements=384,
    expires_at=1060.0,
)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


DEEPLY_NESTED = nested(1020)


def notice_of(plain: Any, *, topic: str = MODEL, identity: Identity = IDENTITY) -> Notice:
    body = plain if isinstance(plain, bytes) else msgpack.packb(plain)
    return Notice.sign(identity, topic=topic, body=body, expires_at=1060.0)


def test_a_peer_record_survives_a_round_trip() -> None:
    assert PeerRecord.from_plain(RECORD.to_plain()) == RECORD
    assert peer_records([RECORD.sign(IDENTITY)], MODEL) == [RECORD]


def test_the_load_of_a_peer_is_carried_checked_and_may_be_missing() -> None:
    work = PeerLoad(engine="paged", batch=7.5, tokens_per_s=300.0, blocks=100, blocks_used=40)
    record = replace(RECORD, work=work)
    assert PeerRecord.from_plain(record.to_plain()) == record
    without_work = record.to_plain()
    del without_work["work"]
    assert PeerRecord.from_plain(without_work) == RECORD
    for wrong in (7, {}, {**work.to_plain(), "batch": -1.0}, {**work.to_plain(), "blocks": "many"}):
        with pytest.raises(DirectoryError):
            PeerRecord.from_plain({**record.to_plain(), "work": wrong})


def test_an_unreachable_link_stays_unreachable() -> None:
    (record,) = peer_records([RECORD.sign(IDENTITY)], MODEL)
    assert not record.links["q" * 32].reachable
    assert record.links["p" * 32].reachable


def test_a_model_record_survives_a_round_trip() -> None:
    notice = MODEL_RECORD.sign(IDENTITY)
    assert (notice.topic, notice.subkey) == (MODELS_TOPIC, IDENTITY.peer_id + MODEL)
    assert model_records([notice]) == [MODEL_RECORD]


@pytest.mark.parametrize("name", sorted(RECORD.to_plain().keys() - {"work"}))
def test_a_missing_field_is_named(name: str) -> None:
    plain = RECORD.to_plain()
    del plain[name]
    with pytest.raises(DirectoryError, match=f"record: {name} is None"):
        PeerRecord.from_plain(plain)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("name", 5),
        ("name", "x" * 257),
        ("name", "\x1b[2J"),
        ("name", DEEPLY_NESTED),
        ("incarnation", -1),
        ("incarnation", True),
        ("incarnation", 1 << 63),
        ("span", "12:4"),
        ("span", "4"),
        ("holds", ["0:12"] * 65),
        ("holds", "0:12"),
        ("holds", ["a"]),
        ("holds", DEEPLY_NESTED),
        ("addresses", ["http://x"]),
        ("addresses", ["10.0.0.1:80"] * 17),
        ("addresses", [7]),
        ("state", "dead"),
        ("entries", [4]),
        ("entries", [12]),
        ("entries", [1.5]),
        ("layer_time_s", float("nan")),
        ("layer_time_s", float("inf")),
        ("layer_time_s", -1.0),
        ("layer_time_s", 1e307),
        ("prefill_time_s", 3601.0),
        ("kv_free", 1.5),
        ("links", []),
        ("links", {"p": 5}),
        ("links", {"p": [1.0]}),
        ("links", {"p": [float("nan"), 1.0]}),
        ("links", {"p": [1e307, 1.0]}),
        ("links", {"p": [nested(400), 1.0]}),
        ("links", {"p": nested(400)}),
    ],
)
def test_a_record_with_an_invalid_field_is_an_error_and_is_left_out(name: str, value: Any) -> None:
    plain = RECORD.to_plain() | {name: value}
    with pytest.raises(SwarmError):
        PeerRecord.from_plain(plain)
    # msgpack reads deeper nesting than it writes, so the nested value is spliced into the bytes.
    body = msgpack.packb(RECORD.to_plain() | {name: "here"})
    deep = body.replace(b"\xa4here", b"\x91" * 1000 + b"\x01" if value is DEEPLY_NESTED else msgpack.packb(value))
    assert peer_records([notice_of(deep), RECORD.sign(IDENTITY)], MODEL) == [RECORD]


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", msgpack.packb([1]), b"\x91" * 5000, b"\x81\xa5links" + b"\x91" * 1000 + b"\x01"]
)
def test_a_body_that_is_not_a_record_is_left_out(body: bytes) -> None:
    assert peer_records([notice_of(body)], MODEL) == []
    assert model_records([notice_of(body, topic=MODELS_TOPIC)]) == []


def test_a_record_about_another_peer_or_model_is_left_out() -> None:
    other = Identity.generate()
    assert peer_records([notice_of(RECORD.to_plain(), identity=other)], MODEL) == []
    assert peer_records([notice_of(RECORD.to_plain(), topic="elsewhere")], MODEL) == []
    assert peer_records([replace(RECORD, model="e" * 64).sign(IDENTITY)], MODEL) == []


@pytest.mark.parametrize("layers", [-1, 0, 1 << 40, 1.5, None])
def test_a_model_record_with_an_impossible_number_of_layers_is_left_out(layers: Any) -> None:
    """Readers allocate a list of that length."""
    body = msgpack.unpackb(MODEL_RECORD.sign(IDENTITY).body) | {"layers": layers}
    assert model_records([notice_of(body, topic=MODELS_TOPIC)]) == []


scalars = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


@given(st.sampled_from(sorted(RECORD.to_plain())), values)
def test_any_value_in_any_field_gives_a_record_or_an_error(name: str, value: Any) -> None:
    try:
        record = PeerRecord.from_plain(RECORD.to_plain() | {name: value})
    except SwarmError:
        return
    assert PeerRecord.from_plain(record.to_plain()) == record


@given(st.binary(max_size=200))
def test_random_bodies_are_left_out(body: bytes) -> None:
    assert peer_records([notice_of(body)], MODEL) == []


def test_addresses_are_pinned_to_the_peer_and_those_of_other_ids_are_left_out() -> None:
    other = Identity.generate().peer_id
    record = replace(RECORD, addresses=("10.0.0.1:5", f"[::1]:6#{IDENTITY.peer_id}", f"10.0.0.2:7#{other}"))
    assert list(map(str, record.pinned_addresses)) == [f"10.0.0.1:5#{IDENTITY.peer_id}", f"[::1]:6#{IDENTITY.peer_id}"]

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import LocalProtocolError, RemoteProtocolError
from swarm.wire.base_message import Message
from swarm.wire.codec import MESSAGES, encode, read_header, read_message
from swarm.wire.framing import Frame
from swarm.wire.messages import Failure, Forward, Hello, HopTrace, Link, OpenSession, Output
from swarm.wire.queries import AskFile, FilePiece, Ping
from tests.swarm.wire.strategies import ALL_MESSAGES, any_message, same

SAMPLING = [1.0, 0, 1.0, 0.0, 1.0, 0, None, 0.0, 0.0, [], 0, ""]


def frame_of(message: Message) -> Frame:
    header, payload = encode(message)
    return Frame(memoryview(header), memoryview(bytearray(b"".join(payload))))


def decode(frame: Frame) -> Message:
    return read_message(read_header(frame.header), frame.payload)


def changed(message: Message, **values: Any) -> Frame:
    """The frame of `message` with other values in its header."""
    header, payload = encode(message)
    plain = msgpack.unpackb(header) | values
    return Frame(memoryview(msgpack.packb(plain)), memoryview(b"".join(payload)))


def a_forward(**values: Any) -> Forward:
    defaults: dict[str, Any] = {
        "session": "session-1",
        "epoch": 1,
        "step": 2,
        "start": 3,
        "rows": 1,
        "tokens": np.array([5, 6], np.int32),
        "hidden": np.ones((2, 4), np.float32),
    }
    return Forward(**(defaults | values))


def test_every_message_has_a_strategy_and_its_own_kind() -> None:
    assert set(MESSAGES.values()) == set(ALL_MESSAGES)
    assert all(message.kind == kind for kind, message in MESSAGES.items())


@pytest.mark.parametrize("kind", ALL_MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_message_survives_encoding_and_decoding(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(ALL_MESSAGES[kind])
    assert same(decode(frame_of(message)), message)


def test_bulk_bytes_are_payload_and_not_copied() -> None:
    data = bytes(1 << 20)
    header, payload = encode(FilePiece(request=1, data=data))
    assert len(header) < 64
    assert isinstance(payload[0], memoryview)
    assert payload[0].obj is data


def test_encoded_hidden_states_are_views_of_their_array() -> None:
    message = a_forward()
    assert message.hidden is not None
    _, payload = encode(message)
    message.hidden[1, 3] = 7
    assert np.frombuffer(payload[1], np.float32)[7] == 7


def test_decoded_hidden_states_are_views_of_the_payload() -> None:
    frame = frame_of(a_forward())
    message = decode(frame)
    assert isinstance(message, Forward)
    assert message.hidden is not None
    assert np.shares_memory(message.hidden, np.frombuffer(frame.payload, np.uint8))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_hidden_states_take_half_the_bytes_in_half_precision(dtype: str) -> None:
    message = a_forward(dtype=dtype, hidden=np.full((2, 4), 1.5, np.float32))
    frame = frame_of(message)
    assert len(frame.payload) == 2 * 4 + 2 * 4 * 2
    assert same(decode(frame), message)


def test_the_header_omits_defaults() -> None:
    header, _ = encode(Ping(request=1))
    assert msgpack.unpackb(header) == {"kind": "ping", "request": 1}


def test_the_header_of_a_decode_step_is_small() -> None:
    trace = HopTrace(peer="p" * 32, queue_s=1e-4, compute_s=1e-2, codec_s=1e-5, received_at=1e5, sent_at=1e5)
    message = a_forward(session="s" * 32, tokens=np.zeros(1, np.int32), hidden=np.zeros((1, 576), np.float32))
    assert len(encode(replace(message, trace=(trace,)))[0]) < 256


@given(any_message, st.data())
def test_a_missing_field_is_named(message: Message, data: st.DataObject) -> None:
    header, payload = encode(message)
    plain = msgpack.unpackb(header)
    entries = fields(message)  # type: ignore[arg-type]
    needed = [e.name for e in entries if e.default is MISSING and e.default_factory is MISSING]
    name = data.draw(st.sampled_from(needed))
    del plain[name]
    with pytest.raises(RemoteProtocolError, match=rf"{type(message).__name__} lacks {name}"):
        decode(Frame(memoryview(msgpack.packb(plain)), memoryview(b"".join(payload))))


@given(any_message)
def test_an_unknown_field_is_named(message: Message) -> None:
    with pytest.raises(RemoteProtocolError, match="unknown field 'surprise'"):
        decode(changed(message, surprise=1))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


WRONG: list[Any] = [None, True, -1, 1.5, "\x00", b"\x00", [], [[]], {}, {"a": {}}, 1 << 63, nested(500)]


@given(any_message, st.data())
def test_a_field_of_the_wrong_type_is_a_remote_protocol_error(message: Message, data: st.DataObject) -> None:
    """Some of the values are valid for some fields: then a message. Never another error."""
    plain = msgpack.unpackb(encode(message)[0])
    name = data.draw(st.sampled_from([name for name in plain if name != "kind"]))
    wrong = data.draw(st.sampled_from(WRONG))
    try:
        decode(changed(message, **{name: wrong}))
    except RemoteProtocolError as error:
        assert name in str(error) or "payload" in str(error) or type(message) in (Forward, Output)  # noqa: PT017


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"epoch": "1"}, "epoch"),
        ({"epoch": True}, "epoch"),
        ({"epoch": -1}, "epoch"),
        ({"session": "short"}, "session"),
        ({"session": "with spaces"}, "session"),
        ({"tokens": None}, "tokens"),
        ({"tokens": [2, 1]}, "tokens"),
        ({"tokens": [0]}, "8 bytes too many"),
        ({"tokens": [1 << 40]}, "tokens"),
        ({"hidden": [2, 5]}, "hidden of shape [2, 5] needs 40 bytes where 32 are left"),
        ({"hidden": [2, 3]}, "8 bytes too many"),
        ({"hidden": [1, 8]}, "hidden"),
        ({"hidden": [8]}, "hidden"),
        ({"hidden": [1, 2, 2, 2, 1]}, "hidden"),
        ({"hidden": [1 << 30, 1 << 30]}, "hidden of shape"),
        ({"dtype": "f64"}, "dtype"),
        ({"dtype": 7}, "dtype"),
        ({"rows": 3}, "rows"),
        ({"trace": [[1]]}, "trace"),
        ({"trace": [["p", 1.0, 1.0, 1.0, 1.0, float("nan")]]}, "sent_at"),
        ({"trace": [["p", 1.0, 1.0, 1.0, 1.0, {}]]}, "trace"),
        ({"sampling": [0.0]}, "sampling"),
        ({"sampling": [-1.0, *SAMPLING[1:]]}, "sampling: temperature is -1.0"),
        ({"sampling": [nested(500), *SAMPLING[1:]]}, "sampling"),
        ({"sampling": [*SAMPLING[:9], [[1, 2.0, 3]], 0, ""]}, "sampling: logit_bias has"),
        ({"sampling": [*SAMPLING[:9], [[-1, 2.0]], 0, ""]}, "sampling: logit_bias: a token id is -1"),
        ({"sampling": [*SAMPLING[:9], [[1, {}]], 0, ""]}, "sampling: logit_bias of token 1"),
        ({"sampling": [*SAMPLING[:9], nested(500), 0, ""]}, "sampling"),
        ({"sampling": [*SAMPLING[:9], [[1, 1.0]] * 301, 0, ""]}, "sampling: logit_bias must be up to 300"),
        ({"sampling": [*SAMPLING[:9], {"1": 1.0}, 0, ""]}, "sampling"),
    ],
)
def test_an_invalid_field_of_a_step_is_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(changed(a_forward(), **values))
    assert str(caught.value).startswith("Forward: ")
    assert named in str(caught.value)


def test_half_precision_is_read_by_the_dtype_of_the_message() -> None:
    with pytest.raises(RemoteProtocolError, match="16 bytes too many"):
        decode(changed(a_forward(), dtype="f16"))


@pytest.mark.parametrize(
    "header",
    [
        b"\xc1",
        b"",
        msgpack.packb([1, 2]),
        msgpack.packb({"request": 1}),
        msgpack.packb({"kind": "nothing"}),
        msgpack.packb({"kind": ["ping"]}),
        msgpack.packb({1: 2}),
        msgpack.packb({"kind": "ping", "request": 1}) + b"\x00",
        msgpack.packb({"kind": "ping", "request": msgpack.Timestamp(1)}),
        msgpack.packb({"kind": "ping", "request": msgpack.ExtType(5, b"")}),
        msgpack.packb({"kind": "ping", "session": b"\xff"})[:-3] + b"\xa1\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
    ],
)
def test_an_invalid_header_is_refused(header: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(Frame(memoryview(header), memoryview(b"")))


@given(any_message, st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=8))
def test_damaged_headers_raise_only_protocol_errors(message: Message, damages: list[tuple[int, int]]) -> None:
    header, payload = encode(message)
    damaged = bytearray(header)
    for position, value in damages:
        damaged[position % len(damaged)] = value
    try:
        decode(Frame(memoryview(bytes(damaged)), memoryview(b"".join(payload))))
    except RemoteProtocolError as error:
        assert len(str(error)) < 500  # noqa: PT017


@given(st.binary(max_size=200), st.binary(max_size=50))
def test_random_headers_raise_only_protocol_errors(header: bytes, payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(Frame(memoryview(header), memoryview(payload)))


def test_constructing_an_invalid_message_is_a_local_protocol_error() -> None:
    with pytest.raises(LocalProtocolError, match=r"Forward: tokens"):
        a_forward(tokens=np.zeros(2, np.int64))
    with pytest.raises(LocalProtocolError, match=r"Forward: hidden"):
        a_forward(hidden=np.zeros((2, 4), np.float64))
    with pytest.raises(LocalProtocolError, match=r"Hello: role"):
        Hello(protocol=1, software="", role="king")
    with pytest.raises(LocalProtocolError, match=r"OpenSession: last"):
        OpenSession(request=1, session="session-1", epoch=0, secret=bytes(16), first=3, last=3, max_tokens=1)
    with pytest.raises(LocalProtocolError, match=r"OpenSession: secret"):
        OpenSession(request=1, session="session-1", epoch=0, secret=b"short", first=3, last=4, max_tokens=1)
    with pytest.raises(LocalProtocolError, match=r"Link: addresses"):
        Link(request=1, session="session-1", epoch=1, addresses=("a b",))
    with pytest.raises(LocalProtocolError, match=r"AskFile: length"):
        AskFile(request=1, sha256="0" * 64, offset=0, length=0)
    with pytest.raises(LocalProtocolError, match=r"AskFile: sha256"):
        AskFile(request=1, sha256="../../etc/passwd", offset=0, length=1)
    with pytest.raises(LocalProtocolError, match=r"Failure: detail"):
        Failure(code="x", text="", detail={"deep": nested(2)})
    with pytest.raises(LocalProtocolError, match=r"Failure: retry_after"):
        Failure(code="x", text="", retry_after=float("inf"))


def test_logprobs_must_fit_the_rows() -> None:
    ids = np.zeros(2, np.int32)
    with pytest.raises(LocalProtocolError, match="logprobs"):
        Output(session="session-1", epoch=0, step=0, ids=ids, logprobs=np.zeros(3, np.float32))
    with pytest.raises(LocalProtocolError, match="top_ids"):
        Output(session="session-1", epoch=0, step=0, ids=ids, top_ids=np.zeros((2, 3), np.int32))
    with pytest.raises(LocalProtocolError, match="top_logprobs"):
        Output(
            session="session-1",
            epoch=0,
            step=0,
            ids=ids,
            top_ids=np.zeros((2, 3), np.int32),
            top_logprobs=np.zeros((2, 2), np.float32),
        )

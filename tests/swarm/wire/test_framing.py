from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import LocalProtocolError, RemoteProtocolError
from swarm.wire.framing import PREFIX, Framer, frame_buffers

MAX_HEADER, MAX_PAYLOAD = 64, 256
contents = st.tuples(st.binary(min_size=1, max_size=MAX_HEADER), st.binary(max_size=MAX_PAYLOAD))


def framer() -> Framer:
    return Framer(max_header=MAX_HEADER, max_payload=MAX_PAYLOAD)


def on_the_wire(header: bytes, payload: bytes) -> bytes:
    return b"".join(frame_buffers(header, [payload], max_header=MAX_HEADER, max_payload=MAX_PAYLOAD))


def chunks(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(st.lists(contents, max_size=5), st.lists(st.integers(0, 2000), max_size=12))
def test_frames_arrive_whole_for_any_split_of_their_bytes(frames: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    receiver, found = framer(), []
    for chunk in chunks(b"".join(on_the_wire(*frame) for frame in frames), cuts):
        found += [(bytes(frame.header), bytes(frame.payload)) for frame in receiver.feed(chunk)]
    assert found == frames
    assert receiver.between_frames


@given(contents)
def test_frames_are_read_byte_by_byte(frame: tuple[bytes, bytes]) -> None:
    receiver = framer()
    data = on_the_wire(*frame)
    found = []
    for position in range(len(data)):
        assert receiver.between_frames == (position == 0)
        found += list(receiver.feed(data[position : position + 1]))
    assert [(bytes(f.header), bytes(f.payload)) for f in found] == [frame]


def test_payloads_share_no_memory() -> None:
    data = bytearray(on_the_wire(b"h", b"first") + on_the_wire(b"h", b"again"))
    first, again = framer().feed(data)
    data[:] = bytes(len(data))
    first.payload[0] = ord("F")
    assert (bytes(first.payload), bytes(again.payload)) == (b"First", b"again")


@pytest.mark.parametrize(
    ("prefix", "named"),
    [
        (PREFIX.pack(0, 0), "header has 0 bytes"),
        (PREFIX.pack(MAX_HEADER + 1, 0), "header has 65 bytes; 1 to 64"),
        (PREFIX.pack(1, MAX_PAYLOAD + 1), "payload has 257 bytes; 256"),
        (PREFIX.pack(1, 2 << 30), "payload has 2147483648 bytes"),
        (b"GET / HT", "header has 1195725856 bytes"),
    ],
)
@pytest.mark.parametrize("size", [1, 8])
def test_a_length_over_its_limit_is_refused_before_anything_is_allocated(prefix: bytes, named: str, size: int) -> None:
    receiver = framer()
    *whole, last = (prefix[begin : begin + size] for begin in range(0, len(prefix), size))
    for piece in whole:
        assert not list(receiver.feed(piece))
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match=named):
            list(receiver.feed(last))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_random_bytes_raise_only_protocol_errors_and_frames_stay_within_the_limits(data: list[bytes]) -> None:
    receiver = framer()
    try:
        for chunk in data:
            for frame in receiver.feed(chunk):
                assert len(frame.header) <= MAX_HEADER
                assert len(frame.payload) <= MAX_PAYLOAD
    except RemoteProtocolError:
        pass


def test_limits_can_change_between_two_frames_of_one_chunk() -> None:
    receiver = Framer(max_header=MAX_HEADER, max_payload=0)
    found = []
    for frame in receiver.feed(on_the_wire(b"hello", b"") + on_the_wire(b"then", b"payload")):
        found.append(bytes(frame.payload))
        receiver.max_payload = MAX_PAYLOAD
    assert found == [b"", b"payload"]


def test_a_payload_is_received_into_one_buffer() -> None:
    """Receiving more chunks allocates no more memory."""
    size = 4 << 20
    receiver = Framer(max_header=MAX_HEADER, max_payload=size)
    chunk = bytes(16 << 10)
    list(receiver.feed(PREFIX.pack(1, size) + b"h"))
    tracemalloc.start()
    try:
        for _ in range(size // len(chunk) - 1):
            assert not list(receiver.feed(chunk))
        assert tracemalloc.get_traced_memory()[1] < len(chunk)
    finally:
        tracemalloc.stop()
    (frame,) = receiver.feed(chunk)
    assert len(frame.payload) == size


def test_a_frame_over_the_limits_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="over the limit"):
        frame_buffers(b"h", [bytes(200), bytes(57)], max_header=MAX_HEADER, max_payload=MAX_PAYLOAD)
    with pytest.raises(LocalProtocolError, match="over the limit"):
        frame_buffers(bytes(65), [], max_header=MAX_HEADER, max_payload=MAX_PAYLOAD)


def test_a_payload_is_sent_without_a_copy() -> None:
    payload = memoryview(bytes(10))
    buffers = frame_buffers(b"h", [payload], max_header=MAX_HEADER, max_payload=MAX_PAYLOAD)
    assert buffers[1] is payload

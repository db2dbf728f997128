from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swarm.errors import LocalProtocolError, RemoteProtocolError
from swarm.wire.tensors import WIRE_SIZES, byte_count, from_bytes, to_bytes

shapes = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)


def round_trip(array: Any, dtype: str) -> Any:
    view = to_bytes(array, dtype)
    assert len(view) == byte_count(dtype, array.shape, "array", len(view))
    return from_bytes(memoryview(bytearray(view)), dtype, array.shape)


@given(hnp.arrays(np.float32, shapes))
def test_f32_is_unchanged_bit_by_bit(array: Any) -> None:
    decoded = round_trip(array, "f32")
    assert decoded.dtype == np.float32
    assert decoded.tobytes() == array.tobytes()


@given(hnp.arrays(np.int32, shapes))
def test_i32_is_unchanged(array: Any) -> None:
    decoded = round_trip(array, "i32")
    assert decoded.dtype == np.int32
    assert np.array_equal(decoded, array)


@given(hnp.arrays(np.float32, shapes, elements=st.floats(-65504, 65504, width=32)))
def test_f16_rounds_as_numpy_does(array: Any) -> None:
    assert np.array_equal(round_trip(array, "f16"), array.astype(np.float16).astype(np.float32))


@given(hnp.arrays(np.float32, shapes, elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_int8_errs_by_at_most_half_a_step_of_the_rows_scale(array: Any) -> None:
    decoded = round_trip(array, "int8")
    assert decoded.dtype == np.float32
    assert decoded.shape == array.shape
    if array.size:
        largest = np.abs(array).max(axis=-1, keepdims=True)
        assert (np.abs(decoded - array) <= largest / 127 * 0.5001 + 1e-40).all()


def test_int8_refuses_numbers_that_are_not_finite() -> None:
    with pytest.raises(LocalProtocolError, match="hidden has numbers that are not finite"):
        to_bytes(np.array([[1.0, np.inf]], np.float32), "int8", "hidden")
    # An invalid scale from another machine is no error here: the engine checks the numbers before it uses them.
    invalid = bytearray(b"\xff\xff\xff\x7f\x01\x02")
    assert np.isnan(from_bytes(memoryview(invalid), "int8", (1, 2))).all()


def nearest_bf16(value: float) -> float:
    """By definition: the nearer of the two neighbours with 16 bits, and of equally near ones the even one."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    below, above = bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000
    rest = bits & 0xFFFF
    even = below if (below >> 16) % 2 == 0 else above
    chosen = even if rest == 0x8000 else (below if rest < 0x8000 else above)
    (result,) = struct.unpack("<f", struct.pack("<I", chosen))
    return float(result)


@given(st.floats(width=32, allow_nan=False))
def test_bf16_rounds_to_the_nearest_with_ties_to_even(value: float) -> None:
    assert float(round_trip(np.array([value], np.float32), "bf16")[0]) == nearest_bf16(value)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001])
def test_a_nan_stays_one_in_bf16(bits: int) -> None:
    assert np.isnan(round_trip(np.array([bits], np.uint32).view(np.float32), "bf16"))[0]


@pytest.mark.parametrize("value", [np.inf, -np.inf, 0.0, -0.0])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_special_values_survive_in_half_precision(value: float, dtype: str) -> None:
    decoded = round_trip(np.array([value], np.float32), dtype)[0]
    assert decoded == value
    assert np.signbit(decoded) == np.signbit(value)


def test_a_value_beyond_f16_is_refused_and_named() -> None:
    with pytest.raises(LocalProtocolError, match=r"hidden has the value 70000, .* agree on bf16 or f32"):
        to_bytes(np.array([1.0, 70000.0], np.float32), "f16", "hidden")


@pytest.mark.parametrize("dtype", ["f32", "i32"])
def test_nothing_is_copied_in_full_precision(dtype: str) -> None:
    array = np.arange(12, dtype=np.float32 if dtype == "f32" else np.int32).reshape(3, 4)
    view = to_bytes(array, dtype)
    assert np.shares_memory(np.frombuffer(view, np.uint8), array)
    assert np.shares_memory(from_bytes(view, dtype, (3, 4)), array)


def test_an_array_that_is_not_contiguous_is_encoded() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    assert np.array_equal(round_trip(array, "f32"), array)


def test_a_decoded_array_is_writable() -> None:
    decoded = round_trip(np.zeros(3, np.float32), "f32")
    decoded[0] = 1


@pytest.mark.parametrize(
    "shape",
    [None, 5, [2], "ab", (), (1, 1, 1, 1, 1), (-1,), (1.0,), (True,), (1 << 31,), ("1",), ((1,),), (None,)],
)
def test_an_invalid_shape_is_refused(shape: object) -> None:
    with pytest.raises(RemoteProtocolError, match="hidden"):
        byte_count("f32", shape, "hidden", 1 << 60)


@given(st.sampled_from(sorted(WIRE_SIZES)), st.lists(st.integers(0, (1 << 31) - 1), min_size=1, max_size=4))
def test_a_shape_larger_than_its_payload_is_refused(dtype: str, lengths: list[int]) -> None:
    limit = 1 << 20
    needed = WIRE_SIZES[dtype] * int(np.prod([*map(int, lengths)], dtype=object))
    if dtype == "int8":
        needed += 4 * int(np.prod([*map(int, lengths[:-1])], dtype=object)) if needed else 0
    if needed <= limit:
        assert byte_count(dtype, tuple(lengths), "hidden", limit) == needed
    else:
        with pytest.raises(RemoteProtocolError, match=f"needs {needed} bytes where {limit} are left"):
            byte_count(dtype, tuple(lengths), "hidden", limit)

"""Arrays to bytes and back. Little-endian, C order. The header has the shape, and the dtype unless it is fixed.

========  =========  ==================================================
on wire   in memory
========  =========  ==================================================
`i32`     int32      no copy either way
`f32`     float32    no copy either way
`f16`     float32    half the bytes; values beyond 65,504 are refused
`bf16`    float32    half the bytes; rounded to the nearest, ties to even
`int8`    float32    a quarter, and 4 bytes a row (the last dimension): the
                     row's scale in f32, then its numbers as -127 ... 127
========  =========  ==================================================
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm.errors import LocalProtocolError, RemoteProtocolError

WIRE_SIZES = {"i32": 4, "f32": 4, "f16": 2, "bf16": 2, "int8": 1}
"""Bytes of a number, without `int8`'s scales."""
HIDDEN_DTYPES = ("f32", "f16", "bf16", "int8")
"""The dtypes in which hidden states may be sent."""
MAX_DIMENSIONS = 4
_MAX_LENGTH = 1 << 31
_STORED: dict[str, np.dtype[Any]] = {
    "i32": np.dtype("<i4"),
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
}
_F16_MAX = 65504.0
_SCALE_BYTES = 4
_INT8_MAX = 127


def byte_count(dtype: str, shape: object, name: str, limit: int) -> int:
    """Bytes of the tensor that a header describes, at most `limit`. Raises RemoteProtocolError; allocates nothing."""
    if type(shape) is not tuple or not 0 < len(shape) <= MAX_DIMENSIONS:
        raise RemoteProtocolError(f"{name}: its shape is not a list of 1 to {MAX_DIMENSIONS} lengths")
    count = WIRE_SIZES[dtype]
    for length in shape:
        if type(length) is not int or not 0 <= length < _MAX_LENGTH:
            raise RemoteProtocolError(f"{name}: its shape has an invalid length")
        count *= length
    if dtype == "int8" and count:
        count += _SCALE_BYTES * (count // shape[-1])
    if count > limit:
        raise RemoteProtocolError(f"{name} of shape {list(shape)} needs {count} bytes where {limit} are left")
    return count


def to_bytes(array: NDArray[Any], dtype: str, name: str = "tensor") -> memoryview:
    """The bytes of `array` as `dtype`: a view of the array for f32 and i32. Raises LocalProtocolError."""
    stored: NDArray[Any]
    if dtype == "int8":
        stored = _to_int8(array, name)
    elif dtype == "bf16":
        stored = _to_bf16(array)
    elif dtype == "f16":
        stored = _to_f16(array, name)
    else:
        stored = np.ascontiguousarray(array, _STORED[dtype])
    return stored.reshape(-1).view(np.uint8).data


def from_bytes(view: memoryview, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """The array in `view`, which has exactly `byte_count` bytes: int32 for i32, float32 for the others.

    For i32 and f32 the array shares `view`'s memory.
    """
    if not len(view):
        return np.empty(shape, np.int32 if dtype == "i32" else np.float32)
    if dtype == "int8":
        return _from_int8(view, shape)
    stored: NDArray[Any] = np.frombuffer(view, _STORED[dtype]).reshape(shape)
    if dtype == "bf16":
        stored = stored.astype(np.uint32)
        stored <<= 16
        return stored.view(np.float32)
    return np.asarray(stored, np.float32) if dtype == "f16" else stored


def _to_int8(array: NDArray[np.float32], name: str) -> NDArray[np.uint8]:
    rows = np.ascontiguousarray(array, np.float32).reshape(-1, array.shape[-1] if array.size else 1)
    largest = np.abs(rows).max(axis=1, initial=0.0, keepdims=True)
    if not np.isfinite(largest).all():
        raise LocalProtocolError(f"{name} has numbers that are not finite, which int8 cannot represent")
    scales = (largest / _INT8_MAX).astype("<f4")
    stored = np.empty((len(rows), _SCALE_BYTES + rows.shape[1]), np.uint8)
    stored[:, :_SCALE_BYTES] = scales.view(np.uint8)
    # The scale is 0 for a row of zeros, and if it is too small for f32.
    whole = np.rint(rows / np.where(scales > 0, scales, 1.0)).clip(-_INT8_MAX, _INT8_MAX)
    stored[:, _SCALE_BYTES:] = whole.astype(np.int8).view(np.uint8)
    return stored


def _from_int8(view: memoryview, shape: tuple[int, ...]) -> NDArray[np.float32]:
    stored = np.frombuffer(view, np.uint8).reshape(-1, _SCALE_BYTES + shape[-1])
    scales = np.ascontiguousarray(stored[:, :_SCALE_BYTES]).view("<f4")
    # The scale comes from another machine and may overflow here: the engine refuses numbers that are not finite.
    with np.errstate(over="ignore", invalid="ignore"):
        values: NDArray[np.float32] = stored[:, _SCALE_BYTES:].view(np.int8) * scales
    return values.reshape(shape)


def _to_f16(array: NDArray[np.float32], name: str) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        half = np.ascontiguousarray(array, np.float16)
    if not np.isfinite(half).all() and np.isfinite(array).all():
        largest = float(np.abs(array).max())
        raise LocalProtocolError(
            f"{name} has the value {largest:.6g}, over f16's largest of {_F16_MAX:g}: agree on bf16 or f32"
        )
    return half


def _to_bf16(array: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    # Rounding could carry a NaN's mantissa into the sign bit: NaNs are not rounded but made quiet.
    return np.where(np.isnan(array), (bits >> 16) | np.uint32(0x40), rounded).astype(np.uint16)

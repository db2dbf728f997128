"""Encode messages to header and payload, and decode them. A field's annotation selects its codec: see `_FIELD_CODECS`.

A header is a msgpack map: `kind`, then the fields by name. A field with its default value may be omitted.
Tensors and `Bulk` bytes follow each other in the payload, in the order of the fields; the header has their
shapes and lengths. Decoding is strict: a RemoteProtocolError names the field that is wrong.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Protocol

import msgpack

from swarm.errors import LocalProtocolError, RemoteProtocolError, SwarmError
from swarm.sampling import Sampling
from swarm.wire import messages, queries
from swarm.wire.base_message import Message
from swarm.wire.framing import Buffer
from swarm.wire.messages import HopTrace
from swarm.wire.tensors import WIRE_SIZES, byte_count, from_bytes, to_bytes

_CONTAINERS = (tuple, dict)
_MAX_CACHED_RECORDS = 64
Plain = Any
"""A value that msgpack reads and writes: int, float, str, bytes, None, tuple, dict."""


class _PayloadReader:
    """Reads a frame's payload piece by piece."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._offset = 0

    @property
    def remaining(self) -> int:
        return len(self._view) - self._offset

    def take(self, count: int, name: str) -> memoryview:
        if count > self.remaining:
            raise RemoteProtocolError(f"{name} needs {count} bytes where {self.remaining} are left")
        piece = self._view[self._offset : self._offset + count]
        self._offset += count
        return piece


class _FieldCodec(Protocol):
    """Writes and reads one field. `plain` is the whole decoded header."""

    def write(self, value: Any, message: Message, payload: list[Buffer]) -> Plain: ...

    def read(self, name: str, plain: Mapping[str, Plain], payload: _PayloadReader) -> Any: ...


class _StringTuple:
    """A tuple of strings, in the header."""

    def write(self, value: Any, message: Message, payload: list[Buffer]) -> Plain:
        return value

    def read(self, name: str, plain: Mapping[str, Plain], payload: _PayloadReader) -> Any:
        value = plain[name]
        if type(value) is not tuple or not all(type(text) is str for text in value):
            raise _invalid(name, value)
        return value


class _DetailMap:
    """A map to scalars and flat lists of scalars, in the header."""

    def write(self, value: Any, message: Message, payload: list[Buffer]) -> Plain:
        return dict(value)

    def read(self, name: str, plain: Mapping[str, Plain], payload: _PayloadReader) -> Any:
        value = plain[name]
        if type(value) is not dict:
            raise _invalid(name, value)
        for key, entry in value.items():
            entries = entry if type(entry) is tuple else (entry,)
            if type(key) is not str or not all(type(x) in (int, float, str) for x in entries):
                raise _invalid(name, key)
        return value


class _Tensor:
    """The shape in the header, the numbers in the payload. With `dtype` "" the message's `dtype_field` names it."""

    def __init__(self, dtype: str, *, optional: bool = True, dtype_field: str = "dtype") -> None:
        self._dtype = dtype
        self._optional = optional
        self._dtype_field = dtype_field

    def write(self, value: Any, message: Message, payload: list[Buffer]) -> Plain:
        if value is None:
            return None
        payload.append(to_bytes(value, self._dtype or vars(message)[self._dtype_field]))
        return value.shape

    def read(self, name: str, plain: Mapping[str, Plain], payload: _PayloadReader) -> Any:
        shape = plain[name]
        if shape is None and self._optional:
            return None
        dtype = self._dtype or plain.get(self._dtype_field, "f32")
        if type(dtype) is not str or dtype not in WIRE_SIZES:
            raise _invalid(self._dtype_field, dtype)
        count = byte_count(dtype, shape, name, payload.remaining)
        return from_bytes(payload.take(count, name), dtype, shape)


class _Bulk:
    """The length in the header, the bytes in the payload."""

    def write(self, value: Any, message: Message, payload: list[Buffer]) -> Plain:
        view = memoryview(value).cast("B")
        payload.append(view)
        return len(view)

    def read(self, name: str, plain: Mapping[str, Plain], payload: _PayloadReader) -> Any:
        return _take_bulk(name, plain[name], payload)


class _BulkTuple:
    """A tuple of byte strings: the lengths in the header, the bytes in the payload."""

    def write(self, value: Any, message: Message, payload: list[Buffer]) -> Plain:
        payload.extend(value)
        return tuple(len(piece) for piece in value)

    def read(self, name: str, plain: Mapping[str, Plain], payload: _PayloadReader) -> Any:
        lengths = plain[name]
        if type(lengths) is not tuple:
            raise _invalid(name, lengths)
        return tuple(_take_bulk(name, length, payload) for length in lengths)


class _Record:
    """A small dataclass as the tuple of its fields: scalars, and tuples where the dataclass itself checks them."""

    def __init__(self, record: type) -> None:
        self._record = record
        self._names = tuple(entry.name for entry in fields(record))
        self.to_plain: Callable[[Any], tuple[Plain, ...]] = operator.attrgetter(*self._names)
        self._nested = {index for index, entry in enumerate(fields(record)) if str(entry.type).startswith("tuple[")}

    def write(self, value: Any, message: Message, payload: list[Buffer]) -> Plain:
        return self.to_plain(value)

    def read(self, name: str, plain: Mapping[str, Plain], payload: _PayloadReader) -> Any:
        return self.from_plain(name, plain[name])

    def from_plain(self, name: str, values: Plain) -> Any:
        if type(values) is not tuple or len(values) != len(self._names):
            raise _invalid(name, values)
        for index, value in enumerate(values):
            if type(value) in _CONTAINERS and not (index in self._nested and type(value) is tuple):
                raise _invalid(name, value)
        try:
            return self._record(**dict(zip(self._names, values, strict=True)))
        except SwarmError as error:
            raise RemoteProtocolError(f"{name}: {error}") from error


class _CachedRecord(_Record):
    """A record that is mostly equal from message to message. It is created and checked once, then cached."""

    def __init__(self, record: type) -> None:
        super().__init__(record)
        self._cached = functools.lru_cache(_MAX_CACHED_RECORDS, typed=True)(self._create)

    def from_plain(self, name: str, values: Plain) -> Any:
        if type(values) is not tuple:
            raise _invalid(name, values)
        try:
            return self._cached(name, *values)
        except TypeError:  # A value is a map, which is not hashable.
            return self._create(name, *values)

    def _create(self, name: str, *values: Plain) -> Any:
        return super().from_plain(name, values)


class _RecordTuple(_Record):
    """A tuple of records."""

    def write(self, value: Any, message: Message, payload: list[Buffer]) -> Plain:
        return tuple(self.to_plain(record) for record in value)

    def read(self, name: str, plain: Mapping[str, Plain], payload: _PayloadReader) -> Any:
        values = plain[name]
        if type(values) is not tuple:
            raise _invalid(name, values)
        return tuple(self.from_plain(name, value) for value in values)


_SCALARS: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "str": (str,), "bytes": (bytes,)}
"""Fields that the header holds unchanged. Most fields are scalars, so they skip the call of a codec."""
_FIELD_CODECS: Mapping[str, _FieldCodec] = {
    "tuple[str, ...]": _StringTuple(),
    "Mapping[str, Detail]": _DetailMap(),
    "Sampling": _CachedRecord(Sampling),
    "tuple[HopTrace, ...]": _RecordTuple(HopTrace),
    "Ids": _Tensor("i32", optional=False),
    "Ids | None": _Tensor("i32"),
    "Floats | None": _Tensor("f32"),
    "Hidden | None": _Tensor(""),
    "Logits | None": _Tensor("", dtype_field="logits_dtype"),
    "Bulk": _Bulk(),
    "tuple[Bulk, ...]": _BulkTuple(),
}


class _MessageLayout:
    """The fields of one kind of message, with their codecs."""

    def __init__(self, message: type[Message]) -> None:
        entries: tuple[Field[Any], ...] = fields(message)  # type: ignore[arg-type]  # each Message is a dataclass
        self.message = message
        self.fields = tuple((entry.name, *_codec_for(str(entry.type)), entry.default) for entry in entries)
        self.names = {entry.name for entry in entries} | {"kind"}
        self.required = {
            entry.name for entry in entries if entry.default is MISSING and entry.default_factory is MISSING
        }


def _codec_for(annotation: str) -> tuple[tuple[type, ...], _FieldCodec | None]:
    """The types of a scalar and None, or no types and the codec."""
    types = _SCALARS.get(annotation, ())
    return types, None if types else _FIELD_CODECS[annotation]


def _all_messages() -> dict[str, type[Message]]:
    found = [value for module in (messages, queries) for value in vars(module).values()]
    return {c.kind: c for c in found if isinstance(c, type) and issubclass(c, Message) and c is not Message}


MESSAGES: Mapping[str, type[Message]] = _all_messages()
_LAYOUTS = {message: _MessageLayout(message) for message in MESSAGES.values()}


def encode(message: Message) -> tuple[bytes, list[Buffer]]:
    """Encode to a header and a payload, whose parts are views of the message's arrays, not copies.

    Raises LocalProtocolError if a value does not fit into the agreed dtype.
    """
    layout = _LAYOUTS[type(message)]
    plain: dict[str, Plain] = {"kind": message.kind}
    payload: list[Buffer] = []
    for name, _, codec, default in layout.fields:
        value = getattr(message, name)
        if value is not default:
            plain[name] = value if codec is None else codec.write(value, message, payload)
    return msgpack.packb(plain), payload


def read_header(header: Buffer) -> dict[str, Plain]:
    """Decode a frame's header to a map with the `kind` of a known message. Raises RemoteProtocolError."""
    try:
        plain = msgpack.unpackb(header, use_list=False, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"a frame's header cannot be read: {error}") from error
    if type(plain) is not dict:
        raise RemoteProtocolError(f"a frame's header is a {type(plain).__name__}, not a map")
    if type(plain.get("kind")) is not str or plain["kind"] not in MESSAGES:
        raise _invalid("kind", plain.get("kind"))
    return plain


def read_message(plain: Mapping[str, Plain], payload: memoryview) -> Message:
    """Build the message from a header (from `read_header`) and its payload. Raises RemoteProtocolError.

    Tensors in f32 and i32 share the payload's memory.
    """
    layout = _LAYOUTS[MESSAGES[plain["kind"]]]
    if not layout.required <= plain.keys() <= layout.names:
        missing, extra = layout.required - plain.keys(), {str(key)[:40] for key in plain.keys() - layout.names}
        what = f"lacks {', '.join(sorted(missing))}" if missing else f"has the unknown field {min(extra)!r}"
        raise RemoteProtocolError(f"{layout.message.__name__} {what}")
    reader = _PayloadReader(payload)
    try:
        values = {}
        for name, types, codec, _ in layout.fields:
            if name not in plain:
                continue
            if codec is not None:
                values[name] = codec.read(name, plain, reader)
            elif type(plain[name]) in types:
                values[name] = plain[name]
            else:
                raise _invalid(name, plain[name])
        if reader.remaining:
            raise RemoteProtocolError(f"its payload has {reader.remaining} bytes too many")
        return layout.message(**values)
    except RemoteProtocolError as error:
        raise RemoteProtocolError(f"{layout.message.__name__}: {error}") from error
    except LocalProtocolError as error:
        raise RemoteProtocolError(str(error)) from error  # The message's own checks refused the received values.


def _take_bulk(name: str, length: Plain, payload: _PayloadReader) -> bytes:
    if type(length) is not int or length < 0:
        raise _invalid(name, length)
    return bytes(payload.take(length, name))


def _invalid(name: str, value: Plain) -> RemoteProtocolError:
    # Containers are not shown: the other side chooses how deeply they nest.
    shown = repr(value)[:60] if type(value) in (int, float, str, bytes, bool) else f"a {type(value).__name__}"
    return RemoteProtocolError(f"{name} is {shown}")

"""Messages to headers and back. How a field travels is said by its annotation: see `_FORMS`.

A header is a msgpack map: `kind`, then the fields by name; one that has its default may be left out.
Tensors and `Bulk` bytes lie in the payload, one after the other in the order of the fields; the header has
their shapes and lengths. Decoding is strict: RemoteProtocolError names the field that is wrong.
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
from swarm.wire.framing import Buffer
from swarm.wire.message import Message
from swarm.wire.messages import HopTrace
from swarm.wire.tensors import WIRE_SIZES, byte_count, from_bytes, to_bytes

_CONTAINERS = (tuple, dict)
_RECORDS_KEPT = 64
Plain = Any
"""What msgpack reads and writes: int, float, str, bytes, None, tuple, dict."""


class _Payload:
    """A frame's payload, taken piece by piece."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._view) - self._at

    def take(self, count: int, name: str) -> memoryview:
        if count > self.left:
            raise RemoteProtocolError(f"{name} needs {count} bytes where {self.left} are left")
        piece = self._view[self._at : self._at + count]
        self._at += count
        return piece


class _Form(Protocol):
    """How a field's value travels. `plain` on reading is the whole header."""

    def write(self, value: Any, message: Message, payload: list[Buffer]) -> Plain: ...

    def read(self, name: str, plain: Mapping[str, Plain], payload: _Payload) -> Any: ...


class _Texts:
    """A tuple of texts, in the header."""

    def write(self, value: Any, message: Message, payload: list[Buffer]) -> Plain:
        return value

    def read(self, name: str, plain: Mapping[str, Plain], payload: _Payload) -> Any:
        value = plain[name]
        if type(value) is not tuple or not all(type(text) is str for text in value):
            raise _wrong(name, value)
        return value


class _Details:
    """A map of scalars and of flat lists of them, in the header."""

    def write(self, value: Any, message: Message, payload: list[Buffer]) -> Plain:
        return dict(value)

    def read(self, name: str, plain: Mapping[str, Plain], payload: _Payload) -> Any:
        value = plain[name]
        if type(value) is not dict:
            raise _wrong(name, value)
        for key, entry in value.items():
            entries = entry if type(entry) is tuple else (entry,)
            if type(key) is not str or not all(type(x) in (int, float, str) for x in entries):
                raise _wrong(name, key)
        return value


class _Tensor:
    """The shape in the header, the numbers in the payload. `dtype` "" means the message's own, in its field `said`."""

    def __init__(self, dtype: str, *, optional: bool = True, said: str = "dtype") -> None:
        self._dtype = dtype
        self._optional = optional
        self._said = said

    def write(self, value: Any, message: Message, payload: list[Buffer]) -> Plain:
        if value is None:
            return None
        payload.append(to_bytes(value, self._dtype or vars(message)[self._said]))
        return value.shape

    def read(self, name: str, plain: Mapping[str, Plain], payload: _Payload) -> Any:
        shape = plain[name]
        if shape is None and self._optional:
            return None
        dtype = self._dtype or plain.get(self._said, "f32")
        if type(dtype) is not str or dtype not in WIRE_SIZES:
            raise _wrong(self._said, dtype)
        count = byte_count(dtype, shape, name, payload.left)
        return from_bytes(payload.take(count, name), dtype, shape)


class _Bulk:
    """The length in the header, the bytes in the payload."""

    def write(self, value: Any, message: Message, payload: list[Buffer]) -> Plain:
        view = memoryview(value).cast("B")
        payload.append(view)
        return len(view)

    def read(self, name: str, plain: Mapping[str, Plain], payload: _Payload) -> Any:
        return _take_bulk(name, plain[name], payload)


class _Bulks:
    """A tuple of them: the lengths in the header, the bytes in the payload."""

    def write(self, value: Any, message: Message, payload: list[Buffer]) -> Plain:
        payload.extend(value)
        return tuple(len(piece) for piece in value)

    def read(self, name: str, plain: Mapping[str, Plain], payload: _Payload) -> Any:
        lengths = plain[name]
        if type(lengths) is not tuple:
            raise _wrong(name, lengths)
        return tuple(_take_bulk(name, length, payload) for length in lengths)


class _Record:
    """A small dataclass of scalars, as the tuple of its fields; tuples of them only where it checks those itself."""

    def __init__(self, record: type) -> None:
        self._record = record
        self._names = tuple(entry.name for entry in fields(record))
        self.to_plain: Callable[[Any], tuple[Plain, ...]] = operator.attrgetter(*self._names)
        self._nested = {at for at, entry in enumerate(fields(record)) if str(entry.type).startswith("tuple[")}

    def write(self, value: Any, message: Message, payload: list[Buffer]) -> Plain:
        return self.to_plain(value)

    def read(self, name: str, plain: Mapping[str, Plain], payload: _Payload) -> Any:
        return self.from_plain(name, plain[name])

    def from_plain(self, name: str, values: Plain) -> Any:
        if type(values) is not tuple or len(values) != len(self._names):
            raise _wrong(name, values)
        for at, value in enumerate(values):
            if type(value) in _CONTAINERS and not (at in self._nested and type(value) is tuple):
                raise _wrong(name, value)
        try:
            return self._record(**dict(zip(self._names, values, strict=True)))
        except SwarmError as error:
            raise RemoteProtocolError(f"{name}: {error}") from error


class _Repeated(_Record):
    """A record that is mostly the same in one message as in the next: it is made and checked the first time."""

    def __init__(self, record: type) -> None:
        super().__init__(record)
        self._known = functools.lru_cache(_RECORDS_KEPT, typed=True)(self._made)

    def from_plain(self, name: str, values: Plain) -> Any:
        if type(values) is not tuple:
            raise _wrong(name, values)
        try:
            return self._known(name, *values)
        except TypeError:  # there is a map in it, which cannot be looked up
            return self._made(name, *values)

    def _made(self, name: str, *values: Plain) -> Any:
        return super().from_plain(name, values)


class _Records(_Record):
    """A tuple of them."""

    def write(self, value: Any, message: Message, payload: list[Buffer]) -> Plain:
        return tuple(self.to_plain(record) for record in value)

    def read(self, name: str, plain: Mapping[str, Plain], payload: _Payload) -> Any:
        values = plain[name]
        if type(values) is not tuple:
            raise _wrong(name, values)
        return tuple(self.from_plain(name, value) for value in values)


_SCALARS: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "str": (str,), "bytes": (bytes,)}
"""What lies in the header as it is: most fields, and most messages are small, so no call is spent on each."""
_FORMS: Mapping[str, _Form] = {
    "tuple[str, ...]": _Texts(),
    "Mapping[str, Detail]": _Details(),
    "Sampling": _Repeated(Sampling),
    "tuple[HopTrace, ...]": _Records(HopTrace),
    "Ids": _Tensor("i32", optional=False),
    "Ids | None": _Tensor("i32"),
    "Floats | None": _Tensor("f32"),
    "Hidden | None": _Tensor(""),
    "Logits | None": _Tensor("", said="logits_dtype"),
    "Bulk": _Bulk(),
    "tuple[Bulk, ...]": _Bulks(),
}


class _Plan:
    """How one kind of message is written and read."""

    def __init__(self, message: type[Message]) -> None:
        entries: tuple[Field[Any], ...] = fields(message)  # type: ignore[arg-type]  # each Message is a dataclass
        self.message = message
        self.fields = tuple((entry.name, *_way_of(str(entry.type)), entry.default) for entry in entries)
        self.names = {entry.name for entry in entries} | {"kind"}
        self.required = {
            entry.name for entry in entries if entry.default is MISSING and entry.default_factory is MISSING
        }


def _way_of(annotation: str) -> tuple[tuple[type, ...], _Form | None]:
    """The types of a scalar, or else its form."""
    types = _SCALARS.get(annotation, ())
    return types, None if types else _FORMS[annotation]


def _all_messages() -> dict[str, type[Message]]:
    found = [value for module in (messages, queries) for value in vars(module).values()]
    return {c.kind: c for c in found if isinstance(c, type) and issubclass(c, Message) and c is not Message}


MESSAGES: Mapping[str, type[Message]] = _all_messages()
_PLANS = {message: _Plan(message) for message in MESSAGES.values()}


def encode(message: Message) -> tuple[bytes, list[Buffer]]:
    """Header and payload; the payload's parts are views of the message's arrays, not copies.

    Raises LocalProtocolError where a value does not fit what was agreed on.
    """
    plan = _PLANS[type(message)]
    plain: dict[str, Plain] = {"kind": message.kind}
    payload: list[Buffer] = []
    for name, _, form, default in plan.fields:
        value = getattr(message, name)
        if value is not default:
            plain[name] = value if form is None else form.write(value, message, payload)
    return msgpack.packb(plain), payload


def read_header(header: Buffer) -> dict[str, Plain]:
    """The map in a frame's header, with the `kind` of a known message."""
    try:
        plain = msgpack.unpackb(header, use_list=False, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"a frame's header cannot be read: {error}") from error
    if type(plain) is not dict:
        raise RemoteProtocolError(f"a frame's header is a {type(plain).__name__}, not a map")
    if type(plain.get("kind")) is not str or plain["kind"] not in MESSAGES:
        raise _wrong("kind", plain.get("kind"))
    return plain


def read_message(plain: Mapping[str, Plain], payload: memoryview) -> Message:
    """The message that a header (from `read_header`) and its payload make.

    Tensors in f32 and i32 share the payload's memory.
    """
    plan = _PLANS[MESSAGES[plain["kind"]]]
    if not plan.required <= plain.keys() <= plan.names:
        missing, extra = plan.required - plain.keys(), {str(key)[:40] for key in plain.keys() - plan.names}
        what = f"lacks {', '.join(sorted(missing))}" if missing else f"has the unknown field {min(extra)!r}"
        raise RemoteProtocolError(f"{plan.message.__name__} {what}")
    pieces = _Payload(payload)
    try:
        values = {}
        for name, types, form, _ in plan.fields:
            if name not in plain:
                continue
            if form is not None:
                values[name] = form.read(name, plain, pieces)
            elif type(plain[name]) in types:
                values[name] = plain[name]
            else:
                raise _wrong(name, plain[name])
        if pieces.left:
            raise RemoteProtocolError(f"its payload has {pieces.left} bytes too many")
        return plan.message(**values)
    except RemoteProtocolError as error:
        raise RemoteProtocolError(f"{plan.message.__name__}: {error}") from error
    except LocalProtocolError as error:
        raise RemoteProtocolError(str(error)) from error  # what was read breaks the message's own rules


def _take_bulk(name: str, length: Plain, payload: _Payload) -> bytes:
    if type(length) is not int or length < 0:
        raise _wrong(name, length)
    return bytes(payload.take(length, name))


def _wrong(name: str, value: Plain) -> RemoteProtocolError:
    # containers are not shown: their nesting is the other side's choice
    shown = repr(value)[:60] if type(value) in (int, float, str, bytes, bool) else f"a {type(value).__name__}"
    return RemoteProtocolError(f"{name} is {shown}")

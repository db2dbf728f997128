"""Frames: 4 bytes header length, 4 bytes payload length (big-endian), the header, the payload.

Lengths are checked before memory is allocated. A payload is received into one buffer of its exact size: its bytes
are copied once, however they are split on arrival, and tensors can be views of it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from swarm.errors import LocalProtocolError, RemoteProtocolError

PREFIX = struct.Struct(">II")
Buffer = bytes | bytearray | memoryview
_EMPTY = memoryview(b"")


@dataclass(frozen=True)
class Frame:
    """One received frame. `payload` is writable memory that no other frame shares."""

    header: memoryview
    payload: memoryview


class Framer:
    """Splits a byte stream into frames. `max_header` and `max_payload` (bytes) may change between frames."""

    def __init__(self, *, max_header: int, max_payload: int) -> None:
        self.max_header = max_header
        self.max_payload = max_payload
        self._reset()

    @property
    def between_frames(self) -> bool:
        """Whether the bytes received until now end at the end of a frame."""
        return not self._header_length and not self._filled

    def feed(self, data: Buffer) -> Iterator[Frame]:
        """Yield the frames that `data` completes. Exhaust the iterator before the next call.

        Raises RemoteProtocolError if a length is over its limit. The framer cannot be used afterwards.
        """
        rest = memoryview(data)
        while self.between_frames and len(rest) >= PREFIX.size:
            # Fast path: most frames are small and arrive in one piece.
            header, payload = self._read_prefix(rest[: PREFIX.size])
            begin = PREFIX.size + header
            if len(rest) < begin + payload:
                break
            yield Frame(rest[PREFIX.size : begin], memoryview(bytearray(rest[begin : begin + payload])))
            rest = rest[begin + payload :]
        while rest:
            count = min(len(self._target) - self._filled, len(rest))
            self._target[self._filled : self._filled + count] = rest[:count]
            self._filled += count
            rest = rest[count:]
            if self._filled < len(self._target):
                return
            frame = self._advance()
            if frame is not None:
                yield frame

    def _reset(self) -> None:
        self._header: memoryview | None = None
        self._header_length = self._payload_length = 0
        self._expect(memoryview(bytearray(PREFIX.size)))

    def _expect(self, buffer: memoryview) -> None:
        self._target, self._filled = buffer, 0

    def _advance(self) -> Frame | None:
        """Continue after the current target (prefix, header or payload) is full."""
        if not self._header_length:
            self._header_length, self._payload_length = self._read_prefix(self._target)
            self._expect(memoryview(bytearray(self._header_length)))
            return None
        if self._header is None:
            self._header = self._target
            if self._payload_length:
                # np.empty does not zero the memory: pages are only touched when their bytes arrive.
                self._expect(np.empty(self._payload_length, np.uint8).data)
                return None
            frame = Frame(self._header, _EMPTY)
        else:
            frame = Frame(self._header, self._target)
        self._reset()
        return frame

    def _read_prefix(self, prefix: memoryview) -> tuple[int, int]:
        header, payload = PREFIX.unpack(prefix)
        if not 0 < header <= self.max_header:
            raise RemoteProtocolError(f"a frame's header has {header} bytes; 1 to {self.max_header} are allowed")
        if payload > self.max_payload:
            raise RemoteProtocolError(f"a frame's payload has {payload} bytes; {self.max_payload} are allowed")
        return header, payload


def frame_buffers(header: bytes, payload: Sequence[Buffer], *, max_header: int, max_payload: int) -> list[Buffer]:
    """The buffers to send for one frame. The payload is not copied.

    Raises LocalProtocolError if it is over a limit: the other side would refuse it.
    """
    length = sum(map(len, payload))
    if len(header) > max_header or length > max_payload:
        raise LocalProtocolError(
            f"a frame of {len(header)} + {length} bytes is over the limit of {max_header} + {max_payload}"
        )
    return [PREFIX.pack(len(header), length) + header, *payload]

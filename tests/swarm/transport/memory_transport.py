"""A pair of connected in-memory transports that drop, delay and break connections on purpose."""

from __future__ import annotations

import asyncio
from typing import Any

from swarm.transport.limits import Limits
from swarm.transport.stream import Stream
from swarm.wire.messages import PROTOCOL_VERSION, Hello
from swarm.wire.protocol import Role

CALLER_HELLO = Hello(protocol=PROTOCOL_VERSION, software="test", role="client")
PEER_HELLO = Hello(protocol=PROTOCOL_VERSION, software="test", role="peer")


class MemoryTransport(asyncio.Transport):
    """One end. Written data arrives at the other end in the event loop's next turn, except:

    * `blocked`: data waits here until `release`;
    * `dropping`: data is lost;
    * `chunk`: data arrives in pieces of that many bytes;
    * while the other end has paused reading.
    """

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.other: MemoryTransport
        self.blocked = False
        self.dropping = False
        self.chunk = 1 << 20
        self.reading = True
        self._protocol = protocol
        self._unsent = bytearray()
        self._high = 1 << 16
        self._paused = False
        self._closing = False
        self._lost = False
        protocol.connection_made(self)

    # ── faults ──

    def release(self) -> None:
        self.blocked = False
        self._pump()

    def break_connection(self, error: Exception | None = None) -> None:
        """End the connection for this end only; the other end does not notice (yet)."""
        self._closing = True
        if not self._lost:
            self._lost = True
            self._protocol.connection_lost(error)

    # ── asyncio.Transport ──

    def write(self, data: Any) -> None:
        if self._closing:
            return
        if not self.dropping:
            self._unsent += data
        self._pump()
        if len(self._unsent) > self._high and not self._paused:
            self._paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high or 1 << 16

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True
        self.other._pump()

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True
        self._pump()

    def abort(self) -> None:
        self._closing = True
        self._unsent.clear()
        self._pump()

    def _pump(self) -> None:
        asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        while self._unsent and not self.blocked and self.other.reading and not self.other._lost:
            piece = bytes(self._unsent[: self.chunk])
            del self._unsent[: self.chunk]
            self.other._protocol.data_received(piece)
        if self._paused and len(self._unsent) * 4 <= self._high and not self._lost:
            self._paused = False
            self._protocol.resume_writing()
        if self._closing and not self._unsent:
            self.break_connection()
            self.other.break_connection()


async def memory_pair(limits: Limits) -> tuple[Stream, Stream, MemoryTransport, MemoryTransport]:
    """A caller and a peer after both Hellos, and their transports."""
    caller, peer = Stream(Role.CALLER, limits), Stream(Role.PEER, limits)
    near, far = MemoryTransport(caller), MemoryTransport(peer)
    near.other, far.other = far, near
    caller.send(CALLER_HELLO)
    peer.hello = CALLER_HELLO
    assert await peer.receive() == CALLER_HELLO
    peer.send(PEER_HELLO)
    caller.hello = PEER_HELLO
    assert await caller.receive() == PEER_HELLO
    return caller, peer, near, far

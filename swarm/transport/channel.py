"""A caller's side of a stream: answers matched to their requests, everything else passed on."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from swarm.errors import LocalProtocolError, PeerLost, PeerStalled, RemoteProtocolError, SwarmError
from swarm.transport.address import Address
from swarm.transport.limits import DEFAULT_LIMITS, Limits
from swarm.transport.stream import Stream, connect_any
from swarm.wire.failures import failure_to_error
from swarm.wire.message import Message
from swarm.wire.messages import Failure, Hello

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=Message)
_PINGS = 3


def _ignore(_: object) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True)
class _Asked:
    answer: type[Message]
    future: asyncio.Future[Any]


class Channel:
    """Many requests at once over one connection; any number of tasks may ask.

    `on_message` hears what is no answer (outputs, failures of steps, leaving); it must not block, and where it
    raises, the connection ends. `on_lost` hears once why the connection ended, unless it was closed here.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        on_message: Callable[[Message], None] = _ignore,
        on_lost: Callable[[SwarmError], None] = _ignore,
    ) -> None:
        self._stream = stream
        self._on_message = on_message
        self._on_lost = on_lost
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._lost: SwarmError | None = None
        self._reader = asyncio.create_task(self._read(), name=f"channel to {stream}")

    @classmethod
    async def open(
        cls,
        addresses: Sequence[Address],
        hello: Hello,
        *,
        timeout: float = 5.0,
        limits: Limits = DEFAULT_LIMITS,
        on_message: Callable[[Message], None] = _ignore,
        on_lost: Callable[[SwarmError], None] = _ignore,
    ) -> Self:
        """Connect to the first of `addresses` that works. Raises what `stream.connect_any` raises."""
        stream = await connect_any(addresses, hello, timeout=timeout, limits=limits)
        return cls(stream, on_message=on_message, on_lost=on_lost)

    @property
    def peer_id(self) -> str:
        return self._stream.peer_id

    @property
    def hello(self) -> Hello:
        return self._stream.hello

    @property
    def remote(self) -> str:
        return self._stream.remote

    @property
    def closed(self) -> bool:
        return self._lost is not None

    def next_request(self) -> int:
        return next(self._numbers)

    async def ask(self, question: Message, answer: type[Answer], *, timeout: float) -> Answer:
        """Send `question`, whose `request` is from `next_request`, and wait for its answer.

        Raises the error that a Failure means; PeerStalled after `timeout` seconds; PeerLost if the connection
        ends. An answer that comes after the asker has gone is dropped.
        """
        request = getattr(question, "request", 0)
        if not request or request in self._asked:
            raise LocalProtocolError(f"{type(question).__name__}: request is {request}; take it from next_request()")
        self.send(question)
        asked = _Asked(answer, asyncio.get_running_loop().create_future())
        self._asked[request] = asked
        try:
            async with asyncio.timeout(timeout):
                found: Answer = await asked.future
                return found
        except TimeoutError as error:
            raise PeerStalled(
                f"{self._stream} does not answer {type(question).__name__} within {timeout:g} s", peer=self.peer_id
            ) from error
        finally:
            del self._asked[request]

    def send(self, message: Message, *, at_once: bool = False) -> float:
        """Queue it; see `Stream.send`. Raises why the connection ended, if it did."""
        if self._lost is not None:
            raise self._lost
        return self._stream.send(message, at_once=at_once)

    async def drain(self) -> None:
        """See `Stream.drain`."""
        await self._stream.drain()

    async def close(self) -> None:
        """End the connection; whoever still asks gets PeerLost. Idempotent and bounded."""
        self._end(PeerLost(f"the connection to {self._stream} was closed here", peer=self.peer_id))
        self._reader.cancel()
        await self._stream.close()

    async def _read(self) -> None:
        try:
            while True:
                self._sort(await self._stream.receive())
        except SwarmError as error:
            lost = error
        except Exception as error:
            logger.exception("a bug ended the connection to %s", self._stream)
            lost = LocalProtocolError(f"a bug ended the connection to {self._stream}: {error!r}")
        if isinstance(lost, RemoteProtocolError):
            self._stream.fail(lost)
        if self._end(lost):
            self._on_lost(lost)
        await self._stream.close()

    def _sort(self, message: Message) -> None:
        request = getattr(message, "request", 0)
        if not request:
            self._on_message(message)
            return
        asked = self._asked.get(request)
        if asked is None or asked.future.done():
            logger.debug("%s: the answer to request %d came too late", self._stream, request)
        elif isinstance(message, Failure):
            asked.future.set_exception(failure_to_error(message, self.peer_id))
        elif isinstance(message, asked.answer):
            asked.future.set_result(message)
        else:
            raise RemoteProtocolError(
                f"{self._stream} answers with {type(message).__name__} where {asked.answer.__name__} was asked for"
            )

    def _end(self, error: SwarmError) -> bool:
        """Mark the end; False where it was marked before."""
        if self._lost is not None:
            return False
        self._lost = error
        for asked in self._asked.values():
            if not asked.future.done():
                asked.future.set_exception(error)
        return True

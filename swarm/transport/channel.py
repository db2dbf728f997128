"""The caller's side of a stream: matches answers to requests and passes all other messages on."""

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
from swarm.wire.base_message import Message
from swarm.wire.failures import failure_to_error
from swarm.wire.messages import Failure, Hello

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=Message)


def _ignore(_: object) -> None:
    """The default callback."""


@dataclass(frozen=True)
class _PendingRequest:
    answer_type: type[Message]
    future: asyncio.Future[Any]


class Channel:
    """Sends requests over one connection. Any number of tasks may wait for answers at once.

    `on_message` receives messages that are no answers (Output, Failure of a step, Leaving). It must not block; if it
    raises, the connection ends. `on_lost` receives once the error that ended the connection, unless `close` ended it.
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
        self._request_numbers = itertools.count(1)
        self._pending: dict[int, _PendingRequest] = {}
        self._close_error: SwarmError | None = None
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
        """Connect to the first of `addresses` that answers. Raises what `stream.connect_any` raises."""
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
        return self._close_error is not None

    def next_request(self) -> int:
        return next(self._request_numbers)

    async def ask(self, request: Message, answer_type: type[Answer], *, timeout: float) -> Answer:
        """Send `request`, whose number is from `next_request`, and wait for its answer.

        Raises the error of a Failure; PeerStalled after `timeout` seconds; PeerLost if the connection ends.
        An answer that arrives after the timeout or a cancellation is dropped.
        """
        number = getattr(request, "request", 0)
        if not number or number in self._pending:
            raise LocalProtocolError(f"{type(request).__name__}: request is {number}; take it from next_request()")
        self.send(request)
        pending = _PendingRequest(answer_type, asyncio.get_running_loop().create_future())
        self._pending[number] = pending
        try:
            async with asyncio.timeout(timeout):
                result: Answer = await pending.future
                return result
        except TimeoutError as error:
            raise PeerStalled(
                f"{self._stream} does not answer {type(request).__name__} within {timeout:g} s", peer=self.peer_id
            ) from error
        finally:
            del self._pending[number]

    def send(self, message: Message, *, flush: bool = False) -> float:
        """See `Stream.send`. Raises the error that ended the connection, if it has ended."""
        if self._close_error is not None:
            raise self._close_error
        return self._stream.send(message, flush=flush)

    async def drain(self) -> None:
        """See `Stream.drain`."""
        await self._stream.drain()

    async def close(self) -> None:
        """Close the connection. Waiting requests raise PeerLost. Idempotent; takes at most `close_timeout_s`."""
        self._mark_closed(PeerLost(f"the connection to {self._stream} was closed here", peer=self.peer_id))
        self._reader.cancel()
        await self._stream.close()

    async def _read(self) -> None:
        try:
            while True:
                self._dispatch(await self._stream.receive())
        except SwarmError as error:
            reason = error
        except Exception as error:
            logger.exception("a bug ended the connection to %s", self._stream)
            reason = LocalProtocolError(f"a bug ended the connection to {self._stream}: {error!r}")
        if isinstance(reason, RemoteProtocolError):
            self._stream.send_failure(reason)
        if self._mark_closed(reason):
            self._on_lost(reason)
        await self._stream.close()

    def _dispatch(self, message: Message) -> None:
        number = getattr(message, "request", 0)
        if not number:
            self._on_message(message)
            return
        pending = self._pending.get(number)
        if pending is None or pending.future.done():
            logger.debug("%s: the answer to request %d came too late", self._stream, number)
        elif isinstance(message, Failure):
            pending.future.set_exception(failure_to_error(message, self.peer_id))
        elif isinstance(message, pending.answer_type):
            pending.future.set_result(message)
        else:
            expected = pending.answer_type.__name__
            raise RemoteProtocolError(f"{self._stream} answers with {type(message).__name__}, not {expected}")

    def _mark_closed(self, error: SwarmError) -> bool:
        """Fail all waiting requests with `error`. False if the channel was closed before."""
        if self._close_error is not None:
            return False
        self._close_error = error
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(error)
        return True

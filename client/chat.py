"""A conversation: its messages here, its KV cache on the peers between turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from client.config import GenerationConfig
from client.generate import Piece, Reply, collect
from client.text import Message

Answering = Callable[[Sequence[Message], GenerationConfig], AsyncGenerator[Piece, None]]


class ChatSession:
    """Made by `SwarmClient.session`. One message at a time.

    A turn sends only what the peers have not cached: the conversation up to there is a common prefix. Where
    a peer was lost meanwhile, or the session expired, everything is sent again, without a difference in the text.

    >>> # async with swarm.session() as chat:
    >>> #     reply = await chat.send("What is the capital of France?")
    """

    def __init__(
        self,
        *,
        answering: Answering,
        close: Callable[[], Awaitable[None]],
        route: Callable[[], str],
        config: GenerationConfig,
        system: str | None,
    ) -> None:
        self._answering = answering
        self._close = close
        self._route = route
        self._config = config
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._system)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far."""
        return tuple(self._messages)

    @property
    def route(self) -> str:
        """The hops for a person; empty before the first answer."""
        return self._route()

    async def send(self, text: str, config: GenerationConfig | None = None) -> Reply:
        """Say `text`, wait for the whole answer. Raises what `stream` raises."""
        async with contextlib.aclosing(self.stream(text, config)) as pieces:
            return await collect(pieces)

    async def stream(self, text: str, config: GenerationConfig | None = None) -> AsyncGenerator[Piece, None]:
        """Say `text`; the answer piece by piece.

        An answer that its reader breaks off stays in the conversation as far as it came. One that fails (the
        errors of `SwarmClient.generate`) takes its question with it: the turn can be tried again.
        """
        asked = [*self._messages, {"role": "user", "content": text}]
        said: list[str] = []
        pieces = self._answering(asked, config or self._config)
        try:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    said.append(piece.text)
                    if piece.finish_reason is not None:
                        self._messages = [*asked, _assistant(said)]
                    yield piece
        except (GeneratorExit, asyncio.CancelledError):
            if any(said):
                self._messages = [*asked, _assistant(said)]
            raise

    def reset(self) -> None:
        """Forget the conversation. The peers' caches are overwritten by the next turn."""
        self._messages = list(self._system)

    async def close(self) -> None:
        """Give the session back on all peers. Idempotent."""
        await self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _assistant(said: Sequence[str]) -> Message:
    return {"role": "assistant", "content": "".join(said)}

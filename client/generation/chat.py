"""A conversation: its messages here, its KV cache on the peers between turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from client.config import GenerationConfig
from client.generation.generate import Piece, Reply, collect
from client.generation.tokenizer import Message
from swarm.errors import LocalProtocolError

Answering = Callable[[Sequence[Message], GenerationConfig], AsyncGenerator[Piece, None]]


@dataclass(eq=False)
class _Turn:
    """An answer that is not over. `waits`: its reader has a piece and has not asked for the next one. `kept`: it
    goes into the conversation."""

    pieces: AsyncGenerator[Piece, None]
    asked: list[Message]
    said: list[str] = field(default_factory=list)
    waits: bool = False
    kept: bool = True


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
        self._turn: _Turn | None = None

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

        An answer that its reader breaks off stays in the conversation as far as it came; the next message breaks it
        off too, and a reader that goes on with it then gets LocalProtocolError, as does a message while an answer is
        waited for. One that fails (the errors of `SwarmClient.generate`) takes its question with it: the turn can
        be tried again.
        """
        await self._break_off()
        asked: list[Message] = [*self._messages, {"role": "user", "content": text}]
        pieces = self._answering(asked, config or self._config)
        turn = self._turn = _Turn(pieces, asked)
        try:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    turn.said.append(piece.text)
                    if piece.finish_reason is not None:
                        self._keep(turn)
                    turn.waits = True
                    yield piece
                    turn.waits = False
            if self._turn is not turn:
                raise LocalProtocolError("this answer was broken off by what came after it in the conversation")
        except (GeneratorExit, asyncio.CancelledError):
            if any(turn.said):
                self._keep(turn)
            raise
        finally:
            if self._turn is turn:
                self._turn = None

    async def _break_off(self) -> None:
        """End an answer whose reader left it as it was: `break` alone closes a generator only some time later."""
        turn = self._turn
        if turn is None:
            return
        if not turn.waits:
            raise LocalProtocolError("this session is still answering: one message at a time")
        if any(turn.said):
            self._keep(turn)
        self._turn = None
        await turn.pieces.aclose()

    def _keep(self, turn: _Turn) -> None:
        """Take what was said so far into the conversation, unless that has gone on."""
        if turn is self._turn and turn.kept:
            self._messages = [*turn.asked, {"role": "assistant", "content": "".join(turn.said)}]

    def reset(self) -> None:
        """Forget the conversation. The peers' caches are overwritten by the next turn."""
        if self._turn is not None:
            self._turn.kept = False
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

"""A conversation: its messages are kept here, its KV cache on the peers between turns."""

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

AnswerFunction = Callable[[Sequence[Message], GenerationConfig], AsyncGenerator[Piece, None]]


@dataclass(eq=False)
class _Turn:
    """An unfinished answer to `messages`. `is_paused`: its reader has a piece and has not asked for the next one yet.
    `is_forgotten`: the conversation was reset, and the answer does not become a part of it."""

    pieces: AsyncGenerator[Piece, None]
    messages: list[Message]
    texts: list[str] = field(default_factory=list)
    is_paused: bool = False
    is_forgotten: bool = False


class ChatSession:
    """Made by `SwarmClient.session`. One message at a time.

    A turn sends only the tokens that the peers have not cached: the earlier turns are a common prefix. If a peer was
    lost or the session expired meanwhile, the whole conversation is sent again, and the text is the same.

    >>> # async with swarm.session() as chat:
    >>> #     reply = await chat.send("What is the capital of France?")
    """

    def __init__(
        self,
        *,
        answer: AnswerFunction,
        close: Callable[[], Awaitable[None]],
        route: Callable[[], str],
        config: GenerationConfig,
        system: str | None,
    ) -> None:
        self._answer = answer
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
        """Send `text` and wait for the whole answer. Raises what `stream` raises."""
        async with contextlib.aclosing(self.stream(text, config)) as pieces:
            return await collect(pieces)

    async def stream(self, text: str, config: GenerationConfig | None = None) -> AsyncGenerator[Piece, None]:
        """Send `text`; yield the answer piece by piece.

        An answer that its reader leaves, or that the next message ends, stays in the conversation as far as it came. A
        reader that goes on after the next message gets LocalProtocolError; so does a message while a reader waits for a
        piece. If the answer fails (with the errors of `SwarmClient.generate`), neither it nor `text` becomes a part of
        the conversation: the turn can be tried again.
        """
        await self._break_off()
        messages: list[Message] = [*self._messages, {"role": "user", "content": text}]
        pieces = self._answer(messages, config or self._config)
        turn = self._turn = _Turn(pieces, messages)
        try:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    turn.texts.append(piece.text)
                    if piece.finish_reason is not None:
                        self._add_to_conversation(turn)
                    turn.is_paused = True
                    yield piece
                    turn.is_paused = False
            if self._turn is not turn:
                raise LocalProtocolError("this answer was broken off by what came after it in the conversation")
        except (GeneratorExit, asyncio.CancelledError):
            if any(turn.texts):
                self._add_to_conversation(turn)
            raise
        finally:
            if self._turn is turn:
                self._turn = None

    async def _break_off(self) -> None:
        """End an answer whose reader has left it: Python closes a generator only some time after `break`."""
        turn = self._turn
        if turn is None:
            return
        if not turn.is_paused:
            raise LocalProtocolError("this session is still answering: one message at a time")
        if any(turn.texts):
            self._add_to_conversation(turn)
        self._turn = None
        await turn.pieces.aclose()

    def _add_to_conversation(self, turn: _Turn) -> None:
        """Add the answer as far as it came, unless a later turn or a reset came first."""
        if turn is self._turn and not turn.is_forgotten:
            self._messages = [*turn.messages, {"role": "assistant", "content": "".join(turn.texts)}]

    def reset(self) -> None:
        """Forget the conversation. The peers' caches are overwritten by the next turn."""
        if self._turn is not None:
            self._turn.is_forgotten = True
        self._messages = list(self._system)

    async def close(self) -> None:
        """Close the session on all peers. Idempotent."""
        await self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

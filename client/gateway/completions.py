"""From a checked request to its answer: places, generations, and what goes back.

A request is refused by its status as long as nothing was sent. Once a stream has begun, what goes wrong is an event in
it, after which it ends without `[DONE]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from client.client import Prompt
from client.config import GenerationConfig
from client.gateway.admission import Admission
from client.gateway.api.errors import BUG, ApiError, api_error_of
from client.gateway.api.requests import CompletionRequest
from client.gateway.api.responses import DONE, ChatFormat, ResponseFormat, TextFormat, Usage, Written, finish_reason
from client.gateway.config import GatewayConfig
from client.gateway.http.asgi import respond
from client.gateway.http.sse import EventStream, Vanished, unless_vanished
from client.gateway.metrics import Gauges
from client.gateway.model_pool import ModelPool, ServedModel
from client.generation.generate import Piece
from swarm.errors import ConfigError, ContextExceeded, RequestError, SwarmError, first_error

_log = logging.getLogger(__name__)
_LONG_TEXT = 16 << 10


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One answer to be made, to the request's prompt number `prompt`."""

    index: int
    prompt: int
    ids: Sequence[int]
    config: GenerationConfig


class CompletionService:
    """Makes answers, at most so many at once."""

    def __init__(
        self,
        pool: ModelPool,
        config: GatewayConfig,
        gauges: Gauges,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.admission = Admission(limit=config.max_concurrent, waiting=config.max_waiting)
        self.running: set[asyncio.Task[Any]] = set()
        self.pool = pool
        self.config = config
        self.gauges = gauges
        self.clock = clock
        self._wall = wall

    def cut_off(self) -> None:
        """End what is being answered; its callers are told."""
        for task in list(self.running):
            task.cancel()

    async def job(self, asked: CompletionRequest) -> CompletionJob:
        """Raises RequestError (404, 400 with the numbers)."""
        served = self.pool.find(asked.model)
        count = asked.choices * len(asked.prompts)
        if count > self.config.max_choices:
            raise RequestError(f"this asks for {count} answers; at most {self.config.max_choices} at once", param="n")
        prompts = [await self._encode(served, prompt, asked.chat) for prompt in asked.prompts]
        choices = [
            Choice(
                index=place * asked.choices + each,
                prompt=place,
                ids=ids,
                config=asked.config_of(each, self._limit(served, len(ids), asked)),
            )
            for place, ids in enumerate(prompts)
            for each in range(asked.choices)
        ]
        shape = (ChatFormat if asked.chat else TextFormat)(
            answer_id=secrets.token_hex(12),
            created=int(self._wall()),
            model=served.name,
            decode=served.client.tokenizer.decode,
            include_usage=asked.include_usage,
        )
        return CompletionJob(self, served, asked, choices, shape, Usage([len(ids) for ids in prompts]))

    async def _encode(self, served: ServedModel, prompt: Prompt, chat: bool) -> Sequence[int]:
        """Raises RequestError that names the parameter."""
        client, param = served.client, "messages" if chat else "prompt"
        if not prompt:
            raise RequestError("the prompt is empty: there is nothing to go on from", param=param)
        try:
            if _size(prompt) > _LONG_TEXT:  # takes the tokenizer a while, and others wait for the loop
                ids = await asyncio.to_thread(client.encode, prompt, raw=not chat)
            else:
                ids = client.encode(prompt, raw=not chat)
        except ConfigError as error:
            raise RequestError(str(error), param=param) from error
        except ContextExceeded as error:
            raise RequestError(str(error), reason="context_length_exceeded", param=param) from error
        return ids

    def _limit(self, served: ServedModel, prompt: int, asked: CompletionRequest) -> int:
        """The most tokens of an answer. Raises RequestError with the numbers where they do not fit."""
        context = served.client.manifest.context_length
        limit = asked.limit
        if prompt >= context or (limit is not None and prompt + limit > context):
            wanted = "" if limit is None else f" and asks for {limit} more"
            raise RequestError(
                f"the context of {served.name} is {context} tokens; the prompt has {prompt}{wanted}: "
                f"{prompt + (limit or 1)} in all. Shorten the prompt, or ask for less",
                reason="context_length_exceeded",
                param="max_tokens" if prompt < context else "messages" if asked.chat else "prompt",
            )
        return min(self.config.default_tokens, context - prompt) if limit is None else limit


class CompletionJob:
    """One request under way; an ASGI application."""

    def __init__(
        self,
        answering: CompletionService,
        served: ServedModel,
        asked: CompletionRequest,
        choices: list[Choice],
        shape: ResponseFormat,
        usage: Usage,
    ) -> None:
        self._answering = answering
        self._served = served
        self._asked = asked
        self._choices = choices
        self._shape = shape
        self._usage = usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = self._answering
        stream = EventStream(send)
        try:
            work = self._stream(stream) if self._asked.stream else self._whole(send)
            await unless_vanished(receive, work, among=answering.running)
        except Exception as raised:
            error = first_error(raised) if isinstance(raised, ExceptionGroup) else raised
            if isinstance(error, Vanished):
                answering.gauges.vanished.labels(self._served.name).inc()
            elif isinstance(error, SwarmError):
                await self._tell(api_error_of(error), stream, send)
            else:
                _log.error("a bug of this program, while it answered", exc_info=error)
                await self._tell(BUG, stream, send)

    async def _tell(self, problem: ApiError, stream: EventStream, send: Send) -> None:
        self._answering.gauges.failures.labels(problem.code).inc()
        if stream.started:
            await stream.write(b"data: " + json.dumps(problem.to_plain()).encode() + b"\n\n")
            await stream.end()
        else:
            await respond(send, problem.to_plain(), status=problem.status, headers=problem.headers)

    async def _whole(self, send: Send) -> None:
        async with self._places(), asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._write(choice)) for choice in self._choices]
        written = [task.result() for task in tasks]
        await respond(send, self._shape.whole(written, self._usage, swarm_metrics=self._asked.swarm_metrics))

    async def _write(self, choice: Choice) -> Written:
        pieces = [piece async for piece in self._pieces(choice)]
        last = pieces[-1]
        assert last.finish_reason is not None
        assert last.metrics is not None
        return Written(
            text="".join(piece.text for piece in pieces),
            reason=finish_reason(last.finish_reason),
            logprobs=self._shape.logprobs(choice.index, pieces) if choice.config.logprobs is not None else None,
            metrics=last.metrics,
        )

    async def _stream(self, stream: EventStream) -> None:
        async with stream.kept_alive(self._answering.config.heartbeat_s):
            async with self._places(), asyncio.TaskGroup() as group:
                for choice in self._choices:
                    group.create_task(self._write_events(choice, stream))
            if self._asked.include_usage:
                await stream.write(self._shape.usage(self._usage))
            await stream.write(DONE)
        await stream.end()

    async def _write_events(self, choice: Choice, stream: EventStream) -> None:
        shape, begun = self._shape, False
        async with contextlib.aclosing(self._pieces(choice)) as pieces:
            async for piece in pieces:
                event = shape.piece(choice.index, piece)
                if piece.metrics is not None and self._asked.swarm_metrics:
                    event = shape.with_metrics(event, piece.metrics)
                if not begun:
                    event, begun = shape.first(choice.index) + event, True
                if event:
                    await stream.write(event)

    async def _pieces(self, choice: Choice) -> AsyncGenerator[Piece, None]:
        """The pieces of one answer, counted on their way."""
        served, gauges = self._served, self._answering.gauges
        watch = gauges.watch(served.name)
        async with contextlib.aclosing(served.client.generate(choice.ids, choice.config)) as pieces:
            async for piece in pieces:
                served.heard()
                watch.piece(len(piece.token_ids))
                if piece.metrics is not None:
                    self._usage.add(choice.prompt, piece.metrics)
                    watch.finished(piece.metrics)
                yield piece

    @contextlib.asynccontextmanager
    async def _places(self) -> AsyncIterator[None]:
        answering = self._answering
        asked_at = answering.clock()
        async with answering.admission.places(len(self._choices)):
            began = answering.clock()
            answering.gauges.queue_seconds.observe(began - asked_at)
            yield
        answering.admission.took(answering.clock() - began)


def _size(prompt: Prompt) -> int:
    """Characters of a text or a conversation, or token ids."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return len(prompt)
    return sum(len(each["content"]) for each in prompt if not isinstance(each, int))

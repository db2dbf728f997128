"""From a checked request to its answer: admission, generation, response.

Until something is sent, a failure sets the status of the response. After a stream has begun, a failure is an event in
it, and the stream ends without `[DONE]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from client.client import Prompt
from client.config import GenerationConfig
from client.gateway.admission import Admission
from client.gateway.api.errors import INTERNAL_ERROR, ApiError, api_error_of
from client.gateway.api.requests import CompletionRequest
from client.gateway.api.responses import (
    DONE,
    ChatFormat,
    FinishedChoice,
    ResponseFormat,
    TextFormat,
    Usage,
    finish_reason,
)
from client.gateway.config import GatewayConfig
from client.gateway.http.asgi import respond
from client.gateway.http.sse import CallerDisconnected, EventStream, cancel_on_disconnect
from client.gateway.metrics import GatewayMetrics
from client.gateway.model_pool import ModelPool, ServedModel
from client.generation.generate import Piece
from swarm.errors import ConfigError, ContextExceeded, RequestError, SwarmError, first_error

_log = logging.getLogger(__name__)
_LARGE_PROMPT = 16 << 10  # characters or tokens; longer prompts are tokenized in a thread


@dataclass(frozen=True, kw_only=True)
class ChoiceSpec:
    """One choice to generate, for the request's prompt number `prompt`."""

    index: int
    prompt: int
    ids: Sequence[int]
    config: GenerationConfig


class CompletionService:
    """Prepares requests and holds what running requests share. `running` are their tasks."""

    def __init__(self, pool: ModelPool, config: GatewayConfig, metrics: GatewayMetrics) -> None:
        self.admission = Admission(limit=config.max_concurrent, max_waiting=config.max_waiting)
        self.running: set[asyncio.Task[Any]] = set()
        self.pool = pool
        self.config = config
        self.metrics = metrics

    def cancel_all(self) -> None:
        """Cancel running requests; their callers get a 503."""
        for task in list(self.running):
            task.cancel()

    async def prepare(self, request: CompletionRequest) -> CompletionJob:
        """Find the model, tokenize the prompts, check their lengths. Raises RequestError: 404, or 400 with numbers."""
        served = self.pool.find(request.model)
        count = request.choices * len(request.prompts)
        if count > self.config.max_choices:
            raise RequestError(f"this asks for {count} answers; at most {self.config.max_choices} at once", param="n")
        prompts = [await self._encode(served, prompt, request.chat) for prompt in request.prompts]
        choices = [
            ChoiceSpec(
                index=number * request.choices + choice,
                prompt=number,
                ids=ids,
                config=request.config_for(choice, self._max_new_tokens(served, len(ids), request)),
            )
            for number, ids in enumerate(prompts)
            for choice in range(request.choices)
        ]
        response_format = (ChatFormat if request.chat else TextFormat)(
            answer_id=secrets.token_hex(12),
            created=int(time.time()),
            model=served.name,
            decode=served.client.tokenizer.decode,
            include_usage=request.include_usage,
        )
        return CompletionJob(self, served, request, choices, response_format, Usage([len(ids) for ids in prompts]))

    async def _encode(self, served: ServedModel, prompt: Prompt, chat: bool) -> Sequence[int]:
        """Raises RequestError that names the parameter."""
        client, param = served.client, "messages" if chat else "prompt"
        if not prompt:
            raise RequestError("the prompt is empty: there is nothing to continue", param=param)
        try:
            if _prompt_size(prompt) > _LARGE_PROMPT:  # tokenizing it would block the event loop
                ids = await asyncio.to_thread(client.encode, prompt, raw=not chat)
            else:
                ids = client.encode(prompt, raw=not chat)
        except ConfigError as error:
            raise RequestError(str(error), param=param) from error
        except ContextExceeded as error:
            raise RequestError(str(error), reason="context_length_exceeded", param=param) from error
        return ids

    def _max_new_tokens(self, served: ServedModel, prompt: int, request: CompletionRequest) -> int:
        """The limit of an answer to a prompt of `prompt` tokens. Raises RequestError where it does not fit."""
        context = served.client.manifest.context_length
        limit = request.max_new_tokens
        if prompt >= context or (limit is not None and prompt + limit > context):
            wanted = "" if limit is None else f" and asks for {limit} more"
            raise RequestError(
                f"the context of {served.name} is {context} tokens; the prompt has {prompt}{wanted}: "
                f"{prompt + (limit or 1)} in all. Shorten the prompt, or ask for less",
                reason="context_length_exceeded",
                param="max_tokens" if prompt < context else "messages" if request.chat else "prompt",
            )
        return min(self.config.default_tokens, context - prompt) if limit is None else limit


class CompletionJob:
    """One request under way; an ASGI application."""

    def __init__(
        self,
        service: CompletionService,
        served: ServedModel,
        request: CompletionRequest,
        choices: list[ChoiceSpec],
        response_format: ResponseFormat,
        usage: Usage,
    ) -> None:
        self._service = service
        self._served = served
        self._request = request
        self._choices = choices
        self._format = response_format
        self._usage = usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics = self._service.metrics
        stream = EventStream(send)
        try:
            work = self._respond_stream(stream) if self._request.stream else self._respond_whole(send)
            await cancel_on_disconnect(receive, work, tasks=self._service.running)
        except Exception as raised:
            error = first_error(raised) if isinstance(raised, ExceptionGroup) else raised
            if isinstance(error, CallerDisconnected):
                metrics.vanished.labels(self._served.name).inc()
            elif isinstance(error, SwarmError):
                await self._send_error(api_error_of(error), stream, send)
            else:
                _log.error("a bug of this program, while it answered", exc_info=error)
                await self._send_error(INTERNAL_ERROR, stream, send)

    async def _send_error(self, error: ApiError, stream: EventStream, send: Send) -> None:
        self._service.metrics.failures.labels(error.code).inc()
        if stream.started:
            await stream.write(b"data: " + json.dumps(error.to_plain()).encode() + b"\n\n")
            await stream.end()
        else:
            await respond(send, error.to_plain(), status=error.status, headers=error.headers)

    async def _respond_whole(self, send: Send) -> None:
        async with self._admitted(), asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._finish_choice(choice)) for choice in self._choices]
        finished = [task.result() for task in tasks]
        await respond(send, self._format.response(finished, self._usage, swarm_metrics=self._request.swarm_metrics))

    async def _finish_choice(self, choice: ChoiceSpec) -> FinishedChoice:
        pieces = [piece async for piece in self._generate(choice)]
        last = pieces[-1]
        assert last.finish_reason is not None
        assert last.metrics is not None
        return FinishedChoice(
            text="".join(piece.text for piece in pieces),
            reason=finish_reason(last.finish_reason),
            logprobs=self._format.logprobs(choice.index, pieces) if choice.config.logprobs is not None else None,
            metrics=last.metrics,
        )

    async def _respond_stream(self, stream: EventStream) -> None:
        async with stream.heartbeat(self._service.config.heartbeat_s):
            async with self._admitted(), asyncio.TaskGroup() as group:
                for choice in self._choices:
                    group.create_task(self._stream_choice(choice, stream))
            if self._request.include_usage:
                await stream.write(self._format.usage_chunk(self._usage))
            await stream.write(DONE)
        await stream.end()

    async def _stream_choice(self, choice: ChoiceSpec, stream: EventStream) -> None:
        response_format, begun = self._format, False
        async with contextlib.aclosing(self._generate(choice)) as pieces:
            async for piece in pieces:
                event = response_format.chunk(choice.index, piece)
                if piece.metrics is not None and self._request.swarm_metrics:
                    event = response_format.with_metrics(event, piece.metrics)
                if not begun:
                    event, begun = response_format.first_chunk(choice.index) + event, True
                if event:
                    await stream.write(event)

    async def _generate(self, choice: ChoiceSpec) -> AsyncGenerator[Piece, None]:
        """Yields the pieces of one choice and records them in usage and metrics."""
        served = self._served
        timer = self._service.metrics.time_answer(served.name)
        async with contextlib.aclosing(served.client.generate(choice.ids, choice.config)) as pieces:
            async for piece in pieces:
                served.record_token()
                timer.on_tokens(len(piece.token_ids))
                if piece.metrics is not None:
                    self._usage.add(choice.prompt, piece.metrics)
                    timer.on_finish(piece.metrics)
                yield piece

    @contextlib.asynccontextmanager
    async def _admitted(self) -> AsyncIterator[None]:
        service = self._service
        queued_at = time.monotonic()
        async with service.admission.slots(len(self._choices)):
            began_at = time.monotonic()
            service.metrics.queue_seconds.observe(began_at - queued_at)
            yield
        service.admission.record_duration(time.monotonic() - began_at)


def _prompt_size(prompt: Prompt) -> int:
    """Characters of a text or a conversation; number of token ids."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return len(prompt)
    return sum(len(message["content"]) for message in prompt if not isinstance(message, int))

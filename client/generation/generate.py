"""The token loop: from a prompt's ids to pieces of text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from client.config import GenerationConfig
from client.generation.detokenizer import TextStream
from client.metrics import Meter, Metrics
from client.pipeline.circuit import Answer
from client.pipeline.pipeline import Pipeline
from client.speculation.speculation import Guesser, Speculation, TripResult
from swarm.errors import ConfigError, ContextExceeded
from swarm.model.manifest import Manifest
from swarm.sampling import Choice, Sampling


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-text id, or one of stop_token_ids
    STOP_STRING = "stop_string"
    LENGTH = "length"  # max_new_tokens
    CONTEXT = "context"  # the model's context, or the session's reservation, is full


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of an answer as it comes. `text` may be empty while the text's end is not certain.

    `token_ids` are the new tokens, several if guesses were right, the one that ends the answer included; `logprobs`
    belong to them, if they were asked for. The last piece has `finish_reason` and `metrics`.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Choice, ...] = ()
    finish_reason: FinishReason | None = None
    metrics: Metrics | None = None


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A whole answer; `text` is its pieces joined."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    metrics: Metrics
    logprobs: tuple[Choice, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """One JSON object: text, token_ids, finish_reason and all metrics."""
        plain: dict[str, Any] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": str(self.finish_reason),
            **self.metrics.to_plain(),
        }
        if self.logprobs:
            plain["logprobs"] = [
                {"token": c.token, "logprob": c.logprob, "top": [list(pair) for pair in c.top]} for c in self.logprobs
            ]
        return plain


@dataclass(frozen=True, kw_only=True)
class GenerationTask:
    """The inputs of one answer. `max_positions` is the session's room for prompt and answer.

    Raises ConfigError or ContextExceeded at once if it cannot work.
    """

    prompt: Sequence[int]
    config: GenerationConfig
    sampling: Sampling
    manifest: Manifest
    decode: Callable[[Sequence[int]], str]
    cleans_up_spaces: bool
    max_positions: int

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ConfigError("the prompt is empty: there is nothing to continue")
        if len(self.prompt) > self.max_positions:
            raise ContextExceeded(
                f"the prompt has {len(self.prompt)} tokens and there is room for {self.max_positions}: shorten it"
            )
        for name, ids in (("stop_token_ids", self.config.stop_token_ids), ("logit_bias", self.config.logit_bias or ())):
            largest = max(ids, default=0)
            if largest >= self.manifest.vocab_size:
                raise ConfigError(f"{name} has {largest}, and the model has {self.manifest.vocab_size} tokens")

    @property
    def stop_ids(self) -> frozenset[int]:
        eos = () if self.config.ignore_eos else self.manifest.eos_token_ids
        return frozenset((*self.config.stop_token_ids, *eos))


async def generate(
    pipeline: Pipeline, task: GenerationTask, meter: Meter, guesser: Guesser | None = None
) -> AsyncGenerator[Piece, None]:
    """The answer to `task.prompt`, piece by piece; the last piece says why it ended. `guesser` drafts, if there is one.

    Raises what `Pipeline.advance` raises, after the pieces that came before.
    """
    known = list(task.prompt)  # `speculation` appends the new tokens
    pipeline.begin(known)
    repairs, reused = pipeline.repairs, 0
    # the last token needs no position
    limit = min(task.max_positions, len(known) + task.config.max_new_tokens - 1)
    speculation = Speculation(pipeline, known, task.sampling, limit=limit, guesser=guesser)

    def on_answer(answer: Answer) -> None:
        meter.on_answer(answer)
        speculation.on_answer(answer)

    pipeline.on_answer = on_answer
    text = _AnswerText(task)
    try:
        while text.finish_reason is None:
            try:
                trip = await speculation.next()
            except ContextExceeded:
                if not text.tokens:
                    raise
                trip, text.finish_reason = TripResult((), ()), FinishReason.CONTEXT  # the text so far stands
            else:
                reused = reused if text.tokens else pipeline.reused
                trip = text.cut(trip)
                if text.finish_reason is None:
                    await speculation.send_ahead()  # the peers compute while the text is decoded
            piece = text.decode(trip)
            if text.finish_reason is None:
                yield piece
    finally:
        await speculation.close()
    metrics = meter.metrics(
        prompt_tokens=len(task.prompt),
        reused_tokens=reused,
        new_tokens=text.tokens,
        repairs=pipeline.repairs - repairs,
        route=pipeline.describe_route(),
        hops=pipeline.hops(),
        speculation=speculation.report(),
    )
    yield replace(piece, text=piece.text + text.rest(), finish_reason=text.finish_reason, metrics=metrics)


class _AnswerText:
    """The answer so far: how many `tokens` it has, and the reason why it ended, if it has."""

    def __init__(self, task: GenerationTask) -> None:
        self.tokens = 0
        self.finish_reason: FinishReason | None = None
        self._task = task
        self._stream = TextStream(task.decode, stops=task.config.stops, cleans_up_spaces=task.cleans_up_spaces)

    def cut(self, trip: TripResult) -> TripResult:
        """Add a trip's tokens up to the one that ends the answer, stop strings aside."""
        task, stop_ids, length = self._task, self._task.stop_ids, len(trip.tokens)
        for place, token in enumerate(trip.tokens, 1):
            self.tokens += 1
            if token in stop_ids:
                self.finish_reason = FinishReason.STOP
            elif self.tokens >= task.config.max_new_tokens:
                self.finish_reason = FinishReason.LENGTH
            # the last token needs no position until another follows
            elif len(task.prompt) + self.tokens > task.max_positions:
                self.finish_reason = FinishReason.CONTEXT
            if self.finish_reason is not None:
                length = place
                break
        return TripResult(trip.tokens[:length], trip.choices[:length])

    def decode(self, trip: TripResult) -> Piece:
        """The text of the tokens that `cut` returned, up to a stop string."""
        tokens, choices, text = trip.tokens, trip.choices, ""
        for place, token in enumerate(tokens, 1):
            if place == len(tokens) and self.finish_reason is FinishReason.STOP:
                break  # the token that ends the answer is no part of its text
            text += self._stream.add(token)
            if self._stream.stopped:
                self.finish_reason = FinishReason.STOP_STRING
                self.tokens -= len(tokens) - place
                tokens, choices = tokens[:place], choices[:place]
                break
        return Piece(text=text, token_ids=tokens, logprobs=choices)

    def rest(self) -> str:
        """The text that was held back."""
        return self._stream.finish()


async def collect(pieces: AsyncIterator[Piece]) -> Reply:
    """Wait for the whole answer."""
    received = [piece async for piece in pieces]
    last = received[-1]
    assert last.finish_reason is not None
    assert last.metrics is not None
    return Reply(
        text="".join(piece.text for piece in received),
        token_ids=tuple(token for piece in received for token in piece.token_ids),
        finish_reason=last.finish_reason,
        metrics=last.metrics,
        logprobs=tuple(choice for piece in received for choice in piece.logprobs),
    )

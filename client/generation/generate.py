"""The token loop: from a prompt's ids to pieces of text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from client.config import GenerationConfig
from client.generation.detokenizer import TextStream
from client.metrics import Meter, Metrics
from client.pipeline.circuit import Answer
from client.pipeline.pipeline import Pipeline
from client.speculation.speculation import Guesser, Speculation
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
    reused = 0
    pipeline.begin(known)
    repairs = pipeline.repairs
    text_stream = TextStream(task.decode, stops=task.config.stops, cleans_up_spaces=task.cleans_up_spaces)
    # the last token needs no position
    limit = min(task.max_positions, len(known) + task.config.max_new_tokens - 1)
    speculation = Speculation(pipeline, known, task.sampling, limit=limit, guesser=guesser)

    def on_answer(answer: Answer) -> None:
        meter.on_answer(answer)
        speculation.hear(answer)

    pipeline.on_answer = on_answer
    new = 0
    reason: FinishReason | None = None
    try:
        while reason is None:
            tokens: tuple[int, ...] = ()
            logprobs: tuple[Choice, ...] = ()
            text = ""
            try:
                trip = await speculation.next()
            except ContextExceeded:
                if not new:
                    raise
                reason = FinishReason.CONTEXT  # a peer has less room than it announced: the text so far stands
            else:
                reused = reused if new else pipeline.reused
                tokens, reason = _cut_at_end(task, trip.tokens, new)
                new += len(tokens)
                logprobs = trip.choices[: len(tokens)]
                if reason is None:
                    await speculation.go_on()  # the peers compute while the text is decoded
                for place, token in enumerate(tokens, 1):
                    if place == len(tokens) and reason is FinishReason.STOP:
                        break  # the token that ends the answer is no part of its text
                    text += text_stream.add(token)
                    if text_stream.stopped:
                        new -= len(tokens) - place
                        tokens, logprobs = tokens[:place], logprobs[:place]
                        reason = FinishReason.STOP_STRING
                        break
            if reason is None:
                yield Piece(text=text, token_ids=tokens, logprobs=logprobs)
    finally:
        await speculation.close()
    metrics = meter.metrics(
        prompt_tokens=len(task.prompt),
        reused_tokens=reused,
        new_tokens=new,
        repairs=pipeline.repairs - repairs,
        route=pipeline.describe_route(),
        hops=pipeline.hops(),
        speculation=speculation.report(),
    )
    text += text_stream.finish()
    yield Piece(text=text, token_ids=tokens, logprobs=logprobs, finish_reason=reason, metrics=metrics)


def _cut_at_end(
    task: GenerationTask, tokens: tuple[int, ...], before: int
) -> tuple[tuple[int, ...], FinishReason | None]:
    """The tokens up to the one that ends the answer, and why it does, stop strings aside. `before`: how many came
    before them."""
    stop_ids = task.stop_ids
    for place, token in enumerate(tokens, 1):
        if token in stop_ids:
            return tokens[:place], FinishReason.STOP
        if before + place >= task.config.max_new_tokens:
            return tokens[:place], FinishReason.LENGTH
        # the last token needs no position until another follows
        if len(task.prompt) + before + place > task.max_positions:
            return tokens[:place], FinishReason.CONTEXT
    return tokens, None


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

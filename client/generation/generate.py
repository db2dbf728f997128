"""The token loop: from a prompt's ids to pieces of text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from client.config import GenerationConfig
from client.generation.detokenizer import Writer
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
    CONTEXT = "context"  # the model's context, or what the session reserved, is full


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of an answer as it comes. `text` may be empty while its end is not certain.

    `token_ids` are the tokens that this piece brought, several where guesses were right, the one that stopped it
    included; `logprobs` belong to them, where they were asked for. The last piece has `finish_reason` and `metrics`.
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
        """One JSON object: text, token_ids, finish_reason and everything of the metrics."""
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
class Task:
    """What one answer needs beside the pipeline."""

    prompt: Sequence[int]
    config: GenerationConfig
    sampling: Sampling
    manifest: Manifest
    decode: Callable[[Sequence[int]], str]
    tidies: bool
    limit: int

    def __post_init__(self) -> None:
        """Refuses what cannot work before anything is sent. `limit` is the positions that there are."""
        if not self.prompt:
            raise ConfigError("the prompt is empty: there is nothing to go on from")
        if len(self.prompt) > self.limit:
            raise ContextExceeded(
                f"the prompt has {len(self.prompt)} tokens and there is room for {self.limit}: shorten it"
            )
        for name, ids in (("stop_token_ids", self.config.stop_token_ids), ("logit_bias", self.config.logit_bias or ())):
            worst = max(ids, default=0)
            if worst >= self.manifest.vocab_size:
                raise ConfigError(f"{name} has {worst}, and the model has {self.manifest.vocab_size} tokens")

    @property
    def stop_ids(self) -> frozenset[int]:
        eos = () if self.config.ignore_eos else self.manifest.eos_token_ids
        return frozenset((*self.config.stop_token_ids, *eos))


async def generate(
    pipeline: Pipeline, task: Task, meter: Meter, guesser: Guesser | None = None
) -> AsyncGenerator[Piece, None]:
    """The answer to `task.prompt`, piece by piece; the last one says why it ended. `guesser` drafts, if there is one.

    Raises what `Pipeline.advance` raises; what came before is already given.
    """
    prompt = list(task.prompt)
    reused = 0
    pipeline.begin(prompt)
    repairs = pipeline.repairs
    writer = Writer(task.decode, stops=task.config.stops, tidies=task.tidies)
    room = min(task.limit, len(prompt) + task.config.max_new_tokens - 1)  # the last token needs no position
    speculation = Speculation(pipeline, prompt, task.sampling, limit=room, guesser=guesser)

    def hear(answer: Answer) -> None:
        meter.step(answer)
        speculation.hear(answer)

    pipeline.on_answer = hear
    new = 0
    reason: FinishReason | None = None
    try:
        while reason is None:
            tokens: tuple[int, ...] = ()
            logprobs: tuple[Choice, ...] = ()
            text = ""
            try:
                given = await speculation.next()
            except ContextExceeded:
                if not new:
                    raise
                reason = FinishReason.CONTEXT  # a peer's limit is lower than it said: the text so far is kept
            else:
                reused = reused if new else pipeline.reused
                tokens, reason = _up_to_the_end(task, given.tokens, new)
                new += len(tokens)
                logprobs = given.choices[: len(tokens)]
                if reason is None:
                    await speculation.go_on()  # nobody waits for the text
                for place, token in enumerate(tokens, 1):
                    if place == len(tokens) and reason is FinishReason.STOP:
                        break  # it is no part of the text
                    text += writer.add(token)
                    if writer.stopped:
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
    text += writer.finish()
    yield Piece(text=text, token_ids=tokens, logprobs=logprobs, finish_reason=reason, metrics=metrics)


def _up_to_the_end(task: Task, tokens: tuple[int, ...], before: int) -> tuple[tuple[int, ...], FinishReason | None]:
    """The tokens up to the one that ends the answer, whatever its text, and why it does. `before` came before them."""
    stop_ids = task.stop_ids
    for place, token in enumerate(tokens, 1):
        if token in stop_ids:
            return tokens[:place], FinishReason.STOP
        if before + place >= task.config.max_new_tokens:
            return tokens[:place], FinishReason.LENGTH
        # the last token needs no position of its own until another follows
        if len(task.prompt) + before + place > task.limit:
            return tokens[:place], FinishReason.CONTEXT
    return tokens, None


async def collect(pieces: AsyncIterator[Piece]) -> Reply:
    """Wait for the whole answer."""
    got = [piece async for piece in pieces]
    last = got[-1]
    assert last.finish_reason is not None
    assert last.metrics is not None
    return Reply(
        text="".join(piece.text for piece in got),
        token_ids=tuple(token for piece in got for token in piece.token_ids),
        finish_reason=last.finish_reason,
        metrics=last.metrics,
        logprobs=tuple(choice for piece in got for choice in piece.logprobs),
    )

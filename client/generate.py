"""The token loop: from a prompt's ids to pieces of text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from client.circuit import Answer
from client.config import GenerationConfig
from client.metrics import Meter, Metrics
from client.pieces import Writer
from client.pipeline import Pipeline
from swarm.errors import ConfigError, ContextExceeded
from swarm.manifest import Manifest
from swarm.sampling import Choice, Sampling


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-text id, or one of stop_token_ids
    STOP_STRING = "stop_string"
    LENGTH = "length"  # max_new_tokens
    CONTEXT = "context"  # the model's context, or what the session reserved, is full


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of an answer as it comes. `text` may be empty while its end is not certain.

    `token_ids` are the tokens that this piece brought, the one that stopped it included; `logprobs` belong
    to them, where they were asked for. The last piece has `finish_reason` and `metrics`.
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


async def generate(pipeline: Pipeline, task: Task, meter: Meter) -> AsyncGenerator[Piece, None]:
    """The answer to `task.prompt`, piece by piece; the last one says why it ended.

    Raises what `Pipeline.advance` raises; what came before is already given.
    """
    known = list(task.prompt)
    reused = 0
    pipeline.begin(known)
    repairs = pipeline.repairs
    writer = Writer(task.decode, stops=task.config.stops, tidies=task.tidies)
    stop_ids = task.stop_ids
    pipeline.on_answer = meter.step
    reason: FinishReason | None = None
    while reason is None:
        tokens: tuple[int, ...] = ()
        logprobs: tuple[Choice, ...] = ()
        text = ""
        try:
            answer = await pipeline.advance(known, task.sampling)
        except ContextExceeded:
            if len(known) == len(task.prompt):
                raise
            reason = FinishReason.CONTEXT  # a peer's limit is lower than it said: the text so far is kept
        else:
            if len(known) == len(task.prompt):
                reused = pipeline.reused
            tokens, logprobs = _chosen(answer)
            known.extend(tokens)
            reason = _finish_reason(task, stop_ids, known)
            if reason is None:
                pipeline.go_on(known, task.sampling)  # nobody waits for the text
            if reason is not FinishReason.STOP:
                text = writer.add(tokens[0])
                reason = FinishReason.STOP_STRING if writer.stopped else reason
        if reason is None:
            yield Piece(text=text, token_ids=tokens, logprobs=logprobs)
    metrics = meter.metrics(
        prompt_tokens=len(task.prompt),
        reused_tokens=reused,
        repairs=pipeline.repairs - repairs,
        route=pipeline.describe_route(),
        hops=pipeline.hops(),
    )
    text += writer.finish()
    yield Piece(text=text, token_ids=tokens, logprobs=logprobs, finish_reason=reason, metrics=metrics)


def _finish_reason(task: Task, stop_ids: frozenset[int], known: Sequence[int]) -> FinishReason | None:
    """Whether the last of `known` ends the answer, whatever its text."""
    if known[-1] in stop_ids:
        return FinishReason.STOP
    if len(known) - len(task.prompt) >= task.config.max_new_tokens:
        return FinishReason.LENGTH
    # the last token needs no position of its own until another follows
    return FinishReason.CONTEXT if len(known) > task.limit else None


def _chosen(answer: Answer) -> tuple[tuple[int, ...], tuple[Choice, ...]]:
    """The token that follows what was sent; its log-probabilities where they were asked for."""
    output = answer.output
    token = int(output.ids[-1])
    if output.logprobs is None:
        return (token,), ()
    top: tuple[tuple[int, float], ...] = ()
    if output.top_ids is not None and output.top_logprobs is not None:
        pairs = zip(output.top_ids[-1].tolist(), output.top_logprobs[-1].tolist(), strict=True)
        top = tuple((int(i), float(p)) for i, p in pairs)
    return (token,), (Choice(token=token, logprob=float(output.logprobs[-1]), top=top),)


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

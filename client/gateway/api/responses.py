"""Responses in OpenAI's shape: whole objects, and the chunks of a stream.

A stream has a chunk for every token, so what all its chunks share is encoded once.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from client.generation.generate import FinishReason, Piece
from client.metrics import Metrics
from swarm.sampling import Choice

DONE = b"data: [DONE]\n\n"
Decode = Callable[[Sequence[int]], str]


def finish_reason(reason: FinishReason) -> str:
    return "stop" if reason in (FinishReason.STOP, FinishReason.STOP_STRING) else "length"


class Usage:
    """Token counts of one request. Each prompt counts once, however many choices it gets."""

    def __init__(self, prompts: Sequence[int]) -> None:
        """`prompts` are the lengths of the prompts."""
        self._prompt = sum(prompts)
        self._cached = [0] * len(prompts)
        self._completion = 0

    def add(self, prompt: int, metrics: Metrics) -> None:
        """Count a finished choice of prompt number `prompt`."""
        self._cached[prompt] = max(self._cached[prompt], metrics.reused_tokens)
        self._completion += metrics.new_tokens

    def to_plain(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._completion,
            "total_tokens": self._prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }


@dataclass(kw_only=True)
class FinishedChoice:
    """One complete choice."""

    text: str
    reason: str
    logprobs: dict[str, Any] | None
    metrics: Metrics


class ResponseFormat(ABC):
    """Builds the response of one request. `decode` gives the text of token ids, for log-probabilities."""

    kind: str
    chunk_kind: str
    id_prefix: str

    def __init__(self, *, answer_id: str, created: int, model: str, decode: Decode, include_usage: bool) -> None:
        self._header = {"id": f"{self.id_prefix}{answer_id}", "created": created, "model": model}
        self._decode = decode
        frame = _compact({**self._header, "object": self.chunk_kind})[:-1]
        self._chunk_start = f"data: {frame},"
        self._chunk_end = ',"usage":null}\n\n' if include_usage else "}\n\n"

    def first_chunk(self, index: int) -> bytes:
        """The chunk before the text of a choice; empty where the API has none."""
        return b""

    def chunk(self, index: int, piece: Piece) -> bytes:
        """The chunk of a piece; empty where the piece has nothing to show."""
        logprobs = self.logprobs(index, [piece]) if piece.logprobs else None
        reason = None if piece.finish_reason is None else finish_reason(piece.finish_reason)
        if not piece.text and not logprobs and reason is None:
            return b""
        choice = self._chunk_choice(index, piece.text, _compact(logprobs) if logprobs else "null", reason)
        return f"{self._chunk_start}{choice}{self._chunk_end}".encode()

    def with_metrics(self, chunk: bytes, metrics: Metrics) -> bytes:
        """Add the metrics of the hops to the last chunk of a choice."""
        end = self._chunk_end.encode()
        return chunk.removesuffix(end) + b',"swarm":' + _compact(metrics.to_plain()).encode() + end

    def usage_chunk(self, usage: Usage) -> bytes:
        """The chunk with the usage, after all choices."""
        return f'{self._chunk_start}"choices":[],"usage":{_compact(usage.to_plain())}}}\n\n'.encode()

    def response(self, choices: Sequence[FinishedChoice], usage: Usage, *, swarm_metrics: bool) -> dict[str, Any]:
        plain = {
            **self._header,
            "object": self.kind,
            "choices": [self._response_choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage.to_plain(),
        }
        if swarm_metrics:
            plain["swarm"] = [choice.metrics.to_plain() for choice in choices]
        return plain

    @abstractmethod
    def logprobs(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        """Log-probabilities of the next tokens of choice `index`, without the token that ends the text."""

    @abstractmethod
    def _chunk_choice(self, index: int, text: str, logprobs: str, reason: str | None) -> str:
        """The `choices` member of a chunk as JSON; `logprobs` is JSON already."""

    @abstractmethod
    def _response_choice(self, index: int, finished: FinishedChoice) -> dict[str, Any]: ...


def _shown(pieces: Sequence[Piece]) -> list[Choice]:
    return [
        choice
        for piece in pieces
        for choice in (piece.logprobs[:-1] if piece.finish_reason is FinishReason.STOP else piece.logprobs)
    ]


class ChatFormat(ResponseFormat):
    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def first_chunk(self, index: int) -> bytes:
        delta = '{"role":"assistant","content":"","refusal":null}'
        choice = f'"choices":[{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":null}}]'
        return f"{self._chunk_start}{choice}{self._chunk_end}".encode()

    def logprobs(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        content = []
        for choice in _shown(pieces):
            token = self._token(choice.token, choice.logprob or 0.0)
            content.append({**token, "top_logprobs": [self._token(each, p) for each, p in choice.top]})
        return {"content": content, "refusal": None} if content else None

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._decode([token])
        broken = "\N{REPLACEMENT CHARACTER}" in text
        return {"token": text, "logprob": _finite(logprob), "bytes": None if broken else list(text.encode())}

    def _chunk_choice(self, index: int, text: str, logprobs: str, reason: str | None) -> str:
        delta = f'{{"content":{quoted(text)}}}' if text or reason is None else "{}"
        end = "null" if reason is None else f'"{reason}"'
        return f'"choices":[{{"index":{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{end}}}]'

    def _response_choice(self, index: int, finished: FinishedChoice) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": finished.text, "refusal": None},
            "logprobs": finished.logprobs,
            "finish_reason": finished.reason,
        }


class TextFormat(ResponseFormat):
    kind, chunk_kind, id_prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._lengths: dict[int, int] = {}  # choice -> characters so far: offsets continue from chunk to chunk

    def logprobs(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        shown = _shown(pieces)
        if not shown:
            return None
        texts = [self._decode([choice.token]) for choice in shown]
        *offsets, self._lengths[index] = accumulate(map(len, texts), initial=self._lengths.get(index, 0))
        return {
            "tokens": texts,
            "token_logprobs": [_finite(choice.logprob or 0.0) for choice in shown],
            "top_logprobs": [{self._decode([token]): _finite(p) for token, p in choice.top} for choice in shown],
            "text_offset": offsets,
        }

    def _chunk_choice(self, index: int, text: str, logprobs: str, reason: str | None) -> str:
        end = "null" if reason is None else f'"{reason}"'
        return f'"choices":[{{"index":{index},"text":{quoted(text)},"logprobs":{logprobs},"finish_reason":{end}}}]'

    def _response_choice(self, index: int, finished: FinishedChoice) -> dict[str, Any]:
        return {
            "index": index,
            "text": finished.text,
            "logprobs": finished.logprobs,
            "finish_reason": finished.reason,
        }


def _compact(plain: object) -> str:
    return json.dumps(plain, separators=(",", ":"), allow_nan=False)


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for tokens that are practically impossible."""
    return max(logprob, -9999.0)

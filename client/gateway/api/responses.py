"""OpenAI's answers: whole objects, and the chunks of a stream.

A chunk is made for every token, so what is the same in all of an answer is put together once, as bytes.
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
    """Tokens of one request: each of its prompts counts once, whatever is made of it."""

    def __init__(self, prompts: Sequence[int]) -> None:
        """`prompts` are their lengths."""
        self._prompt = sum(prompts)
        self._cached = [0] * len(prompts)
        self._completion = 0

    def add(self, prompt: int, metrics: Metrics) -> None:
        """An answer to prompt number `prompt`."""
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
class Written:
    """One choice, whole."""

    text: str
    reason: str
    logprobs: dict[str, Any] | None
    metrics: Metrics


class ResponseFormat(ABC):
    """The frame of one request's answers. `decode` gives the text of token ids, for log-probabilities."""

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, *, answer_id: str, created: int, model: str, decode: Decode, include_usage: bool) -> None:
        self._head = {"id": f"{self.prefix}{answer_id}", "created": created, "model": model}
        self._decode = decode
        frame = _compact({**self._head, "object": self.chunk_kind})[:-1]
        self._before = f"data: {frame},"
        self._after = ',"usage":null}\n\n' if include_usage else "}\n\n"

    def first(self, index: int) -> bytes:
        """What a stream says before the text of a choice."""
        return b""

    def piece(self, index: int, piece: Piece) -> bytes:
        """One chunk; empty where the piece shows nothing."""
        logprobs = self.logprobs(index, [piece]) if piece.logprobs else None
        reason = None if piece.finish_reason is None else finish_reason(piece.finish_reason)
        if not piece.text and not logprobs and reason is None:
            return b""
        choice = self._choice(index, piece.text, _compact(logprobs) if logprobs else "null", reason)
        return f"{self._before}{choice}{self._after}".encode()

    def with_metrics(self, chunk: bytes, metrics: Metrics) -> bytes:
        """A last chunk of a choice with what its hops did."""
        tail = self._after.encode()
        return chunk.removesuffix(tail) + b',"swarm":' + _compact(metrics.to_plain()).encode() + tail

    def usage(self, usage: Usage) -> bytes:
        """The chunk after the last."""
        return f'{self._before}"choices":[],"usage":{_compact(usage.to_plain())}}}\n\n'.encode()

    def whole(self, choices: Sequence[Written], usage: Usage, *, swarm_metrics: bool) -> dict[str, Any]:
        plain = {
            **self._head,
            "object": self.kind,
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage.to_plain(),
        }
        if swarm_metrics:
            plain["swarm"] = [choice.metrics.to_plain() for choice in choices]
        return plain

    @abstractmethod
    def logprobs(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        """Of the tokens whose text is shown, the next ones of choice `index`: the one that ends an answer has none."""

    @abstractmethod
    def _choice(self, index: int, text: str, logprobs: str, reason: str | None) -> str:
        """A chunk's choice; `logprobs` is JSON already."""

    @abstractmethod
    def _whole_choice(self, index: int, written: Written) -> dict[str, Any]: ...


def _shown(pieces: Sequence[Piece]) -> list[Choice]:
    return [
        choice
        for piece in pieces
        for choice in (piece.logprobs[:-1] if piece.finish_reason is FinishReason.STOP else piece.logprobs)
    ]


class ChatFormat(ResponseFormat):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def first(self, index: int) -> bytes:
        delta = '{"role":"assistant","content":"","refusal":null}'
        choice = f'"choices":[{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":null}}]'
        return f"{self._before}{choice}{self._after}".encode()

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

    def _choice(self, index: int, text: str, logprobs: str, reason: str | None) -> str:
        delta = f'{{"content":{quoted(text)}}}' if text or reason is None else "{}"
        end = "null" if reason is None else f'"{reason}"'
        return f'"choices":[{{"index":{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{end}}}]'

    def _whole_choice(self, index: int, written: Written) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": written.text, "refusal": None},
            "logprobs": written.logprobs,
            "finish_reason": written.reason,
        }


class TextFormat(ResponseFormat):
    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._lengths: dict[int, int] = {}  # of what each choice has so far: offsets go on from chunk to chunk

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

    def _choice(self, index: int, text: str, logprobs: str, reason: str | None) -> str:
        end = "null" if reason is None else f'"{reason}"'
        return f'"choices":[{{"index":{index},"text":{quoted(text)},"logprobs":{logprobs},"finish_reason":{end}}}]'

    def _whole_choice(self, index: int, written: Written) -> dict[str, Any]:
        return {
            "index": index,
            "text": written.text,
            "logprobs": written.logprobs,
            "finish_reason": written.reason,
        }


def _compact(plain: object) -> str:
    return json.dumps(plain, separators=(",", ":"), allow_nan=False)


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for what is as good as impossible."""
    return max(logprob, -9999.0)

"""Parses request bodies into what is to be generated. Pure; every error names the parameter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from client.config import AUTO, GenerationConfig
from client.gateway.api.parameters import CHAT, COMPLETION
from client.gateway.api.schema import check_object
from client.generation.tokenizer import Message
from swarm.errors import ConfigError, RequestError

_SEED_MASK = (1 << 63) - 1
_COPIED_PARAMETERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
)


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """One checked request. `prompts` are conversations (`chat`), texts or token ids; each gets `choices` answers.

    `max_new_tokens` is the caller's limit, None where the gateway chooses; `config` has a placeholder for it.
    """

    model: str
    chat: bool
    prompts: tuple[str | Sequence[Message] | Sequence[int], ...]
    choices: int
    max_new_tokens: int | None
    config: GenerationConfig
    stream: bool
    include_usage: bool
    swarm_metrics: bool

    def config_for(self, choice: int, max_new_tokens: int) -> GenerationConfig:
        """The config of choice number `choice` of a prompt. Each choice has a seed of its own."""
        seed = self.config.seed
        seed = None if seed is None else (seed + choice) & _SEED_MASK
        return replace(self.config, max_new_tokens=max_new_tokens, seed=seed)


def parse_json(body: bytes) -> Mapping[str, Any]:
    """Raises RequestError where the body is not a JSON object."""
    try:
        plain = json.loads(body, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {_reason(error)}", reason="invalid_json") from error
    if not isinstance(plain, dict):
        raise RequestError(f"the body is a JSON {type(plain).__name__}; it must be an object", reason="invalid_json")
    return plain


def parse_chat(plain: Mapping[str, Any], *, temperature: float, draft: str = AUTO) -> CompletionRequest:
    """Parse a chat request. `temperature` is the default; `draft` is GenerationConfig's. Raises RequestError."""
    check_object(plain, CHAT, "")
    top = plain.get("top_logprobs")
    if top is not None and not plain.get("logprobs"):
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    limits = [plain[name] for name in ("max_completion_tokens", "max_tokens") if plain.get(name) is not None]
    if len(set(limits)) > 1:
        raise RequestError("max_tokens and max_completion_tokens differ: send one of them", param="max_tokens")
    return _build_request(
        plain,
        chat=True,
        prompts=(tuple(_message(message) for message in plain["messages"]),),
        max_new_tokens=limits[0] if limits else None,
        logprobs=int(top or 0) if plain.get("logprobs") else None,
        temperature=temperature,
        draft=draft,
    )


def parse_completion(plain: Mapping[str, Any], *, temperature: float, draft: str = AUTO) -> CompletionRequest:
    """Parse a request to continue a text, as `parse_chat` does."""
    check_object(plain, COMPLETION, "")
    logprobs = plain.get("logprobs")
    return _build_request(
        plain,
        chat=False,
        prompts=_prompts(plain["prompt"]),
        max_new_tokens=16 if plain.get("max_tokens") is None else plain["max_tokens"],  # OpenAI's default here
        logprobs=None if logprobs is None else int(logprobs),
        temperature=temperature,
        draft=draft,
    )


def _build_request(
    plain: Mapping[str, Any],
    *,
    chat: bool,
    prompts: tuple[Any, ...],
    max_new_tokens: int | None,
    logprobs: int | None,
    temperature: float,
    draft: str,
) -> CompletionRequest:
    sampling: dict[str, Any] = {name: plain[name] for name in _COPIED_PARAMETERS if plain.get(name) is not None}
    if "top_k" in sampling:
        sampling["top_k"] = int(sampling["top_k"])
    sampling.setdefault("temperature", temperature)
    stop = plain.get("stop")
    seed = plain.get("seed")
    try:
        config = GenerationConfig(
            max_new_tokens=1,
            seed=None if seed is None else int(seed) & _SEED_MASK,
            stop_strings=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            stop_token_ids=tuple(int(token) for token in plain.get("stop_token_ids") or ()),
            logit_bias=_bias(plain.get("logit_bias")),
            logprobs=logprobs,
            draft=draft,
            **sampling,
        )
    except ConfigError as error:
        raise RequestError(str(error), param=str(error).partition(" ")[0]) from error
    options = plain.get("stream_options")
    if options is not None and not plain.get("stream"):
        raise RequestError("stream_options needs stream: true", param="stream_options")
    return CompletionRequest(
        model=plain["model"],
        chat=chat,
        prompts=prompts,
        choices=int(plain.get("n") or 1),
        max_new_tokens=None if max_new_tokens is None else int(max_new_tokens),
        config=config,
        stream=bool(plain.get("stream")),
        include_usage=bool((options or {}).get("include_usage")),
        swarm_metrics=bool(plain.get("swarm_metrics")),
    )


def _message(plain: Mapping[str, Any]) -> Message:
    content = plain["content"]
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    message = {"role": "system" if plain["role"] == "developer" else plain["role"], "content": content}
    return message | {"name": plain["name"]} if plain.get("name") else message


def _prompts(prompt: Any) -> tuple[Any, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt[0], str):
        return tuple(prompt)
    if isinstance(prompt[0], list):
        return tuple(tuple(int(token) for token in ids) for ids in prompt)
    return (tuple(int(token) for token in prompt),)


def _bias(plain: Mapping[str, float] | None) -> dict[int, float] | None:
    return {int(token): float(value) for token, value in plain.items()} if plain else None


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _reason(error: Exception) -> str:
    """Where the JSON is wrong, without quoting the body."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    return "it cannot be read" if isinstance(error, UnicodeDecodeError) else str(error)[:80]

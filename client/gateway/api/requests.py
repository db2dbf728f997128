"""From a request's body to what is to be generated. Pure; every refusal names the parameter."""

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

_SEEDS = (1 << 63) - 1
_SAME_NAME = (
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
    """One request. `prompts` are conversations (`chat`), texts or token ids; each gets `choices` answers.

    `config` says how, with one token as its limit: `limit` is the caller's, None where the gateway chooses.
    """

    model: str
    chat: bool
    prompts: tuple[str | Sequence[Message] | Sequence[int], ...]
    choices: int
    limit: int | None
    config: GenerationConfig
    stream: bool
    include_usage: bool
    swarm_metrics: bool

    def config_of(self, choice: int, limit: int) -> GenerationConfig:
        """Choice `choice` of a prompt draws with a seed of its own."""
        seed = self.config.seed
        return replace(self.config, max_new_tokens=limit, seed=None if seed is None else (seed + choice) & _SEEDS)


def parse_json(body: bytes) -> Mapping[str, Any]:
    """Raises RequestError where it is no JSON object."""
    try:
        plain = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {_reason(error)}", reason="invalid_json") from error
    if not isinstance(plain, dict):
        raise RequestError(f"the body is a JSON {type(plain).__name__}; it must be an object", reason="invalid_json")
    return plain


def parse_chat(plain: Mapping[str, Any], *, temperature: float, draft: str = AUTO) -> CompletionRequest:
    """`temperature` is for those who ask for none; `draft` as in GenerationConfig, for all."""
    check_object(plain, CHAT, "")
    top = plain.get("top_logprobs")
    if top is not None and not plain.get("logprobs"):
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    limits = [plain[name] for name in ("max_completion_tokens", "max_tokens") if plain.get(name) is not None]
    if len(set(limits)) > 1:
        raise RequestError("max_tokens and max_completion_tokens say different things", param="max_tokens")
    return _asked(
        plain,
        chat=True,
        prompts=(tuple(_message(message) for message in plain["messages"]),),
        limit=limits[0] if limits else None,
        logprobs=int(top or 0) if plain.get("logprobs") else None,
        temperature=temperature,
        draft=draft,
    )


def parse_completion(plain: Mapping[str, Any], *, temperature: float, draft: str = AUTO) -> CompletionRequest:
    """The same for a text that is to be continued."""
    check_object(plain, COMPLETION, "")
    logprobs = plain.get("logprobs")
    return _asked(
        plain,
        chat=False,
        prompts=_prompts(plain["prompt"]),
        limit=16 if plain.get("max_tokens") is None else plain["max_tokens"],  # OpenAI's default here
        logprobs=None if logprobs is None else int(logprobs),
        temperature=temperature,
        draft=draft,
    )


def _asked(
    plain: Mapping[str, Any],
    *,
    chat: bool,
    prompts: tuple[Any, ...],
    limit: int | None,
    logprobs: int | None,
    temperature: float,
    draft: str,
) -> CompletionRequest:
    given: dict[str, Any] = {name: plain[name] for name in _SAME_NAME if plain.get(name) is not None}
    if "top_k" in given:
        given["top_k"] = int(given["top_k"])
    given.setdefault("temperature", temperature)
    stop = plain.get("stop")
    seed = plain.get("seed")
    try:
        config = GenerationConfig(
            max_new_tokens=1,
            seed=None if seed is None else int(seed) & _SEEDS,
            stop_strings=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            stop_token_ids=tuple(int(token) for token in plain.get("stop_token_ids") or ()),
            logit_bias=_bias(plain.get("logit_bias")),
            logprobs=logprobs,
            draft=draft,
            **given,
        )
    except ConfigError as error:
        raise RequestError(str(error), param=str(error).partition(" ")[0]) from error
    options = plain.get("stream_options")
    if options is not None and not plain.get("stream"):
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    return CompletionRequest(
        model=plain["model"],
        chat=chat,
        prompts=prompts,
        choices=int(plain.get("n") or 1),
        limit=None if limit is None else int(limit),
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


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _reason(error: Exception) -> str:
    """Where it is wrong; nothing of the text itself."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    return "it cannot be read" if isinstance(error, UnicodeDecodeError) else str(error)[:80]

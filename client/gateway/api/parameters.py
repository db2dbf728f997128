"""The parameters of the two completion endpoints, as JSON Schema.

Parameters of OpenAI's API that a swarm does not support are listed too, with the values that do not use them. Other
values are refused by name; nothing is silently ignored. `user`, `metadata` and the like describe the caller and
change no answer.
"""

from __future__ import annotations

from typing import Any

from swarm.sampling import MAX_LOGIT_BIAS, MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY

_MAX_TEXT = 4 << 20
_MAX_TOKENS = 1 << 20
_INT64 = 1 << 63
_MAX_PROMPTS = 16
_MAX_TOP_LOGPROBS = 20

_TOKENS = {"type": ["integer", "null"], "minimum": 1, "maximum": (1 << 31) - 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": _MAX_TOKENS}
_TEXT = {"type": "string", "maxLength": _MAX_TEXT}


def _number(low: float, high: float, description: str, **more: Any) -> dict[str, Any]:
    return {"type": ["number", "null"], "minimum": low, "maximum": high, "description": description, **more}


def _integer(low: int, high: int, description: str) -> dict[str, Any]:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high, "description": description}


def _flag(description: str) -> dict[str, Any]:
    return {"type": ["boolean", "null"], "description": description}


def _unsupported(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter that only takes values with no effect."""
    return {**schema, "x-unsupported": True, "description": "Not supported; only values without effect are accepted."}


_UNSUPPORTED = _unsupported({"type": "null"})
_UNSUPPORTED_LIST = _unsupported({"type": ["array", "null"], "maxItems": 0})
_UNSUPPORTED_FLAG = _unsupported({"type": ["boolean", "null"], "enum": [False, None]})

_CALLER = {"type": ["string", "null"], "maxLength": 512, "description": "Describes the caller; changes no answer."}

COMMON: dict[str, Any] = {
    "model": {"type": "string", "minLength": 1, "maxLength": 256, "description": "As /v1/models lists it."},
    "max_tokens": _TOKENS,
    "temperature": _number(0, 2, "0 always takes the likeliest token."),
    "top_p": {
        "type": ["number", "null"],
        "exclusiveMinimum": 0,
        "maximum": 1,
        "description": "Draw among the likeliest tokens that together have this share.",
    },
    "top_k": _integer(0, 1 << 31, "Draw among this many of the likeliest tokens; 0: among all."),
    "min_p": _number(0, 1, "Leave out tokens below this share of the likeliest one's."),
    "seed": _integer(-_INT64, _INT64 - 1, "The same seed draws the same text; choice i draws with seed + i."),
    "stop": {
        "anyOf": [
            {"type": "string", "minLength": 1, "maxLength": 1024},
            {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 1024}, "maxItems": 16},
            {"type": "null"},
        ],
        "description": "The answer ends before the first of these texts.",
    },
    "n": _integer(1, 16, "How many answers."),
    "presence_penalty": _number(-2, 2, "Subtracted from the logit of each token that the answer contains already."),
    "frequency_penalty": _number(-2, 2, "Subtracted from a token's logit for each time that the answer contains it."),
    "repetition_penalty": {
        "type": ["number", "null"],
        "minimum": MIN_REPETITION_PENALTY,
        "maximum": MAX_REPETITION_PENALTY,
        "description": "Over 1: tokens of the prompt and the answer become less likely.",
    },
    "logit_bias": {
        "type": ["object", "null"],
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_LOGIT_BIAS,
        "description": "Token id to what is added to its logit.",
    },
    "stream": _flag("Server-sent events instead of one object."),
    "stream_options": {
        "type": ["object", "null"],
        "properties": {
            "include_usage": _flag("A last chunk with the usage."),
            "include_obfuscation": _UNSUPPORTED_FLAG,
        },
        "additionalProperties": False,
    },
    "ignore_eos": _flag("Go on after the model's end of text."),
    "stop_token_ids": {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0}, "maxItems": 64},
    "swarm_metrics": _flag("Add `swarm` to the end of the answer: which hops made it, and how fast."),
    "user": _CALLER,
}

_PART = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": _TEXT},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART, "minItems": 1, "maxItems": 1024}]},
        "name": {"type": ["string", "null"], "maxLength": 256},
        # Fields of this API's own answers, which callers send back as history.
        "refusal": _UNSUPPORTED,
        "audio": _UNSUPPORTED,
        "function_call": _UNSUPPORTED,
        "tool_calls": _UNSUPPORTED_LIST,
        "annotations": _UNSUPPORTED_LIST,
    },
    "required": ["role", "content"],
    "additionalProperties": False,
}

CHAT: dict[str, Any] = {
    "type": "object",
    "properties": {
        **COMMON,
        "messages": {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": 4096},
        "max_completion_tokens": _TOKENS,
        "logprobs": _flag("Log-probabilities of the answer's tokens."),
        "top_logprobs": _integer(0, _MAX_TOP_LOGPROBS, "How many of the likeliest tokens to add; needs `logprobs`."),
        "metadata": {"type": ["object", "null"], "maxProperties": 16},
        "safety_identifier": _CALLER,
        "prompt_cache_key": _CALLER,
        "prompt_cache_retention": _UNSUPPORTED,
        "tools": _UNSUPPORTED_LIST,
        "functions": _UNSUPPORTED_LIST,
        "tool_choice": _unsupported({"type": ["string", "null"], "enum": ["none", "auto", None]}),
        "function_call": _unsupported({"type": ["string", "null"], "enum": ["none", "auto", None]}),
        "parallel_tool_calls": _flag("Has no effect: tools are not supported."),
        "response_format": _unsupported(
            {
                "type": ["object", "null"],
                "properties": {"type": _unsupported({"type": "string", "enum": ["text"]})},
                "additionalProperties": False,
            }
        ),
        "modalities": _unsupported({"type": ["array", "null"], "items": {"type": "string", "enum": ["text"]}}),
        "store": _UNSUPPORTED_FLAG,
        "service_tier": _unsupported({"type": ["string", "null"], "enum": ["auto", "default", None]}),
        "audio": _UNSUPPORTED,
        "prediction": _UNSUPPORTED,
        "reasoning_effort": _UNSUPPORTED,
        "verbosity": _UNSUPPORTED,
        "web_search_options": _UNSUPPORTED,
    },
    "required": ["model", "messages"],
    "additionalProperties": False,
}

COMPLETION: dict[str, Any] = {
    "type": "object",
    "properties": {
        **COMMON,
        "prompt": {
            "anyOf": [
                _TEXT,
                _IDS,
                {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": _MAX_PROMPTS},
                {"type": "array", "items": _IDS, "minItems": 1, "maxItems": _MAX_PROMPTS},
            ],
            "description": "One or several prompts, each a text or token ids.",
        },
        "logprobs": _integer(0, _MAX_TOP_LOGPROBS, "Log-probabilities, with this many of the likeliest tokens."),
        "echo": _UNSUPPORTED_FLAG,
        "best_of": _unsupported({"type": ["integer", "null"], "enum": [1, None]}),
        "suffix": _UNSUPPORTED,
    },
    "required": ["model", "prompt"],
    "additionalProperties": False,
}

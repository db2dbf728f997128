"""The parameters of the two completion endpoints, as JSON Schema.

What OpenAI's API has and a swarm cannot do is listed too, with the values that mean "do without": anything else is
refused by name, nothing is ignored in silence. `user`, `metadata` and their like describe the caller and change no
answer.
"""

from __future__ import annotations

from typing import Any

from swarm.sampling import MAX_LOGIT_BIAS

_MAX_TEXT = 4 << 20
_MAX_TOKENS = 1 << 20
_INT64 = 1 << 63
MAX_PROMPTS = 16
MAX_TOP_LOGPROBS = 20

_TOKENS = {"type": ["integer", "null"], "minimum": 1, "maximum": (1 << 31) - 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": _MAX_TOKENS}
_TEXT = {"type": "string", "maxLength": _MAX_TEXT}


def _number(low: float, high: float, about: str, **more: Any) -> dict[str, Any]:
    return {"type": ["number", "null"], "minimum": low, "maximum": high, "description": about, **more}


def _integer(low: int, high: int, about: str) -> dict[str, Any]:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high, "description": about}


def _flag(about: str) -> dict[str, Any]:
    return {"type": ["boolean", "null"], "description": about}


def _without(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter of which only the value that asks for nothing is taken."""
    return {**schema, "x-unsupported": True, "description": "Not supported; only the value that asks for nothing."}


_NOTHING = _without({"type": "null"})
_NO_LIST = _without({"type": ["array", "null"], "maxItems": 0})
_NOT_TRUE = _without({"type": ["boolean", "null"], "enum": [False, None]})

_CALLER = {"type": ["string", "null"], "maxLength": 512, "description": "Describes the caller; changes no answer."}

COMMON: dict[str, Any] = {
    "model": {"type": "string", "minLength": 1, "maxLength": 256, "description": "As /v1/models lists it."},
    "max_tokens": _TOKENS,
    "temperature": _number(0, 2, "0 takes the likeliest token."),
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
    "presence_penalty": _number(-2, 2, "Subtracted from the score of each token that the answer has already."),
    "frequency_penalty": _number(-2, 2, "The same for each time that it has it."),
    "repetition_penalty": {
        "type": ["number", "null"],
        "exclusiveMinimum": 0,
        "maximum": 100,
        "description": "Over 1: tokens of prompt and answer become less likely.",
    },
    "logit_bias": {
        "type": ["object", "null"],
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_LOGIT_BIAS,
        "description": "Token id to what is added to its score.",
    },
    "stream": _flag("Server-sent events instead of one object."),
    "stream_options": {
        "type": ["object", "null"],
        "properties": {"include_usage": _flag("A last chunk with the usage."), "include_obfuscation": _NOT_TRUE},
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
        # what an answer of this API brings along when it is sent back
        "refusal": _NOTHING,
        "audio": _NOTHING,
        "function_call": _NOTHING,
        "tool_calls": _NO_LIST,
        "annotations": _NO_LIST,
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
        "top_logprobs": _integer(0, MAX_TOP_LOGPROBS, "How many of the likeliest tokens beside; needs `logprobs`."),
        "metadata": {"type": ["object", "null"], "maxProperties": 16},
        "safety_identifier": _CALLER,
        "prompt_cache_key": _CALLER,
        "prompt_cache_retention": _NOTHING,
        "tools": _NO_LIST,
        "functions": _NO_LIST,
        "tool_choice": _without({"type": ["string", "null"], "enum": ["none", "auto", None]}),
        "function_call": _without({"type": ["string", "null"], "enum": ["none", "auto", None]}),
        "parallel_tool_calls": _flag("Means nothing without tools, which are not supported."),
        "response_format": _without(
            {
                "type": ["object", "null"],
                "properties": {"type": _without({"type": "string", "enum": ["text"]})},
                "additionalProperties": False,
            }
        ),
        "modalities": _without({"type": ["array", "null"], "items": {"type": "string", "enum": ["text"]}}),
        "store": _NOT_TRUE,
        "service_tier": _without({"type": ["string", "null"], "enum": ["auto", "default", None]}),
        "audio": _NOTHING,
        "prediction": _NOTHING,
        "reasoning_effort": _NOTHING,
        "verbosity": _NOTHING,
        "web_search_options": _NOTHING,
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
                {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_PROMPTS},
                {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ],
            "description": "A text or token ids, or several of them.",
        },
        "logprobs": _integer(0, MAX_TOP_LOGPROBS, "Log-probabilities, with this many of the likeliest tokens."),
        "echo": _NOT_TRUE,
        "best_of": _without({"type": ["integer", "null"], "enum": [1, None]}),
        "suffix": _NOTHING,
    },
    "required": ["model", "prompt"],
    "additionalProperties": False,
}

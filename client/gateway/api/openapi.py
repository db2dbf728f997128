"""The API's description in OpenAPI 3.1; its request bodies are what requests are checked against."""

from __future__ import annotations

from typing import Any

from client.gateway.api.parameters import CHAT, COMPLETION
from swarm import __version__

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_USAGE = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {
        "prompt_tokens": {"type": "integer", "minimum": 1},
        "completion_tokens": {"type": "integer", "minimum": 1},
        "total_tokens": {"type": "integer", "minimum": 2},
    },
}
_MODEL = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": {"type": "string"},
        "object": {"enum": ["model"]},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
        "digest": {"type": "string"},
        "context_length": {"type": "integer"},
    },
}
_REFUSALS = {
    400: "The request is wrong; `param` says where.",
    401: "No key, or a wrong one.",
    403: "Without keys: asked under a host name that is not this machine's.",
    404: "There is no such model.",
    408: "The body did not come in time.",
    413: "The body is too long.",
    415: "The body is no JSON.",
    429: "Full; Retry-After says when to come back.",
    500: "A mistake of the gateway.",
    502: "A peer answered what cannot be.",
    503: "Layers of the model are not covered, or peers failed; the message names them.",
}


def _answer(kind: str) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"enum": [kind]},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {
                "type": "array",
                "minItems": 1,
                "items": {"type": "object", "required": ["index", "finish_reason"]},
            },
            "usage": _USAGE,
        },
    }


def _json(schema: dict[str, Any], about: str) -> dict[str, Any]:
    return {"description": about, "content": {"application/json": {"schema": schema}}}


def _refusals(*statuses: int) -> dict[str, Any]:
    return {str(status): _json(_ERROR, _REFUSALS[status]) for status in statuses}


def _completion(name: str, body: dict[str, Any], kind: str, about: str) -> dict[str, Any]:
    answered = _json(_answer(kind), "The answer; with `stream`, its chunks as server-sent events.")
    answered["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "post": {
            "operationId": name,
            "summary": about,
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {"200": answered, **_refusals(*_REFUSALS)},
        }
    }


def _get(name: str, schema: dict[str, Any], about: str, *refusals: int, **more: Any) -> dict[str, Any]:
    return {
        "get": {
            "operationId": name,
            "summary": about,
            "responses": {"200": _json(schema, about), **_refusals(*refusals)},
            **more,
        }
    }


def _text(name: str, kind: str, about: str) -> dict[str, Any]:
    got = _get(name, {}, about, 401, 403)
    got["get"]["responses"]["200"]["content"] = {kind: {"schema": {"type": "string"}}}
    return got


def description(*, needs_key: bool) -> dict[str, Any]:
    """The document at /openapi.json."""
    swarm = {
        "type": "object",
        "required": ["schema", "at", "models"],
        "properties": {"models": {"type": "array", "items": {"type": "object"}}},
    }
    health = {"type": "object", "required": ["live", "ready", "models"]}
    model_id = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    listed = {
        "type": "object",
        "required": ["object", "data"],
        "properties": {"object": {"enum": ["list"]}, "data": {"type": "array", "items": _MODEL}},
    }
    healthy = _get("health", health, "Live, and whether a token came through a route lately.", 403)
    healthy["get"]["responses"]["503"] = _json(health, "Live, and not ready.")
    plain: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "swarm gateway", "version": __version__},
        "paths": {
            "/v1/chat/completions": _completion("chat", CHAT, "chat.completion", "Answer a conversation."),
            "/v1/completions": _completion("complete", COMPLETION, "text_completion", "Continue a text."),
            "/v1/models": _get("models", listed, "The models that are offered.", 401, 403),
            "/v1/models/{model}": _get("model", _MODEL, "One of them.", 401, 403, 404, parameters=[model_id]),
            "/api/swarm": _get("swarm", swarm, "Who serves what, and the routes in use.", 401, 403),
            "/api/swarm/events": _text("events", "text/event-stream", "The same as events, every two seconds."),
            "/health": healthy,
            "/health/live": _get("live", {"type": "object", "required": ["live"]}, "It lives.", 403),
            "/metrics": _text("metrics", "text/plain", "For Prometheus."),
        },
    }
    if needs_key:
        plain["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        plain["security"] = [{"key": []}]
    return plain

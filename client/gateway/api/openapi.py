"""The API's description in OpenAPI 3.1. Requests are checked against the schemas that it contains."""

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
_ERROR_MEANINGS = {
    400: "The request is wrong; `param` says where.",
    401: "No key, or a wrong one.",
    403: "The gateway has no keys, and the Host header does not name its machine.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too long.",
    415: "The body is not JSON.",
    429: "The gateway is busy; Retry-After says when to try again.",
    500: "An internal error of the gateway.",
    502: "A peer broke the protocol.",
    503: "Layers of the model are not covered, or peers failed; the message names them.",
}


def _completion_schema(kind: str) -> dict[str, Any]:
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


def _json(schema: dict[str, Any], summary: str) -> dict[str, Any]:
    return {"description": summary, "content": {"application/json": {"schema": schema}}}


def _error_responses(*statuses: int) -> dict[str, Any]:
    return {str(status): _json(_ERROR, _ERROR_MEANINGS[status]) for status in statuses}


def _completion_path(name: str, body: dict[str, Any], kind: str, summary: str) -> dict[str, Any]:
    success = _json(_completion_schema(kind), "The answer; with `stream`, its chunks as server-sent events.")
    success["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "post": {
            "operationId": name,
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {"200": success, **_error_responses(*_ERROR_MEANINGS)},
        }
    }


def _get_path(name: str, schema: dict[str, Any], summary: str, *statuses: int, **more: Any) -> dict[str, Any]:
    return {
        "get": {
            "operationId": name,
            "summary": summary,
            "responses": {"200": _json(schema, summary), **_error_responses(*statuses)},
            **more,
        }
    }


def _text_path(name: str, kind: str, summary: str) -> dict[str, Any]:
    path = _get_path(name, {}, summary, 401, 403)
    path["get"]["responses"]["200"]["content"] = {kind: {"schema": {"type": "string"}}}
    return path


def openapi_document(*, needs_key: bool) -> dict[str, Any]:
    """The document that /openapi.json serves."""
    swarm = {
        "type": "object",
        "required": ["schema", "at", "models"],
        "properties": {"models": {"type": "array", "items": {"type": "object"}}},
    }
    health = {"type": "object", "required": ["live", "ready", "models"]}
    model_id = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    model_list = {
        "type": "object",
        "required": ["object", "data"],
        "properties": {"object": {"enum": ["list"]}, "data": {"type": "array", "items": _MODEL}},
    }
    health_path = _get_path("health", health, "Live, and at least one model generated a token recently.", 403)
    health_path["get"]["responses"]["503"] = _json(health, "Live, but not ready.")
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "swarm gateway", "version": __version__},
        "paths": {
            "/v1/chat/completions": _completion_path("chat", CHAT, "chat.completion", "Answer a conversation."),
            "/v1/completions": _completion_path("complete", COMPLETION, "text_completion", "Continue a text."),
            "/v1/models": _get_path("models", model_list, "List the models.", 401, 403),
            "/v1/models/{model}": _get_path(
                "model", _MODEL, "Describe one model.", 401, 403, 404, parameters=[model_id]
            ),
            "/api/swarm": _get_path("swarm", swarm, "Peers, their layers, and the routes in use.", 401, 403),
            "/api/swarm/events": _text_path("events", "text/event-stream", "The same as events, every two seconds."),
            "/health": health_path,
            "/health/live": _get_path("live", {"type": "object", "required": ["live"]}, "The gateway runs.", 403),
            "/metrics": _text_path("metrics", "text/plain", "Metrics for Prometheus."),
        },
    }
    if needs_key:
        document["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        document["security"] = [{"key": []}]
    return document

"""Errors as HTTP callers get them: a status, and OpenAI's error object."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from client.gateway.api.parameters import COMMON
from swarm.errors import (
    ConfigError,
    ContextExceeded,
    DirectoryError,
    MixedModels,
    NotCovered,
    PeerBusy,
    PeerError,
    ProtocolError,
    RequestError,
    SwarmError,
    UnknownModel,
    UnknownSession,
)

_RETRY_S = 1.0
_ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


@dataclass(frozen=True, kw_only=True)
class ApiError:
    """One error response: its `status`, and the fields of OpenAI's error object."""

    status: int
    message: str
    code: str
    param: str | None = None
    retry_after_s: float = 0.0

    @property
    def error_type(self) -> str:
        return _ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def to_plain(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.error_type, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {"retry-after": str(math.ceil(self.retry_after_s))} if self.retry_after_s else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def api_error_of(error: SwarmError) -> ApiError:
    """Translate an error of this program. Faults of the caller are 4xx, those of the swarm or the gateway 5xx."""
    text = str(error)
    match error:
        case RequestError():
            return ApiError(
                status=error.status,
                message=text,
                code=error.reason,
                param=error.param,
                retry_after_s=error.retry_after,
            )
        case ContextExceeded():
            return ApiError(status=400, message=text, code="context_length_exceeded")
        case ConfigError():
            param = text.partition(" ")[0]
            return ApiError(status=400, message=text, code="invalid_value", param=param if param in COMMON else None)
        case UnknownModel() | MixedModels():
            return ApiError(status=404, message=text, code="model_not_found", param="model")
        case PeerBusy():
            return ApiError(status=429, message=text, code=error.code, retry_after_s=max(error.retry_after, _RETRY_S))
        case NotCovered() | PeerError() | DirectoryError() | UnknownSession():
            return ApiError(status=503, message=text, code=error.code, retry_after_s=_RETRY_S)
        case ProtocolError() if error.retryable:
            return ApiError(status=502, message=text, code=error.code)
        case _:
            return ApiError(status=500, message=text, code=error.code)


INTERNAL_ERROR = ApiError(status=500, message="the gateway made a mistake; its log says which", code="internal_error")

"""Errors as HTTP callers see them: OpenAI's shape, and a status that fits."""

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

_BUSY_S = 1.0
_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


@dataclass(frozen=True, kw_only=True)
class ApiError:
    """What goes back: `status`, and the four fields of OpenAI's error object."""

    status: int
    message: str
    code: str
    param: str | None = None
    retry_after_s: float = 0.0

    @property
    def kind(self) -> str:
        return _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def to_plain(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {"retry-after": str(math.ceil(self.retry_after_s))} if self.retry_after_s else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def api_error_of(error: SwarmError) -> ApiError:
    """Which status an error of this program gets. A caller's own mistakes are 4xx, a swarm that cannot is 5xx."""
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
            named = text.partition(" ")[0]
            return ApiError(status=400, message=text, code="invalid_value", param=named if named in COMMON else None)
        case UnknownModel() | MixedModels():
            return ApiError(status=404, message=text, code="model_not_found", param="model")
        case PeerBusy():
            return ApiError(status=429, message=text, code=error.code, retry_after_s=max(error.retry_after, _BUSY_S))
        case NotCovered():
            return ApiError(status=503, message=text, code=error.code, retry_after_s=_BUSY_S)
        case PeerError() | DirectoryError() | UnknownSession():
            return ApiError(status=503, message=text, code=error.code, retry_after_s=_BUSY_S)
        case ProtocolError() if error.retryable:
            return ApiError(status=502, message=text, code=error.code)
        case _:
            return ApiError(status=500, message=text, code=error.code)


BUG = ApiError(status=500, message="the gateway made a mistake; its log says which", code="internal_error")

"""Middleware that checks keys and hosts before any endpoint sees a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from client.gateway.api.errors import api_error_of
from client.gateway.config import GatewayConfig, is_loopback
from client.gateway.http.asgi import close_connection, respond
from swarm.errors import RequestError

_PROTECTED = ("/v1/", "/api/", "/metrics")
# The page may run only its own files. It shows texts from other machines: with trusted types, the browser refuses to
# turn any text into markup.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    b"require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", _POLICY),
]

OnResponse = Callable[[str, int], None]


class Guard:
    """Requires a key for the API, the swarm's state and /metrics; the page and /health are open.

    A gateway on loopback without keys answers only to host names of this machine: a page of another site could
    otherwise reach it by DNS rebinding. `on_response` is called with each request's path and status.
    """

    def __init__(self, app: ASGIApp, config: GatewayConfig, on_response: OnResponse) -> None:
        self._app = app
        self._config = config
        self._on_response = on_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
                self._on_response(scope["path"], message["status"])
            try:
                async with asyncio.timeout(self._config.write_s):
                    await send(message)
            except TimeoutError:
                await close_connection(scope)  # the endpoint then sees a disconnected caller

        try:
            self._check(scope)
        except RequestError as refused:
            error = api_error_of(refused)
            await respond(guarded_send, error.to_plain(), status=error.status, headers=error.headers)
            return
        await self._app(scope, receive, guarded_send)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        keys = self._config.keys
        if keys is None:
            host = headers.get(b"host", b"").decode("latin-1")
            if is_loopback(self._config.listen.host) and not _names_this_machine(host):
                raise RequestError(
                    f"this gateway has no key and answers only to localhost, not to {host[:80]!r}",
                    status=403,
                    reason="wrong_host",
                )
            return
        if not scope["path"].startswith(_PROTECTED) or scope["method"] == "OPTIONS":
            return
        scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.casefold() != "bearer" or key.strip() not in keys:
            problem = "the API key is wrong" if key else "there is no API key: send authorization: Bearer KEY"
            raise RequestError(problem, status=401, reason="invalid_api_key")


def _names_this_machine(host: str) -> bool:
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return is_loopback(name.casefold())

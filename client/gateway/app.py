"""The gateway's ASGI application: routes, middleware, error responses, metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from client.gateway.api.errors import INTERNAL_ERROR, ApiError, api_error_of
from client.gateway.api.openapi import openapi_document
from client.gateway.api.requests import CompletionRequest, parse_chat, parse_completion, parse_json
from client.gateway.completions import CompletionService
from client.gateway.config import GatewayConfig
from client.gateway.http.asgi import LARGE_BODY, BodyReader
from client.gateway.http.guard import Guard
from client.gateway.http.sse import CallerDisconnected, EventStream, cancel_on_disconnect
from client.gateway.metrics import GatewayMetrics, current_state
from client.gateway.model_pool import ModelPool, ServedModel
from client.gateway.swarm_view import SwarmView
from swarm.errors import RequestError, SwarmError

PAGE = Path(__file__).parent / "page"
_MODEL_PREFIX = "/v1/models/"
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _PageFiles(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Makes the browser revalidate each file: files of two releases do not work together."""
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


class Gateway:
    """State that the endpoints share. An async context manager.

    `stopping` is set when the gateway begins to stop: endless streams end then, and requests that still run after
    `grace_s` are cancelled.
    """

    def __init__(self, pool: ModelPool, config: GatewayConfig, *, stopping: asyncio.Event) -> None:
        self._stopping = stopping
        self._pool = pool
        self._config = config
        self._metrics = metrics = GatewayMetrics()
        self._completions = CompletionService(pool, config, metrics)
        self._bodies = BodyReader(limit=config.max_body, timeout=config.body_s, max_large=config.max_large_bodies)
        self._swarm_view = SwarmView(pool)
        admission = self._completions.admission
        metrics.register(lambda: current_state(pool, running=admission.running, waiting=admission.waiting))
        self._known_paths: frozenset[str] = frozenset()
        self._grace_task: asyncio.Task[None] | None = None

    def app(self) -> ASGIApp:
        config = self._config
        v1 = [
            Route("/chat/completions", self._completion_endpoint(parse_chat), methods=["POST"]),
            Route("/completions", self._completion_endpoint(parse_completion), methods=["POST"]),
            Route("/models", self.models),
            Route("/models/{model:path}", self.model),
        ]
        api = [Route("/swarm", self.swarm), Route("/swarm/events", self.swarm_events)]
        gateway = [
            Route("/health", self.health),
            Route("/health/live", self.live),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.openapi),
        ]
        # Mounted: a wrong method under /v1 and /api gets their 405. It would fall through to the page otherwise.
        page = Mount("/", _PageFiles(directory=PAGE, html=True))
        routes = [Mount("/v1", routes=v1), Mount("/api", routes=api), *gateway, page]
        self._known_paths = frozenset(
            [f"/v1{each.path}" for each in v1] + [f"/api{each.path}" for each in api] + [each.path for each in gateway]
        )
        middleware = [Middleware(Guard, config=config, on_response=self._count_request)]
        if config.allow_origins:
            # Outside the guard: a browser's preflight request carries no key.
            cors = Middleware(
                CORSMiddleware,
                allow_origins=list(config.allow_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # OpenAI's JavaScript package adds a dozen of its own
                expose_headers=["retry-after"],
            )
            middleware.insert(0, cors)
        return Starlette(
            routes=routes,
            middleware=middleware,
            exception_handlers={
                HTTPException: _http_error,  # type: ignore[dict-item]
                SwarmError: self._swarm_error,  # type: ignore[dict-item]
                Exception: self._internal_error,
            },
        )

    async def __aenter__(self) -> Self:
        self._grace_task = asyncio.create_task(self._cancel_after_grace(), name="cancel after grace")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._grace_task is not None:
            self._grace_task.cancel()
            await asyncio.wait([self._grace_task])
        await self._swarm_view.close()

    async def _cancel_after_grace(self) -> None:
        await self._stopping.wait()
        await asyncio.sleep(self._config.grace_s)
        self._completions.cancel_all()

    # -- OpenAI's endpoints

    def _completion_endpoint(self, parse: Callable[..., CompletionRequest]) -> Callable[[Request], object]:
        async def endpoint(request: Request) -> object:
            async with self._bodies.read(request.scope, request.receive) as body:
                # Parsing a large body would block the event loop.
                parsed = await asyncio.to_thread(parse_body, body) if len(body) > LARGE_BODY else parse_body(body)
                return await self._completions.prepare(parsed)

        def parse_body(body: bytes) -> CompletionRequest:
            return parse(parse_json(body), temperature=self._config.temperature, draft=self._config.draft)

        return endpoint

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model_to_plain(served) for served in self._pool.served]})

    async def model(self, request: Request) -> Response:
        return JSONResponse(_model_to_plain(self._pool.find(request.path_params["model"])))

    # -- the state of the swarm

    async def swarm(self, request: Request) -> Response:
        return JSONResponse(await self._swarm_view.current())

    async def swarm_events(self, request: Request) -> object:
        return self._stream_swarm

    async def _stream_swarm(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = EventStream(send)
        try:
            await cancel_on_disconnect(receive, self._write_swarm_events(stream), tasks=self._completions.running)
        except CallerDisconnected:
            pass
        except RequestError:
            if not stream.started:
                raise

    async def _write_swarm_events(self, stream: EventStream) -> None:
        while not self._stopping.is_set():
            await stream.write(b"data: " + json.dumps(await self._swarm_view.current()).encode() + b"\n\n")
            try:
                async with asyncio.timeout(self._config.swarm_interval_s):
                    await self._stopping.wait()
            except TimeoutError:
                continue
        await stream.end()

    # -- the gateway itself

    async def health(self, request: Request) -> Response:
        """200 while at least one model is ready (see `ModelPool.is_ready`), else 503."""
        models = {
            served.name: {
                "ready": self._pool.is_ready(served),
                "last_token_age_s": served.token_age_s,
                "problem": served.problem,
            }
            for served in self._pool.served
        }
        ready = any(model["ready"] for model in models.values()) and not self._stopping.is_set()
        return JSONResponse({"live": True, "ready": ready, "models": models}, status_code=200 if ready else 503)

    async def live(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.page(), media_type=_METRICS_TYPE)

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi_document(needs_key=self._config.keys is not None))

    async def _swarm_error(self, request: Request, raised: SwarmError) -> Response:
        error = api_error_of(raised)
        self._metrics.failures.labels(error.code).inc()
        return _error_response(error)

    async def _internal_error(self, request: Request, raised: Exception) -> Response:
        self._metrics.failures.labels(INTERNAL_ERROR.code).inc()
        return _error_response(INTERNAL_ERROR)

    def _count_request(self, path: str, status: int) -> None:
        if path in self._known_paths:
            endpoint = path
        elif path.startswith(_MODEL_PREFIX):
            endpoint = f"{_MODEL_PREFIX}NAME"
        else:
            endpoint = "page" if status < 400 else "other"
        self._metrics.requests.labels(endpoint, str(status)).inc()


def _model_to_plain(served: ServedModel) -> dict[str, object]:
    manifest = served.client.manifest
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "swarm",
        "digest": manifest.digest,
        "context_length": manifest.context_length,
    }


def _error_response(error: ApiError) -> Response:
    return JSONResponse(error.to_plain(), status_code=error.status, headers=error.headers)


async def _http_error(request: Request, raised: HTTPException) -> Response:
    path = request.url.path[:80]
    messages = {404: f"there is nothing at {path}", 405: f"{path} does not take {request.method}"}
    error = ApiError(
        status=raised.status_code,
        message=messages.get(raised.status_code, str(raised.detail)),
        code=f"http_{raised.status_code}",
    )
    response = _error_response(error)
    response.headers.update(raised.headers or {})
    return response

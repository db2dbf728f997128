"""The endpoints, put together."""

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

from client.gateway.api.errors import BUG, ApiError, api_error_of
from client.gateway.api.openapi import description
from client.gateway.api.requests import CompletionRequest, parse_chat, parse_completion, parse_json
from client.gateway.completions import CompletionService
from client.gateway.config import GatewayConfig
from client.gateway.http.asgi import LONG, Bodies
from client.gateway.http.guard import Guard
from client.gateway.http.sse import EventStream, Vanished, unless_vanished
from client.gateway.metrics import Gauges, state_of
from client.gateway.model_pool import ModelPool, ServedModel
from client.gateway.swarm_view import SwarmView
from swarm.errors import RequestError, SwarmError

PAGE = Path(__file__).parent / "page"
_ONE_MODEL = "/v1/models/"
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Page(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """A browser asks whether a file has changed: those of two releases do not fit together."""
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


class Gateway:
    """What the endpoints share; a context. `ending` is set when the gateway begins to end: streams without an end of
    their own stop then, and what still runs after `grace_s` is cut off."""

    def __init__(self, pool: ModelPool, config: GatewayConfig, *, ending: asyncio.Event) -> None:
        self._ending = ending
        self._pool = pool
        self._config = config
        self._gauges = gauges = Gauges()
        self._answering = CompletionService(pool, config, gauges)
        self._bodies = Bodies(limit=config.max_body, timeout=config.body_s, max_long=config.max_long_bodies)
        self._watch = SwarmView(pool)
        admission = self._answering.admission
        gauges.follow(lambda: state_of(pool, lambda: admission.running, lambda: admission.waiting))
        self._paths: frozenset[str] = frozenset()
        self._ender: asyncio.Task[None] | None = None

    def app(self) -> ASGIApp:
        config = self._config
        v1 = [
            Route("/chat/completions", self._completion(parse_chat), methods=["POST"]),
            Route("/completions", self._completion(parse_completion), methods=["POST"]),
            Route("/models", self.models),
            Route("/models/{model:path}", self.model),
        ]
        api = [Route("/swarm", self.swarm), Route("/swarm/events", self.swarm_events)]
        own = [
            Route("/health", self.health),
            Route("/health/live", self.live),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.openapi),
        ]
        # mounted, so that a wrong method there is told by them and does not end at the page
        routes = [Mount("/v1", routes=v1), Mount("/api", routes=api), *own, Mount("/", _page())]
        self._paths = frozenset(
            [f"/v1{each.path}" for each in v1] + [f"/api{each.path}" for each in api] + [each.path for each in own]
        )
        middleware = [Middleware(Guard, config=config, counted=self._count)]
        if config.allow_origins:
            # outside the guard: a browser's question before the request carries no key
            cors = Middleware(
                CORSMiddleware,
                allow_origins=list(config.allow_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # OpenAI's package for browsers sends a dozen of its own
                expose_headers=["retry-after"],
            )
            middleware.insert(0, cors)
        return Starlette(
            routes=routes,
            middleware=middleware,
            exception_handlers={HTTPException: _http_error, SwarmError: self._refuse, Exception: self._bug},  # type: ignore[dict-item]
        )

    async def __aenter__(self) -> Self:
        self._ender = asyncio.create_task(self._cut_off_late(), name="cut off late")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ender is not None:
            self._ender.cancel()
            await asyncio.wait([self._ender])
        await self._watch.close()

    async def _cut_off_late(self) -> None:
        await self._ending.wait()
        await asyncio.sleep(self._config.grace_s)
        self._answering.cut_off()

    # -- OpenAI's

    def _completion(self, parse: Callable[..., CompletionRequest]) -> Callable[[Request], object]:
        async def endpoint(request: Request) -> object:
            async with self._bodies.read(request.scope, request.receive) as body:
                # a long one takes its while, and others wait for the loop
                asked = await asyncio.to_thread(read, body) if len(body) > LONG else read(body)
                return await self._answering.job(asked)

        def read(body: bytes) -> CompletionRequest:
            return parse(parse_json(body), temperature=self._config.temperature, draft=self._config.draft)

        return endpoint

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model_to_plain(served) for served in self._pool.served]})

    async def model(self, request: Request) -> Response:
        return JSONResponse(_model_to_plain(self._pool.find(request.path_params["model"])))

    # -- the swarm

    async def swarm(self, request: Request) -> Response:
        return JSONResponse(await self._watch.current())

    async def swarm_events(self, request: Request) -> object:
        return self._send_swarm

    async def _send_swarm(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = EventStream(send)
        try:
            await unless_vanished(receive, self._write_swarm(stream), among=self._answering.running)
        except Vanished:
            pass
        except RequestError:
            if not stream.started:
                raise

    async def _write_swarm(self, stream: EventStream) -> None:
        while not self._ending.is_set():
            await stream.write(b"data: " + json.dumps(await self._watch.current()).encode() + b"\n\n")
            try:
                async with asyncio.timeout(self._config.look_every_s):
                    await self._ending.wait()
            except TimeoutError:
                continue
        await stream.end()

    # -- the gateway itself

    async def health(self, request: Request) -> Response:
        """200 while a token came lately through a route of some model, else 503."""
        models = {
            served.name: {
                "ready": self._pool.is_ready(served),
                "last_token_age_s": served.token_age_s,
                "problem": served.problem,
            }
            for served in self._pool.served
        }
        ready = any(model["ready"] for model in models.values()) and not self._ending.is_set()
        return JSONResponse({"live": True, "ready": ready, "models": models}, status_code=200 if ready else 503)

    async def live(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def metrics(self, request: Request) -> Response:
        return Response(self._gauges.page(), media_type=_METRICS_TYPE)

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(description(needs_key=self._config.keys is not None))

    async def _refuse(self, request: Request, error: SwarmError) -> Response:
        problem = api_error_of(error)
        self._gauges.failures.labels(problem.code).inc()
        return _answer(problem)

    async def _bug(self, request: Request, error: Exception) -> Response:
        self._gauges.failures.labels(BUG.code).inc()
        return _answer(BUG)

    def _count(self, path: str, status: int) -> None:
        if path in self._paths:
            endpoint = path
        elif path.startswith(_ONE_MODEL):
            endpoint = f"{_ONE_MODEL}NAME"
        else:
            endpoint = "page" if status < 400 else "other"
        self._gauges.requests.labels(endpoint, str(status)).inc()


def _page() -> StaticFiles:
    return _Page(directory=PAGE, html=True)


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


def _answer(problem: ApiError) -> Response:
    return JSONResponse(problem.to_plain(), status_code=problem.status, headers=problem.headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    path = request.url.path[:80]
    told = {404: f"there is nothing at {path}", 405: f"{request.method} is not for {path}"}
    problem = ApiError(
        status=error.status_code,
        message=told.get(error.status_code, str(error.detail)),
        code=f"http_{error.status_code}",
    )
    response = _answer(problem)
    response.headers.update(error.headers or {})
    return response

"""The swarm as the page shows it: what `swarm routes --json` says of each model, and the routes in use now.

Peers are measured only while the page asks; requests at the same time share one measurement.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from client.client import RouteInUse
from client.gateway.model_pool import ModelPool, ServedModel
from client.inspector.report import SCHEMA, inspect_swarm
from client.inspector.swarm_inspector import SwarmInspector
from client.options import DEFAULT_SESSION_TOKENS
from swarm.errors import SwarmError
from swarm.routing.plan import RouteRequest

_INSPECT_TIMEOUT_S = 20.0
_MAX_AGE_S = 1.0


class SwarmView:
    """The latest inspection of every model in a pool, refreshed on demand."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool
        self._inspectors: dict[str, SwarmInspector] = {}
        self._latest: dict[str, dict[str, Any]] = {}
        self._refreshed_at: float | None = None
        self._refreshing: asyncio.Task[None] | None = None

    async def current(self) -> dict[str, Any]:
        """The state of all models, at most a second old where the peers answer in time.

        ::

            {"schema": 1, "at", "models": [{... as `swarm routes --json` ..., "id": "as /v1/models has it", "ready",
             "look_problem": "why this is out of date", "routes_in_use": [{"session", "tokens", "repairs",
             "hops": [{"peer_id", "name", "span"}]}]}]}
        """
        if self._refreshed_at is None or time.monotonic() - self._refreshed_at > _MAX_AGE_S:
            if self._refreshing is None:
                self._refreshing = asyncio.create_task(self._refresh())
            # Shielded: cancelling one request must not cancel the refresh that others wait for.
            await asyncio.shield(self._refreshing)
        return {
            "schema": SCHEMA,
            "at": time.time(),
            "models": [
                {
                    **self._latest[served.digest],
                    "id": served.name,
                    "ready": self._pool.is_ready(served),
                    "routes_in_use": [_route_to_plain(route) for route in served.client.routes],
                }
                for served in self._pool.served
                if served.digest in self._latest
            ],
        }

    async def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait([self._refreshing])

    async def _refresh(self) -> None:
        try:
            await asyncio.gather(*(self._inspect(served) for served in self._pool.served))
            self._refreshed_at = time.monotonic()
        finally:
            self._refreshing = None

    async def _inspect(self, served: ServedModel) -> None:
        digest = served.digest
        inspector = self._inspectors.setdefault(
            digest,
            SwarmInspector(
                model=digest,
                manifest=served.client.manifest,
                tokens=1,
                kv_tokens=DEFAULT_SESSION_TOKENS,
                objective="latency",
                numerics=None,
            ),
        )
        try:
            async with asyncio.timeout(_INSPECT_TIMEOUT_S):
                inspection = await inspector.inspect(self._pool.directory)
        except (SwarmError, TimeoutError) as error:
            problem = str(error) or f"the swarm did not answer within {_INSPECT_TIMEOUT_S:g} s"
            previous = self._latest.get(digest) or self._without_peers(served)
            self._latest[digest] = {**previous, "look_problem": problem}
        else:
            self._latest[digest] = {**inspection.to_plain(), "look_problem": ""}

    def _without_peers(self, served: ServedModel) -> dict[str, Any]:
        manifest = served.client.manifest
        request = RouteRequest(layers=len(manifest.layers), hidden_bytes=4 * manifest.hidden_size)
        return inspect_swarm(manifest.name, manifest.digest, [], request, links={}, now=time.time()).to_plain()


def _route_to_plain(route: RouteInUse) -> dict[str, Any]:
    return {
        "session": route.session,
        "tokens": route.tokens,
        "repairs": route.repairs,
        "hops": [{"peer_id": peer_id, "name": name, "span": span} for peer_id, name, span in route.hops],
    }

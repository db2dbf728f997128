"""The swarm as the page shows it: what `swarm routes --json` says of each model, and the routes in use now.

Nobody is asked while nobody looks; those who look at the same time share one look.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from client.client import RouteInUse
from client.gateway.model_pool import ModelPool, ServedModel
from client.inspector.report import SCHEMA, inspect_swarm
from client.inspector.snapshot import SwarmInspector
from client.options import USUAL_SESSION_TOKENS
from swarm.errors import SwarmError
from swarm.routing.plan import RouteRequest

_LOOK_LIMIT_S = 20.0
_FRESH_S = 1.0


class SwarmView:
    """Looks at the models of a fleet."""

    def __init__(
        self,
        pool: ModelPool,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._wall = wall
        self._looks: dict[str, SwarmInspector] = {}
        self._seen: dict[str, dict[str, Any]] = {}
        self._looked_at: float | None = None
        self._looking: asyncio.Task[None] | None = None

    async def current(self) -> dict[str, Any]:
        """At most a second old, where the peers answer in time.

        ::

            {"schema": 1, "at", "models": [{... as `swarm routes --json` ..., "id": "as /v1/models has it", "ready",
             "look_problem": "why this is old", "routes_in_use": [{"session", "tokens", "repairs",
             "hops": [{"peer_id", "name", "span"}]}]}]}
        """
        if self._looked_at is None or self._clock() - self._looked_at > _FRESH_S:
            if self._looking is None:
                self._looking = asyncio.create_task(self._look_at_all())
            # whoever is cancelled does not take the look away from others
            await asyncio.shield(self._looking)
        return {
            "schema": SCHEMA,
            "at": self._wall(),
            "models": [
                {
                    **self._seen[served.digest],
                    "id": served.name,
                    "ready": self._pool.is_ready(served),
                    "routes_in_use": [_route_to_plain(route) for route in served.client.routes],
                }
                for served in self._pool.served
                if served.digest in self._seen
            ],
        }

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])

    async def _look_at_all(self) -> None:
        try:
            await asyncio.gather(*(self._look_at(served) for served in self._pool.served))
            self._looked_at = self._clock()
        finally:
            self._looking = None

    async def _look_at(self, served: ServedModel) -> None:
        digest, manifest = served.digest, served.client.manifest
        look = self._looks.setdefault(
            digest,
            SwarmInspector(
                text=digest,
                manifest=manifest,
                tokens=1,
                kv_tokens=USUAL_SESSION_TOKENS,
                objective="latency",
                numerics=None,
                wall=self._wall,
            ),
        )
        try:
            async with asyncio.timeout(_LOOK_LIMIT_S):
                seen = await look(self._pool.directory)
        except (SwarmError, TimeoutError) as error:
            problem = str(error) or f"the swarm did not answer within {_LOOK_LIMIT_S:g} s"
            before = self._seen.get(digest) or self._unseen(served)
            self._seen[digest] = {**before, "look_problem": problem}
        else:
            self._seen[digest] = {**seen.to_plain(), "look_problem": ""}

    def _unseen(self, served: ServedModel) -> dict[str, Any]:
        manifest = served.client.manifest
        request = RouteRequest(layers=len(manifest.layers), hidden_bytes=4 * manifest.hidden_size)
        return inspect_swarm(manifest.name, manifest.digest, [], request, links={}, now=self._wall()).to_plain()


def _route_to_plain(route: RouteInUse) -> dict[str, Any]:
    return {
        "session": route.session,
        "tokens": route.tokens,
        "repairs": route.repairs,
        "hops": [{"peer_id": peer_id, "name": name, "span": span} for peer_id, name, span in route.hops],
    }

"""Which route next: records, measured ways and bans together. One for all sessions of a client."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence

from client.config import ClientConfig
from client.pipeline.connections import ConnectionPool
from client.pipeline.peer_health import PeerHealth
from swarm.discovery.directory import Directory
from swarm.discovery.records import LEAVING, PeerRecord
from swarm.discovery.remote_directory import find_peers
from swarm.errors import (
    ContextExceeded,
    DirectoryError,
    NotCovered,
    PeerBusy,
    PeerError,
    PeerLeaving,
    SwarmError,
    UnknownSession,
)
from swarm.model.manifest import Manifest
from swarm.routing.choose import choose_route, replan
from swarm.routing.plan import Plan, RouteRequest
from swarm.transport.link import LinkQuality
from swarm.wire.tensors import WIRE_SIZES

_APART_S = 60.0
_NO_WAY = LinkQuality(rtt_s=math.inf)


class Planner:
    """Decides with `swarm.routing.choose` and remembers who failed. `clock` is monotonic, `wall` Unix time; seconds."""

    def __init__(
        self,
        directory: Directory,
        manifest: Manifest,
        *,
        connections: ConnectionPool,
        config: ClientConfig,
        seed: str,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.peer_health = PeerHealth(first_s=config.ban_s, limit_s=config.ban_limit_s, clock=clock)
        self._directory = directory
        self._manifest = manifest
        self._connections = connections
        self._config = config
        self._seed = seed
        self._clock = clock
        self._wall = wall
        self._records: list[PeerRecord] = []
        self._look_up: asyncio.Task[list[PeerRecord]] | None = None
        self._apart: dict[tuple[str, str], float] = {}

    async def plan(self, kv_tokens: int, before: Plan | None = None, *, prompt_tokens: int = 0) -> Plan:
        """The best route for a session of `kv_tokens`; after `before` one of the same numerics.

        Raises NotCovered; ContextExceeded where there is a route, but not for a prompt of `prompt_tokens`;
        DirectoryError where nobody was ever reached.
        """
        try:
            return await self._plan(kv_tokens, before, prompt_tokens)
        except NotCovered:
            with contextlib.suppress(NotCovered):
                plan = await self._plan(kv_tokens, before, 0)
                narrow = [hop.record for hop in plan.route.hops if 0 < hop.record.attends_to < prompt_tokens]
                if narrow:
                    raise too_long(prompt_tokens, min(narrow, key=lambda record: record.attends_to)) from None
            raise

    async def _plan(self, kv_tokens: int, before: Plan | None, prompt_tokens: int) -> Plan:
        if before is not None:
            request = dataclasses.replace(before.request, prompt_tokens=prompt_tokens)
            before = dataclasses.replace(before, request=request)
        if before is not None:
            # a repair does not wait for a look-up as long as what was known a moment ago is enough
            with contextlib.suppress(NotCovered):
                return await self._choose(self._known_records(), kv_tokens, before, prompt_tokens)
        return await self._choose(await self._current_records(), kv_tokens, before, prompt_tokens)

    async def _choose(
        self, records: Sequence[PeerRecord], kv_tokens: int, before: Plan | None, prompt_tokens: int
    ) -> Plan:
        banned = self.peer_health.remaining((record.peer_id, record.incarnation) for record in records)
        links = await self._connections.measure(r for r in records if r.state != LEAVING and r.peer_id not in banned)
        records = [self._with_lost_ways(record) for record in records]
        if before is None:
            request = self._request(kv_tokens, prompt_tokens)
            return choose_route(records, request, links=links, now=self._wall(), banned=banned, explain=False)
        if not self._config.mixed_numerics:
            # the text so far is this numerics' text: another would not continue it exactly
            request = dataclasses.replace(before.request, numerics=before.route.numerics)
            before = dataclasses.replace(before, request=request)
        return replan(before, now=self._wall(), banned=banned, records=records, links=links)

    def record_failure(self, record: PeerRecord, error: SwarmError) -> None:
        """Leave the peer out for as long as `error` deserves; UnknownSession deserves nothing."""
        peer, incarnation = record.peer_id, record.incarnation
        if isinstance(error, UnknownSession):
            return
        if isinstance(error, PeerBusy):
            self.peer_health.pause(peer, incarnation, max(error.retry_after, self._config.look_again_s), str(error))
        elif isinstance(error, PeerLeaving):
            self.exclude(record)
        else:
            self.peer_health.record_failure(peer, incarnation, str(error))

    def exclude(self, record: PeerRecord) -> None:
        """This process is about to leave."""
        self.peer_health.pause(record.peer_id, record.incarnation, self._config.ban_limit_s, "it is leaving")

    def part(self, pair: tuple[str, str]) -> None:
        """The first peer cannot send to the second: route them by way of this client for a while."""
        self._apart[pair] = self._clock() + _APART_S

    def record_success(self, record: PeerRecord) -> None:
        """The peer did its part of a step."""
        self.peer_health.record_success(record.peer_id, record.incarnation)

    async def close(self) -> None:
        """Stop looking up."""
        if self._look_up is not None:
            self._look_up.cancel()
            await asyncio.wait([self._look_up])

    def _known_records(self) -> list[PeerRecord]:
        """What was announced when it was last looked up and holds still; the next look-up begins."""
        if self._look_up is not None and self._look_up.done():
            look_up, self._look_up = self._look_up, None
            if not look_up.cancelled() and look_up.exception() is None:
                self._records = look_up.result()
        if self._look_up is None:
            self._look_up = asyncio.create_task(self._ask())
        self._records = [record for record in self._records if record.expires_at > self._wall()]
        return self._records

    async def _current_records(self) -> list[PeerRecord]:
        """What is announced now; what was known a moment ago where nobody says so in time: it will mostly hold.

        Raises DirectoryError, PeerError where nothing was known and nobody can be asked.
        """
        known, look_up = self._known_records(), self._look_up
        assert look_up is not None
        await asyncio.wait([look_up], timeout=self._config.look_up_timeout_s if known else None)
        if look_up.cancelled():
            raise DirectoryError("this client was closed")
        if look_up.done() and look_up.exception() is None:
            self._records = look_up.result()
        elif look_up.done() and not (known and isinstance(look_up.exception(), (DirectoryError, PeerError))):
            look_up.result()  # raises it
        if look_up.done() and self._look_up is look_up:
            self._look_up = None
        return self._records

    async def _ask(self) -> list[PeerRecord]:
        return await find_peers(self._directory, self._manifest.digest, now=self._wall())

    def _request(self, kv_tokens: int, prompt_tokens: int) -> RouteRequest:
        return RouteRequest(
            layers=len(self._manifest.layers),
            hidden_bytes=self._manifest.hidden_size * WIRE_SIZES[self._config.dtype],
            kv_tokens=kv_tokens,
            prompt_tokens=prompt_tokens,
            numerics=self._config.numerics,
            allow_mixed=self._config.mixed_numerics,
            seed=self._seed,
        )

    def _with_lost_ways(self, record: PeerRecord) -> PeerRecord:
        now = self._clock()
        lost = {to: _NO_WAY for (peer, to), until in self._apart.items() if peer == record.peer_id and until > now}
        return dataclasses.replace(record, links={**record.links, **lost}) if lost else record


def too_long(prompt_tokens: int, record: PeerRecord) -> ContextExceeded:
    """The prompt does not fit into what this peer attends to."""
    return ContextExceeded(
        f"the prompt has {prompt_tokens} tokens and peer {record.name or record.peer_id[:8]} attends to "
        f"{record.attends_to}: shorten it, or wait for peers that take more"
    )

"""The next route, from records, measured links and bans. One planner for all sessions of a client."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from client.config import ClientConfig
from client.pipeline.connections import UNREACHABLE, ConnectionPool
from client.pipeline.peer_health import PeerHealth
from swarm.discovery.directory import Directory
from swarm.discovery.peer_directory import find_peers
from swarm.discovery.records import LEAVING, PeerRecord
from swarm.errors import (
    ContextExceeded,
    DirectoryError,
    NotCovered,
    PeerBusy,
    PeerError,
    PeerLeaving,
    PeerLost,
    PeerStalled,
    PeerUnreachable,
    SwarmError,
    UnknownSession,
)
from swarm.model.manifest import Manifest
from swarm.routing.choose import choose_route, replan
from swarm.routing.plan import Plan, RouteRequest
from swarm.wire.tensors import WIRE_SIZES

_LOST_LINK_S = 60.0


class Planner:
    """Decides with `swarm.routing.choose`; remembers failed peers and lost links. `clock` is monotonic, `wall` Unix."""

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
        self._peer_health = PeerHealth(first_s=config.ban_s, limit_s=config.ban_limit_s, clock=clock)
        self._directory = directory
        self._manifest = manifest
        self._connections = connections
        self._config = config
        self._seed = seed
        self._clock = clock
        self._wall = wall
        self._records: list[PeerRecord] = []
        self._lookup: asyncio.Task[list[PeerRecord]] | None = None
        self._trial: asyncio.Task[bool] | None = None
        self._lost_links: dict[tuple[str, str], float] = {}  # (sender, receiver): relayed until

    async def plan(self, kv_tokens: int, before: Plan | None = None, *, prompt_tokens: int = 0) -> Plan:
        """The best route for a session of `kv_tokens`; if it replaces the plan `before`, one of the same numerics.

        Raises NotCovered; ContextExceeded if there is a route, but none for a prompt of `prompt_tokens`;
        DirectoryError if no directory was ever reached.
        """
        try:
            return await self._plan(kv_tokens, before, prompt_tokens)
        except NotCovered:
            with contextlib.suppress(NotCovered):
                if await self._try_banned_peers():
                    return await self._plan(kv_tokens, before, prompt_tokens)
            with contextlib.suppress(NotCovered):
                plan = await self._plan(kv_tokens, before, 0)
                narrow = [hop.record for hop in plan.route.hops if 0 < hop.record.attends_to < prompt_tokens]
                if narrow:
                    raise _prompt_too_long(prompt_tokens, min(narrow, key=lambda record: record.attends_to)) from None
            raise

    async def _plan(self, kv_tokens: int, before: Plan | None, prompt_tokens: int) -> Plan:
        if before is not None:
            request = dataclasses.replace(before.request, prompt_tokens=prompt_tokens)
            before = dataclasses.replace(before, request=request)
            # a repair does not wait for a look-up as long as the records of the last one are enough
            with contextlib.suppress(NotCovered):
                return await self._choose(self._known_records(), kv_tokens, before, prompt_tokens)
        return await self._choose(await self._current_records(), kv_tokens, before, prompt_tokens)

    async def has_route_without(self, record: PeerRecord, kv_tokens: int, before: Plan) -> bool:
        """Whether another route could replace `before` if this peer were left out."""
        with contextlib.suppress(NotCovered):
            await self._choose(self._known_records(), kv_tokens, before, 0, without=record.peer_id)
            return True
        return False

    async def _choose(
        self,
        records: Sequence[PeerRecord],
        kv_tokens: int,
        before: Plan | None,
        prompt_tokens: int,
        *,
        without: str = "",
    ) -> Plan:
        banned = self._peer_health.remaining((record.peer_id, record.incarnation) for record in records)
        if without:
            banned[without] = self._config.look_again_s
        links = await self._connections.measure(r for r in records if r.state != LEAVING and r.peer_id not in banned)
        records = [self._with_lost_links(record) for record in records]
        if before is None:
            request = self._request(kv_tokens, prompt_tokens)
            return choose_route(records, request, links=links, now=self._wall(), banned=banned, explain=False)
        return replan(before, now=self._wall(), banned=banned, records=records, links=links)

    async def _try_banned_peers(self) -> bool:
        """No route is left without the banned peers: end the bans of those that may be tried and answer a ping.

        Returns whether a ban ended. One trial serves all sessions that wait for it.
        """
        if self._trial is None or self._trial.done():
            self._trial = asyncio.create_task(self._end_bans_of_reachable())
        trial = self._trial
        await asyncio.wait([trial])
        if trial.cancelled():
            raise DirectoryError("this client was closed")
        return trial.result()

    async def _end_bans_of_reachable(self) -> bool:
        candidates = [r for r in self._records if self._peer_health.may_be_tried(r.peer_id, r.incarnation)]
        links = await self._connections.measure(candidates)
        reachable = [r for r in candidates if r.peer_id in links and links[r.peer_id].reachable]
        for record in reachable:
            self._peer_health.end_ban(record.peer_id, record.incarnation)
        return bool(reachable)

    def record_failure(self, record: PeerRecord, error: SwarmError, *, began: float) -> None:
        """Leave the peer out of routes: a pause if it is busy or leaving, else a ban; nothing for UnknownSession.

        `began` is when the circuit that failed was opened, on the clock.
        """
        peer, incarnation = record.peer_id, record.incarnation
        if isinstance(error, UnknownSession):
            return
        if isinstance(error, PeerBusy):
            self._peer_health.pause(peer, incarnation, max(error.retry_after, self._config.look_again_s))
        elif isinstance(error, PeerLeaving):
            self.exclude(record)
        else:
            silent = isinstance(error, (PeerLost, PeerStalled, PeerUnreachable))
            self._peer_health.record_failure(peer, incarnation, began=began, silent=silent)

    def exclude(self, record: PeerRecord) -> None:
        """Leave out a peer that has announced that it leaves."""
        self._peer_health.pause(record.peer_id, record.incarnation, self._config.ban_limit_s)

    def record_lost_link(self, pair: tuple[str, str]) -> None:
        """The first peer cannot send to the second: for a minute, this client relays between the two."""
        now = self._clock()
        self._lost_links = {other: until for other, until in self._lost_links.items() if until > now}
        self._lost_links[pair] = now + _LOST_LINK_S

    def record_success(self, record: PeerRecord) -> None:
        """The peer computed its part of a step."""
        self._peer_health.record_success(record.peer_id, record.incarnation)

    async def close(self) -> None:
        """Cancel the look-up and the trial under way."""
        tasks = [task for task in (self._lookup, self._trial) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _known_records(self) -> list[PeerRecord]:
        """The records of the last look-up that have not expired. Starts the next look-up."""
        if self._lookup is not None and self._lookup.done():
            lookup, self._lookup = self._lookup, None
            if not lookup.cancelled() and lookup.exception() is None:
                self._records = lookup.result()
        if self._lookup is None:
            self._lookup = asyncio.create_task(self._find_peers())
        self._records = [record for record in self._records if record.expires_at > self._wall()]
        return self._records

    async def _current_records(self) -> list[PeerRecord]:
        """The records that are announced now, or those of the last look-up if this one takes too long or fails.

        Raises DirectoryError, PeerError if the look-up fails and no records are known.
        """
        known, lookup = self._known_records(), self._lookup
        assert lookup is not None
        await asyncio.wait([lookup], timeout=self._config.look_up_timeout_s if known else None)
        if lookup.cancelled():
            raise DirectoryError("this client was closed")
        if lookup.done() and lookup.exception() is None:
            self._records = lookup.result()
        elif lookup.done() and not (known and isinstance(lookup.exception(), (DirectoryError, PeerError))):
            lookup.result()  # raises its exception
        if lookup.done() and self._lookup is lookup:
            self._lookup = None
        return self._records

    async def _find_peers(self) -> list[PeerRecord]:
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

    def _with_lost_links(self, record: PeerRecord) -> PeerRecord:
        now, pairs = self._clock(), self._lost_links.items()
        lost = {to: UNREACHABLE for (peer, to), until in pairs if peer == record.peer_id and until > now}
        return dataclasses.replace(record, links={**record.links, **lost}) if lost else record


def _prompt_too_long(prompt_tokens: int, record: PeerRecord) -> ContextExceeded:
    """The error for a prompt that is longer than what `record`'s peer attends to."""
    return ContextExceeded(
        f"the prompt has {prompt_tokens} tokens and peer {record.name or record.peer_id[:8]} attends to "
        f"{record.attends_to}: shorten it, or wait for peers that take more"
    )

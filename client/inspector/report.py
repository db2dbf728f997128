"""The route inspector's data: peers, the links to them, the chosen route and the reasons.

`inspect_swarm` is pure; only `measure_links` uses the network. `picture.py` draws an `Inspection` for people, and
`Inspection.to_plain()` is for programs.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarm.discovery.records import LEAVING, ModelRecord, PeerRecord
from swarm.errors import NotCovered, PeerUnreachable, SwarmError
from swarm.model.memory_footprint import kv_bytes, layer_bytes
from swarm.model.spans import LayerRange, coverage, gaps
from swarm.routing.choose import choose_route, filter_records
from swarm.routing.plan import Alternative, LeftOut, Route, RouteRequest
from swarm.transport.channel import Channel
from swarm.transport.link import LinkQuality, measure_link
from swarm.wire.messages import Hello

SCHEMA = 1
_MAX_CONCURRENT = 16
_PAYLOAD_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class MeasuredLink(LinkQuality):
    """A link from this machine. `problem` says why the peer cannot be reached; empty where it can."""

    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class PeerView:
    """One peer, its link, and its place `hop` on the chosen route, from 0. `left_out` says why it cannot be used."""

    record: PeerRecord
    link: MeasuredLink | None
    age_s: float
    hop: int | None = None
    left_out: str = ""

    def to_plain(self) -> dict[str, Any]:
        plain = self.record.to_plain()
        del plain["model"], plain["links"]
        reachable = self.link is not None and self.link.reachable
        return plain | {
            "age_s": self.age_s,
            "rtt_s": self.link.rtt_s if self.link and reachable else None,
            "bytes_per_s": self.link.bytes_per_s or None if self.link and reachable else None,
            "unreachable": self.link.problem if self.link else "",
            "hop": self.hop,
            "left_out": self.left_out,
        }


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The state of a model's swarm at Unix time `at`.

    `coverage` counts for each layer the peers that a route could use there. Where there is no route, `missing` has the
    layers that prevent one, and `problem` the full reason.
    """

    name: str
    digest: str
    at: float
    request: RouteRequest
    coverage: tuple[int, ...]
    missing: tuple[LayerRange, ...]
    peers: tuple[PeerView, ...]
    route: Route | None
    alternatives: tuple[Alternative, ...]
    problem: str

    @property
    def covered(self) -> bool:
        return self.route is not None

    def name_of(self, peer_id: str) -> str:
        """A peer's name, with the start of its id where another peer has the same name."""
        names = Counter(view.record.name for view in self.peers)
        record = next((view.record for view in self.peers if view.record.peer_id == peer_id), None)
        if record is None or not record.name:
            return peer_id[:8]
        return record.name if names[record.name] == 1 else f"{record.name} {peer_id[:4]}"

    def to_plain(self) -> dict[str, Any]:
        """JSON types only. Under one `schema` number fields may be added, never changed.

        ::

            {"schema": 1, "model": {"name", "digest", "layers"}, "at",
             "request": {"tokens", "kv_tokens", "objective", "numerics"},
             "covered": bool, "problem": "", "missing": ["12:20"], "coverage": [1, 2, ...],
             "peers": [{"peer_id", "name", "incarnation", "span": "0:11", "entries": [4], "holds": ["0:11"],
                        "addresses": ["10.0.0.7:31337"], "device", "numerics": "f32/f32", "layer_time_s",
                        "prefill_time_s", "queue", "sessions", "kv_free", "kv_total", "state", "software",
                        "announced_at", "expires_at", "age_s", "rtt_s", "bytes_per_s", "unreachable",
                        "work": {"engine": "paged", "batch", "tokens_per_s", "blocks", "blocks_used"},
                        "hop": 0, "left_out": ""}],
             "route": {"numerics", "cost_s", "step_s", "slowest_s", "return_s",
                       "hops": [{"peer_id", "name", "span", "relayed", "latency_s", "transfer_s", "queue_s",
                                 "compute_s", "entry_s", "total_s"}]},
             "alternatives": [{"kind", "peer_id", "cost_s", "reason", "route"}]}

        Times in seconds; `at` and `..._at` are Unix times. `route`, `hop`, `work`, `rtt_s`, `bytes_per_s`, `cost_s`
        and `numerics` may be null; `unreachable` and `left_out` are the reason, or "".
        """
        return {
            "schema": SCHEMA,
            "model": {"name": self.name, "digest": self.digest, "layers": self.request.layers},
            "at": self.at,
            "request": {
                "tokens": self.request.tokens,
                "kv_tokens": self.request.kv_tokens,
                "objective": self.request.objective,
                "numerics": str(self.request.numerics) if self.request.numerics else None,
            },
            "covered": self.covered,
            "problem": self.problem,
            "missing": [str(span) for span in self.missing],
            "coverage": list(self.coverage),
            "peers": [view.to_plain() for view in self.peers],
            "route": _route_to_plain(self.route),
            "alternatives": [
                {
                    "kind": other.kind,
                    "peer_id": other.peer_id,
                    "cost_s": other.cost_s,
                    "reason": other.reason,
                    "route": _route_to_plain(other.route),
                }
                for other in self.alternatives
            ],
        }


def _route_to_plain(route: Route | None) -> dict[str, Any] | None:
    if route is None:
        return None
    return {
        "numerics": str(route.numerics) if route.numerics else None,
        "cost_s": route.cost_s,
        "step_s": route.step_s,
        "slowest_s": route.slowest_s,
        "return_s": route.return_s,
        "hops": [
            {
                "peer_id": hop.record.peer_id,
                "name": hop.record.name,
                "span": str(hop.span),
                "relayed": hop.relayed,
                "latency_s": hop.cost.latency_s,
                "transfer_s": hop.cost.transfer_s,
                "queue_s": hop.cost.queue_s,
                "compute_s": hop.cost.compute_s,
                "entry_s": hop.cost.entry_s,
                "total_s": hop.cost.total_s,
            }
            for hop in route.hops
        ],
    }


def inspect_swarm(
    name: str,
    digest: str,
    records: Sequence[PeerRecord],
    request: RouteRequest,
    *,
    links: Mapping[str, MeasuredLink],
    now: float,
) -> Inspection:
    """Plan what a client with this `request` would do at Unix time `now`, and why. Never raises NotCovered."""
    route: Route | None = None
    alternatives: tuple[Alternative, ...] = ()
    missing: tuple[LayerRange, ...] = ()
    problem = ""
    usable, left_out = filter_records(records, request, links=links, now=now, banned={})
    try:
        plan = choose_route(records, request, links=links, now=now)
    except NotCovered as error:
        missing = tuple(LayerRange(first, last) for first, last in error.missing)
        problem = str(error)
    else:
        route, alternatives, left_out = plan.route, plan.alternatives, list(plan.left_out)
    views = (_view_peer(record, left_out, route, links, now) for record in records)
    return Inspection(
        name=name,
        digest=digest,
        at=now,
        request=request,
        coverage=tuple(coverage((record.span for record in usable), request.layers)),
        missing=missing,
        peers=tuple(sorted(views, key=lambda view: (view.record.span, view.record.name, view.record.peer_id))),
        route=route,
        alternatives=alternatives,
        problem=problem,
    )


def _view_peer(
    record: PeerRecord,
    left_out: Iterable[LeftOut],
    route: Route | None,
    links: Mapping[str, MeasuredLink],
    now: float,
) -> PeerView:
    link = links.get(record.peer_id)
    reason = next((out.reason for out in left_out if out.record == record), "")
    on_route = [i for i, hop in enumerate(route.hops) if hop.record == record] if route else []
    return PeerView(
        record=record,
        link=link,
        age_s=max(0.0, now - record.announced_at),
        hop=on_route[0] if on_route else None,
        left_out=reason,
    )


Probe = Callable[[PeerRecord, Hello, float], Awaitable[LinkQuality]]


async def measure_peer(record: PeerRecord, hello: Hello, timeout: float) -> LinkQuality:
    """Connect to a peer and measure the link. Raises SwarmError, also where the peer restarted since its `record`."""
    channel = await Channel.open(record.pinned_addresses, hello, timeout=timeout)
    try:
        if channel.hello.incarnation != record.incarnation:
            raise PeerUnreachable("it was restarted since it announced itself", peer=record.peer_id)
        return await measure_link(channel, timeout=timeout, payload=_PAYLOAD_BYTES)
    finally:
        await channel.close()


async def measure_links(
    records: Iterable[PeerRecord], hello: Hello, *, timeout: float = 3.0, probe: Probe = measure_peer
) -> dict[str, MeasuredLink]:
    """Measure the links to all peers that have an address. Returns them by peer id, with the reason where one failed.

    Takes at most a few times `timeout` seconds for each 16 peers. Never raises SwarmError.
    """
    slots = asyncio.Semaphore(_MAX_CONCURRENT)
    links: dict[str, MeasuredLink] = {}

    async def measure_into_links(record: PeerRecord) -> None:
        async with slots:
            try:
                async with asyncio.timeout(3 * timeout):
                    quality = await probe(record, hello, timeout)
            except TimeoutError:
                problem = f"no answer within {3 * timeout:g} s"
                links[record.peer_id] = MeasuredLink(rtt_s=math.inf, problem=problem)
            except SwarmError as error:
                links[record.peer_id] = MeasuredLink(rtt_s=math.inf, problem=str(error))
            else:
                links[record.peer_id] = MeasuredLink(rtt_s=quality.rtt_s, bytes_per_s=quality.bytes_per_s)

    async with asyncio.TaskGroup() as group:
        for record in records:
            if record.addresses:
                group.create_task(measure_into_links(record))
    return links


@dataclass(frozen=True, kw_only=True)
class ModelView:
    """A served model, as its peers describe it. `missing` layers have no peer, or only leaving ones."""

    model: ModelRecord
    peers: int
    missing: tuple[LayerRange, ...]

    @property
    def layers_covered(self) -> int:
        return self.model.layers - sum(map(len, self.missing))

    @property
    def layer_memory(self) -> int:
        """Bytes of memory of an average layer on a peer in accuracy mode."""
        return layer_bytes(self.model.layer_bytes, self.model.weights, "f32")

    @property
    def kv_token_memory(self) -> int:
        """Bytes that one cached token adds to a layer."""
        return kv_bytes(self.model.kv_layer_elements, "f32")

    def to_plain(self) -> dict[str, Any]:
        """JSON types only. Per layer, on average: `layer_bytes` on disk, `kv_layer_elements` numbers of KV cache for
        each token, and the bytes of both in the memory of a peer in accuracy mode."""
        return {
            "name": self.model.name,
            "digest": self.model.digest,
            "source": self.model.source,
            "licence": self.model.licence,
            "weights": self.model.weights,
            "layers": self.model.layers,
            "layers_covered": self.layers_covered,
            "missing": [str(span) for span in self.missing],
            "peers": self.peers,
            "layer_bytes": self.model.layer_bytes,
            "kv_layer_elements": self.model.kv_layer_elements,
            "layer_memory_bytes": self.layer_memory,
            "kv_token_memory_bytes": self.kv_token_memory,
        }


def view_model(model: ModelRecord, records: Iterable[PeerRecord]) -> ModelView:
    serving = [record for record in records if record.state != LEAVING and record.span.last <= model.layers]
    missing = gaps((record.span for record in serving), model.layers)
    return ModelView(model=model, peers=len(serving), missing=tuple(missing))

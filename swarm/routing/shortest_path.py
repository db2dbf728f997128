"""The graph over layer boundaries, and the shortest paths through it. Pure; seconds.

A node is (boundary, the peer that computed up to it). An edge enters a peer at one of its boundaries, which costs the
link to it (`LinkCost`), and leaves it at a later one, which costs the computing in between. Boundaries only ascend, so
one sweep over them finds all paths.

A peer may appear in a path once. Spans are contiguous, so a path can only return to a peer that it left before the
end of its span. Each path carries the set of those peers (`Path.left_early`), which is mostly empty.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from swarm.discovery.records import PeerRecord
from swarm.model.spans import LayerRange
from swarm.routing.plan import HopCost, HopPlan, Route, RouteRequest
from swarm.transport.link import LinkQuality

_TOKEN_ID_BYTES = 4
_MAX_PATHS = 8
"""Undominated paths kept at a node. Only a swarm built for the purpose has more, and it must not cost the client
unbounded time: the route may then be a little dearer than the best, but it is still found."""

PreferHop = Callable[[PeerRecord, LayerRange], bool]


def boundaries(record: PeerRecord) -> list[int]:
    """The layer boundaries at which a route may enter or leave a peer, ascending."""
    return sorted({record.span.first, *record.entries, record.span.last})


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Seconds to send a step's data one way between two machines."""

    latency_s: float
    transfer_s: float
    relayed: bool = False


class RouteCosts:
    """Costs of links and of computing, from records and measured links.

    The cost of the link from one peer to the next comes from the first of these that is known: the sender's own
    measurement; the receiver's, taken as symmetric; else half of the larger round trip between the client and either
    peer. The true distance lies between the difference and the sum of those two, and two peers near the client are
    near each other.
    """

    def __init__(self, request: RouteRequest, links: Mapping[str, LinkQuality]) -> None:
        self.request = request
        self._links = links
        self._assumed_link = LinkQuality(rtt_s=request.assumed_rtt_s)
        self._link_costs: dict[tuple[str, str], LinkCost] = {}

    def link_cost(self, sender: PeerRecord | None, record: PeerRecord) -> LinkCost:
        """Cost from the client (None: token ids) or from the peer `sender` (hidden states) to `record`."""
        key = (sender.peer_id if sender else "", record.peer_id)
        cost = self._link_costs.get(key)
        if cost is None:
            cost = self._link_costs[key] = self._between(sender, record) if sender else self._from_client(record)
        return cost

    def return_s(self, record: PeerRecord) -> float:
        """Seconds of the answer from the last hop to the client. Its few bytes are not counted."""
        return self._client_link(record).rtt_s / 2

    def device_costs(self, record: PeerRecord, span: LayerRange) -> tuple[float, float, float]:
        """(compute, queue, entry) seconds of one step over `span`.

        Queued steps are assumed to be decode steps over the peer's whole span.
        """
        tokens = self.request.tokens
        # Weights are read once a step, so a step of several tokens is never faster than a step of one.
        layer_s = record.layer_time_s if tokens == 1 else max(record.layer_time_s, record.prefill_time_s * tokens)
        inner_ends = (span.first != record.span.first) + (span.last != record.span.last)
        return (
            len(span) * layer_s,
            record.queue * len(record.span) * record.layer_time_s,
            inner_ends * self.request.entry_penalty_s,
        )

    def route(self, hops: Sequence[tuple[PeerRecord, LayerRange]]) -> Route:
        """The route over `hops`, with its costs."""
        planned = []
        for i, (record, span) in enumerate(hops):
            link = self.link_cost(hops[i - 1][0] if i else None, record)
            compute, queue, entry = self.device_costs(record, span)
            cost = HopCost(
                latency_s=link.latency_s, transfer_s=link.transfer_s, compute_s=compute, queue_s=queue, entry_s=entry
            )
            planned.append(HopPlan(record=record, span=span, relayed=link.relayed, cost=cost))
        numerics = {hop.record.numerics for hop in planned}
        return_s = self.return_s(hops[-1][0])
        step_s = sum(hop.cost.total_s for hop in planned) + return_s
        slowest_s = max(hop.cost.stage_s for hop in planned)
        return Route(
            hops=tuple(planned),
            return_s=return_s,
            cost_s=slowest_s if self.request.objective == "throughput" else step_s,
            numerics=numerics.pop() if len(numerics) == 1 else None,
        )

    def _client_link(self, record: PeerRecord) -> LinkQuality:
        return self._links.get(record.peer_id, self._assumed_link)

    def _from_client(self, record: PeerRecord) -> LinkCost:
        link = self._client_link(record)
        return LinkCost(link.rtt_s / 2, self._transfer_s(_TOKEN_ID_BYTES, link))

    def _between(self, sender: PeerRecord, record: PeerRecord) -> LinkCost:
        size = self.request.hidden_bytes
        forward, backward = sender.links.get(record.peer_id), record.links.get(sender.peer_id)
        sender_link, record_link = self._client_link(sender), self._client_link(record)
        if forward is not None and not forward.reachable:
            transfer = self._transfer_s(size, sender_link) + self._transfer_s(size, record_link)
            return LinkCost((sender_link.rtt_s + record_link.rtt_s) / 2, transfer, relayed=True)
        # Unreachable `backward` says nothing about `forward`: a peer behind a NAT connects but cannot be connected to.
        link = forward or (backward if backward is not None and backward.reachable else None)
        if link is None:
            rtt_s = max(sender_link.rtt_s, record_link.rtt_s)
            return LinkCost(rtt_s / 2, size * self.request.tokens / self.request.assumed_bytes_per_s)
        return LinkCost(link.rtt_s / 2, self._transfer_s(size, link))

    def _transfer_s(self, token_bytes: int, link: LinkQuality) -> float:
        return token_bytes * self.request.tokens / (link.bytes_per_s or self.request.assumed_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Path:
    """Hops from layer 0 up to a node.

    `cost` is what the sweep minimises; `preferred` counts the preferred hops; `left_early` are the ids of the peers
    that the path must not enter again.
    """

    cost: float = 0.0
    preferred: int = 0
    left_early: frozenset[str] = frozenset()
    hops: tuple[tuple[PeerRecord, LayerRange], ...] = ()

    def sort_key(self) -> tuple[float, int, list[tuple[str, int, int]]]:
        """A total order: equal costs are ordered by hops and peer ids, never by the order of the input."""
        return self.cost, len(self.hops), [(r.peer_id, s.first, s.last) for r, s in self.hops]


def best_path(
    records: Iterable[PeerRecord],
    costs: RouteCosts,
    *,
    prefer: PreferHop | None = None,
    min_preferred: int = 0,
    margin: float = 0.0,
) -> Path | None:
    """The best path by the request's objective; None where no path leads from 0 to the last layer.

    Of the paths that cost at most a share `margin` more than the cheapest, it is the one with the most preferred hops.
    Only paths with at least `min_preferred` of them count. For throughput, it is the path with the shortest step among
    those whose slowest stage is fastest.
    """
    peers = list(records)
    stage_limit, within_limit = math.inf, []
    if costs.request.objective == "throughput":
        swept = _Sweep(costs, prefer, by_slowest_stage=True, stage_limit=stage_limit).run(peers)
        stage_limit = min((path.cost for path in swept if path.preferred >= min_preferred), default=0.0) * (1 + margin)
        within_limit = [path for path in swept if path.cost <= stage_limit]
    # The second sweep keeps _MAX_PATHS at a node and may drop the only paths within the limit: then take the first's.
    swept = _Sweep(costs, prefer, by_slowest_stage=False, stage_limit=stage_limit).run(peers) or within_limit
    paths = [path for path in swept if path.preferred >= min_preferred]
    if not paths:
        return None
    max_cost = min(path.cost for path in paths) * (1 + margin) if stage_limit == math.inf else math.inf
    allowed = (path for path in paths if path.cost <= max_cost)
    return min(allowed, key=lambda path: (-path.preferred if margin else 0, *path.sort_key()))


@dataclass(frozen=True, slots=True)
class _Sweep:
    """One pass over the boundaries that minimises the sum of costs, or the slowest stage.

    No stage of a path is slower than `stage_limit`.
    """

    costs: RouteCosts
    prefer: PreferHop | None
    by_slowest_stage: bool
    stage_limit: float

    def run(self, peers: Sequence[PeerRecord]) -> list[Path]:
        """The undominated paths over all layers."""
        layers = self.costs.request.layers
        span_ends = {record.peer_id: record.span.last for record in peers}
        entering: dict[int, list[PeerRecord]] = {}
        for record in peers:
            for boundary in boundaries(record)[:-1]:
                entering.setdefault(boundary, []).append(record)
        arrived: dict[int, dict[str, list[Path]]] = {0: {"": [Path()]}}
        for boundary in sorted(entering):
            nodes = arrived.pop(boundary, {})
            paths = [path for node in nodes.values() for path in _undominated(node, boundary, span_ends)]
            for record in entering[boundary]:
                entered = _undominated(self._enter(paths, record), boundary, span_ends)
                for end in boundaries(record):
                    if end > boundary:
                        node = arrived.setdefault(end, {}).setdefault(record.peer_id, [])
                        node.extend(self._leave(entered, record, LayerRange(boundary, end)))
        complete = [path for node in arrived.get(layers, {}).values() for path in node]
        if not self.by_slowest_stage:
            complete = [replace(path, cost=path.cost + self.costs.return_s(path.hops[-1][0])) for path in complete]
        return _undominated(complete, layers, span_ends)

    def _enter(self, paths: list[Path], record: PeerRecord) -> list[Path]:
        """The paths that may enter `record`, with the cost of the link to it."""
        factor = _spread_factor(self.costs.request, record)
        entered = []
        for path in paths:
            link = self.costs.link_cost(path.hops[-1][0] if path.hops else None, record)
            stage_s = link.transfer_s * factor
            if record.peer_id not in path.left_early and stage_s <= self.stage_limit:
                cost = self._add(path.cost, stage_s) + (0.0 if self.by_slowest_stage else link.latency_s * factor)
                entered.append(Path(cost, path.preferred, path.left_early, path.hops))
        return entered

    def _leave(self, entered: list[Path], record: PeerRecord, span: LayerRange) -> list[Path]:
        """The paths extended by the hop (`record`, `span`)."""
        stage_s = sum(self.costs.device_costs(record, span)) * _spread_factor(self.costs.request, record)
        if stage_s > self.stage_limit:
            return []
        is_preferred = self.prefer is not None and self.prefer(record, span)
        left_early = frozenset((record.peer_id,)) if span.last < record.span.last else frozenset()
        return [
            Path(
                cost=self._add(path.cost, stage_s),
                preferred=path.preferred + is_preferred,
                left_early=path.left_early | left_early,
                hops=(*path.hops, (record, span)),
            )
            for path in entered
        ]

    def _add(self, cost: float, stage_s: float) -> float:
        return max(cost, stage_s) if self.by_slowest_stage else cost + stage_s


def _undominated(paths: list[Path], boundary: int, span_ends: Mapping[str, int]) -> list[Path]:
    """The paths to one node that no other path matches or beats in cost, preferred hops and `left_early` together."""
    rest = [_without_passed(path, boundary, span_ends) if path.left_early else path for path in paths]
    undominated: list[Path] = []
    while rest and len(undominated) < _MAX_PATHS:
        # The cheapest path nearly always dominates all others, so this is one pass without sorting.
        min_cost = min(path.cost for path in rest)
        best = min((path for path in rest if path.cost == min_cost), key=Path.sort_key)
        undominated.append(best)
        rest = [path for path in rest if path.preferred > best.preferred or not path.left_early >= best.left_early]
    return undominated


def _without_passed(path: Path, boundary: int, span_ends: Mapping[str, int]) -> Path:
    """The path without those peers in `left_early` whose spans end at or before `boundary`."""
    left_early = frozenset(peer_id for peer_id in path.left_early if span_ends[peer_id] > boundary)
    return path if left_early == path.left_early else Path(path.cost, path.preferred, left_early, path.hops)


def _spread_factor(request: RouteRequest, record: PeerRecord) -> float:
    """This client's cost factor for a peer, 1 ... 1 + spread: the same on every machine and in every run."""
    if not request.seed:
        return 1.0
    raw = hashlib.blake2b(f"{request.seed}\0{record.peer_id}".encode(), digest_size=8).digest()
    return 1.0 + request.spread * int.from_bytes(raw) / 2**64

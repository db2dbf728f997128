"""The graph over layer boundaries, and the shortest paths through it. Pure; seconds.

A node is (boundary, the peer that computed up to there). A path enters a peer at one of its stops, which
costs the way there (`Leg`), and leaves it at a later one, which costs the computing in between. Boundaries
only ascend, so one sweep over them settles everything.

A peer runs one stretch of a session at most. Spans are contiguous, so a path can only meet a peer again
that it left *early*, inside its span: paths carry the set of those (`Path.open`), mostly empty.
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
_PATHS_KEPT = 8
"""Undominated paths kept for a node. More of them takes a swarm built for it, which must not cost us our time:
there the route may miss the best by a little, never its existence."""

Prefer = Callable[[PeerRecord, LayerRange], bool]


def stops(record: PeerRecord) -> list[int]:
    """The boundaries at which a route may enter or leave a peer, ascending."""
    return sorted({record.span.first, *record.entries, record.span.last})


@dataclass(frozen=True, slots=True)
class Leg:
    """A one-way trip of a step's data between two machines."""

    latency_s: float
    transfer_s: float
    relayed: bool = False


class Ways:
    """What it costs to move and to compute, from records and measured links.

    A peer's own measurement of the way to the next counts first. Without one: the next peer's, taken as
    symmetric; else the larger of both round trips to the client, halved. The distance lies between their
    difference and their sum, and peers near the client are then near each other.
    """

    def __init__(self, request: RouteRequest, links: Mapping[str, LinkQuality]) -> None:
        self.request = request
        self._links = links
        self._unknown = LinkQuality(rtt_s=request.assumed_rtt_s)
        self._legs: dict[tuple[str, str], Leg] = {}

    def leg(self, before: PeerRecord | None, record: PeerRecord) -> Leg:
        """From the client (None: token ids) or from the peer `before` (hidden states) to `record`."""
        key = (before.peer_id if before else "", record.peer_id)
        found = self._legs.get(key)
        if found is None:
            found = self._legs[key] = self._between(before, record) if before else self._first(record)
        return found

    def back(self, record: PeerRecord) -> float:
        """The answer's way from the last hop to the client; its few bytes count as nothing."""
        return self._client(record).rtt_s / 2

    def busy(self, record: PeerRecord, span: LayerRange) -> tuple[float, float, float]:
        """(compute, queue, entry) seconds of one step over `span`.

        Steps that wait are taken to be decode steps over the peer's whole span.
        """
        tokens = self.request.tokens
        # weights are read once a step, so no step of several tokens is faster than that of one
        layer_s = record.layer_time_s if tokens == 1 else max(record.layer_time_s, record.prefill_time_s * tokens)
        inner_ends = (span.first != record.span.first) + (span.last != record.span.last)
        return (
            len(span) * layer_s,
            record.queue * len(record.span) * record.layer_time_s,
            inner_ends * self.request.entry_penalty_s,
        )

    def route(self, steps: Sequence[tuple[PeerRecord, LayerRange]]) -> Route:
        """Price the hops as they are."""
        hops = []
        for i, (record, span) in enumerate(steps):
            leg = self.leg(steps[i - 1][0] if i else None, record)
            compute, queue, entry = self.busy(record, span)
            cost = HopCost(
                latency_s=leg.latency_s, transfer_s=leg.transfer_s, compute_s=compute, queue_s=queue, entry_s=entry
            )
            hops.append(HopPlan(record=record, span=span, relayed=leg.relayed, cost=cost))
        numerics = {hop.record.numerics for hop in hops}
        back = self.back(steps[-1][0])
        step_s = sum(hop.cost.total for hop in hops) + back
        slowest_s = max(hop.cost.stage_s for hop in hops)
        return Route(
            hops=tuple(hops),
            return_s=back,
            cost_s=slowest_s if self.request.objective == "throughput" else step_s,
            numerics=numerics.pop() if len(numerics) == 1 else None,
        )

    def _client(self, record: PeerRecord) -> LinkQuality:
        return self._links.get(record.peer_id, self._unknown)

    def _first(self, record: PeerRecord) -> Leg:
        link = self._client(record)
        return Leg(link.rtt_s / 2, self._seconds(_TOKEN_ID_BYTES, link))

    def _between(self, before: PeerRecord, record: PeerRecord) -> Leg:
        size = self.request.hidden_bytes
        there, back = before.links.get(record.peer_id), record.links.get(before.peer_id)
        near, far = self._client(before), self._client(record)
        if there is not None and not there.reachable:
            transfer = self._seconds(size, near) + self._seconds(size, far)
            return Leg((near.rtt_s + far.rtt_s) / 2, transfer, relayed=True)
        # `back` unreachable says nothing of the way there: peers behind a NAT can call, not be called
        link = there or (back if back is not None and back.reachable else None)
        if link is None:
            return Leg(max(near.rtt_s, far.rtt_s) / 2, size * self.request.tokens / self.request.assumed_bytes_per_s)
        return Leg(link.rtt_s / 2, self._seconds(size, link))

    def _seconds(self, token_bytes: int, link: LinkQuality) -> float:
        return token_bytes * self.request.tokens / (link.bytes_per_s or self.request.assumed_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Path:
    """The way so far. `weight` is what is minimised, `merit` how many of its hops are preferred."""

    weight: float = 0.0
    merit: int = 0
    open: frozenset[str] = frozenset()
    steps: tuple[tuple[PeerRecord, LayerRange], ...] = ()

    def order(self) -> tuple[float, int, list[tuple[str, int, int]]]:
        """Total: equal weights are told apart by hops and names, never by the order of the input."""
        return self.weight, len(self.steps), [(r.peer_id, s.first, s.last) for r, s in self.steps]


def best_path(
    records: Iterable[PeerRecord], ways: Ways, *, prefer: Prefer | None = None, needs: int = 0, margin: float = 0.0
) -> Path | None:
    """The best path by the request's objective; None where no path leads from 0 to the last layer.

    Among paths within `margin` of the best, the one with most hops that `prefer` likes; only those with at
    least `needs` of them count. For throughput, of the routes whose slowest stage is the least slow the
    one with the shortest step.
    """
    peers = list(records)
    limit, staged = math.inf, []
    if ways.request.objective == "throughput":
        swept = _Sweep(ways, prefer, slowest=True, limit=limit).run(peers)
        limit = min((path.weight for path in swept if path.merit >= needs), default=0.0) * (1 + margin)
        staged = [path for path in swept if path.weight <= limit]
    # the paths that a sweep drops for want of room may be the only ones within the limit
    swept = _Sweep(ways, prefer, slowest=False, limit=limit).run(peers) or staged
    paths = [path for path in swept if path.merit >= needs]
    if not paths:
        return None
    within = min(path.weight for path in paths) * (1 + margin) if limit == math.inf else math.inf
    allowed = (path for path in paths if path.weight <= within)
    return min(allowed, key=lambda path: (-path.merit if margin else 0, *path.order()))


@dataclass(frozen=True, slots=True)
class _Sweep:
    """One pass over the boundaries, by the sum of costs or by the `slowest` stage.

    No stage on the way is slower than `limit`.
    """

    ways: Ways
    prefer: Prefer | None
    slowest: bool
    limit: float

    def run(self, peers: Sequence[PeerRecord]) -> list[Path]:
        """Undominated paths over all layers."""
        layers = self.ways.request.layers
        last = {record.peer_id: record.span.last for record in peers}
        entering: dict[int, list[PeerRecord]] = {}
        for record in peers:
            for stop in stops(record)[:-1]:
                entering.setdefault(stop, []).append(record)
        arrived: dict[int, dict[str, list[Path]]] = {0: {"": [Path()]}}
        for boundary in sorted(entering):
            nodes = arrived.pop(boundary, {})
            paths = [path for node in nodes.values() for path in _undominated(node, boundary, last)]
            for record in entering[boundary]:
                entered = _undominated(self._enter(paths, record), boundary, last)
                for stop in stops(record):
                    if stop > boundary:
                        node = arrived.setdefault(stop, {}).setdefault(record.peer_id, [])
                        node.extend(self._leave(entered, record, LayerRange(boundary, stop)))
        ends = [path for node in arrived.get(layers, {}).values() for path in node]
        if not self.slowest:
            ends = [replace(path, weight=path.weight + self.ways.back(path.steps[-1][0])) for path in ends]
        return _undominated(ends, layers, last)

    def _enter(self, paths: list[Path], record: PeerRecord) -> list[Path]:
        """The same paths once their data is at `record`."""
        stretch = _stretch(self.ways.request, record)
        entered = []
        for path in paths:
            leg = self.ways.leg(path.steps[-1][0] if path.steps else None, record)
            stage = leg.transfer_s * stretch
            if record.peer_id not in path.open and stage <= self.limit:
                weight = self._add(path.weight, stage) + (0.0 if self.slowest else leg.latency_s * stretch)
                entered.append(Path(weight, path.merit, path.open, path.steps))
        return entered

    def _leave(self, entered: list[Path], record: PeerRecord, span: LayerRange) -> list[Path]:
        """The same paths once `record` computed `span`."""
        stage = sum(self.ways.busy(record, span)) * _stretch(self.ways.request, record)
        if stage > self.limit:
            return []
        liked = self.prefer is not None and self.prefer(record, span)
        left_early = frozenset((record.peer_id,)) if span.last < record.span.last else frozenset()
        return [
            Path(
                weight=self._add(path.weight, stage),
                merit=path.merit + liked,
                open=path.open | left_early,
                steps=(*path.steps, (record, span)),
            )
            for path in entered
        ]

    def _add(self, weight: float, stage: float) -> float:
        return max(weight, stage) if self.slowest else weight + stage


def _undominated(paths: list[Path], boundary: int, last: Mapping[str, int]) -> list[Path]:
    """Of paths to one node, those that no other beats in weight, merit and freedom together."""
    rest = [_closed(path, boundary, last) if path.open else path for path in paths]
    kept: list[Path] = []
    while rest and len(kept) < _PATHS_KEPT:
        # nearly always the first beats all others, so this is one pass and no sorting
        least = min(path.weight for path in rest)
        best = min((path for path in rest if path.weight == least), key=Path.order)
        kept.append(best)
        rest = [path for path in rest if path.merit > best.merit or not path.open >= best.open]
    return kept


def _closed(path: Path, boundary: int, last: Mapping[str, int]) -> Path:
    """Without those who cannot be met again from `boundary` on."""
    still = frozenset(name for name in path.open if last[name] > boundary)
    return path if still == path.open else Path(path.weight, path.merit, still, path.steps)


def _stretch(request: RouteRequest, record: PeerRecord) -> float:
    """This client's liking of a peer: 1 ... 1 + spread, the same on every machine and every run."""
    if not request.seed:
        return 1.0
    raw = hashlib.blake2b(f"{request.seed}\0{record.peer_id}".encode(), digest_size=8).digest()
    return 1.0 + request.spread * int.from_bytes(raw) / 2**64

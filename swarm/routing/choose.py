"""Choose the peers of a session, and explain the choice. Pure: records and measured links in, a `Plan` out.

::

    records ──► usable peers ──► one graph for each numerics ──► cheapest path ──► the alternatives, and why they lost
          └──► left out, each with a reason (NotCovered names them where layers are then missing)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from swarm.discovery.records import LEAVING, PeerRecord
from swarm.errors import NotCovered
from swarm.model.numerics import Numerics
from swarm.model.spans import LayerRange, gaps
from swarm.routing.plan import Alternative, LeftOut, LeftOutCode, Plan, Route, RouteRequest
from swarm.routing.shortest_path import Path, PreferHop, RouteCosts, best_path, boundaries
from swarm.transport.link import LinkQuality

_MAX_EXPLAINED = 32
"""Peers off the route for which an alternative through them is searched."""
_MAX_NAMED = 4
_MIN_DIFFERENCE_S = 5e-5


def choose_route(
    records: Iterable[PeerRecord],
    request: RouteRequest,
    *,
    links: Mapping[str, LinkQuality],
    now: float,
    banned: Mapping[str, float] | None = None,
    explain: bool = True,
) -> Plan:
    """The cheapest route over all layers.

    `links` are the client's measurements, by peer id; `now` is Unix time in seconds; `banned` maps a peer id to the
    seconds for which it stays banned. Without `explain` the plan has no alternatives (each costs a search).

    Raises NotCovered, which names the missing layers and why peers that announce them cannot be used.
    """
    return _plan(tuple(records), request, links=links, now=now, banned=banned or {}, explain=explain)


def replan(
    plan: Plan,
    *,
    now: float,
    banned: Mapping[str, float],
    records: Iterable[PeerRecord] | None = None,
    links: Mapping[str, LinkQuality] | None = None,
) -> Plan:
    """Choose another route for a session on `plan.route`, without alternatives.

    `records` and `links` default to those of `plan`. The hops of `plan.route` hold a KV reservation for the session, so
    their peers need no free KV cache. The numerics stay the same, because one text is computed in one precision. Of the
    routes within `request.keep_margin` of the cheapest, it chooses the one that keeps the most hops (same peer, same
    layers). Raises NotCovered as `choose_route` does.
    """
    numerics = plan.route.numerics or plan.request.numerics
    return _plan(
        plan.records if records is None else tuple(records),
        plan.request if plan.request.allow_mixed else replace(plan.request, numerics=numerics),
        links=plan.links if links is None else links,
        now=now,
        banned=banned,
        explain=False,
        current=plan.route,
    )


def explain_difference(chosen: Route, other: Route) -> str:
    """Compare `other` with `chosen`, by one step: "+12.3 ms: 8.1 ms more latency, 4.2 ms more compute"."""
    differences = []
    for cost in ("latency", "transfer", "compute", "queue", "entry"):
        difference_s = sum(getattr(hop.cost, f"{cost}_s") for hop in other.hops)
        difference_s -= sum(getattr(hop.cost, f"{cost}_s") for hop in chosen.hops)
        if cost == "latency":
            difference_s += other.return_s - chosen.return_s
        if abs(difference_s) >= _MIN_DIFFERENCE_S:
            text = f"{abs(difference_s) * 1e3:.1f} ms {'more' if difference_s > 0 else 'less'} {cost}"
            differences.append((difference_s, text))
    total_s = other.step_s - chosen.step_s
    if not differences:
        return "costs the same"
    # The costs that differ in the same direction as the total come first.
    differences.sort(key=lambda pair: -pair[0] if total_s >= 0 else pair[0])
    return f"{total_s * 1e3:+.1f} ms: {', '.join(text for _, text in differences)}"


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """One group of peers that may share a route, and the best path through the group."""

    numerics: Numerics | None
    usable: tuple[PeerRecord, ...]
    path: Path | None


def _plan(
    records: tuple[PeerRecord, ...],
    request: RouteRequest,
    *,
    links: Mapping[str, LinkQuality],
    now: float,
    banned: Mapping[str, float],
    explain: bool,
    current: Route | None = None,
) -> Plan:
    reserved = current.peer_ids if current else ()
    usable, left_out = filter_records(records, request, links=links, now=now, banned=banned, reserved=reserved)
    costs = RouteCosts(request, links)
    candidates = _candidates(usable, costs, current)
    found = [(candidate, costs.route(candidate.path.hops)) for candidate in candidates if candidate.path]
    if not found:
        raise _not_covered(candidates, usable, left_out, request)
    winner, route = min(found, key=lambda pair: (pair[1].cost_s, str(pair[0].numerics)))
    alternatives: list[Alternative] = []
    if explain:
        explainer = _Explainer(usable=winner.usable, route=route, costs=costs)
        alternatives = explainer.alternatives()
        alternatives += [explainer.other_numerics(other) for _, other in found if other is not route]
    return Plan(
        route=route,
        alternatives=tuple(alternatives),
        left_out=(*left_out, *_with_other_numerics(usable, winner)),
        request=request,
        records=records,
        links=links,
    )


def filter_records(
    records: Iterable[PeerRecord],
    request: RouteRequest,
    *,
    links: Mapping[str, LinkQuality],
    now: float,
    banned: Mapping[str, float],
    reserved: Collection[str] = (),
) -> tuple[list[PeerRecord], list[LeftOut]]:
    """The records that a route may use, by peer id, and the others, each with the first reason that applies.

    `reserved` are the ids of peers that already hold a KV reservation for the session.
    """
    newest: dict[str, PeerRecord] = {}
    left_out: list[LeftOut] = []
    for record in sorted(records, key=lambda r: (r.peer_id, -r.announced_at, -r.incarnation)):
        if record.peer_id in newest:
            left_out.append(LeftOut(record=record, code="older", reason="has announced a newer record"))
            continue
        newest[record.peer_id] = record
    usable = []
    for record in newest.values():
        unusable = _unusable(record, request, links.get(record.peer_id), now, banned, reserved)
        if unusable is None:
            usable.append(record)
        else:
            left_out.append(LeftOut(record=record, code=unusable[0], reason=unusable[1]))
    return usable, left_out


def _unusable(
    record: PeerRecord,
    request: RouteRequest,
    link: LinkQuality | None,
    now: float,
    banned: Mapping[str, float],
    reserved: Collection[str],
) -> tuple[LeftOutCode, str] | None:
    """Why no route may use the peer; None if one may."""
    if record.span.last > request.layers:
        return "layers", f"announces layers {record.span} of a model that has {request.layers}"
    if record.expires_at <= now:
        return "expired", f"last announced {now - record.announced_at:.0f} s ago"
    if record.state == LEAVING:
        return "leaving", "is leaving"
    if record.peer_id in banned:
        return "banned", f"was busy or failed: tried again in {max(0.0, banned[record.peer_id]):.0f} s"
    if not record.addresses:
        return "no_address", "announces no address"
    if link is not None and not link.reachable:
        return "unreachable", "cannot be reached from here"
    if request.numerics not in (None, record.numerics):
        return "numerics", f"computes in {record.numerics}, not in {request.numerics}"
    if record.kv_free < request.kv_tokens and record.peer_id not in reserved:
        free = f"{record.kv_free} of the {request.kv_tokens} tokens of KV cache" if record.kv_free else "no KV cache"
        return "kv_free", f"has {free} free"
    if 0 < record.attends_to < request.prompt_tokens:
        return "attends_to", f"attends to {record.attends_to} tokens, fewer than the prompt's {request.prompt_tokens}"
    return None


def _candidates(usable: Sequence[PeerRecord], costs: RouteCosts, current: Route | None) -> list[_Candidate]:
    request = costs.request
    groups: list[tuple[Numerics | None, tuple[PeerRecord, ...]]] = [(request.numerics, tuple(usable))]
    if request.numerics is None and not request.allow_mixed and usable:
        kinds = sorted({record.numerics for record in usable}, key=str)
        groups = [(kind, tuple(record for record in usable if record.numerics == kind)) for kind in kinds]
    prefer = _prefer_hops_of(current) if current else None
    margin = request.keep_margin if current else 0.0
    return [
        _Candidate(numerics=numerics, usable=group, path=best_path(group, costs, prefer=prefer, margin=margin))
        for numerics, group in groups
    ]


def _prefer_hops_of(route: Route) -> PreferHop:
    hops = {(hop.record.peer_id, hop.span) for hop in route.hops}
    return lambda record, span: (record.peer_id, span) in hops


def _with_other_numerics(usable: Sequence[PeerRecord], candidate: _Candidate) -> list[LeftOut]:
    """The usable peers that `candidate` leaves out because of their numerics."""
    included = {record.peer_id for record in candidate.usable}
    return [
        LeftOut(record=record, code="numerics", reason=f"computes in {record.numerics}, not in {candidate.numerics}")
        for record in usable
        if record.peer_id not in included
    ]


@dataclass(frozen=True, kw_only=True)
class _Explainer:
    """Finds the alternatives and says why each of them lost."""

    usable: Sequence[PeerRecord]
    route: Route
    costs: RouteCosts

    def alternatives(self) -> list[Alternative]:
        off_route = [record for record in self.usable if record.peer_id not in self.route.peer_ids]
        without = [self._without(hop.record) for hop in self.route.hops]
        return without + [self._through(record) for record in off_route[:_MAX_EXPLAINED]]

    def other_numerics(self, other: Route) -> Alternative:
        return Alternative(kind="numerics", peer_id="", route=other, reason=f"{other.numerics}: {self._reason(other)}")

    def _without(self, excluded: PeerRecord) -> Alternative:
        others = [record for record in self.usable if record.peer_id != excluded.peer_id]
        path = best_path(others, self.costs)
        if path is None:
            missing = ", ".join(map(str, _missing_layers(others, self.costs.request.layers)))
            return Alternative(
                kind="without", peer_id=excluded.peer_id, route=None, reason=f"no route: no other peer serves {missing}"
            )
        other = self.costs.route(path.hops)
        return Alternative(kind="without", peer_id=excluded.peer_id, route=other, reason=self._reason(other))

    def _through(self, record: PeerRecord) -> Alternative:
        peer_id = record.peer_id
        path = best_path(self.usable, self.costs, prefer=lambda r, _: r.peer_id == peer_id, min_preferred=1)
        if path is None:
            reason = f"no route: no other spans meet its boundaries {', '.join(map(str, boundaries(record)))}"
            return Alternative(kind="through", peer_id=peer_id, route=None, reason=reason)
        other = self.costs.route(path.hops)
        return Alternative(kind="through", peer_id=peer_id, route=other, reason=self._reason(other))

    def _reason(self, other: Route) -> str:
        reason = explain_difference(self.route, other)
        if self.costs.request.objective == "throughput":
            slowest = max(other.hops, key=lambda hop: hop.cost.stage_s)
            reason = (
                f"slowest stage {other.slowest_s * 1e3:.1f} ms ({slowest.record.name or slowest.record.peer_id[:8]}) "
                f"against {self.route.slowest_s * 1e3:.1f} ms; a step {reason}"
            )
        if (other.cost_s, other.step_s) > (self.route.cost_s, self.route.step_s):
            return reason
        return f"{reason}; {'equal routes are spread among clients' if self.costs.request.seed else 'a tie'}"


def _missing_layers(usable: Sequence[PeerRecord], layers: int) -> list[LayerRange]:
    """The layers that new peers must serve for a route to exist: those without a peer, or else the shortest range that
    joins boundaries reachable from both ends."""
    unserved = gaps((record.span for record in usable), layers)
    if unserved:
        return unserved
    forward = _reachable([boundaries(record) for record in usable], 0)
    backward = _reachable([boundaries(record)[::-1] for record in usable], layers)
    bridges = [LayerRange(a, b) for a in forward for b in backward if a < b]
    return [min(bridges, key=lambda bridge: (len(bridge), bridge))]


def _reachable(boundary_lists: Sequence[Sequence[int]], start: int) -> set[int]:
    """The boundaries that can be reached from `start` by following the lists in their order."""
    reached, latest = {start}, {start}
    while latest:
        following = {
            boundary
            for boundary_list in boundary_lists
            for at in latest.intersection(boundary_list)
            for boundary in boundary_list[boundary_list.index(at) :]
        }
        latest = following - reached
        reached |= latest
    return reached


def _not_covered(
    candidates: Sequence[_Candidate],
    usable: Sequence[PeerRecord],
    left_out: Sequence[LeftOut],
    request: RouteRequest,
) -> NotCovered:
    """The error, about the numerics that lack the fewest layers."""
    lacking = [(_missing_layers(candidate.usable, request.layers), candidate) for candidate in candidates]
    missing, candidate = min(lacking, key=lambda pair: (sum(map(len, pair[0])), str(pair[1].numerics)))
    excluded = [*left_out, *_with_other_numerics(usable, candidate)]
    parts = [_describe_gap(gap, candidate, excluded, request.layers) for gap in missing]
    wanted = f" in {candidate.numerics}" if candidate.numerics and len({r.numerics for r in usable}) > 1 else ""
    full = [out.record.span for out in left_out if out.code == "kv_free" and out.record.kv_total >= request.kv_tokens]
    return NotCovered(
        f"no route over layers 0:{request.layers}{wanted}: {'; '.join(parts)}",
        missing=[(gap.first, gap.last) for gap in missing],
        full=not any(unserved.overlap(gap) for unserved in gaps(full, request.layers) for gap in missing),
    )


def _describe_gap(gap: LayerRange, candidate: _Candidate, left_out: Sequence[LeftOut], layers: int) -> str:
    reasons = [
        f"{out.record.name or out.record.peer_id[:8]} ({out.record.span}) {out.reason}"
        for out in left_out
        if out.code not in ("older", "layers") and out.record.span.overlap(gap)
    ]
    if len(reasons) > _MAX_NAMED:
        reasons[_MAX_NAMED:] = [f"and {len(reasons) - _MAX_NAMED} more"]
    if not gaps((record.span for record in candidate.usable), layers):
        text = f"layers {gap} are served, but no spans meet at {gap.first} and at {gap.last}"
        return f"{text}; not usable: {', '.join(reasons)}" if reasons else text
    if not reasons:
        return f"no peer serves layers {gap}"
    announced = [out.record.span for out in left_out if out.code not in ("older", "layers")]
    unannounced = [part for empty in gaps(announced, layers) if (part := empty.overlap(gap))]
    rest = f"; no peer at all serves {', '.join(map(str, unannounced))}" if unannounced else ""
    return f"layers {gap} are served only by peers that cannot be used: {', '.join(reasons)}{rest}"

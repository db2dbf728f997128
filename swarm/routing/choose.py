"""Which peers a session runs through, and why those. Pure: records and measured links in, a `Plan` out.

::

    records ──► usable? ──► one graph for each numerics ──► cheapest path ──► what lost, and by how much
                  └── left out, each with its reason (named by NotCovered where layers are then missing)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from swarm.discovery.records import LEAVING, PeerRecord
from swarm.errors import NotCovered
from swarm.model.numerics import Numerics
from swarm.model.spans import LayerRange, gaps
from swarm.routing.plan import Alternative, LeftOut, LeftOutCode, Plan, Route, RouteRequest
from swarm.routing.shortest_path import Path, Prefer, Ways, best_path, stops
from swarm.transport.link import LinkQuality

_EXPLAINED = 32
"""Peers off the route whose best route is worked out too; a search for each."""
_NAMED = 4
_SAME_S = 5e-5


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

    `links` is what the client measured, by peer id; `now` Unix time in seconds; `banned` the seconds for
    which a peer is still banned, by peer id. Without `explain`, no alternatives are worked out (each
    costs a search of its own).

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
    explain: bool = False,
) -> Plan:
    """Another route for a session that runs on `plan.route`, by newer records and links where there are.

    A hop that still works holds the session's KV reservation, so its peer is not asked for free room
    again. It computes as the route before did: a text is never half of one numerics and half of another.
    Of the routes within `request.keep_margin` of the cheapest, it takes the one that keeps most
    hops (same peer, same layers). Raises NotCovered as `choose_route` does.
    """
    numerics = plan.route.numerics or plan.request.numerics
    return _plan(
        plan.records if records is None else tuple(records),
        plan.request if plan.request.allow_mixed else replace(plan.request, numerics=numerics),
        links=plan.links if links is None else links,
        now=now,
        banned=banned,
        explain=explain,
        before=plan.route,
    )


def explain_difference(chosen: Route, other: Route) -> str:
    """How `other` compares, in milliseconds of one step.

    "+12.3 ms: 8.1 ms more latency, 4.2 ms more compute".
    """
    shares = ("latency", "transfer", "compute", "queue", "entry")
    parts = []
    for share in shares:
        more = sum(getattr(hop.cost, f"{share}_s") for hop in other.hops)
        more -= sum(getattr(hop.cost, f"{share}_s") for hop in chosen.hops)
        if share == "latency":
            more += other.return_s - chosen.return_s
        if abs(more) >= _SAME_S:
            parts.append((more, f"{abs(more) * 1e3:.1f} ms {'more' if more > 0 else 'less'} {share}"))
    difference = other.step_s - chosen.step_s
    if not parts:
        return "costs the same"
    # what speaks for the difference comes first
    parts.sort(key=lambda part: -part[0] if difference >= 0 else part[0])
    return f"{difference * 1e3:+.1f} ms: {', '.join(text for _, text in parts)}"


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """One set of peers that may share a route, and the best path through it."""

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
    before: Route | None = None,
) -> Plan:
    reserved = before.peer_ids if before else ()
    usable, left_out = sift(records, request, links=links, now=now, banned=banned, reserved=reserved)
    ways = Ways(request, links)
    choices = _choices(usable, ways, before)
    found = [(choice, ways.route(choice.path.steps)) for choice in choices if choice.path]
    if not found:
        raise _not_covered(choices, usable, left_out, request)
    choice, route = min(found, key=lambda pair: (pair[1].cost_s, str(pair[0].numerics)))
    alternatives: list[Alternative] = []
    if explain:
        tie = "hops that work are kept" if before else "equals are spread among clients" if request.seed else "a tie"
        explainer = _Explainer(usable=choice.usable, route=route, ways=ways, tie=tie)
        alternatives = explainer.alternatives()
        alternatives += [explainer.other_numerics(other) for _, other in found if other is not route]
    return Plan(
        route=route,
        alternatives=tuple(alternatives),
        left_out=(*left_out, *_excluded(usable, choice)),
        request=request,
        records=records,
        links=links,
    )


def sift(
    records: Iterable[PeerRecord],
    request: RouteRequest,
    *,
    links: Mapping[str, LinkQuality],
    now: float,
    banned: Mapping[str, float],
    reserved: Collection[str] = (),
) -> tuple[list[PeerRecord], list[LeftOut]]:
    """Whom a route may use, ordered by peer id; and whom not, each with the first reason that holds.

    `reserved` are the peers that hold room for the session already.
    """
    newest: dict[str, PeerRecord] = {}
    left_out: list[LeftOut] = []
    for record in sorted(records, key=lambda r: (r.peer_id, -r.announced_at, -r.incarnation)):
        if record.peer_id in newest:
            left_out.append(LeftOut(record=record, code="older", reason="announced itself again since"))
            continue
        newest[record.peer_id] = record
    usable = []
    for record in newest.values():
        fault = _fault(record, request, links.get(record.peer_id), now, banned, reserved)
        if fault is None:
            usable.append(record)
        else:
            left_out.append(LeftOut(record=record, code=fault[0], reason=fault[1]))
    return usable, left_out


def _fault(
    record: PeerRecord,
    request: RouteRequest,
    link: LinkQuality | None,
    now: float,
    banned: Mapping[str, float],
    reserved: Collection[str],
) -> tuple[LeftOutCode, str] | None:
    if record.span.last > request.layers:
        return "layers", f"announces layers {record.span} of a model that has {request.layers}"
    if record.expires_at <= now:
        return "expired", f"was last heard of {now - record.announced_at:.0f} s ago"
    if record.state == LEAVING:
        return "leaving", "is leaving"
    if record.peer_id in banned:
        return "banned", f"was busy or failed: asked again in {max(0.0, banned[record.peer_id]):.0f} s"
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


def _choices(usable: Sequence[PeerRecord], ways: Ways, before: Route | None) -> list[_Choice]:
    request = ways.request
    groups: list[tuple[Numerics | None, tuple[PeerRecord, ...]]] = [(request.numerics, tuple(usable))]
    if request.numerics is None and not request.allow_mixed and usable:
        kinds = sorted({record.numerics for record in usable}, key=str)
        groups = [(kind, tuple(record for record in usable if record.numerics == kind)) for kind in kinds]
    prefer = _keeps(before) if before else None
    margin = request.keep_margin if before else 0.0
    return [
        _Choice(numerics=numerics, usable=group, path=best_path(group, ways, prefer=prefer, margin=margin))
        for numerics, group in groups
    ]


def _keeps(before: Route) -> Prefer:
    hops = {(hop.record.peer_id, hop.span) for hop in before.hops}
    return lambda record, span: (record.peer_id, span) in hops


def _excluded(usable: Sequence[PeerRecord], choice: _Choice) -> list[LeftOut]:
    """Who could have been used, had the route not settled on one kind of numerics."""
    inside = {record.peer_id for record in choice.usable}
    return [
        LeftOut(record=record, code="numerics", reason=f"computes in {record.numerics}, not in {choice.numerics}")
        for record in usable
        if record.peer_id not in inside
    ]


@dataclass(frozen=True, kw_only=True)
class _Explainer:
    """Says of each other route why it lost. `tie` is the reason where it is no worse."""

    usable: Sequence[PeerRecord]
    route: Route
    ways: Ways
    tie: str

    def alternatives(self) -> list[Alternative]:
        off = [record for record in self.usable if record.peer_id not in self.route.peer_ids]
        return [self._without(hop.record) for hop in self.route.hops] + [self._through(r) for r in off[:_EXPLAINED]]

    def other_numerics(self, other: Route) -> Alternative:
        return Alternative(kind="numerics", peer_id="", route=other, reason=f"{other.numerics}: {self._why(other)}")

    def _without(self, gone: PeerRecord) -> Alternative:
        others = [record for record in self.usable if record.peer_id != gone.peer_id]
        path = best_path(others, self.ways)
        if path is None:
            missing = ", ".join(map(str, _missing(others, self.ways.request.layers)))
            return Alternative(
                kind="without", peer_id=gone.peer_id, route=None, reason=f"no route: nobody else serves {missing}"
            )
        other = self.ways.route(path.steps)
        return Alternative(kind="without", peer_id=gone.peer_id, route=other, reason=self._why(other))

    def _through(self, record: PeerRecord) -> Alternative:
        peer_id = record.peer_id
        path = best_path(self.usable, self.ways, prefer=lambda r, _: r.peer_id == peer_id, needs=1)
        if path is None:
            reason = f"no route: the others' spans do not meet its stops {', '.join(map(str, stops(record)))}"
            return Alternative(kind="through", peer_id=peer_id, route=None, reason=reason)
        other = self.ways.route(path.steps)
        return Alternative(kind="through", peer_id=peer_id, route=other, reason=self._why(other))

    def _why(self, other: Route) -> str:
        reason = explain_difference(self.route, other)
        if self.ways.request.objective == "throughput":
            slow = max(other.hops, key=lambda hop: hop.cost.stage_s)
            reason = (
                f"slowest stage {other.slowest_s * 1e3:.1f} ms ({slow.record.name or slow.record.peer_id[:8]}) "
                f"against {self.route.slowest_s * 1e3:.1f} ms; a step {reason}"
            )
        no_worse = (other.cost_s, other.step_s) <= (self.route.cost_s, self.route.step_s)
        return f"{reason}; {self.tie}" if no_worse else reason


def _missing(usable: Sequence[PeerRecord], layers: int) -> list[LayerRange]:
    """What a new peer would have to serve for there to be a route: holes, or else the shortest bridge."""
    holes = gaps((record.span for record in usable), layers)
    if holes:
        return holes
    forward = _reachable([stops(record) for record in usable], 0)
    backward = _reachable([stops(record)[::-1] for record in usable], layers)
    bridges = [LayerRange(a, b) for a in forward for b in backward if a < b]
    return [min(bridges, key=lambda bridge: (len(bridge), bridge))]


def _reachable(ways: Iterable[Sequence[int]], start: int) -> set[int]:
    """Boundaries that can be reached from `start` along lists of stops, each walked in its order."""
    lists = list(ways)
    reached, fresh = {start}, {start}
    while fresh:
        onward = {stop for way in lists for at in fresh.intersection(way) for stop in way[way.index(at) :]}
        fresh = onward - reached
        reached |= fresh
    return reached


def _not_covered(
    choices: Sequence[_Choice], usable: Sequence[PeerRecord], left_out: Sequence[LeftOut], request: RouteRequest
) -> NotCovered:
    """About the numerics that lack fewest layers."""
    lacks = [(_missing(choice.usable, request.layers), choice) for choice in choices]
    missing, choice = min(lacks, key=lambda lack: (sum(map(len, lack[0])), str(lack[1].numerics)))
    excluded = [*left_out, *_excluded(usable, choice)]
    parts = [_describe_hole(hole, choice, excluded, request.layers) for hole in missing]
    wanted = f" in {choice.numerics}" if choice.numerics and len({r.numerics for r in usable}) > 1 else ""
    full = [out.record.span for out in left_out if out.code == "kv_free" and out.record.kv_total >= request.kv_tokens]
    return NotCovered(
        f"no route over layers 0:{request.layers}{wanted}: {'; '.join(parts)}",
        missing=[(hole.first, hole.last) for hole in missing],
        full=not any(gap.overlap(hole) for gap in gaps(full, request.layers) for hole in missing),
    )


def _describe_hole(hole: LayerRange, choice: _Choice, left_out: Sequence[LeftOut], layers: int) -> str:
    reasons = [
        f"{out.record.name or out.record.peer_id[:8]} ({out.record.span}) {out.reason}"
        for out in left_out
        if out.code not in ("older", "layers") and out.record.span.overlap(hole)
    ]
    if len(reasons) > _NAMED:
        reasons[_NAMED:] = [f"and {len(reasons) - _NAMED} more"]
    if not gaps((record.span for record in choice.usable), layers):
        joined = f"layers {hole} are served, but no spans meet at {hole.first} and at {hole.last}"
        return f"{joined}; not usable: {', '.join(reasons)}" if reasons else joined
    if not reasons:
        return f"nobody serves layers {hole}"
    announced = [out.record.span for out in left_out if out.code not in ("older", "layers")]
    alone = [part for empty in gaps(announced, layers) if (part := empty.overlap(hole))]
    rest = f"; nobody at all serves {', '.join(map(str, alone))}" if alone else ""
    return f"layers {hole} are served only by peers that cannot be used: {', '.join(reasons)}{rest}"

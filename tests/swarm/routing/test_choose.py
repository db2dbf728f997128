"""Routes over small swarms: the search against brute force, costs, reasons and plans after failures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.discovery.records import LEAVING, SERVING, PeerRecord
from swarm.errors import ConfigError, NotCovered
from swarm.model.numerics import Numerics
from swarm.model.spans import LayerRange
from swarm.routing.choose import choose_route, explain_difference, replan
from swarm.routing.plan import OBJECTIVES, Plan, RouteRequest
from swarm.routing.shortest_path import RouteCosts, boundaries
from swarm.transport.link import LinkQuality

EXACT, FAST = Numerics.parse("f32/f32"), Numerics.parse("bf16/u8")
NOW = 1_000.0
LAYERS = 6
REQUEST = RouteRequest(layers=LAYERS, hidden_bytes=2304, kv_tokens=100)
MS = 1e-3


def peer(name: str, span: str, **changes: object) -> PeerRecord:
    record = PeerRecord(
        model="digest",
        peer_id=f"id-{name}",
        name=name,
        incarnation=1,
        span=LayerRange.parse(span),
        holds=(LayerRange.parse(span),),
        addresses=("10.0.0.1:31337",),
        device="CPU",
        numerics=EXACT,
        layer_time_s=1 * MS,
        prefill_time_s=0.1 * MS,
        kv_free=1000,
        kv_total=1000,
        sessions=0,
        queue=0,
        state=SERVING,
        software="0.1.0",
        announced_at=NOW - 5,
        expires_at=NOW + 60,
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def links_to(records: Sequence[PeerRecord], rtt_s: float = 2 * MS) -> dict[str, LinkQuality]:
    return {record.peer_id: LinkQuality(rtt_s=rtt_s, bytes_per_s=1e8) for record in records}


def plan_of(
    records: Sequence[PeerRecord],
    request: RouteRequest = REQUEST,
    links: Mapping[str, LinkQuality] | None = None,
    banned: Mapping[str, float] | None = None,
) -> Plan:
    return choose_route(records, request, links=links_to(records) if links is None else links, now=NOW, banned=banned)


# -- the search against brute force --------------------------------------------------------------------------------


def every_route(records: Sequence[PeerRecord], request: RouteRequest) -> Iterator[list[tuple[PeerRecord, LayerRange]]]:
    """All routes with each peer at most once, by plain recursion."""

    def continuations(start: int, used: tuple[str, ...]) -> Iterator[list[tuple[PeerRecord, LayerRange]]]:
        if start == request.layers:
            yield []
        for record in records:
            if record.peer_id not in used and start in boundaries(record):
                for end in boundaries(record):
                    if end > start:
                        for rest in continuations(end, (*used, record.peer_id)):
                            yield [(record, LayerRange(start, end)), *rest]

    yield from continuations(0, ())


def cheapest(records: Sequence[PeerRecord], request: RouteRequest, links: Mapping[str, LinkQuality]) -> float:
    costs = RouteCosts(request, links)
    totals = [math.inf]
    for hops in every_route(records, request):
        if request.allow_mixed or len({record.numerics for record, _ in hops}) == 1:
            totals.append(costs.route(hops).cost_s)
    return min(totals)


times = st.sampled_from([0.0, 0.5 * MS, 1 * MS, 3 * MS, 10 * MS])
link_times = st.sampled_from([0.0, 1 * MS, 7 * MS, 40 * MS])


@st.composite
def swarms(draw: st.DrawFn, max_peers: int = 5) -> tuple[list[PeerRecord], dict[str, LinkQuality]]:
    count = draw(st.integers(0, max_peers))
    names = [f"p{i}" for i in range(count)]
    records = []
    for name in names:
        first = draw(st.integers(0, LAYERS - 1))
        last = draw(st.integers(first + 1, LAYERS))
        others = st.sampled_from([f"id-{other}" for other in names])
        records.append(
            peer(
                name,
                f"{first}:{last}",
                entries=tuple(sorted(draw(st.sets(st.integers(1, LAYERS - 1))) & set(range(first + 1, last)))),
                numerics=draw(st.sampled_from([EXACT, EXACT, FAST])),
                layer_time_s=draw(times),
                prefill_time_s=draw(times),
                queue=draw(st.integers(0, 2)),
                links={
                    other: LinkQuality(
                        rtt_s=rtt if rtt >= 0 else math.inf, bytes_per_s=draw(st.sampled_from([0.0, 1e6]))
                    )
                    for other, rtt in draw(st.dictionaries(others, link_times | st.just(-1.0), max_size=3)).items()
                },
            )
        )
    links = {
        record.peer_id: LinkQuality(rtt_s=draw(link_times), bytes_per_s=draw(st.sampled_from([0.0, 1e6])))
        for record in records
        if draw(st.booleans())
    }
    return records, links


requests = st.builds(
    RouteRequest,
    layers=st.just(LAYERS),
    hidden_bytes=st.just(2304),
    tokens=st.sampled_from([1, 64]),
    objective=st.sampled_from(OBJECTIVES),
    allow_mixed=st.booleans(),
    entry_penalty_s=st.sampled_from([0.0, 0.5 * MS]),
)


@settings(max_examples=150, deadline=None)
@given(swarms(), requests)
def test_the_route_is_the_cheapest_of_all_and_is_found_if_one_exists(
    swarm: tuple[list[PeerRecord], dict[str, LinkQuality]], request: RouteRequest
) -> None:
    records, links = swarm
    best = cheapest(records, request, links)
    if best == math.inf:
        with pytest.raises(NotCovered) as caught:
            choose_route(records, request, links=links, now=NOW)
        assert caught.value.missing
    else:
        plan = choose_route(records, request, links=links, now=NOW, explain=False)
        assert plan.route.cost_s == pytest.approx(best, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(swarms(), requests, st.sets(st.sampled_from(["id-p0", "id-p1", "id-p2"])))
def test_hops_join_from_first_to_last_layer_without_banned_peers_or_mixed_numerics(
    swarm: tuple[list[PeerRecord], dict[str, LinkQuality]], request: RouteRequest, banned: set[str]
) -> None:
    records, links = swarm
    try:
        plan = choose_route(records, request, links=links, now=NOW, banned=dict.fromkeys(banned, 8.0))
    except NotCovered:
        return
    hops = plan.route.hops
    assert hops[0].span.first == 0
    assert hops[-1].span.last == LAYERS
    assert all(a.span.last == b.span.first for a, b in pairwise(hops))
    assert all({hop.span.first, hop.span.last} <= set(boundaries(hop.record)) for hop in hops)
    assert len(set(plan.route.peer_ids)) == len(hops)
    for route in [plan.route, *(a.route for a in plan.alternatives if a.route)]:
        assert not banned & set(route.peer_ids)
        assert request.allow_mixed or len({hop.record.numerics for hop in route.hops}) == 1
        assert plan.route.cost_s <= route.cost_s + 1e-12


@settings(max_examples=80, deadline=None)
@given(swarms(), requests)
def test_one_more_peer_never_makes_the_route_dearer(
    swarm: tuple[list[PeerRecord], dict[str, LinkQuality]], request: RouteRequest
) -> None:
    records, links = swarm
    costs = []
    for count in range(len(records) + 1):
        try:
            plan = choose_route(records[:count], request, links=links, now=NOW, explain=False)
            costs.append(plan.route.cost_s)
        except NotCovered:
            costs.append(math.inf)
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(costs))


@settings(max_examples=60, deadline=None)
@given(swarms(), requests, st.randoms(use_true_random=False), st.sampled_from(["", "client-7"]))
def test_the_order_of_the_records_changes_nothing(
    swarm: tuple[list[PeerRecord], dict[str, LinkQuality]], request: RouteRequest, random: Random, seed: str
) -> None:
    records, links = swarm
    shuffled = list(records)
    random.shuffle(shuffled)

    def outcome(records: Sequence[PeerRecord]) -> object:
        try:
            plan = choose_route(records, replace(request, seed=seed), links=links, now=NOW)
        except NotCovered as error:
            return str(error)
        return plan.route, plan.alternatives, plan.left_out

    assert outcome(shuffled) == outcome(records)


@settings(max_examples=100, deadline=None)
@given(swarms(), requests, st.text(min_size=1, max_size=4))
def test_a_seed_costs_no_more_than_the_stated_spread(
    swarm: tuple[list[PeerRecord], dict[str, LinkQuality]], request: RouteRequest, seed: str
) -> None:
    records, links = swarm
    best = cheapest(records, request, links)
    if best < math.inf:
        plan = choose_route(records, replace(request, seed=seed), links=links, now=NOW, explain=False)
        assert plan.route.cost_s <= best * (1 + request.spread) + 1e-12


@settings(max_examples=150, deadline=None)
@given(swarms(), requests, st.integers(0, 4))
def test_a_replanned_route_stays_within_the_margin_and_never_uses_the_failed_peer(
    swarm: tuple[list[PeerRecord], dict[str, LinkQuality]], request: RouteRequest, index: int
) -> None:
    records, links = swarm
    try:
        plan = choose_route(records, request, links=links, now=NOW, explain=False)
        failed = plan.route.peer_ids[index % len(plan.route.hops)]
        new_plan = replan(plan, now=NOW, banned={failed: 1.0})
    except NotCovered:
        return
    assert failed not in new_plan.route.peer_ids
    others = [record for record in records if record.peer_id != failed]
    if not request.allow_mixed:
        others = [record for record in others if record.numerics == plan.route.numerics]
    best = cheapest(others, request, links)
    assert new_plan.route.cost_s <= best * (1 + request.keep_margin) + 1e-12
    assert request.allow_mixed or new_plan.route.numerics == plan.route.numerics


def test_a_swarm_of_hundreds_of_peers_is_routed_and_entries_are_used() -> None:
    records = [peer(f"p{i:03}", f"{i % 4}:{i % 4 + 3}", entries=(i % 4 + 1, i % 4 + 2)) for i in range(300)]
    plan = choose_route(records, REQUEST, links=links_to(records), now=NOW, explain=False)
    assert [hop.span for hop in plan.route.hops] == [LayerRange(0, 3), LayerRange(3, 6)]


# -- costs ---------------------------------------------------------------------------------------------------------


def test_the_cost_of_each_hop_is_its_link_its_computing_and_its_queue() -> None:
    a = peer("a", "0:2", links={"id-b": LinkQuality(rtt_s=6 * MS, bytes_per_s=2304e3)})
    b = peer("b", "2:6", queue=2, layer_time_s=2 * MS)
    links = {"id-a": LinkQuality(rtt_s=2 * MS, bytes_per_s=4e3), "id-b": LinkQuality(rtt_s=10 * MS)}
    plan = plan_of([a, b], links=links)
    first, second = (hop.cost for hop in plan.route.hops)
    assert first.latency_s == pytest.approx(1 * MS)
    assert first.transfer_s == pytest.approx(1 * MS)
    assert first.compute_s == pytest.approx(2 * MS)
    assert second.latency_s == pytest.approx(3 * MS)
    assert second.transfer_s == pytest.approx(1 * MS)
    assert second.compute_s == pytest.approx(8 * MS)
    assert second.queue_s == pytest.approx(16 * MS)
    assert plan.route.return_s == pytest.approx(5 * MS)
    assert plan.route.cost_s == pytest.approx((4 + 28 + 5) * MS)


def test_a_prefill_chunk_costs_by_its_tokens_and_at_least_one_decode_step() -> None:
    whole = peer("a", "0:6", layer_time_s=4 * MS, prefill_time_s=1 * MS)
    costs = {n: plan_of([whole], replace(REQUEST, tokens=n)).route.hops[0].cost.compute_s for n in (1, 2, 64)}
    assert costs == pytest.approx({1: 24 * MS, 2: 24 * MS, 64: 384 * MS})


def test_an_unreachable_next_hop_is_relayed_and_costs_both_links_to_the_client() -> None:
    a = peer("a", "0:3", links={"id-b": LinkQuality(rtt_s=math.inf)})
    b = peer("b", "3:6", links={"id-a": LinkQuality(rtt_s=1 * MS)})
    links = {
        "id-a": LinkQuality(rtt_s=4 * MS, bytes_per_s=2304e3),
        "id-b": LinkQuality(rtt_s=8 * MS, bytes_per_s=1152e3),
    }
    hop = plan_of([a, b], links=links).route.hops[1]
    assert hop.relayed
    assert hop.cost.latency_s == pytest.approx(6 * MS)
    assert hop.cost.transfer_s == pytest.approx(3 * MS)


def test_a_link_measured_only_by_the_receiver_counts_as_symmetric() -> None:
    b = peer("b", "3:6", links={"id-a": LinkQuality(rtt_s=1 * MS)})
    hop = plan_of([peer("a", "0:3"), b]).route.hops[1]
    assert not hop.relayed
    assert hop.cost.latency_s == pytest.approx(0.5 * MS)


def test_a_sender_that_the_receiver_cannot_reach_is_no_reason_to_relay() -> None:
    b = peer("b", "3:6", links={"id-a": LinkQuality(rtt_s=math.inf)})
    hop = plan_of([peer("a", "0:3"), b]).route.hops[1]
    assert not hop.relayed
    assert hop.cost.latency_s == pytest.approx(1 * MS)


def test_a_peer_with_a_measured_link_wins_over_an_equal_one_without() -> None:
    records = [peer("a", "0:6"), peer("b", "0:6")]
    assert plan_of(records, links={"id-b": LinkQuality(rtt_s=30 * MS)}).route.peer_ids == ("id-b",)


def test_entering_inside_a_span_costs_the_entry_penalty() -> None:
    records = [peer("a", "0:4"), peer("b", "2:6", entries=(4,))]
    plan = plan_of(records)
    assert [str(hop.span) for hop in plan.route.hops] == ["0:4", "4:6"]
    assert [hop.cost.entry_s for hop in plan.route.hops] == [0.0, REQUEST.entry_penalty_s]


def test_throughput_minimises_the_slowest_stage_and_latency_the_sum() -> None:
    records = [peer("whole", "0:6"), peer("a", "0:3"), peer("b", "3:6")]
    links = links_to(records, rtt_s=20 * MS)
    assert plan_of(records, links=links).route.peer_ids == ("id-whole",)
    plan = plan_of(records, replace(REQUEST, objective="throughput"), links=links)
    assert plan.route.peer_ids == ("id-a", "id-b")
    assert plan.route.cost_s == pytest.approx(3 * MS)


def test_of_routes_with_equal_slowest_stages_the_shorter_step_wins() -> None:
    records = [peer("slow", "0:3", layer_time_s=9 * MS), peer("x", "3:6", layer_time_s=8 * MS), peer("y", "3:6")]
    assert plan_of(records, replace(REQUEST, objective="throughput")).route.peer_ids == ("id-slow", "id-y")


# -- peers that are left out, and the reasons -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code", "reason"),
    [
        ({"state": LEAVING}, "leaving", "is leaving"),
        ({"expires_at": NOW - 1}, "expired", "last announced 5 s ago"),
        ({"kv_free": 99}, "kv_free", "has 99 of the 100 tokens of KV cache free"),
        ({"kv_free": 0}, "kv_free", "has no KV cache free"),
        ({"attends_to": 49}, "attends_to", "attends to 49 tokens, fewer than the prompt's 50"),
        ({"addresses": ()}, "no_address", "announces no address"),
        ({"span": LayerRange(0, 99)}, "layers", "announces layers 0:99 of a model that has 6"),
        ({"numerics": FAST}, "numerics", "computes in bf16/u8, not in f32/f32"),
    ],
)
def test_a_peer_that_cannot_serve_is_left_out_with_its_reason(
    changes: dict[str, object], code: str, reason: str
) -> None:
    good = peer("good", "0:6", layer_time_s=5 * MS)
    bad = replace(peer("bad", "0:6", layer_time_s=0.0), **changes)  # type: ignore[arg-type]
    plan = plan_of([good, bad], replace(REQUEST, numerics=EXACT, prompt_tokens=50))
    assert plan.route.peer_ids == ("id-good",)
    assert [(out.record.name, out.code, out.reason) for out in plan.left_out] == [("bad", code, reason)]


def test_unreachable_and_banned_peers_are_left_out_with_their_reason() -> None:
    records = [peer("good", "0:6"), peer("far", "0:6"), peer("bad", "0:6")]
    links = links_to(records) | {"id-far": LinkQuality(rtt_s=math.inf)}
    plan = plan_of(records, links=links, banned={"id-bad": 8.2})
    assert {out.record.name: out.reason for out in plan.left_out} == {
        "far": "cannot be reached from here",
        "bad": "was busy or failed: tried again in 8 s",
    }


def test_of_two_records_of_one_peer_the_newer_counts() -> None:
    old, new = peer("a", "0:6", announced_at=NOW - 9), peer("a", "0:6", incarnation=2, state=LEAVING)
    with pytest.raises(NotCovered, match="is leaving"):
        plan_of([old, new])


def test_missing_layers_are_named_with_the_peers_that_cannot_serve_them_now() -> None:
    records = [
        peer("a", "0:2"),
        peer("b", "2:4", state=LEAVING),
        peer("c", "2:4"),
        peer("d", "2:4", kv_free=0),
    ]
    with pytest.raises(NotCovered) as caught:
        plan_of(records, banned={"id-c": 8.0})
    assert caught.value.missing == ((2, 6),)
    text = str(caught.value)
    assert "layers 2:6 are served only by peers that cannot be used" in text
    assert "b (2:4) is leaving, c (2:4) was busy or failed: tried again in 8 s, d (2:4) has no KV cache free" in text
    assert "no peer at all serves 4:6" in text


def test_not_covered_is_full_only_where_peers_with_enough_kv_cache_are_full_now() -> None:
    def reports_full(*records: PeerRecord) -> bool:
        with pytest.raises(NotCovered) as caught:
            plan_of(records)
        return caught.value.full

    full = peer("b", "2:6", kv_free=9)
    assert reports_full(peer("a", "0:2"), full)
    assert not reports_full(full)
    assert not reports_full(peer("a", "0:2"), replace(full, kv_total=99))
    assert not reports_full(peer("a", "0:2"), replace(full, span=LayerRange(2, 5)))
    assert not reports_full(peer("a", "0:2"), replace(full, state=LEAVING))


def test_an_empty_swarm_misses_all_layers() -> None:
    with pytest.raises(NotCovered, match="no peer serves layers 0:6") as caught:
        plan_of([])
    assert caught.value.missing == ((0, 6),)


def test_spans_that_overlap_without_a_common_boundary_are_named_as_such() -> None:
    with pytest.raises(NotCovered, match="layers 0:2 are served, but no spans meet") as caught:
        plan_of([peer("a", "0:4"), peer("b", "2:6")])
    assert caught.value.missing == ((0, 2),)


def test_layers_that_only_other_numerics_serve_are_missing() -> None:
    records = [peer("a", "0:3"), peer("b", "3:6", numerics=FAST)]
    with pytest.raises(NotCovered, match=r"b \(3:6\) computes in bf16/u8, not in f32/f32"):
        plan_of(records, replace(REQUEST, numerics=EXACT))
    with pytest.raises(NotCovered):
        plan_of(records)
    plan = plan_of(records, replace(REQUEST, allow_mixed=True))
    assert plan.route.numerics is None


def test_without_requested_numerics_the_cheaper_win_and_the_others_are_an_alternative() -> None:
    records = [peer("exact", "0:6"), peer("fast", "0:6", numerics=FAST, layer_time_s=0.5 * MS)]
    plan = plan_of(records)
    assert plan.route.numerics == FAST
    other = next(a for a in plan.alternatives if a.kind == "numerics")
    assert other.reason == "f32/f32: +3.0 ms: 3.0 ms more compute"


# -- alternatives --------------------------------------------------------------------------------------------------


def test_each_hop_and_each_other_peer_has_an_alternative_with_a_reason() -> None:
    records = [peer("a", "0:3"), peer("b", "3:6"), peer("c", "3:6", layer_time_s=2 * MS), peer("d", "1:2")]
    links = links_to(records) | {"id-c": LinkQuality(rtt_s=10 * MS, bytes_per_s=1e8)}
    plan = plan_of(records, links=links)
    reasons = {(a.kind, a.peer_id): a.reason for a in plan.alternatives}
    assert reasons["without", "id-a"] == "no route: no other peer serves 0:1, 2:3"
    assert reasons["without", "id-b"] == "+11.0 ms: 8.0 ms more latency, 3.0 ms more compute"
    assert reasons["through", "id-c"] == reasons["without", "id-b"]
    assert reasons["through", "id-d"] == "no route: no other spans meet its boundaries 1, 2"


def test_a_difference_lists_the_costs_of_its_own_sign_first() -> None:
    slow, far = peer("slow", "0:6", layer_time_s=3 * MS), peer("far", "0:6")
    costs = RouteCosts(REQUEST, {"id-slow": LinkQuality(rtt_s=1 * MS), "id-far": LinkQuality(rtt_s=5 * MS)})
    a, b = (costs.route([(record, record.span)]) for record in (far, slow))
    assert explain_difference(a, b) == "+8.0 ms: 12.0 ms more compute, 4.0 ms less latency"
    assert explain_difference(b, a) == "-8.0 ms: 12.0 ms less compute, 4.0 ms more latency"
    assert explain_difference(a, a) == "costs the same"


def test_equal_routes_are_chosen_by_peer_id_and_spread_by_seeds() -> None:
    records = [peer(name, "0:6") for name in "dbca"]
    assert plan_of(records).route.peer_ids == ("id-a",)
    chosen = {plan_of(records, replace(REQUEST, seed=f"client-{i}")).route.peer_ids for i in range(40)}
    assert len(chosen) == 4


# -- replan --------------------------------------------------------------------------------------------------------


def test_replan_keeps_working_hops_if_that_costs_little() -> None:
    a, b, c = peer("a", "0:2"), peer("b", "2:4"), peer("c", "4:6")
    plan = plan_of([a, b, c])
    spare = peer("spare", "2:4", layer_time_s=1.5 * MS)
    whole = peer("whole", "0:6", layer_time_s=1.4 * MS)
    records = [a, b, c, spare, whole]
    new_plan = replan(plan, now=NOW, banned={"id-b": 5.0}, records=records, links=links_to(records))
    assert new_plan.route.peer_ids == ("id-a", "id-spare", "id-c")
    assert replan(new_plan, now=NOW, banned={"id-spare": 5.0}).route.peer_ids == ("id-a", "id-b", "id-c")


def test_replan_drops_working_hops_where_keeping_them_costs_too_much() -> None:
    a, b = peer("a", "0:3"), peer("b", "3:6")
    plan = plan_of([a, b])
    records = [a, b, peer("spare", "3:6", layer_time_s=20 * MS), peer("whole", "0:6")]
    new_plan = replan(plan, now=NOW, banned={"id-b": 5.0}, records=records, links=links_to(records))
    assert new_plan.route.peer_ids == ("id-whole",)


def test_a_kept_hop_needs_no_free_kv_cache_because_it_holds_a_reservation() -> None:
    a, b = peer("a", "0:3"), peer("b", "3:6")
    plan = plan_of([a, b, peer("c", "3:6", layer_time_s=2 * MS)])
    full = [replace(a, kv_free=0), peer("c", "3:6")]
    assert replan(plan, now=NOW, banned={"id-b": 1.0}, records=full).route.peer_ids == ("id-a", "id-c")


def test_replan_keeps_the_numerics_of_the_text() -> None:
    records = [peer("a", "0:6"), peer("b", "0:6", numerics=FAST, layer_time_s=9 * MS)]
    plan = plan_of(records)
    with pytest.raises(NotCovered, match="computes in bf16/u8"):
        replan(plan, now=NOW, banned={"id-a": 1.0})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layers": 0}, "layers"),
        ({"tokens": 0}, "tokens"),
        ({"objective": "fun"}, "objective"),
        ({"spread": -1.0}, "spread"),
    ],
)
def test_an_invalid_request_is_refused_with_the_name_of_the_field(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        replace(REQUEST, **changes)  # type: ignore[arg-type]

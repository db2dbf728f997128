"""The Prometheus metrics of peers and gateways, and the dashboard that shows them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import numpy as np
import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from client.gateway.metrics import GatewayMetrics
from client.metrics import HopTime, Metrics
from peer.announcing.metrics import PeerMetrics
from peer.batching.step_job import StepOutcome
from peer.sessions.service import Load
from swarm.discovery.records import PeerLoad
from swarm.engine.base import Step
from swarm.errors import BadStep
from tests.client.gateway.toy_gateway import toy_gateway
from tests.conftest import ROOT

LOAD = Load(
    kv_free=3,
    kv_total=9,
    sessions=2,
    queue=1,
    state="serving",
    layer_time_s=None,
    prefill_time_s=None,
    work=PeerLoad(engine="paged", blocks=7, blocks_used=5),
)


def families(page: bytes | str) -> Iterator[Metric]:
    return text_string_to_metric_families(page if isinstance(page, str) else page.decode())


def value(page: bytes | str, name: str, **labels: str) -> float:
    samples = [sample for family in families(page) for sample in family.samples]
    (found,) = [sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items()]
    return float(found)


def peer_metrics() -> PeerMetrics:
    metrics = PeerMetrics(lambda: LOAD, lambda: 4)
    step = Step(session="s", start=0, tokens=np.zeros(7, np.int32), hidden=None, rows=0)
    metrics.on_step(step, StepOutcome(hidden=None, choices=(), queue_s=0.1, compute_s=0.2, batch=3))
    metrics.on_error(BadStep("wrong"))
    return metrics


def test_a_peer_counts_its_steps_and_reports_its_load() -> None:
    page = peer_metrics().page()
    assert value(page, "swarm_peer_tokens_total", kind="prefill") == 7
    assert value(page, "swarm_peer_step_batch_sum") == 3
    assert value(page, "swarm_peer_failures_total", kind="bad_step") == 1
    assert value(page, "swarm_peer_kv_free_tokens") == 3
    assert value(page, "swarm_peer_connections") == 4
    assert value(page, "swarm_peer_kv_blocks") == 7
    assert value(page, "swarm_peer_kv_blocks_used") == 5
    assert value(page, "swarm_peer_serving") == 1


def test_a_gateway_counts_requests_and_tokens() -> None:
    with toy_gateway() as gateway:
        for _ in range(2):
            gateway.http.post("/v1/completions", json={"model": "toy", "prompt": "abc", "max_tokens": 5})
        gateway.http.post("/v1/completions", json={"model": "other", "prompt": "abc"})
        gateway.http.get("/v1/models/toy")
        page = gateway.http.get("/metrics").text
    assert value(page, "swarm_gateway_requests_total", endpoint="/v1/models/NAME", status="200") == 1
    assert value(page, "swarm_gateway_requests_total", endpoint="/v1/completions", status="200") == 2
    assert value(page, "swarm_gateway_requests_total", endpoint="/v1/completions", status="404") == 1
    assert value(page, "swarm_gateway_failures_total", code="model_not_found") == 1
    assert value(page, "swarm_gateway_tokens_total", model="toy") == 10
    assert value(page, "swarm_gateway_first_token_seconds_count", model="toy") == 2
    assert value(page, "swarm_gateway_between_tokens_seconds_count", model="toy") == 8
    assert value(page, "swarm_gateway_hop_seconds_count", peer="b", part="compute") == 2
    assert value(page, "swarm_gateway_running") == 0


def test_the_number_of_peer_labels_is_bounded() -> None:
    metrics = GatewayMetrics()
    labels = {metrics.peer_label(f"peer {number}") for number in range(1000)}
    assert len(labels) == 65
    assert metrics.peer_label("peer 3") == "peer 3"
    assert metrics.peer_label("peer 999") == "others"


def test_a_piece_of_several_tokens_counts_each_token() -> None:
    times = iter([0.0, 1.0, 3.0])
    metrics = GatewayMetrics(lambda: next(times))
    timer = metrics.time_answer("m")
    timer.on_tokens(1)
    timer.on_tokens(4)
    assert value(metrics.page(), "swarm_gateway_tokens_total") == 5
    assert value(metrics.page(), "swarm_gateway_between_tokens_seconds_sum") == pytest.approx(0.5)


def test_the_dashboard_shows_exactly_the_existing_metrics() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())
    queried = {
        name
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"swarm_\w+", target["expr"])
    }
    existing: set[str] = set()
    with toy_gateway() as gateway:
        gateway.http.post("/v1/completions", json={"model": "toy", "prompt": "abc", "max_tokens": 5})
        pages = [gateway.http.get("/metrics").text, peer_metrics().page()]
    for page in pages:
        for family in families(page):
            existing |= {sample.name for sample in family.samples}
            if family.type == "counter":
                existing.add(f"{family.name}_total")  # counters without labels so far have no sample
    assert queried <= existing
    bases = {re.sub(r"_(bucket|sum|count|created|total)$", "", name) for name in existing}
    shown = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in queried}
    assert shown == bases


def test_the_times_of_a_hop_are_recorded() -> None:
    hop = HopTime(
        peer_id="p", name="n", layers="0:1", queue_s=0.5, compute_s=0.25, codec_s=0, other_s=0, network_s=0.125
    )
    metrics = GatewayMetrics()
    metrics.time_answer("m").on_finish(
        Metrics(
            prompt_tokens=3,
            reused_tokens=2,
            new_tokens=1,
            ttft_s=1,
            total_s=1,
            tokens_per_second=0.0,
            token_s=0.1,
            return_s=0,
            client_s=0,
            repairs=4,
            route="",
            hops=(hop,),
        )
    )
    page = metrics.page()
    assert value(page, "swarm_gateway_hop_seconds_sum", part="network") == 0.125
    assert value(page, "swarm_gateway_cached_prompt_tokens_total") == 2
    assert value(page, "swarm_gateway_reroutes_total") == 4

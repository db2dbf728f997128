"""The Prometheus metrics of a peer. No label comes from another machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from peer.batching.step_job import StepOutcome
from peer.sessions.service import Load
from swarm.discovery.records import SERVING
from swarm.engine.base import Step
from swarm.errors import SwarmError
from swarm.process.metrics_server import ScrapeCollector

_STEP_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 2.0, 8.0)
_BATCH = (1, 2, 4, 8, 16, 32, 64)


class PeerMetrics:
    """Counts steps and failures. Each scrape (`page`) also calls `load` and `connections`."""

    def __init__(self, load: Callable[[], Load], connections: Callable[[], int]) -> None:
        self._load = load
        self._connections = connections
        self._registry = registry = CollectorRegistry()
        self._steps = Counter("swarm_peer_steps", "Steps computed.", ["kind"], registry=registry)
        self._tokens = Counter("swarm_peer_tokens", "Tokens computed.", ["kind"], registry=registry)
        self._failures = Counter("swarm_peer_failures", "Steps that failed, by error.", ["kind"], registry=registry)
        self._compute = Histogram(
            "swarm_peer_step_compute_seconds",
            "Seconds that a step took on the device.",
            ["kind"],
            buckets=_STEP_S,
            registry=registry,
        )
        self._queue = Histogram(
            "swarm_peer_step_queue_seconds",
            "Seconds that a step waited for the device.",
            buckets=_STEP_S,
            registry=registry,
        )
        self._batch = Histogram(
            "swarm_peer_step_batch", "Steps that ran in one inference.", buckets=_BATCH, registry=registry
        )
        registry.register(ScrapeCollector(self._state))

    def on_step(self, step: Step, outcome: StepOutcome) -> None:
        """Count a step that was computed."""
        kind = "decode" if len(step.tokens) == 1 else "prefill"
        self._steps.labels(kind).inc()
        self._tokens.labels(kind).inc(len(step.tokens))
        self._compute.labels(kind).observe(outcome.compute_s)
        self._queue.observe(outcome.queue_s)
        self._batch.observe(outcome.batch)

    def on_error(self, error: SwarmError) -> None:
        """Count a step that failed."""
        self._failures.labels(error.code).inc()

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def _state(self) -> Iterator[Metric]:
        load = self._load()
        for name, description, value in (
            ("sessions", "Open sessions.", load.sessions),
            ("queue_steps", "Waiting steps.", load.queue),
            ("kv_free_tokens", "Tokens of KV cache that the next session may reserve.", load.kv_free),
            ("kv_total_tokens", "Tokens of KV cache in all.", load.kv_total),
            ("kv_blocks", "Blocks of KV cache; 0 where the engine has none.", load.work.blocks if load.work else 0),
            ("kv_blocks_used", "Blocks of KV cache that sessions hold.", load.work.blocks_used if load.work else 0),
            ("connections", "Open connections.", self._connections()),
            ("serving", "1 while the peer takes sessions.", int(load.state == SERVING)),
        ):
            yield GaugeMetricFamily(f"swarm_peer_{name}", description, value=value)

"""The gateway's Prometheus metrics. Label values are bounded: names of models and hops, words of this program."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from client.gateway.model_pool import ModelPool
from client.metrics import Metrics
from swarm.process.metrics_server import ScrapeCollector

_FIRST_TOKEN_BUCKETS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0, 60.0)
_BETWEEN_TOKENS_BUCKETS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 3.0, 10.0)
_HOP_BUCKETS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 1.0)
_MAX_PEER_LABELS = 64
_OTHER_PEERS = "others"


class GatewayMetrics:
    """All metrics of one gateway. `page` renders them for a scrape."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._registry = registry = CollectorRegistry()
        self._peer_labels: set[str] = set()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"swarm_gateway_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"swarm_gateway_{name}", text, labels, buckets=buckets, registry=registry)

        self.requests = counter("requests", "HTTP requests by endpoint and status.", "endpoint", "status")
        self.failures = counter("failures", "Requests that failed, by OpenAI error code.", "code")
        self.vanished = counter("vanished", "Callers that disconnected before their answer was complete.", "model")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.", "model")
        self.cached_tokens = counter("cached_prompt_tokens", "Tokens of prompts that peers had cached.", "model")
        self.tokens = counter("tokens", "Tokens of answers.", "model")
        self.reroutes = counter("reroutes", "Routes that were replaced in the middle of an answer.", "model")
        self.proposed = counter("proposed_tokens", "Tokens that a draft guessed.", "model")
        self.accepted = counter("accepted_tokens", "Guesses that were right.", "model")
        self.queue_seconds = histogram("queue_seconds", "How long requests waited for admission.", _FIRST_TOKEN_BUCKETS)
        self.first_seconds = histogram(
            "first_token_seconds", "From admission to the first token.", _FIRST_TOKEN_BUCKETS, "model"
        )
        self.between_seconds = histogram(
            "between_tokens_seconds", "Time between two tokens.", _BETWEEN_TOKENS_BUCKETS, "model"
        )
        self.speed = histogram(
            "answer_tokens_per_second", "Speed of whole answers.", (1, 2, 5, 10, 20, 40, 80, 160, 320), "model"
        )
        self.hop_seconds = histogram(
            "hop_seconds", "A token's time at a hop, the average of an answer.", _HOP_BUCKETS, "model", "peer", "part"
        )

    def time_answer(self, model: str) -> AnswerTimer:
        return AnswerTimer(self, model, self._clock)

    def register(self, collect: Callable[[], Iterator[Metric]]) -> None:
        """Call `collect` at each scrape and add its metrics."""
        self._registry.register(ScrapeCollector(collect))

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def peer_label(self, name: str) -> str:
        """The label of a peer. Peers choose their names: after the first 64 all others share one label."""
        if name not in self._peer_labels and len(self._peer_labels) >= _MAX_PEER_LABELS:
            return _OTHER_PEERS
        self._peer_labels.add(name)
        return name


class AnswerTimer:
    """Records the token times of one answer."""

    def __init__(self, gauges: GatewayMetrics, model: str, clock: Callable[[], float]) -> None:
        self._gauges = gauges
        self._model = model
        self._clock = clock
        self._last_at = clock()
        self._has_tokens = False
        self._between = gauges.between_seconds.labels(model)
        self._tokens = gauges.tokens.labels(model)

    def on_tokens(self, count: int) -> None:
        if not count:
            return
        now = self._clock()
        if self._has_tokens:
            self._between.observe((now - self._last_at) / count)
        else:
            self._gauges.first_seconds.labels(self._model).observe(now - self._last_at)
        self._has_tokens, self._last_at = True, now
        self._tokens.inc(count)

    def on_finish(self, metrics: Metrics) -> None:
        gauges, model = self._gauges, self._model
        gauges.prompt_tokens.labels(model).inc(metrics.prompt_tokens)
        gauges.cached_tokens.labels(model).inc(metrics.reused_tokens)
        gauges.reroutes.labels(model).inc(metrics.repairs)
        if metrics.speculation is not None:
            gauges.proposed.labels(model).inc(metrics.speculation.proposed)
            gauges.accepted.labels(model).inc(metrics.speculation.accepted)
        if metrics.tokens_per_second:
            gauges.speed.labels(model).observe(metrics.tokens_per_second)
        for hop in metrics.hops:
            peer = gauges.peer_label(hop.name)
            for part in ("network", "queue", "compute"):
                gauges.hop_seconds.labels(model, peer, part).observe(getattr(hop, f"{part}_s"))


def current_state(pool: ModelPool, *, running: int, waiting: int) -> Iterator[Metric]:
    """Metrics that are read at the time of a scrape."""
    yield GaugeMetricFamily("swarm_gateway_running", "Answers that are being made.", value=running)
    yield GaugeMetricFamily("swarm_gateway_waiting", "Answers that wait for admission.", value=waiting)
    ready = GaugeMetricFamily("swarm_gateway_ready", "Whether a token was generated recently.", labels=["model"])
    for served in pool.served:
        ready.add_metric([served.name], float(pool.is_ready(served)))
    yield ready

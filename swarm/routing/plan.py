"""Values of routing: the request, the route with its costs, and the plan that explains it. Seconds and bytes.

`choose.py` makes a plan from records; `shortest_path.py` searches for the route.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from swarm.discovery.records import PeerRecord
from swarm.errors import ConfigError
from swarm.model.manifest import MAX_LAYERS
from swarm.model.numerics import Numerics
from swarm.model.spans import LayerRange
from swarm.transport.link import LinkQuality

Objective = Literal["latency", "throughput"]
OBJECTIVES: tuple[Objective, ...] = ("latency", "throughput")


@dataclass(frozen=True, kw_only=True)
class RouteRequest:
    """What a route must do, and how its cost is counted.

    >>> request = RouteRequest(layers=30, hidden_bytes=576 * 4, tokens=1, kv_tokens=512)

    layers          of the model
    hidden_bytes    of one token's hidden state on the wire
    tokens          in a step: 1 for decode, more for a chunk of a prompt
    kv_tokens       of KV cache that the session needs on every hop
    prompt_tokens   that every hop must be able to attend to
    objective       minimise the time of one step ("latency") or of the slowest stage ("throughput")
    numerics        of all hops; None takes the cheapest
    allow_mixed     hops may differ in numerics
    entry_penalty_s added for each end of a hop that lies inside its peer's span. The peer runs a second graph there:
                    half a millisecond more a step, and seconds of compiling at first use, here spread over some
                    hundred steps
    assumed_rtt_s, assumed_bytes_per_s  for links that are not measured; pessimistic, so that a measured link wins
    seed, spread    spread clients over routes of nearly equal cost: each peer's cost is multiplied by a factor of
                    1 ... 1 + `spread` that depends on (seed, peer). `seed` is any text, such as a client's id
    keep_margin     by what share a new plan may cost more than the cheapest, to keep more hops of the current route
    """

    layers: int
    hidden_bytes: int
    tokens: int = 1
    kv_tokens: int = 0
    prompt_tokens: int = 0
    objective: Objective = "latency"
    numerics: Numerics | None = None
    allow_mixed: bool = False
    entry_penalty_s: float = 0.02
    assumed_rtt_s: float = 0.1
    assumed_bytes_per_s: float = 12.5e6
    seed: str = ""
    spread: float = 0.05
    keep_margin: float = 0.2

    def __post_init__(self) -> None:
        for name, minimum in (
            ("layers", 1),
            ("hidden_bytes", 1),
            ("tokens", 1),
            ("kv_tokens", 0),
            ("prompt_tokens", 0),
        ):
            if getattr(self, name) < minimum:
                raise ConfigError(f"route: {name} is {getattr(self, name)}; at least {minimum} is needed")
        if self.layers > MAX_LAYERS:
            raise ConfigError(f"route: layers is {self.layers}; a model has at most {MAX_LAYERS}")
        if self.objective not in OBJECTIVES:
            raise ConfigError(f"route: objective is {self.objective!r}; choose {' or '.join(OBJECTIVES)}")
        for name in ("entry_penalty_s", "assumed_rtt_s", "spread", "keep_margin"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"route: {name} is {getattr(self, name)}; 0 or more is needed")
        if not 0 < self.assumed_bytes_per_s < math.inf:
            raise ConfigError(f"route: assumed_bytes_per_s is {self.assumed_bytes_per_s}; more than 0 is needed")


@dataclass(frozen=True, kw_only=True)
class HopCost:
    """Seconds of one step on one hop: the link to it, its queue and its computing. `entry_s` is the entry penalty."""

    latency_s: float
    transfer_s: float
    compute_s: float
    queue_s: float
    entry_s: float

    @property
    def total_s(self) -> float:
        return self.latency_s + self.transfer_s + self.busy_s

    @property
    def busy_s(self) -> float:
        """Seconds at the peer: waiting in its queue and computing."""
        return self.compute_s + self.queue_s + self.entry_s

    @property
    def stage_s(self) -> float:
        """The slower of link and device: the time between two steps at this hop when the pipeline is full."""
        return max(self.transfer_s, self.busy_s)


@dataclass(frozen=True, kw_only=True)
class HopPlan:
    """One peer computes `span`, a part of `record.span`. `relayed`: the client relays its input."""

    record: PeerRecord
    span: LayerRange
    relayed: bool
    cost: HopCost


@dataclass(frozen=True, kw_only=True)
class Route:
    """Hops that cover the model in order.

    `return_s` is the time of the answer from the last hop to the client. `cost_s` is what the request minimises: the
    time of one step ("latency") or of the slowest stage ("throughput"). `numerics` is None where hops differ, which
    only `allow_mixed` permits.
    """

    hops: tuple[HopPlan, ...]
    return_s: float
    cost_s: float
    numerics: Numerics | None

    @property
    def step_s(self) -> float:
        """Seconds of one step from the client through all hops and back."""
        return sum(hop.cost.total_s for hop in self.hops) + self.return_s

    @property
    def slowest_s(self) -> float:
        return max(hop.cost.stage_s for hop in self.hops)

    @property
    def peer_ids(self) -> tuple[str, ...]:
        return tuple(hop.record.peer_id for hop in self.hops)

    def __str__(self) -> str:
        return " → ".join(f"{hop.record.name or hop.record.peer_id[:8]} {hop.span}" for hop in self.hops)


LeftOutCode = Literal[
    "older", "layers", "expired", "leaving", "banned", "no_address", "unreachable", "kv_free", "attends_to", "numerics"
]


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A peer that no route may use. `reason` continues a sentence that starts with its name: "is leaving"."""

    record: PeerRecord
    code: LeftOutCode
    reason: str


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A route that was not chosen; `reason` says why, for people.

    `without`  the best route without `peer_id`, a peer of the chosen route
    `through`  the best route through `peer_id`, a peer off the chosen route
    `numerics` the best route with other numerics

    `route` and `cost_s` are None where there is no such route.
    """

    kind: Literal["without", "through", "numerics"]
    peer_id: str
    route: Route | None
    reason: str

    @property
    def cost_s(self) -> float | None:
        return self.route.cost_s if self.route else None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The chosen route, the alternatives that lost, the peers that were left out, and the inputs of the choice."""

    route: Route
    alternatives: tuple[Alternative, ...]
    left_out: tuple[LeftOut, ...]
    request: RouteRequest
    records: tuple[PeerRecord, ...]
    links: Mapping[str, LinkQuality]

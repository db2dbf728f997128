"""What routing takes and gives: a request, and a plan that explains itself. Values only; seconds and bytes.

The search over them is in `paths.py`, the choice in `routing.py`.
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
    """What the route is for.

    >>> request = RouteRequest(layers=30, hidden_bytes=576 * 4, tokens=1, kv_tokens=512)

    `layers` of the model; `hidden_bytes` that one token's hidden state has on the wire; `tokens` in a step
    (1: decode; more: a chunk of a prompt); `kv_tokens` of cache that the session needs on every hop;
    `prompt_tokens` that every hop must attend to at once.

    `numerics` None takes whichever one is cheapest, the same on all hops unless `allow_mixed` is set.
    `entry_penalty_s` is added for each end of a hop inside its peer's span: a second graph runs there, which takes
    half a millisecond more a step, and seconds of compiling at first use, spread over some hundred steps here.
    `assumed_rtt_s` and `assumed_bytes_per_s` stand in for what nobody measured; cautious on purpose, so
    that a measured way wins. `seed` (any text, such as a client's id) spreads clients over near-equal
    routes: each peer's cost is stretched by a factor of 1 ... 1 + `spread` that depends on (seed, peer).
    `keep_margin`: how much dearer than the best a re-planned route may be if it keeps more hops.
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
        for name, least in (("layers", 1), ("hidden_bytes", 1), ("tokens", 1), ("kv_tokens", 0), ("prompt_tokens", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"route: {name} is {getattr(self, name)}; at least {least} is needed")
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
    """Where the time of one step goes on one hop, its way in included. Seconds."""

    latency_s: float
    transfer_s: float
    compute_s: float
    queue_s: float
    entry_s: float

    @property
    def total(self) -> float:
        return self.latency_s + self.transfer_s + self.busy_s

    @property
    def busy_s(self) -> float:
        """What the peer's device spends or waits."""
        return self.compute_s + self.queue_s + self.entry_s

    @property
    def stage_s(self) -> float:
        """The slower of wire and device: steps of a full pipeline come out of this hop that far apart."""
        return max(self.transfer_s, self.busy_s)


@dataclass(frozen=True, kw_only=True)
class HopPlan:
    """One peer runs `span`, a part of `record.span`. `relayed`: its input comes by way of the client."""

    record: PeerRecord
    span: LayerRange
    relayed: bool
    cost: HopCost


@dataclass(frozen=True, kw_only=True)
class Route:
    """Hops that cover the model in order. `return_s` is the answer's way back to the client.

    `cost_s` is the time of one step ("latency") or of the slowest stage ("throughput").
    `numerics` is None where hops differ, which only `allow_mixed` permits.
    """

    hops: tuple[HopPlan, ...]
    return_s: float
    cost_s: float
    numerics: Numerics | None

    @property
    def step_s(self) -> float:
        """One step from the client through all hops and back."""
        return sum(hop.cost.total for hop in self.hops) + self.return_s

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
    """A peer that no route may use; `reason` goes on from its name: "is leaving"."""

    record: PeerRecord
    code: LeftOutCode
    reason: str


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """What was not chosen, and `reason` why, for a person.

    `without`  the best route without `peer_id`, which the chosen route uses: what happens if it goes
    `through`  the best route through `peer_id`, which the chosen route does not use
    `numerics` the best route of other numerics

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
    """The chosen route, what lost against it, who was left out, and what it was all derived from."""

    route: Route
    alternatives: tuple[Alternative, ...]
    left_out: tuple[LeftOut, ...]
    request: RouteRequest
    records: tuple[PeerRecord, ...]
    links: Mapping[str, LinkQuality]

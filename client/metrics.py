"""How fast an answer came, and how the time of a token divides among the hops. Seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from client.pipeline.circuit import Answer
from client.speculation.speculation import SpeculationReport
from swarm.wire.messages import HopTrace


@dataclass(frozen=True, kw_only=True)
class HopTime:
    """One hop's share of a token's time, on average. `network_s` is the transfer from the hop (or client) before.

    `queue_s` and `compute_s` were measured; `other_s` is the rest of the step's time on the hop until it was encoded:
    the hand-over between threads and the turns of the event loop. `codec_s` is the encoding after that.
    If the hops' clocks cannot be compared, the time outside of the hops is divided evenly.
    """

    peer_id: str
    name: str
    layers: str
    queue_s: float
    compute_s: float
    codec_s: float
    other_s: float
    network_s: float


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """One answer. `ttft_s` is from the call to the first token, `total_s` to the last; rates exclude the first.

    `token_s` is the average time of a step after the first. Such a step gives one token, or several with `speculation`.
    `token_s` equals the sum over `hops`, `return_s` (from the last hop back) and `client_s`. `reused_tokens` of the
    prompt were in the peers' caches. `repairs` counts how often the route was replaced. `overheads_s` has, for each
    step after the first, its time beyond the hops' compute; `to_plain` leaves it out.
    """

    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    ttft_s: float
    total_s: float
    tokens_per_second: float
    token_s: float
    return_s: float
    client_s: float
    repairs: int
    route: str
    hops: tuple[HopTime, ...]
    speculation: SpeculationReport | None = None
    overheads_s: tuple[float, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """JSON types only."""
        plain = asdict(self) | {"hops": [asdict(hop) for hop in self.hops]}
        del plain["overheads_s"]
        return plain


class Meter:
    """Collects one answer's times. Made at the call; `on_answer` gets the answer of every step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._first_at: float | None = None
        self._last_at: float | None = None
        self._steps: list[tuple[Answer, float]] = []

    def on_answer(self, answer: Answer) -> None:
        if not answer.forward.rows:
            return
        before = self._last_at
        self._last_at = answer.received_at
        if before is None:
            self._first_at = answer.received_at
        elif len(answer.forward.tokens) == answer.forward.rows:
            # from the answer before, or from its sending if that was earlier: windows overlap
            self._steps.append((answer, answer.received_at - min(before, answer.sent_at)))

    def metrics(
        self,
        *,
        prompt_tokens: int,
        reused_tokens: int,
        new_tokens: int,
        repairs: int,
        route: str,
        hops: Sequence[tuple[str, str, str]],
        speculation: SpeculationReport | None = None,
    ) -> Metrics:
        """The averages; `hops` are (peer id, name, layers) of the present route, `route` its text."""
        first = self._first_at if self._first_at is not None else self._clock()
        last = self._last_at if self._last_at is not None else first
        decode_s = last - first
        # without the steps over an earlier route
        steps = [(a, s) for a, s in self._steps if [t.peer for t in a.output.trace] == [peer for peer, _, _ in hops]]
        networks = [_network_times(answer) for answer, _ in steps]
        return Metrics(
            prompt_tokens=prompt_tokens,
            reused_tokens=reused_tokens,
            new_tokens=new_tokens,
            ttft_s=first - self._began,
            total_s=last - self._began,
            tokens_per_second=(new_tokens - 1) / decode_s if decode_s > 0 else 0.0,
            token_s=_mean([seconds for _, seconds in steps]),
            return_s=_mean([network.legs[-1] for network in networks]),
            client_s=_mean([seconds - (answer.received_at - answer.sent_at) for answer, seconds in steps]),
            repairs=repairs,
            route=route,
            hops=tuple(
                _hop_time(hop, place, [answer.output.trace[place] for answer, _ in steps], networks)
                for place, hop in enumerate(hops)
            ),
            speculation=speculation,
            overheads_s=tuple(seconds - sum(hop.compute_s for hop in answer.output.trace) for answer, seconds in steps),
        )


@dataclass(frozen=True)
class _NetworkTimes:
    """One answer's seconds outside of the hops: `legs` to each hop and back from the last, without `codecs`, the
    encoding at the end of each hop."""

    legs: list[float]
    codecs: list[float]


def _network_times(answer: Answer) -> _NetworkTimes:
    trace = answer.output.trace
    sent = [answer.sent_at, *(hop.sent_at for hop in trace)]
    received = [*(hop.received_at for hop in trace), answer.received_at]
    legs = [later - earlier for earlier, later in zip(sent, received, strict=True)]
    if min(legs) < 0:  # the clocks of other machines differ
        legs = [(answer.received_at - answer.sent_at - sum(map(_time_on_hop, trace))) / len(legs)] * len(legs)
    # A trace has the encoding time of the step before. This step's is at most the whole leg.
    codecs = [min(hop.codec_s, leg) for hop, leg in zip(trace, legs[1:], strict=True)]
    return _NetworkTimes([legs[0], *(leg - codec for leg, codec in zip(legs[1:], codecs, strict=True))], codecs)


def _hop_time(
    hop: tuple[str, str, str], place: int, traces: Sequence[HopTrace], networks: Sequence[_NetworkTimes]
) -> HopTime:
    peer_id, name, layers = hop
    return HopTime(
        peer_id=peer_id,
        name=name,
        layers=layers,
        queue_s=_mean([trace.queue_s for trace in traces]),
        compute_s=_mean([trace.compute_s for trace in traces]),
        codec_s=_mean([network.codecs[place] for network in networks]),
        other_s=_mean([_time_on_hop(trace) - trace.queue_s - trace.compute_s for trace in traces]),
        network_s=_mean([network.legs[place] for network in networks]),
    )


def _time_on_hop(trace: HopTrace) -> float:
    return trace.sent_at - trace.received_at


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0

"""How long a step is expected to take. After a multiple of that, the client asks the hops what is wrong. Pure."""

from __future__ import annotations

from swarm.routing.plan import Route

_WEIGHT = 0.3


class StepTimes:
    """Expected seconds of a step of n tokens: according to the route's records, or as measured if that is more.

    Steps of one token and of several are measured apart: the first are bound by reading the weights, the others by
    arithmetic.
    """

    def __init__(self, *, token_s: float, prompt_token_s: float, latency_s: float) -> None:
        self._token_s = token_s
        self._prompt_token_s = prompt_token_s
        self._latency_s = latency_s
        self._measured: dict[bool, float] = {}

    def expected(self, tokens: int) -> float:
        """Seconds for a step of `tokens` over all hops, from sending it to its answer."""
        planned = self._token_s if tokens == 1 else max(self._token_s, self._prompt_token_s * tokens)
        measured = self._measured.get(tokens > 1, 0.0) * tokens
        return max(planned + self._latency_s, measured)

    def observe(self, tokens: int, seconds: float) -> None:
        """Record that a step of `tokens` was answered after `seconds`."""
        token_s = seconds / tokens
        before = self._measured.get(tokens > 1)
        # a slower step counts at once, a faster one by `_WEIGHT`: a deadline that is too short costs a repair
        if before is not None and token_s < before:
            token_s = before + _WEIGHT * (token_s - before)
        self._measured[tokens > 1] = token_s


def step_times_of(route: Route) -> StepTimes:
    """The times that the route's records announce, for a single token and for a token of a prompt."""
    records = [(hop.record, len(hop.span)) for hop in route.hops]
    return StepTimes(
        token_s=sum(record.layer_time_s * layers for record, layers in records),
        prompt_token_s=sum(record.prefill_time_s * layers for record, layers in records),
        latency_s=route.return_s
        + sum(hop.cost.latency_s + hop.cost.transfer_s + hop.cost.queue_s for hop in route.hops),
    )

"""The link to another peer: how good it is, and measuring that."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from swarm.transport.channel import Channel
from swarm.wire.queries import Ping, Pong

_PINGS = 3


@dataclass(frozen=True, kw_only=True)
class LinkQuality:
    """What a peer measured of the way to another. `rtt_s` is infinite where there is no way."""

    rtt_s: float
    bytes_per_s: float = 0.0

    @property
    def reachable(self) -> bool:
        return math.isfinite(self.rtt_s)


async def measure_link(
    channel: Channel, *, timeout: float = 2.0, payload: int = 0, clock: Callable[[], float] = time.perf_counter
) -> LinkQuality:
    """Round trip: the best of a few pings. Bandwidth towards the peer, if `payload` bytes are sent to find it.

    Raises PeerStalled where a ping takes longer than `timeout` seconds, and PeerLost.
    """

    async def ping(size: int) -> float:
        begin = clock()
        question = Ping(request=channel.next_request(), payload=bytes(size))
        await channel.ask(question, Pong, timeout=timeout)
        return clock() - begin

    rtt_s = min([await ping(0) for _ in range(_PINGS)])
    if not payload:
        return LinkQuality(rtt_s=rtt_s)
    # the first one opens TCP's window
    full_s = min([await ping(payload) for _ in range(2)])
    # on a fast link the difference drowns in noise: then the whole trip is the (lower) estimate
    transfer_s = full_s - rtt_s if full_s > 2 * rtt_s else full_s
    return LinkQuality(rtt_s=rtt_s, bytes_per_s=payload / max(transfer_s, 1e-9))

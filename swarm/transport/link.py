"""The quality of the link to a peer, and its measurement."""

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
    """Round-trip time and bandwidth of a link. `rtt_s` is infinite if the peer cannot be reached."""

    rtt_s: float
    bytes_per_s: float = 0.0

    @property
    def reachable(self) -> bool:
        return math.isfinite(self.rtt_s)


async def measure_link(
    channel: Channel, *, timeout: float = 2.0, payload: int = 0, clock: Callable[[], float] = time.perf_counter
) -> LinkQuality:
    """Measure the round trip (the fastest of a few pings) and, with `payload` bytes, the bandwidth towards the peer.

    Raises PeerStalled if a ping takes longer than `timeout` seconds, and PeerLost.
    """

    async def ping(size: int) -> float:
        begin = clock()
        await channel.ask(Ping(request=channel.next_request(), payload=bytes(size)), Pong, timeout=timeout)
        return clock() - begin

    rtt_s = min([await ping(0) for _ in range(_PINGS)])
    if not payload:
        return LinkQuality(rtt_s=rtt_s)
    # The first of the two pings opens TCP's window.
    full_s = min([await ping(payload) for _ in range(2)])
    # On a fast link the difference is mostly noise. The whole trip then gives a lower, safe estimate.
    transfer_s = full_s - rtt_s if full_s > 2 * rtt_s else full_s
    return LinkQuality(rtt_s=rtt_s, bytes_per_s=payload / max(transfer_s, 1e-9))

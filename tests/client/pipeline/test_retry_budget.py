from __future__ import annotations

import pytest

from client.config import ClientConfig
from client.pipeline.retry_budget import RetryBudget
from swarm.errors import NotCovered, PeerBusy, SwarmError

CONFIG = ClientConfig(wait_for_peers_s=10.0, repair_timeout_s=60.0)


@pytest.mark.parametrize(
    ("before", "error", "seconds", "raised"),
    [
        (None, NotCovered("no peer is there"), 10.0, NotCovered),
        (PeerBusy("full"), NotCovered("all are paused"), 60.0, PeerBusy),
        (None, NotCovered("all announce that they are full", full=True), 60.0, NotCovered),
    ],
)
def test_full_peers_are_waited_for_longer_than_missing_peers(
    before: SwarmError | None, error: SwarmError, seconds: float, raised: type[SwarmError]
) -> None:
    now = 100.0
    budget = RetryBudget(CONFIG, lambda: now)
    if before is not None:
        budget.add(before)
    assert budget.time_to_wait(error) == seconds
    now += seconds - 1
    assert budget.time_to_wait(error) == 1.0
    now += 1
    with pytest.raises(raised):
        budget.time_to_wait(error)

from __future__ import annotations

import pytest

from client.config import ClientConfig
from client.pipeline.retry_budget import RetryBudget
from swarm.errors import NotCovered, PeerBusy, SwarmError

CONFIG = ClientConfig(wait_for_peers_s=10.0, repair_timeout_s=60.0)


@pytest.mark.parametrize(
    ("before", "error", "seconds", "said"),
    [
        (None, NotCovered("nobody there"), 10.0, NotCovered),
        (PeerBusy("full"), NotCovered("all rest"), 60.0, PeerBusy),
        (None, NotCovered("all are full, they announce", full=True), 60.0, NotCovered),
    ],
)
def test_peers_that_are_full_are_waited_for_longer_than_some_that_are_not_there(
    before: SwarmError | None, error: SwarmError, seconds: float, said: type[SwarmError]
) -> None:
    now = 100.0
    trouble = RetryBudget(CONFIG, lambda: now)
    if before is not None:
        trouble.add(before)
    assert trouble.wait_for(error) == seconds
    now += seconds - 1
    assert trouble.wait_for(error) == 1.0
    now += 1
    with pytest.raises(said):
        trouble.wait_for(error)

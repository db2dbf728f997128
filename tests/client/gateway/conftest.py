"""Real peers that the gateway's tests share, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cases.peer_set import PeerSet, open_peer_set


@pytest.fixture(scope="package")
def gateway_peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerSet]:
    """A swarm without peers at first. Each test file starts the peers that it needs (`real_gateway.start_peers`)."""
    with open_peer_set(tmp_path_factory.mktemp("gateway")) as peer_set:
        yield peer_set

"""Real peers that the gateway's tests share, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cases.town import Town, town_in


@pytest.fixture(scope="package")
def gateway_town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    """A swarm without peers at first. Each test file starts the peers that it needs (`real_gateway.start_peers`)."""
    with town_in(tmp_path_factory.mktemp("gateway")) as town:
        yield town

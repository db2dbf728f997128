"""For every model family that docs/how-to/models.md supports: two peers serve a package and a client generates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from swarm.engine.choice import EngineKind
from swarm.model.spans import LayerRange
from tests.cases.in_process_swarm import start_peers
from tests.export.checkpoint.test_families import SUPPORTED, Packages
from tests.export.make_tiny import LAYERS

# The default engine gets a layer of each kind; the engine of other devices gets the rest.
PEERS: dict[LayerRange, EngineKind] = {LayerRange(0, 3): "paged", LayerRange(3, LAYERS): "stateful"}


@pytest.mark.parametrize("family", SUPPORTED)
def test_two_peers_generate_the_text_that_transformers_generates(
    family: str, tiny_checkpoints: Mapping[str, Path], checkpoint_packages: Packages
) -> None:
    """The prompt is longer than a sliding window."""
    reference = json.loads((tiny_checkpoints[family] / "reference.json").read_text())
    expected = reference["greedy"]

    async def scenario() -> None:
        package = checkpoint_packages[0][family]
        async with (
            start_peers(package, list(PEERS.values()), spans=list(PEERS)) as swarm,
            swarm.client() as client,
        ):
            assert await client.write(reference["prompt"], len(expected)) == expected

    asyncio.run(scenario())

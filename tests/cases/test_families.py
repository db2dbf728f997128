"""Every supported family of docs/how-to/models.md: two peers serve its checkpoint's package, a client generates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from swarm.engine.choice import EngineKind
from swarm.model.spans import LayerRange
from tests.cases.street import street
from tests.export.checkpoint.test_families import SUPPORTED, Packages
from tests.export.make_tiny import LAYERS

# The engine that peers choose by themselves gets a layer of each kind; that of other devices the rest.
PEERS: dict[LayerRange, EngineKind] = {LayerRange(0, 3): "paged", LayerRange(3, LAYERS): "stateful"}


@pytest.mark.parametrize("family", SUPPORTED)
def test_two_peers_write_what_transformers_writes(
    family: str, tiny_checkpoints: Mapping[str, Path], checkpoint_packages: Packages
) -> None:
    """The prompt alone is longer than a sliding window."""
    reference = json.loads((tiny_checkpoints[family] / "reference.json").read_text())
    expected = reference["greedy"]

    async def story() -> None:
        package = checkpoint_packages[0][family]
        async with street(package, list(PEERS.values()), spans=list(PEERS)) as made, made.client() as client:
            assert await client.write(reference["prompt"], len(expected)) == expected

    asyncio.run(story())

"""Fixtures of the end-to-end cases: a state folder for each test, and a swarm that no test changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.app.local_swarm import LocalSwarm
from tests.harness import local_swarm


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder for default identities and saved tracebacks."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="package")
def standing_swarm(smollm2_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    """Three peers, 0:11, 11:15 and 15:30. A test that uses it must leave it unchanged.

    Peers remember which spans passed their self-test (peer/loading/self_test_cache.py). Tests that start peers use the
    same spans if they do not need others.
    """
    with local_swarm(tmp_path_factory.mktemp("standing"), smollm2_package, ("0:11", "11:15", "15:30")) as swarm:
        yield swarm

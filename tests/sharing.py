"""Distributes the suite over three processes: a plugin for pytest-xdist, loaded by tests/conftest.py.

The tests of a file run in one process: they may share a swarm. The files that use the standing swarm
(tests/cases/conftest.py) run in one process too, which starts it once; so do the files with a gateway before real peers
(tests/client/gateway/conftest.py), and the tests of the exporter, which load torch, transformers and nncf once.

The group with the standing swarm takes longest and comes first. Meanwhile the other processes build the cached fixtures
(tests/conftest.py). Other tests that start peers follow: if a long group began last, the other processes would be idle.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

_ROOT = Path(__file__).parent.parent
_PROCESSES = 3
"""More than the two cores: tests spend a tenth of their time waiting for peers, deadlines, announcements."""
_STANDING_SWARM = "standing_swarm"
_SHARED_SWARMS = (_STANDING_SWARM, "gateway_peers")
_EXPORTER_TESTS = "tests/export/"
_CACHED_FIXTURES = {"tiny_irs", "checkpoint_artifacts", "smollm2_static_package"}
"""Fixtures that take long to build if the user's cache does not have them."""


class GroupScheduling(LoadScopeScheduling):
    """xdist's scheduler of whole scopes, with `group_of` as the scope."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])


@cache
def group_of(path: str) -> str:
    """The group of tests that this file belongs to; `path` is relative to the root."""
    if path.startswith(_EXPORTER_TESTS):
        return _EXPORTER_TESTS
    text = (_ROOT / path).read_text()
    return next((swarm for swarm in _SHARED_SWARMS if f"{swarm}: " in text), path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling:
    return GroupScheduling(config, log)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """No worker processes for single files or tests: their start takes longer, and they hide the output."""
    return _PROCESSES if all(Path(argument).is_dir() for argument in config.args) else 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    path = item.nodeid.partition("::")[0]
    if group_of(path) == _STANDING_SWARM:
        return 0
    if _CACHED_FIXTURES & set(getattr(item, "fixturenames", ())):
        return 1
    if path.startswith("tests/cases/"):
        return 2
    return 3 if item.get_closest_marker("model") else 4

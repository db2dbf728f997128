"""How three processes share the suite: a plugin for pytest-xdist, loaded by tests/conftest.py.

A file stays whole, for the swarm of its own that it may have. The files on the one standing swarm
(tests/cases/conftest.py) stay together, so that it is started once; so do those before whose peers a gateway stands
(tests/client/gateway/conftest.py), and the tests of the exporter, so that torch, transformers and nncf are loaded once.

The share on the standing swarm is the longest, and comes first. While one process is at it, the others make all that is
made but once (tests/conftest.py): nobody waits for it then. What else starts peers follows: such shares are long, and a
long one that began last would leave the others idle.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

_ROOT = Path(__file__).parent.parent
_PROCESSES = 3
"""On two cores: a tenth of their time tests wait, for peers, deadlines, announcements; somebody else computes then."""
_STANDING = "standing_swarm"
_SWARMS = (_STANDING, "gateway_town")
_EXPORTER = "tests/export/"
MADE_ONCE = {"tiny_irs", "made_of_checkpoints", "smollm2_static_package"}
"""Fixtures that take long where the user's cache has not got what they make."""


class Shares(LoadScopeScheduling):
    """xdist's scheduler of whole scopes, with `share_of` as the scope."""

    def _split_scope(self, nodeid: str) -> str:
        return share_of(nodeid.partition("::")[0])


@cache
def share_of(path: str) -> str:
    """The share that the tests of this file belong to; `path` is relative to the root."""
    if path.startswith(_EXPORTER):
        return _EXPORTER
    text = (_ROOT / path).read_text()
    return next((swarm for swarm in _SWARMS if f"{swarm}: " in text), path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Shares:
    return Shares(config, log)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """None for single files or tests: starting them would take longer, and what is printed would be hidden."""
    return _PROCESSES if all(Path(argument).is_dir() for argument in config.args) else 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    path = item.nodeid.partition("::")[0]
    if share_of(path) == _STANDING:
        return 0
    if MADE_ONCE & set(getattr(item, "fixturenames", ())):
        return 1
    if path.startswith("tests/cases/"):
        return 2
    return 3 if item.get_closest_marker("model") else 4

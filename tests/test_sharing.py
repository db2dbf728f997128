"""Tests that share a swarm or large libraries run in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sharing import group_of

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("swarm", "files"), [("standing_swarm", "cases/test_*.py"), ("gateway_peers", "client/gateway/**/test_*.py")]
)
def test_the_files_with_a_shared_swarm_are_one_group(swarm: str, files: str) -> None:
    together = [path for path in sorted(ROOT.glob(f"tests/{files}")) if swarm in path.read_text()]
    assert len(together) > 1
    assert len({group_of(str(path.relative_to(ROOT))) for path in together}) == 1


def test_the_exporters_tests_are_one_group() -> None:
    assert len({group_of(str(path.relative_to(ROOT))) for path in ROOT.glob("tests/export/**/test_*.py")}) == 1


def test_every_other_file_is_a_group_of_its_own() -> None:
    for path in ("tests/test_layout.py", "tests/cases/test_churn.py", "tests/client/gateway/http/test_server.py"):
        assert group_of(path) == path

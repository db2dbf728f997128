"""How the suite is shared: what needs one swarm stays in one process."""

from __future__ import annotations

from pathlib import Path

from tests.sharing import share_of

ROOT = Path(__file__).parent.parent


def test_the_files_on_the_standing_swarm_are_one_share() -> None:
    together = [path for path in sorted(ROOT.glob("tests/cases/test_*.py")) if "standing_swarm" in path.read_text()]
    assert len(together) > 1
    assert len({share_of(str(path.relative_to(ROOT))) for path in together}) == 1


def test_every_other_file_is_a_share_of_its_own() -> None:
    for path in ("tests/test_house.py", "tests/cases/test_churn.py"):
        assert share_of(path) == path

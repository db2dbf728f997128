"""What the cases share: a swarm that no test changes, and prompts as the ids that the model reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.app.local_swarm import LocalSwarm
from tests.harness import local_swarm

ChatIds = Callable[[str], list[int]]


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Default identities and kept tracebacks go there."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="package")
def standing_swarm(smollm2_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    """Three peers in a row, 0:11, 11:15 and 15:30. Whoever uses it leaves it as it was.

    Peers remember which spans have passed their self-test (peer/loading/self_test_cache.py): those that tests start
    again and again are the same spans where what a test shows does not depend on them.
    """
    with local_swarm(tmp_path_factory.mktemp("standing"), smollm2_package, ("0:11", "11:15", "15:30")) as swarm:
        yield swarm


@pytest.fixture(scope="session")
def chat_ids(smollm2_tokenizer: Any) -> ChatIds:
    """The ids that a user's message becomes, by the unsplit model's own tokenizer and template."""

    def encode(message: str) -> list[int]:
        text = smollm2_tokenizer.apply_chat_template([{"role": "user", "content": message}], add_generation_prompt=True)
        ids: list[int] = smollm2_tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist()
        return ids

    return encode

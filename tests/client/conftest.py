"""Fixtures of the client's tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def prompt() -> list[int]:
    """A prompt of several chunks."""
    return [(7 * position + 3) % 97 for position in range(45)]

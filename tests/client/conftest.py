"""What the tests of the client share."""

from __future__ import annotations

import pytest


@pytest.fixture
def prompt() -> list[int]:
    """Longer than a few chunks."""
    return [(7 * position + 3) % 97 for position in range(45)]

"""The folders of this program on a user's machine (XDG base directories)."""

from __future__ import annotations

import os
from pathlib import Path

_NAME = "aipc-swarm"


def cache_folder() -> Path:
    """For files that can be created again: exported and fetched packages, compiled graphs, the demo model."""
    return _base("XDG_CACHE_HOME", ".cache") / _NAME


def state_folder() -> Path:
    """For files of this machine: identities, tracebacks of bugs."""
    return _base("XDG_STATE_HOME", ".local/state") / _NAME


def _base(variable: str, default: str) -> Path:
    value = os.environ.get(variable, "")
    return Path(value) if value.startswith("/") else Path.home() / default

"""Where this program keeps things on a person's machine (the XDG base directories)."""

from __future__ import annotations

import os
from pathlib import Path

_NAME = "aipc-swarm"


def cache_folder() -> Path:
    """What can be made again: exported and fetched packages, compiled graphs, the demo model."""
    return _base("XDG_CACHE_HOME", ".cache") / _NAME


def state_folder() -> Path:
    """What is this machine's own: identities, logs of failures."""
    return _base("XDG_STATE_HOME", ".local/state") / _NAME


def _base(variable: str, default: str) -> Path:
    given = os.environ.get(variable, "")
    return Path(given) if given.startswith("/") else Path.home() / default

"""Starts child processes that run modules of this installation, in any working directory.

`python -P -m swarm.process.child_process MODULE ...` switches OpenVINO's telemetry off before any import, then runs
MODULE. Without `-P`, Python puts the working directory first on its path, where a user's `peer.py` or `client.py`
would be imported instead of our packages.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from swarm.process import telemetry


def module_command(module: str) -> list[str]:
    """The command that runs `module` of this program. Start it with `module_environment()`."""
    return [sys.executable, "-P", "-m", "swarm.process.child_process", module]


def module_environment() -> dict[str, str]:
    """The environment of this process, with our packages first on Python's path."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


if __name__ == "__main__":
    telemetry.switch_off()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

"""How this program starts another copy of itself: these very packages, wherever the user stands.

`python -P -m swarm.process.child_process MODULE ...` runs MODULE without reports to OpenVINO's maker, which must be
prevented before
anything imports it. Without `-P`, Python puts the working directory first on its path, where a user's `peer.py` or
`client.py` would be taken for ours.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from swarm.process import telemetry


def module_command(module: str) -> list[str]:
    """The command that runs `module` of this program; give it `module_environment()` too."""
    return [sys.executable, "-P", "-m", "swarm.process.child_process", module]


def module_environment() -> dict[str, str]:
    """This process's environment, with our packages before all others on the path."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


if __name__ == "__main__":
    telemetry.switch_off()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

"""`python -m swarm.app.parent_watch PARENT COMMAND...` is `swarm COMMAND...`, ended by the kernel when PARENT ends.

The demo, tests and benchmarks start their peers with it: not even SIGKILL for PARENT leaves a peer running.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from swarm.app.main import main

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Let the kernel send SIGTERM to this process when its `parent` ends. Exits if the parent has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    main(sys.argv[2:])

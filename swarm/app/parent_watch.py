"""`python -m swarm.app.parent_watch PARENT COMMAND...` is `swarm COMMAND...`, ended by the kernel when PARENT ends.

Whoever starts peers for its own use (the demo, tests, benchmarks) starts them through this, so that not
even its SIGKILL leaves a peer behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from swarm.app.main import main

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have this process get SIGTERM when `parent`, which started it, ends. Exits if that is over already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    main(sys.argv[2:])

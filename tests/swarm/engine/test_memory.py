from __future__ import annotations

import subprocess
import sys

import pytest

from swarm.process.child_process import module_environment

# glibc reports its number of heaps after a thread has allocated memory.
HEAPS = """
import ctypes, threading
from swarm.engine.memory import share_one_heap
{before}
threading.Thread(target=bytearray, args=(100_000,)).start()
libc = ctypes.CDLL("libc.so.6")
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heaps")
@pytest.mark.parametrize(("before", "heaps"), [("share_one_heap()", 1), ("", 2)])
def test_threads_share_one_heap_after_the_call(before: str, heaps: int) -> None:
    code = HEAPS.format(before=before)
    done = subprocess.run(
        [sys.executable, "-c", code], env=module_environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("<heap nr=") == heaps

"""Threads that compute for long let those go first that answer others.

An inference of ten milliseconds and the event loop share cores. Linux takes an awakened thread for no more urgent than
the one that runs, and may leave it waiting until that one's slice is over, 3 ms: a message then waits for a good
part of another session's step. Below the usual priority a device's thread is interrupted at once, and loses the core
for no longer than there is something else to do on it. A volunteer's own programs, too, come before the swarm.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_NICE = 10


def give_way() -> None:
    """From now on this thread, and each that it starts, has a low priority. It cannot be taken back."""
    thread = threading.get_native_id()  # on Linux priorities are a thread's own
    os.setpriority(os.PRIO_PROCESS, thread, max(_NICE, os.getpriority(os.PRIO_PROCESS, thread)))


def giving_way(function: Callable[[], T]) -> T:
    """`function()` in a thread that gives way, for the threads that it starts and that stay."""
    with ThreadPoolExecutor(1, initializer=give_way) as executor:
        return executor.submit(function).result()

"""Threads that answer others come before threads that compute for long.

An inference of ten milliseconds and the event loop share cores. Linux takes an awakened thread for no more urgent than
the one that runs, and may leave it waiting until that one's slice is over, 3 ms: a message then waits for a good
part of another session's step. So a device's thread has a low priority: it is interrupted at once, and loses the core
for no longer than there is something else to do on it. A volunteer's own programs, too, come before the swarm. And a
command's event loop has short turns: what needs little at a time is let in before those who would stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

from swarm.process.own_thread import run_in_own_thread

T = TypeVar("T")
_NICE = 10
_SHORT_NS = 100_000  # the shortest that there is
_USUAL_NS = 0
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period


def lower_priority() -> None:
    """From now on this thread, and each that it starts, has a low priority. It cannot be taken back.

    On Linux, where priorities are a thread's own; elsewhere, and in a sandbox that forbids it, nothing changes.
    """
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, max(_NICE, os.getpriority(os.PRIO_PROCESS, thread)))
    _take_turns(_USUAL_NS)


def low_priority(function: Callable[[], T]) -> T:
    """`function()` in a thread that gives way, for the threads that it starts and that stay."""
    return run_in_own_thread(function, lower_priority)


def short_turns() -> None:
    """From now on this thread, and each that it starts and that does not give way, has short turns; its share is the
    same. Linux knows that from 6.12 on; elsewhere, and in a sandbox that forbids it, nothing changes."""
    _take_turns(_SHORT_NS)


def _take_turns(nanoseconds: int) -> None:
    number = _SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        return
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())  # said again, or it would be 0
        attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, nanoseconds, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)

"""Thread priorities: the event loop runs before threads that compute for long.

An inference of ten milliseconds and the event loop share cores. Linux does not prefer an awakened thread to the
running one, and may let it wait until that one's time slice (3 ms) is over: a message then waits for much of another
session's step. The worker's thread therefore has a low priority: other threads, and other programs of the machine's
user, interrupt it at once, and it continues when they are idle. The event loop of a command has short time slices:
Linux schedules a thread with a short slice earlier.
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
_SHORT_SLICE_NS = 100_000  # Linux's minimum.
_DEFAULT_SLICE_NS = 0
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period


def lower_priority() -> None:
    """Give this thread, and the threads that it starts from now on, a low priority. This cannot be undone.

    Only on Linux, where each thread has its own priority. No effect elsewhere or in a sandbox that forbids it.
    """
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, max(_NICE, os.getpriority(os.PRIO_PROCESS, thread)))
    _set_time_slice(_DEFAULT_SLICE_NS)


def run_at_low_priority(function: Callable[[], T]) -> T:
    """Run `function()` in a new thread of low priority. The threads that it starts keep that priority."""
    return run_in_own_thread(function, lower_priority)


def use_short_time_slices() -> None:
    """Give this thread, and the threads that it starts from now on, short time slices; `lower_priority` undoes that.

    The thread's share of the CPU does not change. No effect before Linux 6.12, on other systems, or in a sandbox that
    forbids it.
    """
    _set_time_slice(_SHORT_SLICE_NS)


def _set_time_slice(nanoseconds: int) -> None:
    number = _SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        return
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())  # The call sets it too.
        attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, nanoseconds, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)

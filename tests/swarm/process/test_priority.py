"""Only threads that compute for long get a low priority."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

import pytest

from swarm.process.priority import lower_priority, run_at_low_priority, use_short_time_slices

USUAL = os.getpriority(os.PRIO_PROCESS, 0)
LOW = max(USUAL, 10)  # The tests may run under `nice`.


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def in_a_thread(function: Callable[[], int]) -> int:
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(function()))
    thread.start()
    thread.join()
    return got[0]


def test_lower_priority_affects_only_the_calling_thread() -> None:
    def work() -> int:
        lower_priority()
        return niceness()

    assert in_a_thread(work) == LOW
    assert niceness() == USUAL


def test_started_threads_inherit_the_low_priority() -> None:
    assert run_at_low_priority(lambda: in_a_thread(niceness)) == LOW


def test_an_even_lower_priority_is_not_raised() -> None:
    def work() -> int:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        lower_priority()
        return niceness()

    assert in_a_thread(work) == 19


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_on_systems_without_thread_priorities_nothing_changes(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> int:
        lower_priority()
        use_short_time_slices()
        return niceness()

    monkeypatch.setattr(sys, "platform", system)
    assert in_a_thread(work) == USUAL


@pytest.mark.parametrize("call", ["getpriority", "setpriority", "sched_getscheduler"])
def test_in_a_sandbox_that_forbids_priorities_functions_still_run(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> NoReturn:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    def work() -> int:
        use_short_time_slices()
        return run_at_low_priority(lambda: 7)

    monkeypatch.setattr(os, call, forbidden)
    assert in_a_thread(work) == 7


def test_an_error_in_a_low_priority_thread_is_raised() -> None:
    def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_at_low_priority(work)


def time_slice_ns() -> int:
    """The time slice that this thread has requested; 0: the default."""
    attributes = ctypes.create_string_buffer(48)
    assert ctypes.CDLL(None).syscall(315, 0, attributes, len(attributes), 0) == 0
    return int(struct.unpack("=IIQiIQQQ", attributes.raw)[5])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of the system call is that of x86_64")
def test_a_low_priority_thread_does_not_inherit_short_time_slices() -> None:
    def work() -> int:
        usual = run_at_low_priority(time_slice_ns)
        use_short_time_slices()
        if time_slice_ns() == usual:
            return 0  # Linux before 6.12.
        assert time_slice_ns() == 100_000
        assert niceness() == USUAL
        assert run_at_low_priority(time_slice_ns) == usual
        return 1

    assert in_a_thread(work) == time_slices_can_be_short()


def time_slices_can_be_short() -> bool:
    major, minor = map(int, platform.release().split(".")[:2])
    return (major, minor) >= (6, 12)

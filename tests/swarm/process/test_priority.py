"""Threads that compute for long have a low priority, and nobody else has."""

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

from swarm.process.priority import low_priority, lower_priority, short_turns

USUAL = os.getpriority(os.PRIO_PROCESS, 0)
LOW = max(USUAL, 10)  # the tests may have been started with `nice`


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def in_a_thread(function: Callable[[], int]) -> int:
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(function()))
    thread.start()
    thread.join()
    return got[0]


def test_a_thread_that_gives_way_comes_after_the_others_of_its_process() -> None:
    def work() -> int:
        lower_priority()
        return niceness()

    assert in_a_thread(work) == LOW
    assert niceness() == USUAL


def test_threads_that_it_starts_give_way_too() -> None:
    assert low_priority(lambda: in_a_thread(niceness)) == LOW


def test_who_has_a_lower_priority_already_keeps_it() -> None:
    def work() -> int:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        lower_priority()
        return niceness()

    assert in_a_thread(work) == 19


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_where_threads_have_no_priority_of_their_own_nothing_changes(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> int:
        lower_priority()
        short_turns()
        return niceness()

    monkeypatch.setattr(sys, "platform", system)
    assert in_a_thread(work) == USUAL


@pytest.mark.parametrize("call", ["getpriority", "setpriority", "sched_getscheduler"])
def test_where_a_sandbox_forbids_priorities_threads_work_all_the_same(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> NoReturn:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    def work() -> int:
        short_turns()
        return low_priority(lambda: 7)

    monkeypatch.setattr(os, call, forbidden)
    assert in_a_thread(work) == 7


def test_what_goes_wrong_in_such_a_thread_is_told() -> None:
    def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        low_priority(work)


def turn_ns() -> int:
    """How long this thread's turns are by its own wish; 0: as long as everybody's."""
    attributes = ctypes.create_string_buffer(48)
    assert ctypes.CDLL(None).syscall(315, 0, attributes, len(attributes), 0) == 0
    return int(struct.unpack("=IIQiIQQQ", attributes.raw)[5])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of the call is another one there")
def test_who_answers_has_short_turns_and_who_computes_for_it_has_usual_ones() -> None:
    def work() -> int:
        usual = low_priority(turn_ns)
        short_turns()
        if turn_ns() == usual:
            return 0  # a Linux before 6.12
        assert turn_ns() == 100_000
        assert niceness() == USUAL
        assert low_priority(turn_ns) == usual
        return 1

    assert in_a_thread(work) == turns_can_be_short()


def turns_can_be_short() -> bool:
    major, minor = map(int, platform.release().split(".")[:2])
    return (major, minor) >= (6, 12)

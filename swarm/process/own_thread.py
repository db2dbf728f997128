"""Runs a function in a new thread, for calls that change the state of the calling thread.

OpenVINO (2026.4.1) gives the thread that loads its CPU plugin another signal stack and frees that stack with the
plugin, even from another thread, and even if a second plugin in the thread has saved it to restore it. In the main
thread, which handles signals, the next Ctrl-C is then a segmentation fault. Code that compiles several graphs in one
process therefore compiles them with `run_in_own_thread`: `run_at_low_priority` does for engines, and `export/verify/`
for parts.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def run_in_own_thread(function: Callable[[], T], initializer: Callable[[], None] | None = None) -> T:
    """Run `initializer()`, then `function()`, in a new thread. Returns and raises what `function` does.

    An interrupt takes effect when `function` has returned.
    """
    with ThreadPoolExecutor(1, initializer=initializer) as thread:
        return thread.submit(function).result()

"""A thread of its own for calls that change the thread that makes them.

OpenVINO (2026.4.1) gives the thread that loads its CPU plugin another stack for signals, and frees that with the
plugin: also where another thread does so, and where a second plugin in the thread remembers it as the one to go back
to. In the main thread, which handles the signals, the next Ctrl-C would be a segmentation fault. So whoever holds
compiled graphs beside others compiles them here.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def run_in_own_thread(function: Callable[[], T], begin: Callable[[], None] | None = None) -> T:
    """`function()` in a thread that ends with it, and does `begin` first. Raises what it raises.

    Interrupted, it ends when `function` does.
    """
    with ThreadPoolExecutor(1, initializer=begin) as thread:
        return thread.submit(function).result()

"""The event loop of this program's commands: uvloop if it is installed, else asyncio's.

The library itself runs on any event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from swarm.process.priority import use_short_time_slices

T = TypeVar("T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # uvloop does not support Windows.
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def runner() -> asyncio.Runner:
    """An `asyncio.Runner` of `new_event_loop`. Gives this thread short time slices."""
    use_short_time_slices()
    return asyncio.Runner(loop_factory=new_event_loop)


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` with `runner`."""
    with runner() as loop_runner:
        return loop_runner.run(main)

"""The event loop of this program's commands: uvloop where it is there, asyncio's own elsewhere.

A program that uses the library runs it on whatever loop it likes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from swarm.process.priority import short_turns

T = TypeVar("T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # there is none for Windows, nor where it was left out
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def runner() -> asyncio.Runner:
    """`asyncio.Runner` on that loop, whose callbacks and sockets cost a step less; this thread has short turns."""
    short_turns()
    return asyncio.Runner(loop_factory=new_event_loop)


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on that loop."""
    with runner() as chosen:
        return chosen.run(main)

"""Runs coroutine tests, each in a new event loop of the kind that the commands use."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec

from swarm.process import event_loop

P = ParamSpec("P")
_LONG_S = 60.0


def in_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Make `test` a plain function. It also fails if an exception reached the loop's exception handler."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        unhandled: list[dict[str, Any]] = []

        async def run_test() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
            async with asyncio.timeout(_LONG_S):
                await test(*args, **kwargs)

        event_loop.run(run_test())
        assert not unhandled

    return run


async def until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`. The test's own timeout ends the wait."""
    while not condition():  # noqa: ASYNC110  # Not every condition has an Event.
        await asyncio.sleep(0.005)

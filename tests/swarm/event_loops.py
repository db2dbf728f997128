"""Tests that are coroutines, each in an event loop of its own, of the commands' kind, that keeps no secrets."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec

from swarm.process import event_loop

P = ParamSpec("P")
_LONG_S = 60.0


def in_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run `test` as a plain function. It fails too if the loop was told of an exception that nobody took."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        untaken: list[dict[str, Any]] = []

        async def watched() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: untaken.append(context))
            async with asyncio.timeout(_LONG_S):
                await test(*args, **kwargs)

        event_loop.run(watched())
        assert not untaken

    return run


async def until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`; the test's own limit ends the wait."""
    while not condition():  # noqa: ASYNC110  # any condition, also of what knows no Event
        await asyncio.sleep(0.005)

"""Shutdown on signals: the first lets sessions move on, the second leaves at once, the third exits the process.

SIGINT and SIGTERM count, and SIGHUP (a closed terminal) unless it is ignored, as `nohup` does. Work that cannot
be interrupted, such as compiling a graph, does not keep the process alive: it exits after a few seconds. Child
processes end with it and the operating system frees the port.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_EXIT_CODE = 130
_EXIT_DELAY_S = 5.0


class Interrupted(Exception):
    """A stop signal came before the peer was announced."""


class Stop:
    """Stop requests of one peer. The first signal sets `requested`, the second `urgent`."""

    def __init__(self, *, exit_process: Callable[[int], None] = os._exit) -> None:
        self.requested = asyncio.Event()
        self.urgent = asyncio.Event()
        self._exit_process = exit_process

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Handle the signals while the block runs."""
        loop = asyncio.get_running_loop()
        # SIGINT is handled even if it is ignored: shells ignore it for background jobs without asking.
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        handled = _SIGNALS if ignored else (*_SIGNALS, signal.SIGHUP)
        for number in handled:
            loop.add_signal_handler(number, self.on_signal)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def on_signal(self) -> None:
        if not self.requested.is_set():
            self.requested.set()
        elif not self.urgent.is_set():
            self.urgent.set()
            self.exit_soon()
        else:
            self._exit_process(_EXIT_CODE)

    def exit_soon(self) -> None:
        """Exit the process after a few seconds if it still runs."""
        asyncio.get_running_loop().call_later(_EXIT_DELAY_S, self._exit_process, _EXIT_CODE)

    async def until_requested(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`; the first signal cancels it. Raises Interrupted then."""
        return await self._race(work, self.requested, Interrupted("stopped before it was announced"))

    async def until_urgent(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`; the second signal cancels it without an error."""
        with contextlib.suppress(Interrupted):
            await self._race(work, self.urgent, Interrupted("stopped twice"))

    async def _race(self, work: Coroutine[Any, Any, T], event: asyncio.Event, error: Exception) -> T:
        task, waiter = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            self.exit_soon()
            raise error
        finally:
            for pending in (task, waiter):
                pending.cancel()
            await asyncio.gather(task, waiter, return_exceptions=True)

"""What Ctrl-C means to a peer: once, leave; again, leave at once; a third time, drop everything.

SIGTERM means the same, and so does a terminal that is closed (SIGHUP, which `nohup` has ignored). Where something
cannot be interrupted (a graph that compiles), the process ends after a few seconds anyway: its children are tied
to it, and the system frees its port.
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
_INTERRUPTED = 130
_PATIENCE_S = 5.0


class Interrupted(Exception):
    """Ctrl-C came before the peer was announced."""


class Stop:
    """`asked` is set by the first signal, `urgent` by the second."""

    def __init__(self, *, end: Callable[[int], None] = os._exit) -> None:
        self.asked = asyncio.Event()
        self.urgent = asyncio.Event()
        self._end = end

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Listen to the signals while the block runs."""
        loop = asyncio.get_running_loop()
        # a shell that starts a job in the background has it ignore SIGINT, and means nothing by that
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        heard = _SIGNALS if ignored else (*_SIGNALS, signal.SIGHUP)
        for number in heard:
            loop.add_signal_handler(number, self.signal)
        try:
            yield
        finally:
            for number in heard:
                loop.remove_signal_handler(number)

    def signal(self) -> None:
        if not self.asked.is_set():
            self.asked.set()
        elif not self.urgent.is_set():
            self.urgent.set()
            self.end_soon()
        else:
            self._end(_INTERRUPTED)

    def end_soon(self) -> None:
        """End the process after a few seconds if it is still there."""
        asyncio.get_running_loop().call_later(_PATIENCE_S, self._end, _INTERRUPTED)

    async def interrupting(self, work: Coroutine[Any, Any, T]) -> T:
        """`work`, cancelled by the first signal. Raises Interrupted then."""
        return await self._race(work, self.asked, Interrupted("stopped before it was announced"))

    async def hurrying(self, work: Coroutine[Any, Any, None]) -> None:
        """`work`, given up at the second signal."""
        with contextlib.suppress(Interrupted):
            await self._race(work, self.urgent, Interrupted("asked twice"))

    async def _race(self, work: Coroutine[Any, Any, T], event: asyncio.Event, error: Exception) -> T:
        task, waiter = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            self.end_soon()
            raise error
        finally:
            for each in (task, waiter):
                each.cancel()
            await asyncio.gather(task, waiter, return_exceptions=True)

"""The one thread that owns a draft's device. What several texts want at the same time is one inference.

::

    text A: guess, guess, guess ...     ┐
    text B: guess, guess, guess ...     ├─ waiting ──► one step of each ──► engine.forward ──► a token for each
    text C: reads its prompt ...        ┘

A text asks for its next guess when it has the last one, a moment after the thread would have begun with the others
alone: they would take turns for ever. So before a batch the thread waits for those of the last one, at most a tenth of
what that took.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from swarm.engine.base import Engine, Step, StepResult
from swarm.errors import EngineError, SwarmError
from swarm.sampling import Sampling, choose

_LINGER = 0.1
_LONGEST_LINGER_S = 0.01
_STILL_THERE = 2.0


@dataclass(eq=False, kw_only=True)
class Feed:
    """One step of one text. `opens` is for how many positions its session is opened first, 0 where it is open.

    With `sampling` it answers with the token that follows, which may look back on `history` [step.end] int32; without,
    with 0.
    """

    step: Step
    opens: int = 0
    sampling: Sampling | None = None
    history: NDArray[np.int32] | None = None
    answer: Future[int] = field(default_factory=Future)


class DraftThread:
    """Owns `engine` from now to `close`; `executor` has one thread. Its methods belong to the event loop."""

    def __init__(
        self, engine: Engine, executor: ThreadPoolExecutor, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._executor = executor
        self._clock = clock
        self._come: deque[Feed] = deque()
        self._something = threading.Event()
        self._closed = False
        # the thread's own:
        self._waiting: list[Feed] = []
        self._seen: dict[str, float] = {}  # sessions of late, and when they were computed
        self._last_s = 0.0

    def feed(self, feed: Feed) -> asyncio.Future[int]:
        """Have it computed, after what was asked for before for the same text. The future raises EngineError."""
        self._come.append(feed)
        self._something.set()
        # Each batch takes the feed that waits longest: after as many batches as there were feeds, all have run.
        self._executor.submit(self._batch)
        return asyncio.wrap_future(feed.answer)

    def post(self, work: Callable[[Engine], object]) -> None:
        """`work` in the thread, after all that was asked for before: what nobody waits for and what cannot fail."""
        if not self._closed:
            self._executor.submit(work, self._engine)

    def close(self) -> None:
        """What runs ends first; nothing waits for it. Idempotent."""
        self._closed = True
        self._executor.shutdown(wait=False)

    # -- in the thread

    def _batch(self) -> None:
        """The next step of each text that has one."""
        self._gather()
        feeds: dict[str, Feed] = {}
        for one in self._waiting:
            feeds.setdefault(one.step.session, one)
        self._waiting = [one for one in self._waiting if feeds[one.step.session] is not one]
        ready = [one for one in feeds.values() if self._is_open(one)]
        if not ready:
            return
        started = self._clock()
        results: Sequence[StepResult | Exception]
        try:
            results = self._engine.forward([one.step for one in ready])
        except Exception as error:  # each that waits gets it
            results = [error for _ in ready]
        ended = self._clock()
        self._last_s = ended - started
        self._seen = {key: at for key, at in self._seen.items() if self._is_there(at, ended)}
        self._seen |= {one.step.session: ended for one in ready}
        for one, result in zip(ready, results, strict=True):
            _settle(one, result)

    def _gather(self) -> None:
        """What has come, and what is about to come."""
        until = self._clock() + min(_LINGER * self._last_s, _LONGEST_LINGER_S)
        while True:
            self._something.clear()
            while self._come:
                self._waiting.append(self._come.popleft())
            now = self._clock()
            here = {one.step.session for one in self._waiting}
            missing = any(key not in here and self._is_there(at, now) for key, at in self._seen.items())
            if not here or not missing or now >= until:
                return
            self._something.wait(until - now)

    def _is_there(self, at: float, now: float) -> bool:
        """A text that was computed then is not done with guessing, as far as one can tell."""
        return now - at < _STILL_THERE * self._last_s

    def _is_open(self, feed: Feed) -> bool:
        if feed.opens:
            try:
                self._engine.open(feed.step.session, feed.opens)
            except SwarmError as error:
                _settle(feed, error)
                return False
        return True


def _settle(feed: Feed, result: NDArray[np.float32] | Exception) -> None:
    """Whatever went wrong, nobody waits for ever."""
    try:
        if isinstance(result, Exception):
            raise result
        sampling, end = feed.sampling, feed.step.end
        token = choose(result[0], sampling, position=end, history=feed.history).token if sampling else 0
    except SwarmError as error:
        failed = EngineError(f"the draft failed: {error}")
        failed.__cause__ = error
        feed.answer.set_exception(failed)
    except Exception as error:  # a bug of this program
        feed.answer.set_exception(error)
    else:
        feed.answer.set_result(token)

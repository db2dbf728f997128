"""The one thread that owns a draft's device. Steps of several texts that wait at the same time are one inference.

::

    text A: guess, guess, guess ...     ┐
    text B: guess, guess, guess ...     ├─ waiting ──► one step of each ──► engine.forward ──► a token for each
    text C: reads its prompt ...        ┘

A text asks for its next guess when it has the last one. That is a moment too late for the next batch, if the thread
starts it at once with the other texts, and the texts would take turns for ever. So before a batch the thread waits for
the texts of the last one, at most a tenth of the time that the last one took.
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

_LINGER = 0.1  # of the last batch's time
_MAX_LINGER_S = 0.01
_ACTIVE = 2.0  # batch times since a text's last step for which it counts as active


@dataclass(eq=False, kw_only=True)
class Feed:
    """One step of one text. If its session is not open yet, it is opened first, for `open_tokens` positions (else 0).

    With `sampling` the answer is the token that follows, for which `history` [step.end] int32 may be needed; without,
    it is 0.
    """

    step: Step
    open_tokens: int = 0
    sampling: Sampling | None = None
    history: NDArray[np.int32] | None = None
    answer: Future[int] = field(default_factory=Future)


class DraftThread:
    """Owns `engine` until `close`; `executor` has one thread. Call its methods from the event loop."""

    def __init__(
        self, engine: Engine, executor: ThreadPoolExecutor, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._executor = executor
        self._clock = clock
        self._inbox: deque[Feed] = deque()
        self._arrived = threading.Event()
        self._closed = False
        # used by the thread only:
        self._waiting: list[Feed] = []
        self._computed_at: dict[str, float] = {}  # by session, of those that are active
        self._last_s = 0.0

    def feed(self, feed: Feed) -> asyncio.Future[int]:
        """Queue a step after the earlier ones of the same text. The future raises EngineError."""
        self._inbox.append(feed)
        self._arrived.set()
        # Each batch takes the feed that waits longest: after as many batches as there were feeds, all have run.
        self._executor.submit(self._batch)
        return asyncio.wrap_future(feed.answer)

    def post(self, work: Callable[[Engine], object]) -> None:
        """Run `work`, which must not fail, in the thread after all queued steps. Its result is not returned."""
        if not self._closed:
            self._executor.submit(work, self._engine)

    def close(self) -> None:
        """Close after the step that runs, without waiting. Idempotent."""
        self._closed = True
        self._executor.shutdown(wait=False)

    # -- in the thread

    def _batch(self) -> None:
        """Run the next step of each text that has one."""
        self._gather()
        feeds: dict[str, Feed] = {}
        for feed in self._waiting:
            feeds.setdefault(feed.step.session, feed)
        self._waiting = [feed for feed in self._waiting if feeds[feed.step.session] is not feed]
        ready = [feed for feed in feeds.values() if self._ensure_open(feed)]
        if not ready:
            return
        started = self._clock()
        results: Sequence[StepResult | Exception]
        try:
            results = self._engine.forward([feed.step for feed in ready])
        except Exception as error:  # each waiting caller gets it
            results = [error for _ in ready]
        ended = self._clock()
        self._last_s = ended - started
        self._computed_at = {key: at for key, at in self._computed_at.items() if self._is_active(at, ended)}
        self._computed_at |= {feed.step.session: ended for feed in ready}
        for feed, result in zip(ready, results, strict=True):
            _set_answer(feed, result)

    def _gather(self) -> None:
        """Take the feeds that have arrived; wait a moment for those of the texts that are active."""
        until = self._clock() + min(_LINGER * self._last_s, _MAX_LINGER_S)
        while True:
            self._arrived.clear()
            while self._inbox:
                self._waiting.append(self._inbox.popleft())
            now = self._clock()
            present = {feed.step.session for feed in self._waiting}
            missing = any(key not in present and self._is_active(at, now) for key, at in self._computed_at.items())
            if not present or not missing or now >= until:
                return
            self._arrived.wait(until - now)

    def _is_active(self, computed_at: float, now: float) -> bool:
        """Whether a text will probably ask for another guess soon, by the time of its last step."""
        return now - computed_at < _ACTIVE * self._last_s

    def _ensure_open(self, feed: Feed) -> bool:
        """False, and the feed's answer is the error, if its session cannot be opened."""
        if feed.open_tokens:
            try:
                self._engine.open(feed.step.session, feed.open_tokens)
            except SwarmError as error:
                _set_answer(feed, error)
                return False
        return True


def _set_answer(feed: Feed, result: NDArray[np.float32] | Exception) -> None:
    """Choose the token and set it as the answer. An error becomes the answer too: a caller must never wait for ever."""
    try:
        if isinstance(result, Exception):
            raise result
        sampling, end = feed.sampling, feed.step.end
        token = choose(result[0], sampling, position=end, history=feed.history).token if sampling else 0
    except SwarmError as error:
        draft_error = EngineError(f"the draft failed: {error}")
        draft_error.__cause__ = error
        feed.answer.set_exception(draft_error)
    except Exception as error:  # a bug of this program
        feed.answer.set_exception(error)
    else:
        feed.answer.set_result(token)

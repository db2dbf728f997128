"""The tokens of one answer, several a trip if a draft saves time.

::

    the line      known ........ t | g1 g2 g3 | g4 g5 g6 g7 | g8 g9
                                 └─ window 1 ┘└─ window 2 ──┘└─ guessed, not sent yet
    under way                    t  g1 g2 g3    g4 g5 g6 g7
    answers                      a1 a2 a3 a4    a5 a6 a7 a8      a1 is chosen for the position of g1, a4 for that of g4

    g1 = a1, g2 = a2, g3 ≠ a3:   known ........ t g1 g2 a3       window 2 is void; a window that begins with a3
                                                                 rewinds all hops to the position of g3

While windows are under way the draft goes on guessing at the end of the line, as if all guesses were right.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from client.pipeline.circuit import Answer
from client.pipeline.pipeline import Pipeline
from client.speculation.draft import Draft
from client.speculation.tuner import Tuner
from client.speculation.verify import verify
from swarm.errors import EngineError
from swarm.sampling import Choice, Sampling
from swarm.wire.messages import MAX_STEP_ROWS


@dataclass(frozen=True)
class TripResult:
    """The tokens that a trip gave, and with each its log-probabilities and logits, if they were asked for."""

    tokens: tuple[int, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True, kw_only=True)
class SpeculationReport:
    """The speculation of one answer. `windows`: (tokens so far, guesses a window, windows under way) at each change.
    `without` is the estimated tokens a second without a draft, 0 if unknown; `off` says why guessing had ended by the
    end of the answer, if it had."""

    draft: str
    proposed: int
    accepted: int
    trips: int
    tokens_a_trip: float
    windows: tuple[tuple[int, int, int], ...]
    without: float
    off: str


class Guesser:
    """A session's draft and the tuner that measures it; kept from answer to answer."""

    def __init__(self, draft: Draft, tuner: Tuner, clock: Callable[[], float]) -> None:
        self.draft = draft
        self.tuner = tuner
        self.failure = ""
        self._clock = clock

    async def propose(self, k: int) -> list[int]:
        """`Draft.propose`, timed. If the device fails, `failure` is set and the draft is not used again."""
        began = self._clock()
        try:
            guesses = await self.draft.propose(k)
        except EngineError as error:
            self.failure = str(error)
            return []
        self.tuner.record_guesses(len(guesses), self._clock() - began)
        return guesses

    async def read(self) -> None:
        """`Draft.read`; sets `failure` if the device fails."""
        try:
            await self.draft.read()
        except EngineError as error:
            self.failure = str(error)


class Speculation:
    """One answer, appended to `known`. No step reaches beyond position `limit`. `close` it in the end."""

    def __init__(
        self, pipeline: Pipeline, known: list[int], sampling: Sampling, *, limit: int, guesser: Guesser | None
    ) -> None:
        self.known = known
        self._pipeline = pipeline
        self._sampling = sampling
        self._limit = limit
        self._guesser = guesser
        self._guesses: list[int] = []  # the draft's guesses after `known`
        self._exhausted = False  # the draft has no more guesses until a correction
        self._drafting: asyncio.Task[list[int]] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._began = len(known)
        self._proposed = self._accepted = self._trips = 0
        self._windows: list[tuple[int, int, int]] = []
        if guesser is not None:
            guesser.draft.begin(known, dataclasses.replace(sampling, logprobs=None, logits=""))
            guesser.tuner.streak = 0

    async def next(self) -> TripResult:
        """Wait for the next trip. Raises what `Pipeline.advance` raises."""
        if self._guesser is None:
            return self._verify(await self._pipeline.advance(self.known, self._sampling))
        if len(self.known) > self._began and not self._pipeline.windows:
            while missing := self._missing_guesses():
                await self._guess(missing)
            self._send_window()
        # else the prompt, which is sent at once
        return self._verify(await self._advance(self._guesser))

    async def send_ahead(self) -> None:
        """Call it after `next` if more tokens are wanted: send without waiting the windows that can be sent now."""
        if self._guesser is None:
            self._pipeline.send_ahead(len(self.known) - 1, self.known[-1:], self._sampling)
        else:
            while self._guesser.draft.instant and (missing := self._missing_guesses()):
                await self._guess(missing)
            if not self._missing_guesses():
                self._send_window()
        # messages are sent at the end of a turn of the event loop: now, not after the text is decoded
        await asyncio.sleep(0)

    async def close(self) -> None:
        """Stop guessing."""
        tasks = {task for task in (self._drafting, self._reading) if task is not None}
        self._drafting = self._reading = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def on_answer(self, answer: Answer) -> None:
        """Take the times of a step. To be called with the answer of every step."""
        if self._guesser is not None:
            self._guesser.tuner.record_answer(answer)

    def report(self) -> SpeculationReport | None:
        if self._guesser is None:
            return None
        tuner = self._guesser.tuner
        return SpeculationReport(
            draft=self._guesser.draft.name,
            proposed=self._proposed,
            accepted=self._accepted,
            trips=self._trips,
            tokens_a_trip=(len(self.known) - self._began) / self._trips if self._trips else 0.0,
            windows=tuple(self._windows),
            without=tuner.rate_without_draft(),
            off=self._guesser.failure or tuner.off_reason() or self._guesser.draft.off_reason,
        )

    # -- guessing

    def _missing_guesses(self) -> int:
        """How many more guesses the next window needs."""
        guesser = self._guesser
        if guesser is None or guesser.failure or self._exhausted or not guesser.tuner.wants_guesses:
            return 0
        window = guesser.tuner.window
        if window.k == 0:
            return 0 if self._guesses else _TRIAL_GUESSES
        if self._is_reading(guesser):
            return 0
        size = window.k + bool(self._pipeline.windows)
        room = self._furthest - len(self.known) - len(self._guesses)
        return max(min(size - self._unsent, room), 0)

    def _is_reading(self, guesser: Guesser) -> bool:
        """Whether the draft has many tokens to read. It reads them in the background; no trip waits for that."""
        if self._reading is not None and self._reading.done():
            self._reading.result()
            self._reading = None
        if self._reading is None and guesser.draft.unread_tokens > _MAX_UNREAD and not guesser.failure:
            self._reading = asyncio.create_task(guesser.read())
        return self._reading is not None

    @property
    def _furthest(self) -> int:
        """The position beyond which no window may reach now."""
        return min(self._limit, self._pipeline.furthest(len(self.known)))

    @property
    def _unsent(self) -> int:
        """How many guesses are in no window yet."""
        return len(self._guesses) - max(self._pipeline.windows_end - len(self.known), 0)

    async def _guess(self, count: int) -> None:
        """Have the draft make `count` guesses; only one if that takes time: a correction then discards only one."""
        assert self._guesser is not None
        if self._guesser.draft.instant:
            guesses = await self._guesser.propose(count)
            self._guesses += guesses
            self._exhausted = len(guesses) < count
            return
        if self._drafting is None:
            self._drafting = asyncio.create_task(self._guesser.propose(1))
        await self._drafting
        self._take_drafted()

    def _take_drafted(self) -> None:
        drafting = self._drafting
        if drafting is not None and drafting.done():
            self._drafting = None
            guesses = drafting.result()
            self._guesses += guesses
            self._exhausted = not guesses

    async def _advance(self, guesser: Guesser) -> Answer:
        """Wait for the answer. Meanwhile the draft goes on guessing, and windows are sent up to the tuner's depth."""
        answering = asyncio.create_task(self._pipeline.advance(self.known, self._sampling))
        try:
            while not answering.done():
                missing = self._missing_guesses()
                if missing and guesser.draft.instant:
                    await self._guess(missing)
                elif missing:
                    self._drafting = self._drafting or asyncio.create_task(guesser.propose(1))
                    await asyncio.wait({answering, self._drafting}, return_when=asyncio.FIRST_COMPLETED)
                    self._take_drafted()
                elif self._pipeline.windows and self._send_window():
                    continue
                elif self._reading is not None:
                    await asyncio.wait({answering, self._reading}, return_when=asyncio.FIRST_COMPLETED)
                    self._is_reading(guesser)
                else:
                    break  # enough windows are under way
            return await answering
        except BaseException:
            answering.cancel()
            await asyncio.wait({answering})
            raise

    # -- windows

    def _send_window(self) -> bool:
        """Send another window if the tuner wants one and there are guesses for it. Whether it was sent."""
        assert self._guesser is not None
        window, under_way = self._guesser.tuner.window, self._pipeline.windows
        if under_way >= window.depth:
            return False
        unsent = self._unsent
        if under_way == 0:
            start, tokens = len(self.known) - 1, [self.known[-1]]
            guesses = self._guesses[: window.k]
        else:
            start, tokens = self._pipeline.windows_end, []
            first = len(self._guesses) - unsent
            guesses = self._guesses[first : first + window.k + 1]
            if not guesses or not window.k:
                return False
        tokens = [*tokens, *guesses][: min(MAX_STEP_ROWS, max(self._furthest - start, 0))]
        if not tokens or not self._pipeline.send_ahead(start, tokens, self._sampling):
            return False
        self._proposed += len(tokens) - (under_way == 0)
        return True

    # -- answers

    def _verify(self, answer: Answer) -> TripResult:
        self._take_drafted()
        chosen = answer.output.ids.tolist()
        sent = max(self._pipeline.windows_end - len(self.known), len(chosen) - 1)
        verdict = verify(self._guesses, chosen)
        tokens = verdict.tokens(self._guesses)
        compared = min(verdict.accepted + 1, len(chosen), len(self._guesses))
        self._trips += 1
        self.known.extend(tokens)
        if self._guesser is not None:
            self._accepted += min(verdict.accepted, sent)
            self._apply_verdict(self._guesser, verdict.accepted, verdict.correction, compared)
        return TripResult(tokens, _choices(answer, len(tokens)))

    def _apply_verdict(self, guesser: Guesser, accepted: int, correction: int | None, compared: int) -> None:
        tuner = guesser.tuner
        if correction is None:
            del self._guesses[:accepted]
        else:
            self._guesses.clear()
            self._exhausted = False
            if self._drafting is not None:
                self._drafting.cancel()  # the draft rewinds what it computed
                self._drafting = None
            self._pipeline.forget_windows()
        guesser.draft.accept(accepted, correction)
        tuner.record_verdict(accepted, compared, corrected=correction is not None and compared > accepted)
        tuner.retune(accepted + (correction is not None))
        window = tuner.window
        if not self._windows or self._windows[-1][1:] != (window.k, window.depth):
            self._windows.append((len(self.known) - self._began, window.k, window.depth))


_MAX_UNREAD = 16
"""A draft reads up to so many tokens together with its next guess, while the peers wait; more in the background."""
_TRIAL_GUESSES = 4
"""Guesses that are only compared and not sent, while guessing is free and sending does not pay."""


def _choices(answer: Answer, count: int) -> tuple[Choice, ...]:
    """The log-probabilities and logits of the first `count` tokens, if they were asked for."""
    output = answer.output
    if output.logprobs is None and output.logits is None:
        return ()
    choices = []
    for place, token in enumerate(output.ids[:count].tolist()):
        top: tuple[tuple[int, float], ...] = ()
        if output.top_ids is not None and output.top_logprobs is not None:
            pairs = zip(output.top_ids[place].tolist(), output.top_logprobs[place].tolist(), strict=True)
            top = tuple((int(i), float(p)) for i, p in pairs)
        logprob = None if output.logprobs is None else float(output.logprobs[place])
        logits = None if output.logits is None else output.logits[place]
        choices.append(Choice(token=token, logprob=logprob, top=top, logits=logits))
    return tuple(choices)

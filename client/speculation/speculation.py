"""The tokens of one answer, several a trip where a draft earns it.

::

    the line      known ........ t | g1 g2 g3 | g4 g5 g6 g7 | g8 g9
                                 └─ window 1 ┘└─ window 2 ──┘└─ guessed, not sent yet
    on its way                   t  g1 g2 g3    g4 g5 g6 g7
    answers                      a1 a2 a3 a4    a5 a6 a7 a8      a1 stands for g1's place, a4 for g4's

    g1 = a1, g2 = a2, g3 ≠ a3:   known ........ t g1 g2 a3       window 2 is void; a window that begins with a3
                                                                 rewinds all hops to where g3 was

While windows are under way the draft goes on at the end of the line, as if all of it were right.
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
class Given:
    """What a trip gave: the tokens that follow, and with each what was asked for beside it."""

    tokens: tuple[int, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True, kw_only=True)
class SpeculationReport:
    """How guessing went in one answer. `windows`: (tokens given so far, guesses a window, windows under way) at each
    change. `without` is the estimated tokens a second without a draft, 0 where nothing tells; `off` says why there
    are no guesses at the end, where there are none."""

    draft: str
    proposed: int
    accepted: int
    trips: int
    tokens_a_trip: float
    windows: tuple[tuple[int, int, int], ...]
    without: float
    off: str


class Guesser:
    """A session's draft with what is known about its worth; it outlives the answers."""

    def __init__(self, draft: Draft, tuner: Tuner, clock: Callable[[], float]) -> None:
        self.draft = draft
        self.tuner = tuner
        self.failure = ""
        self._clock = clock

    async def propose(self, k: int) -> list[int]:
        """As the draft does, and timed. Where its device fails it is not asked again: it is here to save time."""
        began = self._clock()
        try:
            guesses = await self.draft.propose(k)
        except EngineError as error:
            self.failure = str(error)
            return []
        self.tuner.drafted(len(guesses), self._clock() - began)
        return guesses

    async def read(self) -> None:
        """As the draft does."""
        try:
            await self.draft.read()
        except EngineError as error:
            self.failure = str(error)


class Speculation:
    """One answer after `known`, which grows. `limit`: no step reaches beyond this position. `close` it in the end."""

    def __init__(
        self, pipeline: Pipeline, known: list[int], sampling: Sampling, *, limit: int, guesser: Guesser | None
    ) -> None:
        self.known = known
        self._pipeline = pipeline
        self._sampling = sampling
        self._limit = limit
        self._guesser = guesser
        self._guesses: list[int] = []  # what the draft has put after `known`
        self._dry = False  # it has no more before something else follows
        self._drafting: asyncio.Task[list[int]] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._began = len(known)
        self._proposed = self._accepted = self._trips = 0
        self._windows: list[tuple[int, int, int]] = []
        if guesser is not None:
            guesser.draft.begin(known, dataclasses.replace(sampling, logprobs=None, logits=""))
            guesser.tuner.streak = 0

    async def next(self) -> Given:
        """Wait for a trip. Raises what `Pipeline.advance` raises."""
        if self._guesser is None:
            return self._judge(await self._pipeline.advance(self.known, self._sampling))
        if len(self.known) > self._began and not self._pipeline.windows:
            while wanted := self._wanted():
                await self._guess(wanted)
            self._send()
        # else the prompt, which goes out at once
        return self._judge(await self._advance(self._guesser))

    async def go_on(self) -> None:
        """To be called when more is wanted after what `next` gave: what can be sent now is, without waiting."""
        if self._guesser is None:
            self._pipeline.send_ahead(len(self.known) - 1, self.known[-1:], self._sampling)
        else:
            while self._guesser.draft.instant and (wanted := self._wanted()):
                await self._guess(wanted)
            if not self._wanted():
                self._send()
        await asyncio.sleep(0)  # messages leave at the end of a turn of the loop: now, and not after the text is made

    async def close(self) -> None:
        """Nothing is guessed any more."""
        tasks = {task for task in (self._drafting, self._reading) if task is not None}
        self._drafting = self._reading = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def hear(self, answer: Answer) -> None:
        """Of every step, for its times."""
        if self._guesser is not None:
            self._guesser.tuner.answered(answer)

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
            without=tuner.without(),
            off=self._guesser.failure or tuner.verdict() or self._guesser.draft.silence,
        )

    # -- guessing

    def _wanted(self) -> int:
        """How many guesses the next window lacks."""
        guesser = self._guesser
        if guesser is None or guesser.failure or self._dry or not guesser.tuner.guesses:
            return 0
        window = guesser.tuner.window
        if window.k == 0:
            return 0 if self._guesses else _UNSENT
        if self._read(guesser):
            return 0
        size = window.k + bool(self._pipeline.windows)
        room = self._furthest - len(self.known) - len(self._guesses)
        return max(min(size - self._unsent, room), 0)

    def _read(self, guesser: Guesser) -> bool:
        """Whether the draft has much to read, which it does on the side: nothing waits for that."""
        if self._reading is not None and self._reading.done():
            self._reading.result()
            self._reading = None
        if self._reading is None and guesser.draft.unread > _MUCH and not guesser.failure:
            self._reading = asyncio.create_task(guesser.read())
        return self._reading is not None

    @property
    def _furthest(self) -> int:
        """No window reaches beyond this position now."""
        return min(self._limit, self._pipeline.furthest(len(self.known)))

    @property
    def _unsent(self) -> int:
        return len(self._guesses) - max(self._pipeline.line_end - len(self.known), 0)

    async def _guess(self, count: int) -> None:
        """Have `count` guesses made, one at a time where that takes time: what is there is not lost at a verdict."""
        assert self._guesser is not None
        if self._guesser.draft.instant:
            guesses = await self._guesser.propose(count)
            self._guesses += guesses
            self._dry = len(guesses) < count
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
            self._dry = not guesses

    async def _advance(self, guesser: Guesser) -> Answer:
        """Wait for the answer; meanwhile the draft goes on, and what it guesses is sent as deep as it pays."""
        answering = asyncio.create_task(self._pipeline.advance(self.known, self._sampling))
        try:
            while not answering.done():
                wanted = self._wanted()
                if wanted and guesser.draft.instant:
                    await self._guess(wanted)
                elif wanted:
                    self._drafting = self._drafting or asyncio.create_task(guesser.propose(1))
                    await asyncio.wait({answering, self._drafting}, return_when=asyncio.FIRST_COMPLETED)
                    self._take_drafted()
                elif self._pipeline.windows and self._send():
                    continue
                elif self._reading is not None:
                    await asyncio.wait({answering, self._reading}, return_when=asyncio.FIRST_COMPLETED)
                    self._read(guesser)
                else:
                    break  # as deep as it pays
            return await answering
        except BaseException:
            answering.cancel()
            await asyncio.wait({answering})
            raise

    # -- windows

    def _send(self) -> bool:
        """Send a window if there is to be another under way, and guesses for it. False where there is none."""
        assert self._guesser is not None
        window, under_way = self._guesser.tuner.window, self._pipeline.windows
        if under_way >= window.depth:
            return False
        unsent = self._unsent
        if under_way == 0:
            start, tokens = len(self.known) - 1, [self.known[-1]]
            guesses = self._guesses[: window.k]
        else:
            start, tokens = self._pipeline.line_end, []
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

    def _judge(self, answer: Answer) -> Given:
        self._take_drafted()
        chosen = answer.output.ids.tolist()
        sent = max(self._pipeline.line_end - len(self.known), len(chosen) - 1)
        verdict = verify(self._guesses, chosen)
        tokens = verdict.tokens(self._guesses)
        compared = min(verdict.accepted + 1, len(chosen), len(self._guesses))
        self._trips += 1
        self.known.extend(tokens)
        if self._guesser is not None:
            self._accepted += min(verdict.accepted, sent)
            self._settle(self._guesser, verdict.accepted, verdict.correction, compared)
        return Given(tokens, _choices(answer, len(tokens)))

    def _settle(self, guesser: Guesser, accepted: int, correction: int | None, compared: int) -> None:
        tuner = guesser.tuner
        if correction is None:
            del self._guesses[:accepted]
        else:
            self._guesses.clear()
            self._dry = False
            if self._drafting is not None:
                self._drafting.cancel()  # it comes to nothing; what it computed is rewound
                self._drafting = None
            self._pipeline.forget_windows()
        guesser.draft.accept(accepted, correction)
        tuner.judged(accepted, compared, corrected=correction is not None and compared > accepted)
        tuner.retune(accepted + (correction is not None))
        window = tuner.window
        if not self._windows or self._windows[-1][1:] != (window.k, window.depth):
            self._windows.append((len(self.known) - self._began, window.k, window.depth))


_MUCH = 16
"""So many tokens a draft reads on the way to its next guess, which the peers wait for."""
_UNSENT = 4
"""Guesses that are only looked at, where guessing is free and sending them does not pay."""


def _choices(answer: Answer, count: int) -> tuple[Choice, ...]:
    """The log-probabilities and logits of the first `count` tokens, where they were asked for."""
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

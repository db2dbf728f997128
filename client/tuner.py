"""What speculation costs and brings, as it is measured, and the window that follows from it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from client.circuit import Answer
from client.window import NO_DRAFT, Costs, Curve, Window, choose_window

_WEIGHT = 0.25
_MEMORY = 0.98
_PRIOR_WEIGHT = 4.0
# how many guesses in a row were right: the longer, the likelier the next, so each has its own count
_STREAKS = (0, 1, 2, 3, 4, 6, 9, 14)
_FEW = 8
_TRY_AGAIN_TOKENS = 64
_TRIAL_TRIPS = 6
_TRIAL = Window(3)
_HOPE = 0.95


@dataclass(frozen=True, kw_only=True)
class Prior:
    """What is believed before anything was measured: the chance of a guess, and the seconds that it takes."""

    chance: float
    draft_s: float


class Chances:
    """How often a guess is right, after so many right ones in a row. The latest count most."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._right = [0.0] * len(_STREAKS)
        self._seen = [0.0] * len(_STREAKS)

    def note(self, streak: int, right: bool) -> None:
        place = _place(streak)
        self._right[place] = self._right[place] * _MEMORY + right
        self._seen[place] = self._seen[place] * _MEMORY + 1

    def after(self, streak: int) -> Iterator[float]:
        """The chance of the next guess, of the one after it if that is right, and so on, without end."""
        seen, right = sum(self._seen), sum(self._right)
        overall = (right + _PRIOR_WEIGHT * self._prior) / (seen + _PRIOR_WEIGHT)
        each = [
            (r + _PRIOR_WEIGHT * overall) / (n + _PRIOR_WEIGHT) for r, n in zip(self._right, self._seen, strict=True)
        ]
        while True:
            yield each[_place(streak)]
            streak += 1


class Tuner:
    """Hears of every answer, guess and verdict of one session with one draft; `window` is what to do next.

    `k` and `depth` fix what is not to be chosen. `free_guesses`: guessing costs nothing, so that it goes on where it
    does not pay, to see when it would; else it is tried again now and then.
    """

    def __init__(self, prior: Prior, *, free_guesses: bool, k: int | None = None, depth: int | None = None) -> None:
        self.window = NO_DRAFT if k is None else Window(k, depth or 1)
        self.chances = Chances(prior.chance)
        self.streak = 0
        self._k = k
        self._depth = depth
        self._free = free_guesses
        self._draft_s = prior.draft_s
        self._ways_s: float | None = None
        self._decodes = False  # `_ways_s` is not just a prompt's, whose hidden states are large
        self._hops: dict[int, float] = {}
        self._slowest: dict[int, float] = {}
        self._trial_trips = 0
        self._idle_tokens = 0
        self._try_after = _TRY_AGAIN_TOKENS

    @property
    def costs(self) -> Costs | None:
        """None until a step was answered. What a single token takes is not known from a prompt: its share is the least
        that it can be, and with it each guess more seems as dear as it can be."""
        if self._ways_s is None:
            return None
        if min(self._hops) <= _FEW:
            return Costs(self._draft_s, self._ways_s, Curve(self._hops), Curve(self._slowest))
        hops, slowest = ({1: curve[n] / n, **curve} for curve in (self._hops, self._slowest) for n in [min(curve)])
        return Costs(self._draft_s, self._ways_s, Curve(hops), Curve(slowest))

    @property
    def guesses(self) -> bool:
        """Whether to guess at all."""
        return self.window.k > 0 or (self._free and self._k != 0)

    def forget_route(self) -> None:
        """The hops are others now."""
        self._ways_s = None
        self._decodes = False
        self._hops.clear()
        self._slowest.clear()

    def answered(self, answer: Answer) -> None:
        """A step came back, a prompt's chunk or a window."""
        trace, tokens = answer.output.trace, len(answer.forward.tokens)
        if not trace:
            return
        busy = [hop.compute_s for hop in trace]
        ways = answer.received_at - answer.sent_at - sum(busy) - sum(hop.queue_s for hop in trace)
        for curve, seconds in ((self._hops, sum(busy)), (self._slowest, max(busy))):
            curve[tokens] = _moved(curve.get(tokens), seconds)
        if answer.forward.rows == tokens or not self._decodes:
            self._ways_s = _moved(self._ways_s if self._decodes else None, max(ways, 0.0))
            self._decodes = answer.forward.rows == tokens

    def drafted(self, guesses: int, seconds: float) -> None:
        """So many guesses took so long."""
        if guesses:
            self._draft_s = _moved(self._draft_s, seconds / guesses)

    def judged(self, accepted: int, compared: int, *, corrected: bool) -> None:
        """Of `compared` guesses so many were right; `corrected` where another token than the next guess followed."""
        for place in range(compared):
            self.chances.note(self.streak + place, place < accepted)
        self.streak = 0 if corrected else self.streak + accepted

    def retune(self, tokens: int) -> None:
        """Choose again, after an answer that gave so many `tokens`."""
        costs = self.costs
        if costs is None or (self._k is not None and self._depth is not None):
            return
        if self._trial_trips:
            self._trial_trips -= 1
            return
        chosen = choose_window(costs, self.chances.after(self.streak), k=self._k, depth=self._depth, now=self.window)
        if chosen.k == 0 and not self._free and self._k is None:
            self._idle_tokens += tokens
            # each trial in vain costs time, so the next is later; and there is none where the best draft would not do
            if self._idle_tokens >= self._try_after and choose_window(costs, itertools.repeat(_HOPE)).k:
                self._idle_tokens, self._try_after = 0, 2 * self._try_after
                self._trial_trips, chosen = _TRIAL_TRIPS, _TRIAL
        self.window = chosen

    def without(self) -> float:
        """Tokens a second without a draft, as far as what was measured tells; 0 where it does not."""
        return 1 / self.costs.trip_s(1) if self.costs is not None else 0.0

    def verdict(self) -> str:
        """Why no guesses are sent now, with the numbers; empty where they are."""
        costs = self.costs
        if self.window.k or costs is None:
            return ""
        k = _TRIAL.k
        chances = self.chances.after(self.streak)
        share = next(chances)
        return (
            f"{share:.0%} of the guesses were right: {k} of them would take {_ms(k * costs.draft_s)} to make and "
            f"{_ms(costs.trip_s(k + 1))} to verify, where a token takes {_ms(costs.trip_s(1))}"
        )


def _place(streak: int) -> int:
    return next(i for i in reversed(range(len(_STREAKS))) if streak >= _STREAKS[i])


def _moved(before: float | None, value: float) -> float:
    return value if before is None else before + _WEIGHT * (value - before)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"

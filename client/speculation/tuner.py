"""What speculation costs and brings, as it is measured, and the window that follows from it."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from client.pipeline.circuit import Answer
from client.speculation.window import NO_DRAFT, Costs, Curve, Window, choose_window, others_busy

_WEIGHT = 0.25
_MEMORY = 0.98
_PRIOR_WEIGHT = 4.0
_STREAK_WEIGHT = 10.0  # few are seen of each streak: what holds for all says more at first
# how many guesses in a row were right: the longer, the likelier the next, so each has its own count
_STREAKS = (0, 1, 2, 3, 4, 6, 9, 14)
_FEW = 8
_FORGOTTEN = 0.1  # of a size's weight, which is 1 where it was seen once
_LONGEST = 4.0
_MIN_S = 1e-6
_GUESSES_TIMED = 9
_TRY_AGAIN_TOKENS = 64
_HOPELESS = 8
_AT_FIRST = Window(8)
_TRIAL_TRIPS = 6
_TRIAL = Window(3)
_HOPE = 0.95
# what is believed of several windows, and for how many trips' time; how much of what was found each answer leaves,
# with others under way and without
_CROWDING = 0.1
_CROWDING_WEIGHT = 2.0
_CROWDING_MEMORY = 0.9
_CROWDING_FADES = 0.99


@dataclass(frozen=True, kw_only=True)
class Prior:
    """What is believed before anything was measured: the chance of a guess, and the seconds that it takes."""

    chance: float
    draft_s: float


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What one session found out about the hops of a route, named by their `peers`, and about a draft: where the
    next one begins. Seconds as in `Costs`; how often guesses are right is the text's affair, and not here."""

    peers: tuple[str, ...]
    draft_s: float
    ways_s: float
    hops: Mapping[int, float]
    slowest: Mapping[int, float]


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
            (r + _STREAK_WEIGHT * overall) / (n + _STREAK_WEIGHT) for r, n in zip(self._right, self._seen, strict=True)
        ]
        while True:
            yield each[_place(streak)]
            streak += 1


class Times:
    """Seconds of steps by number of tokens. The latest count most, what was not seen for long is forgotten, and no step
    counts as longer than a few times what was expected: one bad moment does not stand against a size."""

    def __init__(self, seconds: Mapping[int, float] | None = None) -> None:
        self._seconds = dict(seconds or {})
        self._weights = dict.fromkeys(self._seconds, 1.0)

    def __bool__(self) -> bool:
        return bool(self._seconds)

    @property
    def seconds(self) -> Mapping[int, float]:
        """By number of tokens, as far as they are remembered."""
        return dict(self._seconds)

    @property
    def smallest(self) -> int:
        return min(self._seconds, default=0)

    def note(self, tokens: int, seconds: float) -> None:
        if self:
            seconds = min(seconds, _LONGEST * self.curve().at(tokens))
        self._seconds[tokens] = _moved(self._seconds.get(tokens), seconds)
        for size in list(self._weights):
            self._weights[size] *= _MEMORY
            # a prompt's tells how steep it is
            if self._weights[size] < _FORGOTTEN and size != max(self._weights):
                del self._weights[size], self._seconds[size]
        self._weights[tokens] = self._weights.get(tokens, 0.0) + 1

    def curve(self, *, decoded: bool = True) -> Curve:
        """What a single token takes is not known from a prompt, before something was `decoded`: its share is the least
        that it can be, and with it each guess more seems as dear as it can be."""
        if decoded:
            return Curve(self._seconds, self._weights)
        least = self._seconds[self.smallest] / self.smallest
        return Curve({1: least, **self._seconds}, {1: 1.0, **self._weights})


class Crowding:
    """By how much longer than expected answers take, for each hop more that is busy. The latest count most."""

    def __init__(self) -> None:
        self._longer_s = self._expected_s = 0.0

    def share(self, ways_s: float, hops_s: float) -> float:
        """Where a step takes `ways_s` and `hops_s`; only these can be disturbed, as far as is known before."""
        believed_s = _CROWDING_WEIGHT * (ways_s + hops_s)
        longer_s = self._longer_s + _CROWDING_WEIGHT * hops_s * _CROWDING
        return max(longer_s / (self._expected_s + believed_s), 0.0)

    def note(self, took_s: float, expected_s: float, *, others: int) -> None:
        """An answer took so long with so many `others` busy."""
        self._longer_s = self._longer_s * _CROWDING_MEMORY + took_s - expected_s
        self._expected_s = self._expected_s * _CROWDING_MEMORY + expected_s * others

    def fade(self) -> None:
        """A window was alone: what was found before is a little less certain."""
        self._longer_s *= _CROWDING_FADES
        self._expected_s *= _CROWDING_FADES


class Tuner:
    """Hears of every answer, guess and verdict of one session with one draft; `window` is what to do next.

    `k` and `depth` fix what is not to be chosen. `free_guesses`: guessing costs nothing, so that it goes on where it
    does not pay, to see when it would; else it is tried again now and then. `learned` by a session before counts as
    long as the route is the same.
    """

    def __init__(
        self,
        prior: Prior,
        *,
        free_guesses: bool,
        k: int | None = None,
        depth: int | None = None,
        learned: Learned | None = None,
    ) -> None:
        self.chances = Chances(prior.chance)
        self.streak = 0
        self._k = k
        self._depth = depth
        self._free = free_guesses
        self._guess_s = deque([learned.draft_s if learned else prior.draft_s], maxlen=_GUESSES_TIMED)
        self._peers = learned.peers if learned else ()
        self._ways_s = learned.ways_s if learned else None
        self._decodes = learned is not None  # `_ways_s` is not just a prompt's, whose hidden states are large
        self._hops, self._slowest = (Times(learned.hops), Times(learned.slowest)) if learned else (Times(), Times())
        self._crowding = Crowding()
        self._answered_at = -math.inf
        self._trial_trips = 0
        self._idle_tokens = 0
        self._try_after = _TRY_AGAIN_TOKENS
        self.window = self._at_first()

    def _at_first(self) -> Window:
        if self._k is not None:
            return Window(self._k, self._depth or 1)
        if self.costs is not None:
            return choose_window(self.costs, self.chances.after(0), depth=self._depth)
        # a draft that takes its time guesses while the peers read the prompt; what becomes of it is seen then
        return NO_DRAFT if self._free else _AT_FIRST

    @property
    def learned(self) -> Learned | None:
        """For the next session; None where nothing was decoded."""
        if self._ways_s is None or not self._decodes:
            return None
        return Learned(
            peers=self._peers,
            draft_s=self._draft_s,
            ways_s=self._ways_s,
            hops=self._hops.seconds,
            slowest=self._slowest.seconds,
        )

    @property
    def costs(self) -> Costs | None:
        """None until a step was answered."""
        if self._ways_s is None:
            return None
        hops, slowest = (times.curve(decoded=self._has_decoded) for times in (self._hops, self._slowest))
        crowding = self._crowding.share(self._ways_s, hops.at(1))
        return Costs(self._draft_s, self._ways_s, hops, slowest, len(self._peers), crowding)

    @property
    def _draft_s(self) -> float:
        """The middle one of the last: a single one that took long is no reason to guess no more."""
        return statistics.median_low(self._guess_s)

    @property
    def _has_decoded(self) -> bool:
        return 0 < self._hops.smallest <= _FEW

    @property
    def guesses(self) -> bool:
        """Whether to guess at all."""
        return self.window.k > 0 or (self._free and self._k != 0)

    def _forget_route(self) -> None:
        """The hops are others now."""
        self._ways_s = None
        self._decodes = False
        self._hops, self._slowest = Times(), Times()
        self._crowding = Crowding()

    def answered(self, answer: Answer) -> None:
        """A step came back, a prompt's chunk or a window."""
        trace, tokens = answer.output.trace, len(answer.forward.tokens)
        if not trace:
            return
        peers = tuple(hop.peer for hop in trace)
        if peers != self._peers:
            self._forget_route()
            self._peers = peers
        # what hops say of themselves counts as far as it goes with what is seen from here
        took = max(answer.received_at - answer.sent_at, _MIN_S)
        busy = _between(_MIN_S, sum(hop.compute_s for hop in trace), took)
        slowest = _between(_MIN_S, max(hop.compute_s for hop in trace), busy)
        ways = took - busy - _between(0.0, sum(hop.queue_s for hop in trace), took - busy)
        if answer.forward.rows == tokens and self.window.depth > 1 and self._has_decoded:
            self._note_crowding(answer)  # its compute is not that of a step which is alone
        else:
            self._crowding.fade()
            self._hops.note(tokens, busy)
            self._slowest.note(tokens, slowest)
        self._answered_at = answer.received_at
        if answer.forward.rows == tokens or not self._decodes:
            self._ways_s = _moved(self._ways_s if self._decodes else None, ways)
            self._decodes = answer.forward.rows == tokens

    def _note_crowding(self, answer: Answer) -> None:
        costs, size, depth = self.costs, len(answer.forward.tokens), self.window.depth
        assert costs is not None  # something was decoded
        follows = answer.sent_at < self._answered_at
        expected = costs.next_s(size, depth) if follows else costs.first_s(size, depth)
        took = answer.received_at - (self._answered_at if follows else answer.sent_at)
        self._crowding.note(took, expected, others=others_busy(depth, costs.hop_count))

    def drafted(self, guesses: int, seconds: float) -> None:
        """So many guesses took so long."""
        if guesses:
            self._guess_s.append(seconds / guesses)

    def judged(self, accepted: int, compared: int, *, corrected: bool) -> None:
        """Of `compared` guesses so many were right; `corrected` where another token than the next guess followed."""
        for place in range(compared):
            self.chances.note(self.streak + place, place < accepted)
        self.streak = 0 if corrected else self.streak + accepted
        if compared:  # else the draft was still reading
            self._trial_trips = max(self._trial_trips - 1, 0)

    def retune(self, tokens: int) -> None:
        """Choose again, after an answer that gave so many `tokens`."""
        costs = self.costs
        if costs is None or (self._k is not None and self._depth is not None):
            return
        if self._trial_trips:
            return
        chosen = choose_window(costs, self.chances.after(self.streak), k=self._k, depth=self._depth, now=self.window)
        if chosen.k == 0 and not self._free and self._k is None:
            self._idle_tokens += tokens
            # each trial in vain costs time, so the next is later, and much later where the best draft would not do
            patience = 1 if choose_window(costs, itertools.repeat(_HOPE)).k else _HOPELESS
            if self._idle_tokens >= self._try_after * patience:
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


def _between(least: float, value: float, most: float) -> float:
    return min(max(value, least), most)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"

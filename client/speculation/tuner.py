"""Measures the costs and gains of speculation, and chooses the window that follows from them."""

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
_STREAK_WEIGHT = 10.0  # of the chance over all streaks: at first, few guesses of each streak are known
# By right guesses in a row: the more, the likelier is the next, so each of these counts separately.
_STREAKS = (0, 1, 2, 3, 4, 6, 9, 14)
_MAX_DECODE_TOKENS = 8  # measured steps of at most so many tokens tell the time of a single one
_MIN_TIMES_WEIGHT = 0.1  # a size whose weight falls below is forgotten; one measurement has 1
_MAX_OUTLIER = 4.0  # times the expected seconds
_MIN_S = 1e-6
_GUESSES_TIMED = 9
_TRY_AGAIN_TOKENS = 64
_HOPELESS_FACTOR = 8
_FIRST_WINDOW = Window(8)
_TRIAL_TRIPS = 6
_TRIAL = Window(3)
_BEST_CHANCE = 0.95
# Contention of several windows: the prior and its weight in trips, and how much of the measurements remains after each
# answer, with other windows under way and without.
_CONTENTION = 0.1
_CONTENTION_WEIGHT = 2.0
_CONTENTION_MEMORY = 0.9
_CONTENTION_MEMORY_ALONE = 0.99


@dataclass(frozen=True, kw_only=True)
class Prior:
    """Assumptions before the first measurement: the chance that a guess is right, and its seconds."""

    chance: float
    draft_s: float


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What one session measured of a draft and of the hops of a route, given by their `peers`: the next session starts
    from it. Seconds as in `Costs`. The chances of guesses are not here: they depend on the text."""

    peers: tuple[str, ...]
    draft_s: float
    network_s: float
    hops: Mapping[int, float]
    slowest: Mapping[int, float]


class Chances:
    """The chance that a guess is right, by the right ones in a row before it. The latest guesses count most."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._right = [0.0] * len(_STREAKS)
        self._seen = [0.0] * len(_STREAKS)

    def observe(self, streak: int, right: bool) -> None:
        place = _streak_index(streak)
        self._right[place] = self._right[place] * _MEMORY + right
        self._seen[place] = self._seen[place] * _MEMORY + 1

    def after(self, streak: int) -> Iterator[float]:
        """The chance of the next guess, of the one after it if that is right, and so on; infinite."""
        seen, right = sum(self._seen), sum(self._right)
        overall = (right + _PRIOR_WEIGHT * self._prior) / (seen + _PRIOR_WEIGHT)
        each = [
            (r + _STREAK_WEIGHT * overall) / (n + _STREAK_WEIGHT) for r, n in zip(self._right, self._seen, strict=True)
        ]
        while True:
            yield each[_streak_index(streak)]
            streak += 1


class Times:
    """Seconds of steps by number of tokens. The latest count most; a size that was not measured for long is forgotten.
    No step counts as longer than a few times the expected seconds, so that an outlier does not rule out its size."""

    def __init__(self, seconds: Mapping[int, float] | None = None) -> None:
        self._seconds = dict(seconds or {})
        self._weights = dict.fromkeys(self._seconds, 1.0)

    def __bool__(self) -> bool:
        return bool(self._seconds)

    @property
    def seconds(self) -> Mapping[int, float]:
        """By number of tokens, without the forgotten ones."""
        return dict(self._seconds)

    @property
    def smallest(self) -> int:
        return min(self._seconds, default=0)

    def observe(self, tokens: int, seconds: float) -> None:
        if self:
            seconds = min(seconds, _MAX_OUTLIER * self.curve().at(tokens))
        self._seconds[tokens] = _moving_average(self._seconds.get(tokens), seconds)
        for size in list(self._weights):
            self._weights[size] *= _MEMORY
            # the largest size, a prompt's, stays: it tells the slope
            if self._weights[size] < _MIN_TIMES_WEIGHT and size != max(self._weights):
                del self._weights[size], self._seconds[size]
        self._weights[tokens] = self._weights.get(tokens, 0.0) + 1

    def curve(self, *, decoded: bool = True) -> Curve:
        """Seconds by tokens in a step. Before a token was `decoded`, only a prompt was measured. A token's share of the
        prompt's time then stands for a step of one token: a lower bound, so guesses seem as expensive as possible."""
        if decoded:
            return Curve(self._seconds, self._weights)
        token_s = self._seconds[self.smallest] / self.smallest
        return Curve({1: token_s, **self._seconds}, {1: 1.0, **self._weights})


class Contention:
    """The share by which answers take longer than expected, for each other busy hop. The latest answers count most."""

    def __init__(self) -> None:
        self._longer_s = self._expected_s = 0.0

    def share(self, network_s: float, hops_s: float) -> float:
        """For a step that takes `network_s` and `hops_s`. The prior assumes that only the hops are slowed down."""
        prior_s = _CONTENTION_WEIGHT * (network_s + hops_s)
        longer_s = self._longer_s + _CONTENTION_WEIGHT * hops_s * _CONTENTION
        return max(longer_s / (self._expected_s + prior_s), 0.0)

    def observe(self, took_s: float, expected_s: float, *, others: int) -> None:
        """An answer took `took_s` while so many `others` may have been busy."""
        self._longer_s = self._longer_s * _CONTENTION_MEMORY + took_s - expected_s
        self._expected_s = self._expected_s * _CONTENTION_MEMORY + expected_s * others

    def fade(self) -> None:
        """A window was alone: the earlier measurements count a little less."""
        self._longer_s *= _CONTENTION_MEMORY_ALONE
        self._expected_s *= _CONTENTION_MEMORY_ALONE


class Tuner:
    """Gets every answer, guess and verdict of one session with one draft; `window` is the choice for the next step.

    `k` and `depth` fix a part of the choice. `free_guesses`: guessing costs nothing; it goes on while it does not pay,
    to notice when it would. Other drafts are tried again now and then. `learned` from an earlier session counts while
    the route is the same.
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
        self._free_guesses = free_guesses
        self._guess_s = deque([learned.draft_s if learned else prior.draft_s], maxlen=_GUESSES_TIMED)
        self._peers = learned.peers if learned else ()
        self._network_s = learned.network_s if learned else None
        # whether `_network_s` is that of decoding, not of a prompt, whose hidden states are larger
        self._network_is_decode = learned is not None
        self._hops, self._slowest = (Times(learned.hops), Times(learned.slowest)) if learned else (Times(), Times())
        self._contention = Contention()
        self._answered_at = -math.inf
        self._trial_trips = 0
        self._idle_tokens = 0
        self._try_after = _TRY_AGAIN_TOKENS
        self.window = self._first_window()

    def _first_window(self) -> Window:
        if self._k is not None:
            return Window(self._k, self._depth or 1)
        if self.costs is not None:
            return choose_window(self.costs, self.chances.after(0), depth=self._depth)
        # A draft that takes time guesses while the peers read the prompt. Whether that pays is known afterwards.
        return NO_DRAFT if self._free_guesses else _FIRST_WINDOW

    @property
    def learned(self) -> Learned | None:
        """For the next session; None if nothing was decoded."""
        if self._network_s is None or not self._network_is_decode:
            return None
        return Learned(
            peers=self._peers,
            draft_s=self._draft_s,
            network_s=self._network_s,
            hops=self._hops.seconds,
            slowest=self._slowest.seconds,
        )

    @property
    def costs(self) -> Costs | None:
        """The measured costs; None before the first answer."""
        if self._network_s is None:
            return None
        hops, slowest = (times.curve(decoded=self._has_decoded) for times in (self._hops, self._slowest))
        contention = self._contention.share(self._network_s, hops.at(1))
        return Costs(self._draft_s, self._network_s, hops, slowest, len(self._peers), contention)

    @property
    def _draft_s(self) -> float:
        """The median of the last guesses: a single slow one must not end guessing."""
        return statistics.median_low(self._guess_s)

    @property
    def _has_decoded(self) -> bool:
        return 0 < self._hops.smallest <= _MAX_DECODE_TOKENS

    @property
    def wants_guesses(self) -> bool:
        """Whether the draft should guess at all."""
        return self.window.k > 0 or (self._free_guesses and self._k != 0)

    def _forget_route(self) -> None:
        """Reset what was measured of other hops."""
        self._network_s = None
        self._network_is_decode = False
        self._hops, self._slowest = Times(), Times()
        self._contention = Contention()

    def record_answer(self, answer: Answer) -> None:
        """Take the times of a step: of a prompt's chunk or a window."""
        trace, tokens = answer.output.trace, len(answer.forward.tokens)
        if not trace:
            return
        peers = tuple(hop.peer for hop in trace)
        if peers != self._peers:
            self._forget_route()
            self._peers = peers
        # the hops' own times count within the bounds of the time measured here
        took = max(answer.received_at - answer.sent_at, _MIN_S)
        busy = _clamp(_MIN_S, sum(hop.compute_s for hop in trace), took)
        slowest = _clamp(_MIN_S, max(hop.compute_s for hop in trace), busy)
        network = took - busy - _clamp(0.0, sum(hop.queue_s for hop in trace), took - busy)
        if answer.forward.rows == tokens and self.window.depth > 1 and self._has_decoded:
            self._record_contention(answer)  # its compute is not that of a single step under way
        else:
            self._contention.fade()
            self._hops.observe(tokens, busy)
            self._slowest.observe(tokens, slowest)
        self._answered_at = answer.received_at
        if answer.forward.rows == tokens or not self._network_is_decode:
            self._network_s = _moving_average(self._network_s if self._network_is_decode else None, network)
            self._network_is_decode = answer.forward.rows == tokens

    def _record_contention(self, answer: Answer) -> None:
        costs, size, depth = self.costs, len(answer.forward.tokens), self.window.depth
        assert costs is not None  # something was decoded
        follows = answer.sent_at < self._answered_at
        expected = costs.next_s(size, depth) if follows else costs.first_s(size, depth)
        took = answer.received_at - (self._answered_at if follows else answer.sent_at)
        self._contention.observe(took, expected, others=others_busy(depth, costs.hop_count))

    def record_guesses(self, guesses: int, seconds: float) -> None:
        """Take the time of so many guesses."""
        if guesses:
            self._guess_s.append(seconds / guesses)

    def record_verdict(self, accepted: int, compared: int, *, corrected: bool) -> None:
        """Of `compared` guesses, `accepted` were right; `corrected` if another token than the next guess followed."""
        for place in range(compared):
            self.chances.observe(self.streak + place, place < accepted)
        self.streak = 0 if corrected else self.streak + accepted
        if compared:  # else the draft was still reading the text
            self._trial_trips = max(self._trial_trips - 1, 0)

    def retune(self, tokens: int) -> None:
        """Choose the window again, after an answer that gave so many `tokens`."""
        costs = self.costs
        if costs is None or (self._k is not None and self._depth is not None):
            return
        if self._trial_trips:
            return
        chosen = choose_window(
            costs, self.chances.after(self.streak), k=self._k, depth=self._depth, current=self.window
        )
        if chosen.k == 0 and not self._free_guesses and self._k is None:
            self._idle_tokens += tokens
            # A failed trial costs time, so the next one comes later; much later if even the best draft would not pay.
            patience = 1 if choose_window(costs, itertools.repeat(_BEST_CHANCE)).k else _HOPELESS_FACTOR
            if self._idle_tokens >= self._try_after * patience:
                self._idle_tokens, self._try_after = 0, 2 * self._try_after
                self._trial_trips, chosen = _TRIAL_TRIPS, _TRIAL
        self.window = chosen

    def rate_without_draft(self) -> float:
        """Estimated tokens a second without a draft; 0 before the first answer."""
        return 1 / self.costs.trip_s(1) if self.costs is not None else 0.0

    def off_reason(self) -> str:
        """Why no guesses are sent now, with the numbers; empty if they are."""
        costs = self.costs
        if self.window.k or costs is None:
            return ""
        k = _TRIAL.k
        share = next(self.chances.after(self.streak))
        return (
            f"{share:.0%} of the guesses were right: {k} of them would take {_ms(k * costs.draft_s)} to make and "
            f"{_ms(costs.trip_s(k + 1))} to verify, where a token takes {_ms(costs.trip_s(1))}"
        )


def _streak_index(streak: int) -> int:
    return next(i for i in reversed(range(len(_STREAKS))) if streak >= _STREAKS[i])


def _moving_average(before: float | None, value: float) -> float:
    return value if before is None else before + _WEIGHT * (value - before)


def _clamp(low: float, value: float, high: float) -> float:
    return min(max(value, low), high)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"

"""How many tokens to guess at a time, and how many windows of them to have under way: what earns most. Pure.

A *cycle* lasts from one token that was not guessed to the next. Its windows carry one token that is sure (or guessed by
the window before) and `k` guesses::

    one window at a time          trip     k x draft + T(k + 1)            gives 1 + S(1) + ... + S(k) tokens
    several (pipelined)           first    k x draft + T(k + 1)
                                  each of the next    max((k + 1) x draft, slowest hop, T(k + 1) / windows)

S(i) is the chance that the next i guesses are all right, T(n) the time of a step of n tokens: the ways between the
machines, and what each hop computes. The draft goes on while a window is away, so where all of it and the token after
it were right, with the chance S(k + 1), the next one is there already, or as much of it as T(k + 1) had room for.
Where a cycle of several windows ends, a hop may be busy with a void one. Hops that share cores, with each other or with
the draft, slow each other down where they are busy at the same time: as it is measured, for each more of them.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from client.config import MAX_GUESSES

_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
_DEPTHS = (1, 2, 3, 4, 6, 8)
_HORIZON = 96
"""Guesses looked ahead: a cycle that is longer is as good as endless."""
_WORTH = 1.03
"""What drafts must earn before they are used: the estimate is not better than that."""


@dataclass(frozen=True, slots=True)
class Window:
    """`k` guesses a window (0: none, no draft), `depth` windows under way; `rate` is the tokens a second to expect."""

    k: int
    depth: int = 1
    rate: float = 0.0


NO_DRAFT = Window(0)


class Curve:
    """Seconds by number of tokens, measured at some numbers: straight lines between them and beyond them, flat before.

    More tokens take no less: where it was measured otherwise, that is noise, and the mean by `weights` (how much was
    measured; all alike where left out) stands for both.

    >>> Curve({1: 0.010, 11: 0.020}).at(6)
    0.015
    >>> Curve({1: 0.010, 2: 0.080, 4: 0.010}, {1: 9.0, 2: 1.0, 4: 6.0}).at(4)
    0.02
    """

    def __init__(self, points: Mapping[int, float], weights: Mapping[int, float] | None = None) -> None:
        self._sizes = sorted(points)
        levels: list[tuple[float, float, int]] = []  # value, weight, how many sizes have it
        for size in self._sizes:
            value, weight, count = points[size], 1.0 if weights is None else weights[size], 1
            while levels and levels[-1][0] > value:
                other, beside, more = levels.pop()
                value, weight, count = (
                    (value * weight + other * beside) / (weight + beside),
                    weight + beside,
                    count + more,
                )
            levels.append((value, weight, count))
        self._values = [value for value, _, count in levels for _ in range(count)]

    def at(self, n: int) -> float:
        sizes, values = self._sizes, self._values
        if n <= sizes[0] or len(sizes) == 1:
            return values[0]
        right = min(max(bisect.bisect_left(sizes, n), 1), len(sizes) - 1)
        left = right - 1
        slope = (values[right] - values[left]) / (sizes[right] - sizes[left])
        return values[left] + slope * (n - sizes[left])


@dataclass(frozen=True)
class Costs:
    """Seconds: of one guess, of all ways between the machines, of a step on all hops together, on the slowest hop.

    The hops' are of a step that is alone on its way. Of `hop_count` each more that is busy beside makes what would
    follow from that longer by the share `crowding`.
    """

    draft_s: float
    ways_s: float
    hops: Curve
    slowest: Curve
    hop_count: int = 2
    crowding: float = 0.0

    def trip_s(self, n: int) -> float:
        """A step of `n` tokens, from sending it to its answer."""
        return self.ways_s + self.hops.at(n)

    def first_s(self, n: int, depth: int) -> float:
        """The same where void windows of the cycle before may still be on the hops."""
        slowest = self.slowest.at(n)
        return self.trip_s(n) + slowest * min(1.0, slowest / self.next_s(n, depth))

    def crowded(self, depth: int) -> float:
        """How many times as long all takes with `depth` windows under way, more than one."""
        return 1 + self.crowding * others_busy(depth, self.hop_count)

    def next_s(self, n: int, depth: int) -> float:
        """Between its answer and that of the window before it, where `depth` are under way."""
        return max(n * self.draft_s, self.slowest.at(n), self.trip_s(n) / depth)


def others_busy(depth: int, hop_count: int) -> int:
    """Hops that may be busy beside one; with a single one it is the draft."""
    return min(depth, max(hop_count, 2)) - 1


def rate_of(window: Window, costs: Costs, survival: Sequence[float]) -> float:
    """Tokens a second. `survival` [MAX_GUESSES + 1 ...]: S(1), S(2) and so on."""
    size = window.k + 1
    drafting, trip = window.k * costs.draft_s, costs.trip_s(size)
    if window.depth == 1:
        away = size * costs.draft_s  # what the draft would do meanwhile
        drafting *= 1 - survival[window.k] * (min(1.0, trip / away) if away else 1.0)
        return (1 + sum(survival[: window.k])) / (drafting + trip)
    lives_on = sum(survival[size - 1 :: size])  # the chance of each window that the next one counts
    windows = costs.first_s(size, window.depth) + costs.next_s(size, window.depth) * lives_on
    return (1 + sum(survival)) / (drafting + costs.crowded(window.depth) * windows)


def choose_window(
    costs: Costs,
    chances: Iterable[float],
    *,
    k: int | None = None,
    depth: int | None = None,
    now: Window = NO_DRAFT,
    max_guesses: int = MAX_GUESSES,
) -> Window:
    """The window that earns most. `chances`: that the next guess is right, that the one after it is then, and so on.

    `k` and `depth` fix one of the two. What is used `now` is left only for what is clearly better.
    """
    survival = list(itertools.accumulate(itertools.islice(chances, _HORIZON), lambda a, b: a * b))
    without = 1 / costs.trip_s(1) if costs.trip_s(1) > 0 else 0.0
    if k == 0:
        return Window(0, 1, without)
    sizes = [size for size in _SIZES if size <= max_guesses] if k is None else [min(k, max_guesses)]
    depths = _DEPTHS if depth is None else (depth,)
    rates = {(size, ways): rate_of(Window(size, ways), costs, survival) for size in sizes for ways in depths}
    if (now.k, now.depth) in rates:
        rates[now.k, now.depth] *= _WORTH  # changing has its price, and the estimate its error
    best = max(rates, key=lambda key: rates[key], default=(0, 1))
    if k is None and (best == (0, 1) or rates[best] < without * _WORTH):
        return Window(0, 1, without)
    return Window(*best, rates[best])

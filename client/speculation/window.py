"""How many guesses a window, and how many windows under way: the choice with the most tokens a second. Pure.

A *cycle* lasts from one token that was not guessed to the next. Each window has one known token (or one guessed by the
window before) and `k` guesses::

    one window at a time          trip     k x draft + T(k + 1)            gives 1 + S(1) + ... + S(k) tokens
    several (pipelined)           first    k x draft + T(k + 1)
                                  each of the next    max((k + 1) x draft, slowest hop, T(k + 1) / windows)

S(i) is the chance that the next i guesses are all right. T(n) is the time of a step of n tokens: the network, and the
compute of each hop. The draft goes on while a window is under way, as if all of the window and the token
after it were right. With the chance S(k + 1) they are: then the next window's guesses are ready, as far as the draft
could make them within T(k + 1).
When a cycle of several windows ends, a hop may be busy with a void one. Hops that share cores, with each other or with
the draft, slow each other down when they are busy at the same time: by a measured share for each other busy hop.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from client.config import MAX_GUESSES

_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, MAX_GUESSES)
_DEPTHS = (1, 2, 3, 4, 6, 8)
_HORIZON = 96
"""Guesses looked ahead. A longer cycle counts as endless."""
_MIN_GAIN = 1.03
"""The gain from which a draft is used, or the window changed: the estimate is not more precise."""


@dataclass(frozen=True, slots=True)
class Window:
    """`k` guesses a window (0: no draft), `depth` windows under way; `rate` is the expected tokens a second."""

    k: int
    depth: int = 1
    rate: float = 0.0


NO_DRAFT = Window(0)


class Curve:
    """Seconds by number of tokens: linear between the measured `points` and beyond them, constant before the first.

    More tokens never take less time. Measurements that say otherwise are noise: their mean replaces them, weighted by
    `weights` (how often each was measured; equal by default).

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
                last_value, last_weight, last_count = levels.pop()
                value = (value * weight + last_value * last_weight) / (weight + last_weight)
                weight, count = weight + last_weight, count + last_count
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
    """Seconds of one guess, of the network over a whole trip, of a step on all `hops` together and on the `slowest`.

    The hops' times are those of a single step under way. Each other busy hop, of `hop_count`, makes a step longer by
    the share `contention`.
    """

    draft_s: float
    network_s: float
    hops: Curve
    slowest: Curve
    hop_count: int = 2
    contention: float = 0.0

    def trip_s(self, n: int) -> float:
        """A step of `n` tokens, from sending it to its answer."""
        return self.network_s + self.hops.at(n)

    def first_s(self, n: int, depth: int) -> float:
        """The same for a cycle's first step, when void windows of the cycle before may still be on the hops."""
        slowest = self.slowest.at(n)
        return self.trip_s(n) + slowest * min(1.0, slowest / self.next_s(n, depth))

    def slowdown(self, depth: int) -> float:
        """The factor by which steps take longer with `depth` windows under way, if `depth` is more than 1."""
        return 1 + self.contention * others_busy(depth, self.hop_count)

    def next_s(self, n: int, depth: int) -> float:
        """Between the answers of two windows in a row, of `depth` under way."""
        return max(n * self.draft_s, self.slowest.at(n), self.trip_s(n) / depth)


def others_busy(depth: int, hop_count: int) -> int:
    """How many other hops may be busy at the same time; next to a single hop, the draft is."""
    return min(depth, max(hop_count, 2)) - 1


def rate_of(window: Window, costs: Costs, survival: Sequence[float]) -> float:
    """Expected tokens a second. `survival`: S(1), S(2), ..., at least MAX_GUESSES + 1 of them."""
    size = window.k + 1
    drafting, trip = window.k * costs.draft_s, costs.trip_s(size)
    if window.depth == 1:
        next_s = size * costs.draft_s  # for the next window's guesses, made during the trip
        drafting *= 1 - survival[window.k] * (min(1.0, trip / next_s) if next_s else 1.0)
        return (1 + sum(survival[: window.k])) / (drafting + trip)
    next_windows = sum(survival[size - 1 :: size])  # expected windows after the first that are not void
    windows = costs.first_s(size, window.depth) + costs.next_s(size, window.depth) * next_windows
    return (1 + sum(survival)) / (drafting + costs.slowdown(window.depth) * windows)


def choose_window(
    costs: Costs,
    chances: Iterable[float],
    *,
    k: int | None = None,
    depth: int | None = None,
    current: Window = NO_DRAFT,
) -> Window:
    """The window with the highest rate. `chances`: of the next guess, of the one after it if that is right, and so on.

    `k` and `depth` fix one of the two. The `current` window changes only for a clearly better one.
    """
    survival = list(itertools.accumulate(itertools.islice(chances, _HORIZON), lambda a, b: a * b))
    without = 1 / costs.trip_s(1) if costs.trip_s(1) > 0 else 0.0
    if k == 0:
        return Window(0, 1, without)
    sizes = _SIZES if k is None else (min(k, MAX_GUESSES),)
    depths = _DEPTHS if depth is None else (depth,)
    rates = {(size, windows): rate_of(Window(size, windows), costs, survival) for size in sizes for windows in depths}
    if (current.k, current.depth) in rates:
        rates[current.k, current.depth] *= _MIN_GAIN
    best = max(rates, key=lambda key: rates[key], default=(0, 1))
    if k is None and (best == (0, 1) or rates[best] < without * _MIN_GAIN):
        return Window(0, 1, without)
    return Window(*best, rates[best])

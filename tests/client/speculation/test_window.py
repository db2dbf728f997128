from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from client.config import MAX_GUESSES
from client.speculation.window import Costs, Curve, Window, choose_window, rate_of

LAN = Costs(0.002, 0.0005, Curve({1: 0.010, 33: 0.030}), Curve({1: 0.005, 33: 0.015}))
WAN = Costs(0.002, 0.300, Curve({1: 0.010, 33: 0.030}), Curve({1: 0.005, 33: 0.015}))
LOOK_UP = Costs(0.0, 0.0005, LAN.hops, LAN.slowest)


def chosen(costs: Costs, chance: float, **fixed: int) -> Window:
    return choose_window(costs, itertools.repeat(chance), **fixed)  # type: ignore[arg-type]


def test_a_curve_is_linear_between_measurements() -> None:
    curve = Curve({1: 1.0, 3: 2.0, 5: 1.5})
    assert [curve.at(n) for n in (1, 2, 3, 4, 5)] == [1.0, 1.375, 1.75, 1.75, 1.75]  # more tokens never take less
    assert Curve({1: 1.0, 2: 8.0, 4: 1.0}, {1: 9.0, 2: 1.0, 4: 6.0}).at(4) == pytest.approx(2.0)
    assert Curve({2: 1.0, 4: 3.0}).at(6) == pytest.approx(5.0)
    assert Curve({2: 1.0, 4: 3.0}).at(1) == 1.0
    assert Curve({7: 1.0}).at(20) == 1.0


def test_more_guesses_are_sent_over_a_wan_than_over_a_lan() -> None:
    assert 0 < chosen(LAN, 0.7, depth=1).k < chosen(WAN, 0.7, depth=1).k <= MAX_GUESSES


def test_a_draft_that_is_often_wrong_or_slower_than_its_target_is_switched_off() -> None:
    assert chosen(LAN, 0.05).k == 0
    slow = Costs(0.020, LAN.network_s, LAN.hops, LAN.slowest)
    assert chosen(slow, 0.9).k == 0
    assert chosen(LAN, 0.0) == Window(0, 1, 1 / LAN.trip_s(1))


def test_free_guesses_are_sent_if_more_tokens_cost_the_hops_little() -> None:
    assert chosen(LOOK_UP, 0.9).k > 5
    busy = Costs(0.0, 0.0005, Curve({1: 0.010, 2: 0.020}), Curve({1: 0.005, 2: 0.010}))
    assert chosen(busy, 0.5).k == 0  # each further token takes as long as the first


def test_several_windows_pay_if_trips_are_long_and_guesses_are_slow() -> None:
    slow_draft = Costs(0.010, 0.300, LAN.hops, LAN.slowest)
    assert chosen(slow_draft, 0.95).depth > 1
    assert chosen(LAN, 0.6).depth == 1


def test_hops_that_slow_each_other_down_get_one_window_at_a_time() -> None:
    near = Costs(0.005, 0.0005, Curve({1: 0.030, 33: 0.045}), Curve({1: 0.010, 33: 0.015}), 3)
    assert chosen(near, 0.8).depth > 1
    assert near.slowdown(2) == 1.0
    crowded = replace(near, contention=0.5)
    assert chosen(crowded, 0.8).depth == 1
    assert [crowded.slowdown(depth) for depth in (2, 3, 8)] == [1.5, 2.0, 2.0]
    assert replace(crowded, hop_count=1).slowdown(4) == 1.5  # with a single hop, the draft is the other one


def test_guesses_made_during_a_trip_cost_nothing() -> None:
    slow = Costs(0.005, 0.0, Curve({1: 0.030}), Curve({1: 0.030}))
    sure, never = [1.0] * 96, [0.0] * 96
    assert rate_of(Window(3), slow, sure) == pytest.approx(4 / 0.030)
    assert rate_of(Window(3), slow, never) == pytest.approx(1 / 0.045)
    assert rate_of(Window(9), slow, sure) == pytest.approx(10 / (0.045 * (1 - 30 / 50) + 0.030))


def test_a_fixed_size_or_depth_is_kept() -> None:
    assert (chosen(LAN, 0.01, k=5, depth=2).k, chosen(LAN, 0.01, k=5, depth=2).depth) == (5, 2)
    assert chosen(WAN, 0.9, k=4).k == 4
    assert chosen(WAN, 0.9, depth=3).depth == 3
    assert chosen(WAN, 0.9, k=0).k == 0


def test_the_window_changes_only_for_a_clear_gain() -> None:
    best = chosen(WAN, 0.8, depth=1)
    near = Window(best.k - 1 if best.k < 9 else best.k - 2, 1)
    assert choose_window(WAN, itertools.repeat(0.8), depth=1, current=near).k == near.k


@pytest.mark.parametrize(("k", "depth", "chance"), [(3, 1, 0.7), (6, 1, 0.9), (3, 2, 0.8), (2, 4, 0.9), (5, 3, 0.95)])
def test_the_rate_is_that_of_a_simulation(k: int, depth: int, chance: float) -> None:
    """Windows are sent one after the other, at most `depth` at a time; the first wrong guess ends the cycle."""
    costs = WAN
    rng, size = random.Random(1), k + 1
    tokens, time, all_right = 0, 0.0, False
    each = max(size * costs.draft_s, costs.slowest.at(size), costs.trip_s(size) / depth)
    for _ in range(4000):
        right = 0
        while rng.random() < chance and (depth > 1 or right < k) and right < 96:
            right += 1
        tokens += right + 1
        if depth == 1:
            time += costs.trip_s(size) + (0 if all_right else k * costs.draft_s)
            all_right = right == k and rng.random() < chance
        else:
            time += k * costs.draft_s + costs.trip_s(size)
            time += (right // size) * each + costs.slowest.at(size) * min(1.0, costs.slowest.at(size) / each)
    survival = list(itertools.accumulate([chance] * 96, lambda a, b: a * b))
    assert rate_of(Window(k, depth), costs, survival) == pytest.approx(tokens / time, rel=0.05)

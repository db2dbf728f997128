from __future__ import annotations

import pytest

from client.pipeline.step_times import StepTimes


def test_the_expected_time_of_a_step_follows_from_the_records() -> None:
    times = StepTimes(token_s=0.02, prompt_token_s=0.005, latency_s=0.1)
    assert times.expected(1) == pytest.approx(0.12)
    assert times.expected(128) == pytest.approx(0.74)
    assert times.expected(2) == pytest.approx(0.12)  # never less than a single token


def test_a_measured_time_counts_if_it_is_longer_than_the_expected() -> None:
    times = StepTimes(token_s=0.02, prompt_token_s=0.005, latency_s=0.0)
    times.observe(128, 12.8)
    assert times.expected(64) == pytest.approx(6.4)
    assert times.expected(1) == pytest.approx(0.02)
    times.observe(1, 3.0)
    assert times.expected(1) == pytest.approx(3.0)


def test_the_expectation_shrinks_little_by_little() -> None:
    times = StepTimes(token_s=0.0, prompt_token_s=0.0, latency_s=0.0)
    times.observe(1, 10.0)
    times.observe(1, 1.0)
    assert 1.0 < times.expected(1) < 10.0
    for _ in range(50):
        times.observe(1, 1.0)
    assert times.expected(1) == pytest.approx(1.0)

from __future__ import annotations

import pytest

from client.pipeline.deadlines import StepTimes


def test_a_step_is_expected_to_take_what_the_records_say() -> None:
    pace = StepTimes(token_s=0.02, prompt_token_s=0.005, latency_s=0.1)
    assert pace.expected(1) == pytest.approx(0.12)
    assert pace.expected(128) == pytest.approx(0.74)
    assert pace.expected(2) == pytest.approx(0.12)  # never less than a single token


def test_what_was_measured_counts_where_it_is_more() -> None:
    pace = StepTimes(token_s=0.02, prompt_token_s=0.005, latency_s=0.0)
    pace.observe(128, 12.8)
    assert pace.expected(64) == pytest.approx(6.4)
    assert pace.expected(1) == pytest.approx(0.02)
    pace.observe(1, 3.0)
    assert pace.expected(1) == pytest.approx(3.0)


def test_it_gets_stricter_little_by_little() -> None:
    pace = StepTimes(token_s=0.0, prompt_token_s=0.0, latency_s=0.0)
    pace.observe(1, 10.0)
    pace.observe(1, 1.0)
    assert 1.0 < pace.expected(1) < 10.0
    for _ in range(50):
        pace.observe(1, 1.0)
    assert pace.expected(1) == pytest.approx(1.0)

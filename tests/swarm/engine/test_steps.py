from __future__ import annotations

import numpy as np
import pytest

from swarm.engine.steps import all_finite


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_single_number_that_is_not_finite_is_found_at_any_position(wrong: float) -> None:
    for place in (0, 17, 999):
        array = np.ones((10, 100), np.float32)
        array.flat[place] = wrong
        assert not all_finite(array)


def test_infinities_that_cancel_are_found_and_large_numbers_are_accepted() -> None:
    assert not all_finite(np.array([[np.inf, -np.inf]], np.float32))
    assert all_finite(np.full((4, 4), 3e38, np.float32))
    assert all_finite(np.array([[3e38, -3e38, 3e38, 3e38]], np.float32))

"""The common prefix of two sequences of token ids. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of leading ids that are the same."""
    one, other = list(one), list(other)
    if one == other[: len(one)]:
        return len(one)  # nearly always
    # Bisection, because Python compares slices fast. The first `low` ids are the same.
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

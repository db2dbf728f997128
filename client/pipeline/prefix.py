"""What two lines of token ids have in common. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many of the first ids are the same."""
    one, other = list(one), list(other)
    if one == other[: len(one)]:
        return len(one)  # nearly always
    low, high = 0, min(len(one), len(other))  # the first `low` are the same; by halves, since slices compare fast
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

"""Layer ranges: half-open, counted from 0, written `A:B`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from swarm.errors import ConfigError

_WRITTEN = re.compile(r"(\d{1,6}):(\d{1,6})")


@dataclass(frozen=True, order=True)
class LayerRange:
    """Layers `first` up to, not including, `last`.

    >>> LayerRange(0, 10).overlap(LayerRange(5, 20))
    LayerRange(first=5, last=10)
    """

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last:
            raise ConfigError(f"layer range {self.first}:{self.last} is empty or starts below 0")

    @classmethod
    def parse(cls, text: str) -> LayerRange:
        """Read `A:B`. Raises ConfigError naming the text."""
        match = _WRITTEN.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"{text!r} is not a layer range; write it as A:B, counted from 0, for example 0:10")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"

    def __len__(self) -> int:
        return self.last - self.first

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last))

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.first <= layer < self.last

    def covers(self, other: LayerRange) -> bool:
        return self.first <= other.first and other.last <= self.last

    def overlap(self, other: LayerRange) -> LayerRange | None:
        first, last = max(self.first, other.first), min(self.last, other.last)
        return LayerRange(first, last) if first < last else None


def union(ranges: Iterable[LayerRange]) -> list[LayerRange]:
    """The same layers as ascending ranges that neither overlap nor touch."""
    merged: list[LayerRange] = []
    for span in sorted(ranges):
        if merged and span.first <= merged[-1].last:
            merged[-1] = LayerRange(merged[-1].first, max(merged[-1].last, span.last))
        else:
            merged.append(span)
    return merged


def gaps(ranges: Iterable[LayerRange], layers: int) -> list[LayerRange]:
    """The layers below `layers` that no range covers, ascending."""
    missing: list[LayerRange] = []
    covered_to = 0
    for span in union(ranges):
        if span.first >= layers:
            break
        if span.first > covered_to:
            missing.append(LayerRange(covered_to, span.first))
        covered_to = max(covered_to, span.last)
    if covered_to < layers:
        missing.append(LayerRange(covered_to, layers))
    return missing


def coverage(ranges: Iterable[LayerRange], layers: int) -> list[int]:
    """The number of ranges over each layer; length `layers`."""
    counts = [0] * layers
    for span in ranges:
        for layer in range(span.first, min(span.last, layers)):
            counts[layer] += 1
    return counts

"""`python -m reproduction.harness.plot RUN.json OUT.svg` draws a run of gateway_load without a plotting library.

The x axis has the number of streams in powers of two. The total speed has a linear y axis, times a logarithmic one.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_WIDTH, _HEIGHT = 360, 240
_LEFT, _TOP, _RIGHT, _BOTTOM = 56, 34, 16, 40
_COLOURS = ("#2f6fde", "#d9692b", "#2a9d6f", "#9a58c9")
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333 } .axis { stroke: #999 } .grid { stroke: #9993 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } }
"""
Points = Sequence[tuple[int, float]]


def read_series(report: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Quantity -> (streams, value), in the order of the run."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in report["rows"]:
        match = re.fullmatch(r"(\d+) streams, (.+)", row["configuration"])
        if match:
            found.setdefault(match[2], []).append((int(match[1]), float(row["value"])))
    return found


def draw(report: Mapping[str, Any]) -> str:
    """The SVG text."""
    series = read_series(report)
    times = {name: points for name, points in series.items() if name != "together"}
    panels = [
        _panel("tokens/s of all streams", {"": series["together"]}, logarithmic=False),
        _panel("ms", times, logarithmic=True),
    ]
    body = "".join(
        f'<g transform="translate({index * (_WIDTH + 70)} 0)">{panel}</g>' for index, panel in enumerate(panels)
    )
    width = 2 * _WIDTH + 190
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" width="{width}" height="{_HEIGHT}">'
    )
    return f"{head}<style>{_STYLE}</style>{body}</svg>\n"


def _panel(title: str, series: Mapping[str, Points], *, logarithmic: bool) -> str:
    streams = [count for count, _ in next(iter(series.values()))]
    highest = max(value for points in series.values() for _, value in points)
    lowest = min(value for points in series.values() for _, value in points)
    ticks = _decades(lowest, highest) if logarithmic else _steps(highest)
    scale: Callable[[float], float] = math.log10 if logarithmic else float

    def x(count: int) -> float:
        share = math.log2(count / streams[0]) / max(math.log2(streams[-1] / streams[0]), 1)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        share = (scale(value) - scale(ticks[0])) / (scale(ticks[-1]) - scale(ticks[0]))
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<text x="{_LEFT}" y="18">{title}</text>']
    for tick in ticks:
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for count in streams:
        parts.append(f'<text x="{x(count):.1f}" y="{_HEIGHT - 22}" text-anchor="middle">{count}</text>')
    parts.append(f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">streams</text>')
    for (name, points), colour in zip(series.items(), _COLOURS, strict=False):
        line = " ".join(f"{x(count):.1f},{y(value):.1f}" for count, value in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(count):.1f}" cy="{y(value):.1f}" r="3" fill="{colour}"/>' for count, value in points]
        parts.append(
            f'<text x="{_WIDTH - _RIGHT + 8}" y="{y(points[-1][1]) + 4:.1f}" style="fill:{colour}">{name}</text>'
        )
    return "".join(parts)


def _decades(lowest: float, highest: float) -> list[float]:
    first, last = math.floor(math.log10(lowest)), math.ceil(math.log10(highest))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


def _steps(highest: float) -> list[float]:
    """About five round numbers from 0 to beyond `highest`."""
    rough = highest / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [step * index for index in range(math.ceil(highest / step) + 1)]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(draw(json.loads(Path(sys.argv[1]).read_text())))

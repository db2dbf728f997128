"""The report of an experiment: rows with the published figures, and ratios within the run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

ROUNDS = 5
ROUNDS_OF_ONE = 15
"""For comparisons of a single stream, which varies by a tenth between rounds."""
Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration's median. `published` is the paper's figure (arXiv 2608.19147), on its hardware."""

    configuration: str
    value: float
    unit: str
    published: float | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """`goals` has (comparison, number) for each ratio with a goal."""

    experiment: str
    machine: Mapping[str, Any]
    rows: Sequence[Row]
    ratios: Mapping[str, float]
    goals: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def to_json(self) -> str:
        plain = {
            "experiment": self.experiment,
            "machine": dict(self.machine),
            "rows": [asdict(row) for row in self.rows],
            "ratios": dict(self.ratios),
        }
        return json.dumps(plain, indent=2)

    def to_markdown(self) -> str:
        """The content of `show` as Markdown, for the documentation."""
        lines = [f"### {self.experiment}", "", "| configuration | measured | unit | published |", "|---|--:|---|--:|"]
        for row in self.rows:
            published = "" if row.published is None else f"{row.published:g}"
            lines.append(f"| {row.configuration} | {row.value:.4g} | {row.unit} | {published} |")
        lines += ["", "| ratio | measured | goal |", "|---|--:|---|"]
        for name, ratio in self.ratios.items():
            goal = f"{self.goals[name][0]} {self.goals[name][1]:g}: {self.verdict(name)}" if name in self.goals else ""
            lines.append(f"| `{name}` | {ratio:.3f} | {goal} |")
        return "\n".join([*lines, "", *(f"{note[0].upper()}{note[1:]}.  " for note in self.notes), ""])

    def verdict(self, ratio: str) -> str:
        """`reached` or `NOT reached`, for a ratio with a goal."""
        compare, goal = self.goals[ratio]
        reached = self.ratios[ratio] >= goal if compare == ">=" else self.ratios[ratio] <= goal
        return "reached" if reached else "NOT reached"

    def show(self, console: Console) -> None:
        table = Table(title=self.experiment, title_justify="left")
        table.add_column("configuration")
        table.add_column("measured", justify="right")
        table.add_column("unit")
        table.add_column("published", justify="right")
        for row in self.rows:
            published = "" if row.published is None else f"{row.published:g}"
            table.add_row(row.configuration, f"{row.value:.4g}", row.unit, published)
        console.print(table)
        for name, ratio in self.ratios.items():
            verdict = ""
            if name in self.goals:
                compare, goal = self.goals[name]
                verdict = f"  (goal {compare} {goal:g}: {self.verdict(name)})"
            console.print(f"{name} = {ratio:.3f}{verdict}", highlight=False)
        for note in self.notes:
            console.print(note, style="dim", highlight=False)


def interleaved(
    configurations: Mapping[str, Callable[[], float]], log: Log, rounds: int = ROUNDS, *, warm_up: bool = True
) -> dict[str, list[float]]:
    """Measure every configuration once per round: a drift of the machine affects all alike.

    The order is reversed every other round. With `warm_up`, one more round comes first and is not counted.
    """
    samples: dict[str, list[float]] = {name: [] for name in configurations}
    for round_ in range(0 if warm_up else 1, rounds + 1):
        names = list(configurations)
        for name in names if round_ % 2 else reversed(names):
            value = configurations[name]()
            if round_:
                samples[name].append(value)
            log(f"round {round_} of {rounds}: {name} {value:.4g}")
    return samples


def median_ratio(samples: Mapping[str, Sequence[float]], above: str, below: str) -> float:
    """The median over the rounds of the ratio of two configurations in the same round."""
    return statistics.median(a / b for a, b in zip(samples[above], samples[below], strict=True))


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in samples.items()}

"""Progress bars of an export: one for each stage, with memory and time left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import psutil
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from export.sources.source import Progress as Report
from swarm.model.memory_footprint import format_bytes


class _Memory(ProgressColumn):
    """Resident memory of this process and its children."""

    max_refresh = 1.0

    def render(self, task: Task) -> Text:
        return Text(format_bytes(_resident()), style="dim")


@contextmanager
def progress_bars(console: Console) -> Iterator[Report]:
    """Show one bar for each stage that is reported. Prints nothing at all if nothing is reported."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        _Memory(),
    )
    progress = Progress(*columns, console=console)
    with ExitStack() as stack:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if not tasks:
                stack.enter_context(progress)
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=None)
            progress.update(tasks[what], completed=done, total=total or None)

        yield report


def _resident() -> int:
    own = psutil.Process()
    total = 0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):
            total += int(process.memory_info().rss)
    return total

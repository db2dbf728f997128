"""Exports ranges of one checkpoint's layers in several processes, into one journal."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from export.package.journal import Journal
from export.sources.source import Progress, last_line
from swarm.errors import PackageError
from swarm.model.spans import LayerRange
from swarm.process.child_process import module_command, module_environment

_POLL_S = 0.2


def run_jobs(
    command: Sequence[str], spans: Sequence[LayerRange], journal: Journal, parts: int, progress: Progress
) -> None:
    """Run `swarm COMMAND --layers A:B` for all `spans` in parallel, and wait for them.

    Raises PackageError with the message of the first process that failed. The others are then terminated; the parts
    that were made stay.
    """
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-export-")))
        running: list[tuple[subprocess.Popen[bytes], Path]] = []
        for number, span in enumerate(spans):
            log = logs / str(number)
            child = subprocess.Popen(
                [*module_command("swarm"), *command, "--layers", str(span)],
                env=module_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stack.enter_context(log.open("wb")),
            )
            stack.callback(_terminate, child)
            running.append((child, log))
        while running:
            progress("exporting layers", min(journal.count(), parts), parts)
            time.sleep(_POLL_S)
            for child, log in running:
                if child.poll():
                    raise PackageError(f"a process of the export failed: {last_line(log.read_text(errors='replace'))}")
            running = [(child, log) for child, log in running if child.returncode is None]
        progress("exporting layers", parts, parts)


def even_shares(span: LayerRange, jobs: int) -> list[LayerRange]:
    """Split `span` into at most `jobs` spans of about equal length.

    >>> [str(piece) for piece in even_shares(LayerRange(0, 7), 3)]
    ['0:2', '2:5', '5:7']
    """
    jobs = min(jobs, len(span))
    edges = [span.first + round(i * len(span) / jobs) for i in range(jobs + 1)]
    return [LayerRange(a, b) for a, b in pairwise(edges)]


def _terminate(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        child.wait()

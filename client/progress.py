"""Progress of a command on the terminal: the answer on stdout, everything else on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from client.events import Event, Stage
from client.generation.generate import FinishReason, Reply
from client.options import stderr_console
from client.speculation.speculation import SpeculationReport

_INTERVAL_S = 1.0
_MAX_WINDOWS_SHOWN = 6


class Progress:
    """Shows progress: on a terminal as one changing status line, elsewhere as at most one line a second.

    Off a terminal no line is repeated in a row; what the client waits for is printed at once.
    """

    def __init__(
        self,
        *,
        console: Console | None = None,
        output: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or stderr_console()
        self._output = output or sys.stdout
        self._clock = clock
        self._status: Status | None = None
        self._mid_line = False
        self._quiet_until = clock() + _INTERVAL_S
        self._last_wait = self._last_status = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear_status()
        self.end_line()

    def on_event(self, event: Event) -> None:
        """The callback for `SwarmClient.connect(on_event=...)`."""
        if event.stage in (Stage.TRUSTED, Stage.REPAIRING):
            self.note(event.text)
        elif event.stage in (Stage.WAITING, Stage.DRAFT) and not self._console.is_terminal:
            if event.text != self._last_wait:
                self.note(event.text)
            self._last_wait = event.text
        elif event.stage is not Stage.CONNECTED:
            share = f" {event.done / event.total:.0%}" if event.total else ""
            self._show_status(event.text + share, interrupt=event.stage is Stage.WAITING)

    def write(self, text: str) -> None:
        """Write a piece of the answer to stdout."""
        if text:
            self._clear_status()
            self._output.write(text)
            self._output.flush()
            self._mid_line = not text.endswith("\n")

    def end_line(self) -> None:
        """Begin a new line on stdout, unless it is at the start of one."""
        if self._mid_line:
            self._output.write("\n")
            self._output.flush()
            self._mid_line = False

    def note(self, text: str, *, dim: bool = False) -> None:
        """Print a permanent line to stderr."""
        self._clear_status()
        if self._console.is_terminal:
            self.end_line()
        self._console.print(text, style="dim" if dim else "", markup=False, soft_wrap=True)

    def ask(self, prompt: str) -> None:
        """Print the prompt of an input line."""
        self._clear_status()
        self._console.print(prompt, end="", markup=False)

    def _show_status(self, text: str, *, interrupt: bool) -> None:
        """Show what is going on. In the middle of an answer's line only with `interrupt`, on a new line."""
        if not self._console.is_terminal:
            if self._clock() >= self._quiet_until and text != self._last_status:
                self._quiet_until = self._clock() + _INTERVAL_S
                self._last_status = text
                self._console.print(text, markup=False, soft_wrap=True)
            return
        if self._mid_line and not interrupt:
            return
        self.end_line()
        if self._status is None:
            self._status = self._console.status(escape(text))
            self._status.start()
        else:
            self._status.update(escape(text))

    def _clear_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def describe(reply: Reply) -> str:
    """One line about an answer: its speed and route, and why it ended unless the model ended it."""
    metrics = reply.metrics
    cached = f", {metrics.reused_tokens} of them cached" if metrics.reused_tokens else ""
    speed = f" at {metrics.tokens_per_second:.1f} tokens/s" if metrics.new_tokens > 1 else ""
    parts = [
        f"{metrics.new_tokens} {'token' if metrics.new_tokens == 1 else 'tokens'}{speed}",
        f"the first after {metrics.ttft_s:.2f} s",
        f"{metrics.prompt_tokens} tokens of prompt{cached}",
        metrics.route,
    ]
    parts += _describe_speculation(metrics.speculation)
    if metrics.repairs:
        parts.append(f"{metrics.repairs} {'repair' if metrics.repairs == 1 else 'repairs'}")
    if reply.finish_reason is FinishReason.CONTEXT:
        parts.append("ended because the context is full")
    if reply.finish_reason is FinishReason.LENGTH:
        parts.append("ended by --max-new-tokens")
    return "; ".join(part for part in parts if part)


def _describe_speculation(report: SpeculationReport | None) -> list[str]:
    if report is None:
        return []
    parts = []
    without = f", {report.without:.1f} tokens/s without (estimated)" if report.without else ""
    if report.proposed:
        parts += [
            f"{report.accepted} of {report.proposed} guesses accepted ({report.draft}), "
            f"{report.tokens_a_trip:.1f} tokens a trip{without}",
            f"guesses a window: {_describe_windows(report)}",
        ]
    if report.off:
        parts.append(f"no guesses ({report.draft}) at the end: {report.off}")
    elif not report.proposed:
        parts.append(f"no guesses ({report.draft})")
    return parts


def _describe_windows(report: SpeculationReport) -> str:
    """`3, 5x2`: windows of three guesses, then two concurrent windows of five. Only the last few changes."""
    sizes = [f"{k}x{depth}" if depth > 1 else str(k) for _, k, depth in report.windows]
    return ", ".join(["...", *sizes[-_MAX_WINDOWS_SHOWN:]] if len(sizes) > _MAX_WINDOWS_SHOWN else sizes)

"""The interface through which a peer reports its progress to the person or program that started it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

ProgressCallback = Callable[[int, int], None]
"""Called with the bytes done and the total bytes, from any thread."""


class Report(Protocol):
    def phase(self, phase: str, text: str, /, **facts: object) -> None:
        """Report that a phase is reached: `text` for people, `facts` (JSON values) for programs."""

    def message(self, text: str) -> None:
        """Report a warning, or what the peer waits for."""

    def progress_bar(self, text: str) -> AbstractContextManager[ProgressCallback]:
        """Show the progress of something that takes long."""

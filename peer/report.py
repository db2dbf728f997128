"""What a peer tells the person (or program) who started it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

Progress = Callable[[int, int], None]
"""Hears bytes done and bytes in all; may be called from any thread."""


class Report(Protocol):
    def phase(self, phase: str, text: str, /, **facts: object) -> None:
        """A phase was reached. `text` is for people, `facts` (JSON values) for programs."""

    def say(self, text: str) -> None:
        """Something to know that is no phase: a warning, or what is waited for."""

    def bar(self, text: str) -> AbstractContextManager[Progress]:
        """Something that takes its time begins."""

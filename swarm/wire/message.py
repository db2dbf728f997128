"""What all messages have in common: they check their own fields, and say which one is wrong."""

from __future__ import annotations

import math
import re
from typing import ClassVar

import numpy as np

from swarm.errors import LocalProtocolError

MAX_TEXT = 4096
NAME = re.compile(r"[0-9a-zA-Z_.:/#\[\]-]{0,300}")
_LIMIT = 1 << 62
_SESSION = re.compile(r"[0-9a-zA-Z_.-]{8,64}")

Bulk = bytes
"""Travels as payload, not in the header. Whoever sends may give any buffer of bytes."""


def check(ok: bool, message: object, name: str) -> None:
    if not ok:
        raise wrong(message, name)


def wrong(message: object, name: str) -> LocalProtocolError:
    """What to raise where the field `name` is not as it must be."""
    return LocalProtocolError(f"{type(message).__name__}: {name} is {repr(getattr(message, name))[:80]}")


def is_array(value: object, dtype: type[np.generic], ndim: int) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == dtype and value.ndim == ndim


class Message:
    """Base of all. `kind` is the word for it in a frame's header."""

    kind: ClassVar[str]

    def _naturals(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < _LIMIT:
                raise wrong(self, name)

    def _numbers(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            check(isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value), self, name)

    def _names(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            check(isinstance(value, str) and NAME.fullmatch(value) is not None, self, name)

    def _texts(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            check(isinstance(value, str) and len(value) <= MAX_TEXT, self, name)

    def _session(self) -> None:
        session = getattr(self, "session", None)
        check(isinstance(session, str) and _SESSION.fullmatch(session) is not None, self, "session")

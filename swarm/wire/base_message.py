"""The base class of all messages, with checks that name the field that is wrong."""

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
"""Bytes in the payload instead of the header. A sender may set any buffer of bytes."""


def check(ok: bool, message: object, name: str) -> None:
    if not ok:
        raise field_error(message, name)


def field_error(message: object, name: str) -> LocalProtocolError:
    """The error for an invalid field `name`."""
    return LocalProtocolError(f"{type(message).__name__}: {name} is {repr(getattr(message, name))[:80]}")


def is_array(value: object, dtype: type[np.generic], ndim: int) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == dtype and value.ndim == ndim


class Message:
    """The base class. `kind` identifies the message in a frame's header."""

    kind: ClassVar[str]

    def _check_naturals(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < _LIMIT:
                raise field_error(self, name)

    def _check_numbers(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            check(isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value), self, name)

    def _check_names(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            check(isinstance(value, str) and NAME.fullmatch(value) is not None, self, name)

    def _check_texts(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            check(isinstance(value, str) and len(value) <= MAX_TEXT, self, name)

    def _check_session(self) -> None:
        session = getattr(self, "session", None)
        check(isinstance(session, str) and _SESSION.fullmatch(session) is not None, self, "session")

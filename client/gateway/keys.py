"""API keys of a gateway: read from a file, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from swarm.errors import ConfigError

_MAX_KEYS = 1024
_MIN_LENGTH = 8


class Keys:
    """A set of API keys. Keeps only their digests; `repr` shows no key."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Raises ConfigError where there is no key or a malformed one. The message never quotes a key."""
        self._digests = [_digest(_checked(key, number)) for number, key in enumerate(keys, 1)]
        if not 0 < len(self._digests) <= _MAX_KEYS:
            raise ConfigError(f"there are {len(self._digests)} API keys; there must be 1 to {_MAX_KEYS}")

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Read one key a line; skips empty lines and those that begin with #. Raises ConfigError naming the file."""
        try:
            lines = [line.strip() for line in path.read_text(encoding="ascii").splitlines()]
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not plain ASCII"
            raise ConfigError(f"the API keys of {path} cannot be read: {reason}") from error
        try:
            return cls(line for line in lines if line and not line.startswith("#"))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def __contains__(self, key: object) -> bool:
        """Compares with every key in constant time."""
        digest = _digest(key) if isinstance(key, str) else b""
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found

    def __len__(self) -> int:
        return len(self._digests)


def _checked(key: str, number: int) -> str:
    if len(key) < _MIN_LENGTH or not key.isprintable() or " " in key:
        raise ConfigError(f"key {number} must have at least {_MIN_LENGTH} characters, and no spaces")
    return key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

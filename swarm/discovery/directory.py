"""The directory of a swarm: signed notices under topics, valid until they expire.

A topic is a model's digest (the records of its peers) or `models` (the models that are served). A notice is signed by
its author, so it proves itself, whether a DHT node, another peer or `MemoryDirectory` delivers it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack

from swarm.errors import DirectoryError
from swarm.transport.identity import Identity, peer_id_of, verify_signature

MODELS_TOPIC = "models"
MAX_NOTICE_BYTES = 64 << 10
MAX_TTL_S = 600.0
MAX_TOPIC = 128


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A signed statement. `expires_at` is Unix time in seconds; `subkey` is the author's peer id and the label."""

    topic: str
    subkey: str
    author: str
    body: bytes
    expires_at: float
    signed_bytes: bytes

    @classmethod
    def sign(cls, identity: Identity, *, topic: str, body: bytes, expires_at: float, label: str = "") -> Notice:
        """Sign `body`. An author has one notice for each (topic, label). Raises DirectoryError if it is too long."""
        statement = msgpack.packb([topic, label, body, expires_at])
        return cls.parse(msgpack.packb([identity.public_key, identity.sign(statement), statement]))

    @classmethod
    def parse(cls, raw: bytes) -> Notice:
        """Read untrusted bytes. Raises DirectoryError where they are malformed or the signature is wrong."""
        if len(raw) > MAX_NOTICE_BYTES:
            raise DirectoryError(f"a notice of {len(raw)} bytes is over the limit of {MAX_NOTICE_BYTES}")
        try:
            key, signature, statement = _unpack(raw)
            genuine = isinstance(statement, bytes) and verify_signature(key, signature, statement)
            topic, label, body, expires_at = _unpack(statement) if genuine else (None, None, None, None)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise DirectoryError(f"a notice cannot be read: {error}") from error
        if not genuine:
            raise DirectoryError("a notice is not signed by the key in it")
        if not (
            isinstance(topic, str)
            and isinstance(label, str)
            and isinstance(body, bytes)
            and isinstance(expires_at, float)
            and len(topic) <= MAX_TOPIC
            and len(label) <= MAX_TOPIC
        ):
            raise DirectoryError("a notice has a field of the wrong type")
        author = peer_id_of(key)
        return cls(
            topic=topic, subkey=f"{author}{label}", author=author, body=body, expires_at=expires_at, signed_bytes=raw
        )

    def is_current(self, now: float) -> bool:
        return now < self.expires_at <= now + MAX_TTL_S


def current_notices(notices: Iterable[Notice], now: float) -> list[Notice]:
    """The current ones of `notices`, the latest of each subkey."""
    latest: dict[str, Notice] = {}
    for notice in notices:
        earlier = latest.get(notice.subkey)
        if notice.is_current(now) and (earlier is None or earlier.expires_at < notice.expires_at):
            latest[notice.subkey] = notice
    return list(latest.values())


def _unpack(raw: bytes) -> list[Any]:
    value = msgpack.unpackb(raw, max_array_len=8, max_map_len=0, max_bin_len=MAX_NOTICE_BYTES, max_ext_len=0)
    if not isinstance(value, list):
        raise ValueError(f"{type(value).__name__} instead of a list")
    return value


class Directory(Protocol):
    """Where notices are published and looked up. Each call is bounded in time and may raise DirectoryError."""

    async def publish(self, notice: Notice) -> None:
        """Publish `notice`, in place of an earlier one with the same subkey."""

    async def collect(self, topic: str) -> list[Notice]:
        """The current notices of a topic, verified, one for each subkey."""


class MemoryDirectory:
    """A directory within one process, for tests."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._topics: dict[str, dict[str, Notice]] = {}

    async def publish(self, notice: Notice) -> None:
        notices = self._topics.setdefault(notice.topic, {})
        published = notices.get(notice.subkey)
        if published is None or published.expires_at <= notice.expires_at:
            notices[notice.subkey] = notice

    async def collect(self, topic: str) -> list[Notice]:
        now = self._clock()
        return [notice for notice in self._topics.get(topic, {}).values() if notice.is_current(now)]

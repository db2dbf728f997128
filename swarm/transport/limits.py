"""Limits on the memory and time that one connection takes. docs/explanation/security.md lists all other limits."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.errors import ConfigError
from swarm.wire.protocol import MAX_PAYLOAD


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one connection: sizes in bytes, times in seconds.

    Received messages are queued until `receive` takes them. Over `max_unread` the socket is not read, and the other
    side has to wait. Sent messages are queued until the socket takes them. Over `high_water`, `drain` waits; over
    `max_unsent`, the connection is aborted.
    """

    max_payload: int = MAX_PAYLOAD
    max_unread: int = 16 << 20
    high_water: int = 1 << 20
    max_unsent: int = 256 << 20
    handshake_timeout_s: float = 5.0
    write_timeout_s: float = 20.0
    close_timeout_s: float = 2.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ConfigError(f"{name} is {value!r}; it must be over 0")


DEFAULT_LIMITS = Limits()

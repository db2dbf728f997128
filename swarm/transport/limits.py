"""How much one connection may take of this machine's memory and time."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.errors import ConfigError
from swarm.wire.protocol import MAX_HEADER, MAX_PAYLOAD


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one connection: sizes in bytes, times in seconds.

    Received messages wait until `receive` takes them; over `max_unread` the socket is not read, so that the
    other side has to wait. What `send` was given waits until the socket takes it; over `high_water` `drain`
    waits, over `max_unsent` the connection is given up.
    """

    max_header: int = MAX_HEADER
    max_payload: int = MAX_PAYLOAD
    max_unread: int = 16 << 20
    high_water: int = 1 << 20
    max_unsent: int = 256 << 20
    greeting_timeout_s: float = 5.0
    write_timeout_s: float = 20.0
    close_timeout_s: float = 2.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ConfigError(f"{name} is {value!r}; it must be over 0")


DEFAULT_LIMITS = Limits()

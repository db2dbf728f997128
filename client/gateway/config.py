"""Options of a gateway, limits on its callers, and the rule for listening without a key."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from client.config import AUTO
from client.gateway.keys import Keys
from swarm.errors import ConfigError
from swarm.transport.address import Address

DEFAULT_LISTEN = Address("127.0.0.1", 8000)


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Sizes in bytes, times in seconds.

    At most `max_concurrent` answers are generated at once and `max_waiting` wait; further requests get 429. A request
    without `max_tokens` gets `default_tokens` or what the context leaves; one without `temperature` gets 1, as with
    OpenAI. `draft` is GenerationConfig's and applies to all answers.

    A caller has `header_s` to send its headers and `body_s` for its body; at most `max_large_bodies` bodies over 64 KiB
    are held at once. A connection whose caller reads nothing for `write_s` is closed. A silent stream gets a comment
    every `heartbeat_s`. A model that generated no token for `probe_s` is probed, and is ready while its last token is
    at most three times as old. At shutdown, running requests have `grace_s` to finish.

    >>> GatewayConfig(max_concurrent=8).max_waiting
    256
    """

    listen: Address = DEFAULT_LISTEN
    keys: Keys | None = None
    allow_origins: tuple[str, ...] = ()
    max_concurrent: int = 64
    max_waiting: int = 256
    max_choices: int = 16
    default_tokens: int = 1024
    temperature: float = 1.0
    draft: str = AUTO
    max_connections: int = 2048
    max_body: int = 4 << 20
    max_large_bodies: int = 32
    max_header: int = 32 << 10
    header_s: float = 10.0
    body_s: float = 30.0
    write_s: float = 30.0
    heartbeat_s: float = 15.0
    keep_alive_s: float = 30.0
    probe_s: float = 20.0
    swarm_interval_s: float = 2.0
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and not value > 0
                and name not in ("max_waiting", "temperature")
            ):
                raise ConfigError(f"{name} is {value!r}; it must be over 0")
        if self.max_waiting < 0:
            raise ConfigError(f"max_waiting is {self.max_waiting}; it must be 0 or more")
        for origin in self.allow_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ConfigError(f"{origin!r} is not an origin; write it as https://HOST[:PORT], or * for all")


def check_exposure(listen: Address, keys: Keys | None, *, no_auth: bool) -> None:
    """Raises ConfigError where other machines could use the gateway without a key, unless `no_auth` allows that."""
    if not (is_loopback(listen.host) or keys or no_auth):
        raise ConfigError(
            f"{listen.host_port} can be reached by others, and there is no key: "
            "add --api-key-file FILE, or --no-auth if everybody who reaches it may use it"
        )


def is_loopback(host: str) -> bool:
    """Whether `host` is `localhost` or a loopback address; names such as 127.site.example are not."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

"""The configuration of a peer: the limits of its sessions, and the options of `swarm join`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from swarm.engine.choice import EngineKind, resolve_engine
from swarm.errors import ConfigError
from swarm.model.numerics import PRECISIONS
from swarm.model.spans import LayerRange
from swarm.transport.address import Address

DEFAULT_PORT = 31337
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Read a size: `6GB` is 6 x 10^9 bytes, `6GiB` is 6 x 2^30. Raises ConfigError that quotes the text.

    >>> parse_bytes("1.5GB")
    1500000000
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write it like 6GB or 512MiB")
    power = " KMGT".index(match[2].upper() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """Limits of the sessions on a peer.

    `kv_total` is the KV cache in tokens. With `reserves`, each session reserves its maximum at its opening and the sum
    never exceeds `kv_total`. Without, a session takes cache as it grows and may be told to begin again; the sum of
    what all sessions are expected to take never exceeds `kv_total`.

    `queue_steps` and `queue_bytes` bound the waiting steps of one session, `all_queue_bytes` those of all sessions
    together; one step always fits. A session that is idle for `idle_s` seconds is closed.

    >>> SessionLimits(kv_total=8192, per_connection=4).sessions
    256
    """

    kv_total: int
    reserves: bool = True
    sessions: int = 256
    per_connection: int = 64
    idle_s: float = 300.0
    queue_steps: int = 32
    queue_bytes: int = 64 << 20
    all_queue_bytes: int = 512 << 20

    def __post_init__(self) -> None:
        for name in ("sessions", "per_connection", "queue_steps", "queue_bytes", "all_queue_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be at least 1")
        if self.kv_total < 0:
            raise ConfigError(f"kv_total is {self.kv_total!r}; it must be a number of tokens")
        if self.idle_s <= 0:
            raise ConfigError(f"idle_s is {self.idle_s!r}; it must be over 0 seconds")


@dataclass(frozen=True, kw_only=True)
class JoinConfig:
    """The options of `swarm join`, or of `swarm bootstrap` if `package` is None.

    package: a directory, or the name or digest of a model that the swarm serves
    layers: None lets the peer choose its span
    listen: None takes the default port or the next free one
    dht_port: port of the DHT node; 0 takes any, None the listening port plus 1000 if it is free
    wait_s: seconds to retry unreachable initial peers; None retries for ever
    grace_s: seconds that a leaving peer waits for its sessions to move on
    metrics: address of the metrics page; None serves none

    >>> JoinConfig(package="smollm2", initial_peers=(Address.parse("10.0.0.7:31337"),)).device
    'CPU'
    """

    package: str | None
    layers: LayerRange | None = None
    initial_peers: tuple[Address, ...] = ()
    listen: Address | None = None
    dht_port: int | None = None
    device: str = "CPU"
    engine: str = "auto"
    precision: str = "accuracy"
    max_memory: int | None = None
    kv_tokens: int | None = None
    kv_memory: int | None = None
    kv_spill: Path | None = None
    kv_spill_size: int = 8_000_000_000
    shared_prefixes: bool = True
    threads: int = 0
    identity: Path | None = None
    name: str = ""
    cache_dir: Path
    wait_s: float | None = None
    grace_s: float = 5.0
    metrics: Address | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision is {self.precision!r}; it must be {' or '.join(PRECISIONS)}")
        kind = resolve_engine(self.engine, self.device)
        if self.kv_spill is not None and kind != "paged":
            raise ConfigError(
                f"--kv-spill needs the paged engine, and this peer runs the {kind} one: leave out --kv-spill, "
                "or use --engine paged"
            )
        if self.max_memory is not None and self.max_memory <= 0:
            raise ConfigError(f"max_memory is {self.max_memory!r}; it must be over 0 bytes")
        if self.kv_spill_size <= 0:
            raise ConfigError(f"kv_spill_size is {self.kv_spill_size!r}; it must be over 0 bytes")
        if self.kv_memory is not None and self.kv_memory <= 0:
            raise ConfigError(f"kv_memory is {self.kv_memory!r}; it must be over 0 bytes")
        if self.kv_tokens is not None and self.kv_tokens < 1:
            raise ConfigError(f"kv_tokens is {self.kv_tokens!r}; it must be at least 1 token")
        if self.threads < 0:
            raise ConfigError(f"threads is {self.threads!r}; 0 leaves the choice to OpenVINO")
        if self.dht_port is not None and not 0 <= self.dht_port < 65536:
            raise ConfigError(f"dht_port is {self.dht_port!r}; it must be a port, or 0 for any")
        if self.wait_s is not None and self.wait_s < 0:
            raise ConfigError(f"wait is {self.wait_s!r}; it must be a number of seconds")
        if self.grace_s < 0:
            raise ConfigError(f"grace is {self.grace_s!r}; it must be a number of seconds")
        if self.package == "":
            raise ConfigError("the package is empty; name a directory, or a model that the swarm serves")
        if len(self.name) > 64 or not self.name.isprintable():
            raise ConfigError(f"name is {self.name[:80]!r}; it must be printable and at most 64 characters long")

    @property
    def engine_kind(self) -> EngineKind:
        """The engine that `engine` selects on `device`."""
        return resolve_engine(self.engine, self.device)

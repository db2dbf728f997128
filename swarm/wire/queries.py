"""Queries that any peer answers, and their answers: topics of the directory, files by hash, liveness."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from swarm.model.manifest import MAX_MANIFEST_BYTES
from swarm.wire.base_message import Bulk, Message, check

MAX_FILE_PIECE = 4 << 20
MAX_PING_PAYLOAD = 1 << 20
MAX_NOTICES = 4096


@dataclass(frozen=True, kw_only=True)
class Ping(Message):
    """Answered at once by the event loop, even while the device is busy. `session` requests that session's progress."""

    kind: ClassVar[str] = "ping"
    request: int
    session: str = ""
    payload: Bulk = b""

    def __post_init__(self) -> None:
        self._check_naturals("request")
        self._check_names("session")
        check(
            isinstance(self.payload, (bytes, bytearray, memoryview)) and len(self.payload) <= MAX_PING_PAYLOAD,
            self,
            "payload",
        )


@dataclass(frozen=True, kw_only=True)
class Pong(Message):
    """`time` is Unix time in seconds. For the session of the Ping: how many steps were `received`, how many were
    `computed` (or failed, or void), and how many results were `sent` to the next hop or the client. `rounds` counts the
    inferences of the peer's device since its start, for all sessions: a slow peer's grows, a hung one's does not."""

    kind: ClassVar[str] = "pong"
    request: int
    time: float
    received: int = 0
    computed: int = 0
    sent: int = 0
    rounds: int = 0

    def __post_init__(self) -> None:
        self._check_naturals("request", "received", "computed", "sent", "rounds")
        self._check_numbers("time")


@dataclass(frozen=True, kw_only=True)
class AskTopic(Message):
    """Look up a topic of the directory: a digest, or `models`."""

    kind: ClassVar[str] = "ask_topic"
    request: int
    topic: str

    def __post_init__(self) -> None:
        self._check_naturals("request")
        self._check_names("topic")


@dataclass(frozen=True, kw_only=True)
class Topic(Message):
    """Signed notices. The receiver verifies each."""

    kind: ClassVar[str] = "topic"
    request: int
    notices: tuple[Bulk, ...]

    def __post_init__(self) -> None:
        self._check_naturals("request")
        check(isinstance(self.notices, tuple) and len(self.notices) <= MAX_NOTICES, self, "notices")
        check(all(isinstance(notice, bytes) for notice in self.notices), self, "notices")


@dataclass(frozen=True, kw_only=True)
class AskDht(Message):
    kind: ClassVar[str] = "ask_dht"
    request: int

    def __post_init__(self) -> None:
        self._check_naturals("request")


@dataclass(frozen=True, kw_only=True)
class DhtAddresses(Message):
    """Multiaddresses of this peer's DHT node, for the DHT node of a joining peer."""

    kind: ClassVar[str] = "dht"
    request: int
    addresses: tuple[str, ...]

    def __post_init__(self) -> None:
        self._check_naturals("request")
        check(isinstance(self.addresses, tuple) and len(self.addresses) <= 64, self, "addresses")
        check(all(isinstance(a, str) and len(a) <= 300 for a in self.addresses), self, "addresses")


@dataclass(frozen=True, kw_only=True)
class AskManifest(Message):
    kind: ClassVar[str] = "ask_manifest"
    request: int
    model: str

    def __post_init__(self) -> None:
        self._check_naturals("request")
        self._check_names("model")


@dataclass(frozen=True, kw_only=True)
class ManifestFile(Message):
    """`raw` is the canonical JSON whose SHA-256 is the digest. The receiver checks it."""

    kind: ClassVar[str] = "manifest"
    request: int
    raw: Bulk

    def __post_init__(self) -> None:
        self._check_naturals("request")
        check(isinstance(self.raw, bytes) and len(self.raw) <= MAX_MANIFEST_BYTES, self, "raw")


@dataclass(frozen=True, kw_only=True)
class AskFile(Message):
    """Request bytes `offset` ... `offset + length` of the file with this hash."""

    kind: ClassVar[str] = "ask_file"
    request: int
    sha256: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        self._check_naturals("request", "offset", "length")
        check(isinstance(self.sha256, str) and re.fullmatch("[0-9a-f]{64}", self.sha256) is not None, self, "sha256")
        check(0 < self.length <= MAX_FILE_PIECE, self, "length")


@dataclass(frozen=True, kw_only=True)
class FilePiece(Message):
    """`data` is shorter than requested only at the end of the file."""

    kind: ClassVar[str] = "file"
    request: int
    data: Bulk

    def __post_init__(self) -> None:
        self._check_naturals("request")
        check(isinstance(self.data, (bytes, bytearray, memoryview)) and len(self.data) <= MAX_FILE_PIECE, self, "data")


@dataclass(frozen=True, kw_only=True)
class AskReach(Message):
    """Ask the peer to connect back to the sender: to its IP as the peer sees it, at `port`."""

    kind: ClassVar[str] = "ask_reach"
    request: int
    port: int
    peer_id: str

    def __post_init__(self) -> None:
        self._check_naturals("request")
        self._check_names("peer_id")
        check(isinstance(self.port, int) and 0 < self.port < 65536, self, "port")


@dataclass(frozen=True, kw_only=True)
class Reach(Message):
    """`address` is the address that was tried; `problem` is empty if the connection worked."""

    kind: ClassVar[str] = "reach"
    request: int
    address: str
    problem: str = ""

    def __post_init__(self) -> None:
        self._check_naturals("request")
        self._check_texts("address", "problem")

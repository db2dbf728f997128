"""One node of the DHT on one daemon: what it keeps, what it refuses, how it looks things up.

Of hivemind we use `DHTNode`: its routing table, its storage and its calls. Look-ups and stores are ours:
hivemind's stop at the first node that claims to have the latest value, call a store that reached only
oneself a success, and leave tasks behind.

hivemind itself is imported by `swarm.discovery.dht` alone; what is needed of it is handed in as `Hivemind`.
"""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from swarm.discovery.directory import MAX_NOTICE_BYTES, MAX_TTL_S, Notice
from swarm.discovery.p2p_daemon import MAX_MESSAGE_BYTES, Daemon
from swarm.errors import DirectoryError

REPLICAS = 5
"""Nodes, besides the author's own, that are asked to keep a notice."""
BREADTH = 20
"""Nearest nodes that a look-up asks; in a swarm of up to that many, all."""
CLOCK_SKEW_S = 3.0
MAX_TOPICS = 256
MAX_TOPIC_BYTES = MAX_MESSAGE_BYTES * 3 // 4
"""A topic must fit in one answer of the daemon, or nobody could read it any more."""

_PARALLEL = 5
_MAX_ASKED = 3 * BREADTH
_RPC_TIMEOUT_S = 2.0
_LOOKUP_BUDGET_S = 4.0
_CONNECT_TIMEOUT_S = 4.0
_OPEN_TIMEOUT_S = 15.0
_SILENT_FOR_S = 20.0
_CLOCKS = re.compile(r"local: ([\d.]+), peer: ([\d.]+)")


@dataclass(frozen=True, kw_only=True)
class Hivemind:
    """What we use of it. hivemind has no types, so these are Any."""

    P2P: Any
    DHTNode: Any
    DHTID: Any
    PeerID: Any
    Multiaddr: Any
    Control: Any
    Connector: Any
    Storage: Any
    ValidationError: type[Exception]
    errors: tuple[type[Exception], ...]


class NoticeValidator:
    """Decides what may stand in the DHT. Has the methods of hivemind's `RecordValidatorBase`.

    hivemind asks it about whatever others store here and about whatever they answer.
    """

    def __init__(self, key_of: Callable[[str], bytes], clock: Callable[[], float]) -> None:
        self._key_of = key_of
        self._clock = clock
        # look-ups show the same notices again and again; a signature costs 0.1 ms of the event loop
        self._unseal = functools.lru_cache(maxsize=512)(Notice.unseal)

    def validate(self, record: Any) -> bool:
        """True for a genuine notice under its own topic and subkey with its own expiry.

        An expired one passes (hivemind drops it): one that expired on its way would otherwise take the
        dictionary that it came in with it.
        """
        try:
            notice = self.read(record.value)
        except DirectoryError:
            return False
        return bool(
            record.key == self._key_of(notice.topic)
            and record.subkey == pack(notice.subkey)  # a plain value has the subkey pack(None): never equal
            and record.expiration_time == notice.expires_at
            and notice.expires_at <= self._clock() + MAX_TTL_S + CLOCK_SKEW_S
        )

    def read(self, value: bytes) -> Notice:
        """The notice in a stored value. Raises DirectoryError."""
        try:
            sealed = msgpack.unpackb(value, max_bin_len=MAX_NOTICE_BYTES, max_array_len=0, max_map_len=0)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise DirectoryError(f"a stored value cannot be read: {error}") from error
        if not isinstance(sealed, bytes) or pack(sealed) != value:
            raise DirectoryError("a stored value is no sealed notice")
        return self._unseal(sealed)

    def sign_value(self, record: Any) -> bytes:
        return bytes(record.value)

    def strip_value(self, record: Any) -> bytes:
        return bytes(record.value)


def pack(value: str | bytes | None) -> bytes:
    """As hivemind packs subkeys and values."""
    return bytes(msgpack.packb(value, use_bin_type=True))


class NoticeStore:
    """What a node keeps for everyone: hivemind's storage behind bounds, and dictionaries only.

    The node's cache is a Board of no bytes: hivemind lets one notice in it that expires late hide all
    others of its topic.
    """

    def __init__(self, storage: Any, *, topic_bytes: int, topics: int) -> None:
        self._storage = storage
        self._topic_bytes = topic_bytes
        self._topics = topics

    def store(self, key: Any, value: bytes, expiration_time: float, subkey: Any = None) -> bool:
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        held = self._storage.get(key)
        if held is None and len(self._storage) >= self._topics:
            return False
        others = sum(len(item.value) for name, item in held.value.items() if name != subkey) if held else 0
        if others + len(value) > self._topic_bytes:
            return False
        return bool(self._storage.store_subkey(key, subkey, value, expiration_time))

    def get(self, key: Any) -> Any:
        return self._storage.get(key)

    def items(self) -> Iterator[Any]:
        entries: Iterator[Any] = self._storage.items()
        return entries


def _hear(task: asyncio.Task[Any]) -> None:
    """A daemon that dies may reset the connection that hivemind's tasks use, which is nobody's news."""
    if not task.cancelled():
        task.exception()


class Node:
    """One life of the daemon and the DHT node on it. Dies with the daemon; the directory then makes another."""

    def __init__(
        self, hive: Hivemind, daemon: Daemon, control: Any, p2p: Any, dht: Any, validator: NoticeValidator
    ) -> None:
        self.daemon = daemon
        self._hive = hive
        self._control = control
        self._p2p = p2p
        self._dht = dht
        self._validator = validator
        self._silent: dict[Any, float] = {}

    @classmethod
    async def open(cls, hive: Hivemind, daemon: Daemon, node_id: Any, validator: NoticeValidator) -> Node:
        """Raises DirectoryError. The daemon stays the caller's to stop."""
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                connector = hive.Connector(control_maddr=hive.Multiaddr(daemon.control))
                control = await hive.Control.create(connector, use_persistent_conn=False)
                p2p = await hive.P2P.replicate(hive.Multiaddr(daemon.control))
                for task in (p2p._client.control._read_task, p2p._client.control._write_task):
                    task.add_done_callback(_hear)
                dht = await hive.DHTNode.create(
                    p2p=p2p, node_id=node_id, wait_timeout=_RPC_TIMEOUT_S, record_validator=validator
                )
        except TimeoutError as error:
            raise DirectoryError(f"the DHT node did not start within {_OPEN_TIMEOUT_S:.0f} s") from error
        except hive.errors as error:
            raise DirectoryError(f"the DHT node cannot be started: {error}") from error
        dht.protocol.storage = NoticeStore(hive.Storage(), topic_bytes=MAX_TOPIC_BYTES, topics=MAX_TOPICS)
        dht.protocol.cache = NoticeStore(hive.Storage(), topic_bytes=0, topics=0)
        return cls(hive, daemon, control, p2p, dht, validator)

    @property
    def neighbours(self) -> dict[str, Any]:
        """The other nodes in the routing table, by libp2p id."""
        return {peer.to_base58(): peer for peer in self._dht.protocol.routing_table.peer_id_to_uid}

    async def join(self, libp2p_id: str, places: Sequence[str]) -> str:
        """Make the acquaintance of the node `libp2p_id`. What was wrong, or an empty text.

        Raises DirectoryError where the two clocks differ too much.
        """
        hive = self._hive
        try:
            peer = hive.PeerID.from_base58(libp2p_id)
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self._control.connect(peer, [hive.Multiaddr(place) for place in places])
                met = await self._dht.protocol.call_ping(peer, validate=True, strict=True)
        except TimeoutError:
            return f"no answer within {_CONNECT_TIMEOUT_S:.0f} s"
        except ValueError as error:
            return f"not an address: {error}"
        except hive.ValidationError as error:
            clocks = _CLOCKS.search(str(error))
            if clocks is None:
                return str(error)
            raise DirectoryError(
                f"this machine's clock and that of {places[0]} differ by {float(clocks[1]) - float(clocks[2]):+.0f} s, "
                f"more than {CLOCK_SKEW_S:.0f} s: set the wrong one, by NTP for example, and try again"
            ) from error
        except hive.errors as error:
            return str(error) or type(error).__name__
        return "" if met is not None else "it does not answer as a DHT node"

    async def places(self) -> dict[str, list[str]]:
        """Where our neighbours are, by libp2p id. Raises DirectoryError where the daemon does not answer."""
        try:
            async with asyncio.timeout(_RPC_TIMEOUT_S):
                peers = await self._control.list_peers()
        except self._hive.errors as error:
            raise DirectoryError(f"the DHT daemon does not answer: {error!r}") from error
        near = self.neighbours
        found = {peer.peer_id.to_base58(): [str(place) for place in peer.addrs] for peer in peers}
        return {libp2p_id: places for libp2p_id, places in found.items() if libp2p_id in near and places}

    async def addresses(self, announced: Sequence[str]) -> list[str]:
        """Multiaddresses at which others find this node: `announced`, or what the daemon sees of itself."""
        own = f"/p2p/{self._p2p.peer_id.to_base58()}"
        if announced:
            return [place + own for place in announced]
        try:
            async with asyncio.timeout(_RPC_TIMEOUT_S):
                return [str(address) for address in await self._p2p.get_visible_maddrs(latest=True)]
        except ValueError as error:
            raise DirectoryError(f"the DHT daemon does not say where it listens: {error}") from error
        except self._hive.errors as error:
            raise DirectoryError(f"the DHT daemon does not answer: {error!r}") from error

    async def explore(self) -> None:
        """Fill the routing table."""
        await self._walk(self._dht.node_id)

    async def keep(self, notice: Notice) -> bool:
        """Store here and on the nearest nodes. False where there are others and none of them took it."""
        key = self._hive.DHTID.generate(source=notice.topic)
        # looking for the id beside the key leads to the same nodes, without moving the topic's notices
        nodes, _ = await self._walk(self._hive.DHTID(int(key) ^ 1))
        value = pack(notice.sealed)
        self._dht.protocol.storage.store_subkey(key, notice.subkey, value, notice.expires_at)
        answers = await asyncio.gather(
            *(
                self._dht.protocol.call_store(
                    peer, keys=[key], values=[value], expiration_time=[notice.expires_at], subkeys=[notice.subkey]
                )
                for peer in nodes[:REPLICAS]
            )
        )
        if not answers or any(answer and answer[0] for answer in answers):
            return True
        # hivemind hands what we keep to nodes that it has just met: they may have had it before we asked
        _, boards = await self._walk(key)
        return any(item.value == value for board in boards if board is not None for _, item in board.value.items())

    async def find(self, topic: str) -> list[Notice]:
        """All notices of `topic` that this node or a node near its key has; one subkey may occur several times."""
        key = self._hive.DHTID.generate(source=topic)
        _, boards = await self._walk(key)
        boards.append(self._dht.protocol.storage.get(key))
        return [
            self._validator.read(item.value) for board in boards if board is not None for _, item in board.value.items()
        ]

    async def close(self) -> None:
        """The daemon is dead afterwards, even where this is cancelled."""
        self._dht.is_alive = False
        try:
            await self._p2p.shutdown()  # hivemind's side: its tasks and its sockets
        finally:
            await self.daemon.stop()

    async def _walk(self, key: Any) -> tuple[list[Any], list[Any]]:
        """Kademlia's look-up: the libp2p ids of the nearest nodes that answered, nearest first, and what they hold.

        Bounded in nodes and in time, whatever the others answer: it then ends with what it has.
        """
        me = self._dht.node_id
        known = dict(self._dht.protocol.routing_table.get_nearest_neighbors(key, BREADTH, exclude=me))
        asked, answered, boards = {me}, {}, []
        deadline = time.monotonic() + _LOOKUP_BUDGET_S
        while time.monotonic() < deadline and len(asked) <= _MAX_ASKED:
            nearest = sorted(known, key=key.xor_distance)[:BREADTH]
            batch = [node for node in nearest if node not in asked][:_PARALLEL]
            if not batch:
                break
            asked.update(batch)
            answers = await asyncio.gather(*(self._ask(known[node], key) for node in batch))
            for node, answer in zip(batch, answers, strict=True):
                peer = known[node]
                if answer is None:
                    del known[node]
                    continue
                board, neighbours = answer
                answered[node] = peer
                boards.append(board)
                known.update({n: p for n, p in list(neighbours.items())[:BREADTH] if n not in asked})
        return [answered[node] for node in sorted(answered, key=key.xor_distance)], boards

    async def _ask(self, peer: Any, key: Any) -> Any:
        """(value or None, neighbours) from one node; None where it is silent."""
        now = time.monotonic()
        if self._silent.get(peer, now) > now:
            return None
        answers = await self._dht.protocol.call_find(peer, [key])
        if answers is None or key not in answers:
            self._silent = {p: until for p, until in self._silent.items() if until > now}
            self._silent[peer] = now + _SILENT_FOR_S
            return None
        self._silent.pop(peer, None)
        return answers[key]

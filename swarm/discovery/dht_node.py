"""One DHT node on one daemon: validation and storage of notices, look-ups and stores.

hivemind's `DHTNode` provides the routing table, the storage and the calls to other nodes. Look-ups and stores are
implemented here, because hivemind's look-up stops at the first node that claims the latest value, its store succeeds
when only the own node stored the value, and both leave tasks behind.

Only `swarm.discovery.dht` imports hivemind; it passes what is needed here as `Hivemind`.
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
"""Nodes, besides the author's own, that are asked to store a notice."""
BREADTH = 20
"""Nearest nodes that a look-up queries; in a DHT of up to that many nodes, all of them."""
CLOCK_SKEW_S = 3.0
MAX_TOPICS = 256
MAX_TOPIC_BYTES = MAX_MESSAGE_BYTES * 3 // 4
"""A topic that does not fit in one answer of the daemon cannot be read."""

_PARALLEL = 5
_MAX_QUERIED = 3 * BREADTH
_RPC_TIMEOUT_S = 2.0
_LOOKUP_BUDGET_S = 4.0
_CONNECT_TIMEOUT_S = 4.0
_OPEN_TIMEOUT_S = 15.0
_SKIP_SILENT_S = 20.0
_CLOCK_ERROR = re.compile(r"local: ([\d.]+), peer: ([\d.]+)")


@dataclass(frozen=True, kw_only=True)
class Hivemind:
    """The parts of hivemind that are used here. hivemind has no types, so these are Any."""

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
    """Decides which records the DHT accepts. Has the methods of hivemind's `RecordValidatorBase`.

    hivemind calls it for every record that other nodes store here or answer with.
    """

    def __init__(self, key_of: Callable[[str], bytes]) -> None:
        self._key_of = key_of
        # Look-ups return the same notices repeatedly, and checking a signature costs 0.1 ms of the event loop.
        self._parse = functools.lru_cache(maxsize=512)(Notice.parse)

    def validate(self, record: Any) -> bool:
        """True for a validly signed notice under its own topic and subkey, with its own expiry.

        An expired notice passes, and hivemind drops it. Otherwise a notice that expires in transit would invalidate
        the whole dictionary that contains it.
        """
        try:
            notice = self.read(record.value)
        except DirectoryError:
            return False
        return bool(
            record.key == self._key_of(notice.topic)
            and record.subkey == pack(notice.subkey)  # never equal for a plain value, whose subkey is pack(None)
            and record.expiration_time == notice.expires_at
            and notice.expires_at <= time.time() + MAX_TTL_S + CLOCK_SKEW_S
        )

    def read(self, value: bytes) -> Notice:
        """The notice in a stored value. Raises DirectoryError."""
        try:
            signed = msgpack.unpackb(value, max_bin_len=MAX_NOTICE_BYTES, max_array_len=0, max_map_len=0)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise DirectoryError(f"a stored value cannot be read: {error}") from error
        if not isinstance(signed, bytes) or pack(signed) != value:
            raise DirectoryError("a stored value is not a signed notice")
        return self._parse(signed)

    def sign_value(self, record: Any) -> bytes:
        return bytes(record.value)

    def strip_value(self, record: Any) -> bytes:
        return bytes(record.value)


def pack(value: str | bytes | None) -> bytes:
    """Pack a subkey or a value as hivemind does."""
    return bytes(msgpack.packb(value, use_bin_type=True))


class NoticeStore:
    """A node's storage: hivemind's, with limits on size and number, and dictionaries only.

    A node's cache is one with `topic_bytes` 0, which stores nothing: in hivemind's cache a single notice that expires
    late hides all others of its topic.
    """

    def __init__(self, storage: Any, *, topic_bytes: int, topics: int) -> None:
        self._storage = storage
        self._topic_bytes = topic_bytes
        self._topics = topics

    def store(self, key: Any, value: bytes, expiration_time: float, subkey: Any = None) -> bool:
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        stored = self._storage.get(key)
        if stored is None and len(self._storage) >= self._topics:
            return False
        others = sum(len(item.value) for name, item in stored.value.items() if name != subkey) if stored else 0
        if others + len(value) > self._topic_bytes:
            return False
        return bool(self._storage.store_subkey(key, subkey, value, expiration_time))

    def get(self, key: Any) -> Any:
        return self._storage.get(key)

    def items(self) -> Iterator[Any]:
        entries: Iterator[Any] = self._storage.items()
        return entries


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Keep asyncio from printing the error of a hivemind task whose connection a dying daemon has reset."""
    if not task.cancelled():
        task.exception()


class Node:
    """One daemon and the DHT node on it. The node ends with the daemon; the directory then opens another."""

    def __init__(
        self, hive: Hivemind, daemon: Daemon, control: Any, p2p: Any, dht: Any, validator: NoticeValidator
    ) -> None:
        self.daemon = daemon
        self._hive = hive
        self._control = control
        self._p2p = p2p
        self._dht = dht
        self._validator = validator
        self._silent_until: dict[Any, float] = {}

    @classmethod
    async def open(cls, hive: Hivemind, daemon: Daemon, node_id: Any, validator: NoticeValidator) -> Node:
        """Raises DirectoryError; the caller must then stop the daemon."""
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                connector = hive.Connector(control_maddr=hive.Multiaddr(daemon.control))
                control = await hive.Control.create(connector, use_persistent_conn=False)
                p2p = await hive.P2P.replicate(hive.Multiaddr(daemon.control))
                for task in (p2p._client.control._read_task, p2p._client.control._write_task):
                    task.add_done_callback(_retrieve_exception)
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

    async def join(self, libp2p_id: str, addresses: Sequence[str]) -> str:
        """Connect to the node `libp2p_id` and add it to the routing table. Returns the problem, or an empty text.

        Raises DirectoryError where the two clocks differ by more than `CLOCK_SKEW_S`.
        """
        hive = self._hive
        try:
            peer = hive.PeerID.from_base58(libp2p_id)
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self._control.connect(peer, [hive.Multiaddr(address) for address in addresses])
                answer = await self._dht.protocol.call_ping(peer, validate=True, strict=True)
        except TimeoutError:
            return f"no answer within {_CONNECT_TIMEOUT_S:.0f} s"
        except ValueError as error:
            return f"not an address: {error}"
        except hive.ValidationError as error:
            clocks = _CLOCK_ERROR.search(str(error))
            if clocks is None:
                return str(error)
            difference_s = float(clocks[1]) - float(clocks[2])
            raise DirectoryError(
                f"this machine's clock and that of {addresses[0]} differ by {difference_s:+.0f} s, "
                f"more than {CLOCK_SKEW_S:.0f} s: set the wrong one, by NTP for example, and try again"
            ) from error
        except hive.errors as error:
            return str(error) or type(error).__name__
        return "" if answer is not None else "it does not answer as a DHT node"

    async def neighbour_addresses(self) -> dict[str, list[str]]:
        """Multiaddresses of the nodes in the routing table, by libp2p id.

        Raises DirectoryError where the daemon does not answer.
        """
        try:
            async with asyncio.timeout(_RPC_TIMEOUT_S):
                peers = await self._control.list_peers()
        except self._hive.errors as error:
            raise DirectoryError(f"the DHT daemon does not answer: {error!r}") from error
        neighbours = self.neighbours
        listed = {peer.peer_id.to_base58(): [str(address) for address in peer.addrs] for peer in peers}
        return {libp2p_id: addrs for libp2p_id, addrs in listed.items() if libp2p_id in neighbours and addrs}

    async def addresses(self, announced: Sequence[str]) -> list[str]:
        """This node's multiaddresses for others: `announced`, or those that the daemon sees of itself."""
        own = f"/p2p/{self._p2p.peer_id.to_base58()}"
        if announced:
            return [address + own for address in announced]
        try:
            async with asyncio.timeout(_RPC_TIMEOUT_S):
                return [str(address) for address in await self._p2p.get_visible_maddrs(latest=True)]
        except ValueError as error:
            raise DirectoryError(f"the DHT daemon does not say where it listens: {error}") from error
        except self._hive.errors as error:
            raise DirectoryError(f"the DHT daemon does not answer: {error!r}") from error

    async def fill_routing_table(self) -> None:
        await self._look_up(self._dht.node_id)

    async def store(self, notice: Notice) -> bool:
        """Store here and on the nearest nodes. False where there are other nodes and none of them stored it."""
        key = self._hive.DHTID.generate(source=notice.topic)
        # The adjacent id leads to the same nodes, without transferring the topic's notices.
        nodes, _ = await self._look_up(self._hive.DHTID(int(key) ^ 1))
        value = pack(notice.signed_bytes)
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
        # hivemind copies stored values to nodes that it has just met: they may have had the notice before the call.
        _, values = await self._look_up(key)
        return any(item.value == value for found in values if found is not None for _, item in found.value.items())

    async def find(self, topic: str) -> list[Notice]:
        """All notices of `topic` on this node and on nodes near its key; a subkey may occur several times."""
        key = self._hive.DHTID.generate(source=topic)
        _, values = await self._look_up(key)
        values.append(self._dht.protocol.storage.get(key))
        return [
            self._validator.read(item.value) for found in values if found is not None for _, item in found.value.items()
        ]

    async def close(self) -> None:
        """End the node and the daemon. The daemon is dead afterwards, even if this is cancelled."""
        self._dht.is_alive = False
        try:
            await self._p2p.shutdown()  # hivemind's tasks and sockets
        finally:
            await self.daemon.stop()

    async def _look_up(self, key: Any) -> tuple[list[Any], list[Any]]:
        """Kademlia's look-up: the libp2p ids of the nearest nodes that answered, nearest first, and their values.

        It stops after `_MAX_QUERIED` nodes or `_LOOKUP_BUDGET_S` and returns what it has.
        """
        own_id = self._dht.node_id
        known = dict(self._dht.protocol.routing_table.get_nearest_neighbors(key, BREADTH, exclude=own_id))
        queried, answered, values = {own_id}, {}, []
        deadline = time.monotonic() + _LOOKUP_BUDGET_S
        while time.monotonic() < deadline and len(queried) <= _MAX_QUERIED:
            nearest = sorted(known, key=key.xor_distance)[:BREADTH]
            batch = [node for node in nearest if node not in queried][:_PARALLEL]
            if not batch:
                break
            queried.update(batch)
            answers = await asyncio.gather(*(self._query(known[node], key) for node in batch))
            for node, answer in zip(batch, answers, strict=True):
                peer = known[node]
                if answer is None:
                    del known[node]
                    continue
                value, neighbours = answer
                answered[node] = peer
                values.append(value)
                known.update({n: p for n, p in list(neighbours.items())[:BREADTH] if n not in queried})
        return [answered[node] for node in sorted(answered, key=key.xor_distance)], values

    async def _query(self, peer: Any, key: Any) -> Any:
        """(value or None, neighbours) from one node; None where it does not answer, now or shortly before."""
        now = time.monotonic()
        if self._silent_until.get(peer, now) > now:
            return None
        answers = await self._dht.protocol.call_find(peer, [key])
        if answers is None or key not in answers:
            self._silent_until = {p: until for p, until in self._silent_until.items() if until > now}
            self._silent_until[peer] = now + _SKIP_SILENT_S
            return None
        self._silent_until.pop(peer, None)
        return answers[key]

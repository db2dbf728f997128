"""`HivemindDirectory`: the directory in a Kademlia DHT of hivemind nodes, on the event loop of this process.

::

    topic          -> key      SHA-1 of the packed topic, as hivemind makes it
    Notice.subkey  -> subkey   of that key's dictionary
    signed bytes   -> value    signed by its author, so any node may store it
    expires_at     -> expiration; only a notice that expires strictly later replaces a notice

Every node refuses a value that is not a validly signed notice under its own topic and subkey
(`dht_node.NoticeValidator`). So no author can overwrite another's subkey, and no plain value can replace a dictionary.
A hostile node can still stay silent or flood: look-ups query several nodes, and each node limits what it stores
(`dht_node.NoticeStore`).

The directory monitors its daemon. When the daemon dies or hangs, the directory starts it again with the same key and
port, rejoins the known nodes, and publishes the current notices of this process again.

hivemind's package also imports its training code: 2 s and 260 MB, mostly torch. `import_hivemind` leaves that out.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import socket
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from swarm.discovery.dht_node import Hivemind, Node, NoticeValidator
from swarm.discovery.directory import Notice, current_notices
from swarm.discovery.lazy_import import lazy_package
from swarm.discovery.p2p_daemon import Daemon, claim_port, generate_key, split_multiaddress, tcp_multiaddress
from swarm.errors import AddressError, DirectoryError

_log = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 12.0
_CHECK_INTERVAL_S = 3.0
_ANSWER_TIMEOUT_S = 2.0
_MAX_MISSED_ANSWERS = 2
_MAX_KNOWN = 64
_JOIN_TIMEOUT_S = 60.0
_BACK_OFF_S = (0.2, 1.0, 2.0, 5.0)
# Names that hivemind.dht and hivemind.p2p import from the package hivemind.utils, by the module that defines them.
_UTILS_NAMES = {
    "logging": ("get_logger",),
    "serializer": ("MSGPackSerializer", "SerializerBase"),
    "timed_storage": ("get_dht_time",),
}


@functools.cache
def import_hivemind() -> Hivemind:
    """Import hivemind's DHT without torch, and undo its changes to log handlers and level names.

    A hivemind release that imports further names from its packages still works, but then imports torch.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        for package in ("hivemind", "hivemind.dht", "hivemind.utils"):
            lazy_package(package)
        import hivemind.utils

        for module, names in _UTILS_NAMES.items():
            source = importlib.import_module(f"hivemind.utils.{module}")
            vars(hivemind.utils).update({name: getattr(source, name) for name in names})
        from hivemind.dht.node import DHTNode
        from hivemind.dht.protocol import ValidationError
        from hivemind.dht.routing import DHTID
        from hivemind.dht.storage import DHTLocalStorage
        from hivemind.p2p import P2P, PeerID
        from hivemind.p2p.p2p_daemon_bindings.control import ControlClient, DaemonConnector
        from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
        from hivemind.utils.logging import use_hivemind_log_handler
        from hivemind.utils.multiaddr import Multiaddr

    use_hivemind_log_handler("nowhere")
    logging.addLevelName(logging.WARNING, "WARNING")
    # With a handler of its own, hivemind prints nothing in a program that has not configured logging.
    logging.getLogger("hivemind").addHandler(logging.NullHandler())
    return Hivemind(
        P2P=P2P,
        DHTNode=DHTNode,
        DHTID=DHTID,
        PeerID=PeerID,
        Multiaddr=Multiaddr,
        Control=ControlClient,
        Connector=DaemonConnector,
        Storage=DHTLocalStorage,
        ValidationError=ValidationError,
        errors=(P2PDaemonError, P2PHandlerError, OSError, EOFError),
    )


FindNodes = Callable[[], Awaitable[Sequence[str]]]
"""Finds the multiaddresses of nodes that answer now; none where that fails."""


class HivemindDirectory:
    """A `Directory` that is a node of the DHT: it stores notices of other peers, and they store its own.

    `say` receives sentences for people about failures and repairs of the DHT. The caller must close the directory,
    which ends the daemon.
    """

    def __init__(
        self,
        hive: Hivemind,
        *,
        host: str,
        port: int,
        announce_hosts: Sequence[str],
        initial: dict[str, list[str]],
        say: Callable[[str], None],
    ) -> None:
        self._hive = hive
        self._listen = tcp_multiaddress(host, port)
        self._announce = [tcp_multiaddress(name, port) for name in announce_hosts]
        self._initial = initial
        self._say = say
        self._key = generate_key()
        self._node_id = hive.DHTID.generate()
        self._validator = NoticeValidator(lambda topic: bytes(hive.DHTID.generate(source=topic).to_bytes()))
        self._known_nodes: dict[str, list[str]] = {}
        self._published: dict[tuple[str, str], Notice] = {}
        self._node: Node | None = None
        self._ready = asyncio.Event()
        self._monitor: asyncio.Task[None] | None = None
        self._last_problem = ""
        self.port = port
        self.restarts = 0
        self.addresses: list[str] = []
        """Multiaddresses of this node, for others to join."""

    @classmethod
    async def start(
        cls,
        *,
        host: str,
        port: int,
        announce_hosts: Sequence[str],
        initial: Sequence[str] = (),
        join_timeout_s: float = _JOIN_TIMEOUT_S,
        find_other_nodes: FindNodes | None = None,
        say: Callable[[str], None] = _log.info,
    ) -> HivemindDirectory:
        """Listen at TCP `host`:`port` (0 for a free port) and join the nodes at the multiaddresses `initial`.

        While none of them answers, `find_other_nodes` is called for other nodes. Without `initial` this is the first
        node of a new DHT. `announce_hosts` are the names or IPs at which others reach this machine; by default those
        of its interfaces.

        Raises AddressError for a malformed address; DirectoryError where the daemon does not start, where no node
        answers within `join_timeout_s`, or where the clocks differ by more than 3 s.
        """
        initial_nodes = _by_libp2p_id(initial)
        loop = asyncio.get_running_loop()
        host = await _resolve(host, port)
        hive = await loop.run_in_executor(None, import_hivemind)
        directory = cls(
            hive,
            host=host,
            port=claim_port(host, port),
            announce_hosts=announce_hosts,
            initial=initial_nodes,
            say=say,
        )
        try:
            directory._node = await directory._open_node()
            directory.addresses = await directory._node.addresses(directory._announce)
            if initial_nodes:
                await directory._join_initial(directory._node, join_timeout_s, find_other_nodes)
        except BaseException:
            await directory.close()
            raise
        directory._ready.set()
        directory._monitor = asyncio.create_task(directory._repair_forever(), name="DHT monitor")
        return directory

    async def publish(self, notice: Notice) -> None:
        """Publish until the notice expires, also after restarts of the daemon. Raises DirectoryError."""
        self._published[notice.topic, notice.subkey] = notice
        async with self._bounded("publish"):
            node = await self._ready_node()
            if not await node.store(notice):
                raise DirectoryError(
                    "no node of the DHT accepted the notice: it has expired, or one that expires later is published"
                )

    async def collect(self, topic: str) -> list[Notice]:
        """The current notices, verified, the latest of each subkey. Raises DirectoryError."""
        async with self._bounded("look up"):
            node = await self._ready_node()
            found = await node.find(topic)
        return current_notices(found, time.time())

    @property
    def daemon_pid(self) -> int | None:
        """The process id of the daemon; None while there is none."""
        return self._node.daemon.pid if self._node is not None else None

    async def close(self) -> None:
        """End the node and the daemon, even if this is cancelled. Idempotent."""
        monitor, self._monitor = self._monitor, None
        try:
            if monitor is not None:
                monitor.cancel()
                await asyncio.wait({monitor})
        finally:
            self._ready.set()  # wakes the callers that wait for a node
            node, self._node = self._node, None
            if node is not None:
                await node.close()

    @contextlib.asynccontextmanager
    async def _bounded(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                yield
        except TimeoutError as error:
            raise DirectoryError(f"the DHT did not {what} within {_CALL_TIMEOUT_S:.0f} s; try again") from error

    async def _ready_node(self) -> Node:
        """Wait for the node. Raises DirectoryError if the directory is closed."""
        if self._monitor is not None and self._monitor.done():
            self._monitor.result()  # raises the bug that ended it
        await self._ready.wait()
        if self._monitor is None or self._node is None:
            raise DirectoryError("the directory is closed")
        return self._node

    async def _open_node(self) -> Node:
        daemon = await Daemon.start(key=self._key, listen=[self._listen], announce=self._announce)
        try:
            return await Node.open(self._hive, daemon, self._node_id, self._validator)
        except BaseException:
            await daemon.kill_and_wait()
            raise

    async def _join_initial(self, node: Node, join_timeout_s: float, find_other_nodes: FindNodes | None) -> None:
        deadline = time.monotonic() + join_timeout_s
        attempt = 0
        while problems := await self._join(node, self._initial):
            if len(problems) < len(self._initial):
                break
            listed = "; ".join(f"{self._initial[name][0]}: {problem}" for name, problem in problems.items())
            pause = _BACK_OFF_S[min(attempt, len(_BACK_OFF_S) - 1)]
            if time.monotonic() + pause > deadline:
                raise DirectoryError(f"no node of the DHT can be joined ({listed}); give another initial peer")
            self._say_once(f"no node of the DHT answers yet ({listed}); trying again")
            await asyncio.sleep(pause)
            attempt += 1
            if find_other_nodes is not None:
                self._initial = _by_libp2p_id(await find_other_nodes()) or self._initial

    async def _join(self, node: Node, nodes: dict[str, list[str]]) -> dict[str, str]:
        """Join all `nodes` at once. Returns the problems by libp2p id. Raises DirectoryError where clocks differ."""
        problems = await asyncio.gather(*(node.join(name, addresses) for name, addresses in nodes.items()))
        if not all(problems):
            await node.fill_routing_table()
        return {name: problem for name, problem in zip(nodes, problems, strict=True) if problem}

    async def _repair_forever(self) -> None:
        while True:
            assert self._node is not None
            failure = await self._wait_for_failure(self._node)
            self._ready.clear()
            self._say(f"the DHT daemon {failure}; starting it again")
            await self._node.close()
            self._node = await self._restart()
            self.restarts += 1
            self._ready.set()
            self._say("the DHT daemon runs again")

    async def _wait_for_failure(self, node: Node) -> str:
        """Keep the routing table filled until the daemon dies or hangs. Returns what happened to it."""
        death = asyncio.create_task(node.daemon.wait(), name="DHT daemon's end")
        missed_answers = 0
        isolated = False
        try:
            while True:
                done, _ = await asyncio.wait({death}, timeout=_CHECK_INTERVAL_S)
                if done:
                    return f"ended with code {death.result()}"
                if not await node.daemon.responds(_ANSWER_TIMEOUT_S):
                    missed_answers += 1
                    if missed_answers >= _MAX_MISSED_ANSWERS:
                        return "does not answer"
                    continue
                missed_answers = 0
                try:
                    addresses = await node.neighbour_addresses()
                except DirectoryError:
                    continue  # the daemon died or hangs: the next check finds out
                self._known_nodes = dict(list((self._known_nodes | addresses).items())[-_MAX_KNOWN:])
                expected = bool(self._known_nodes or self._initial)
                await self._rejoin_lost(node)
                if node.neighbours and isolated:
                    self._say("the DHT answers again")
                elif expected and not node.neighbours and not isolated:
                    self._say("no other node of the DHT answers; trying again")
                isolated = not node.neighbours and (expected or isolated)
        finally:
            death.cancel()

    async def _rejoin_lost(self, node: Node) -> None:
        """Join the known nodes that the routing table lacks. Forget those that fail, except the initial ones."""
        neighbours = node.neighbours
        known = self._known_nodes | self._initial
        lost = {name: addresses for name, addresses in known.items() if name not in neighbours}
        try:
            problems = await self._join(node, lost) if lost else {}
        except DirectoryError as error:  # the clocks differ
            self._say_once(str(error))
            return
        for name in problems:
            self._known_nodes.pop(name, None)

    def _say_once(self, text: str) -> None:
        """Report a problem at its first occurrence, not at every attempt."""
        if text != self._last_problem:
            self._last_problem = text
            self._say(text)

    async def _restart(self) -> Node:
        attempt = 0
        while True:
            try:
                node = await self._open_node()
                break
            except DirectoryError as error:
                self._say(f"{error}; trying again")
                await asyncio.sleep(_BACK_OFF_S[min(attempt, len(_BACK_OFF_S) - 1)])
                attempt += 1
        try:
            await self._rejoin_lost(node)
            now = time.time()
            self._published = {key: notice for key, notice in self._published.items() if notice.is_current(now)}
            for notice in self._published.values():
                await node.store(notice)
        except BaseException:
            await node.daemon.kill_and_wait()
            raise
        return node


def _by_libp2p_id(addresses: Sequence[str]) -> dict[str, list[str]]:
    """TCP multiaddresses by libp2p id. Raises AddressError."""
    nodes: dict[str, list[str]] = {}
    for address in addresses:
        tcp_address, libp2p_id = split_multiaddress(address)
        nodes.setdefault(libp2p_id, []).append(tcp_address)
    return nodes


async def _resolve(host: str, port: int) -> str:
    """The IP of `host`, because the daemon accepts no names. Raises AddressError."""
    if not 0 <= port < 65536:
        raise AddressError(f"{port} is not a port from 0 to 65535")
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise AddressError(f"the DHT cannot listen at {host!r}: {error}") from error
    return str(infos[0][4][0])

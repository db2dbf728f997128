"""`HivemindDirectory`: the notice board in a Kademlia DHT of hivemind nodes, within our own event loop.

::

    topic          -> key      SHA-1 of the packed topic, as hivemind makes it
    Notice.subkey  -> subkey   of that key's dictionary
    sealed bytes   -> value    signed by its author, so any node may hold it
    expires_at     -> expiration; a notice gives way only to one that expires strictly later

Every node refuses what is no genuine notice in its right place (`dhtnode.NoticeValidator`), so nobody
overwrites another's subkey and no plain value replaces a dictionary. What a node can still do is to be
silent or to flood: look-ups ask several, and each node bounds what it keeps (`dhtnode.NoticeStore`).

The daemon below is watched: when it dies or hangs, it is started again with the same key and port, the
node on it joins the nodes that were known, and what this process published is hung up again.

hivemind's package imports its training half too: 2 s and 260 MB, most of it torch. `import_hivemind` leaves that out.
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
from swarm.discovery.directory import Notice
from swarm.discovery.lazy_import import lazy_package
from swarm.discovery.p2p_daemon import Daemon, claim_port, generate_key, split_multiaddress, tcp_multiaddress
from swarm.errors import AddressError, DirectoryError

_log = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 12.0
_TICK_S = 3.0
_ANSWER_TIMEOUT_S = 2.0
_HANGS = 2
_MAX_KNOWN = 64
_PATIENCE_S = 60.0
_BACK_OFF_S = (0.2, 1.0, 2.0, 5.0)
# What hivemind.dht and hivemind.p2p import from the package hivemind.utils, and the module that each is from.
_UTILS = {
    "logging": ("get_logger",),
    "serializer": ("MSGPackSerializer", "SerializerBase"),
    "timed_storage": ("get_dht_time",),
}


@functools.cache
def import_hivemind() -> Hivemind:
    """Import its DHT, without torch and quietly: its log handler and its names of levels are taken back.

    A release that takes more from its packages than is laid out here costs the import of torch, and works.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        for package in ("hivemind", "hivemind.dht", "hivemind.utils"):
            lazy_package(package)
        import hivemind.utils

        for module, names in _UTILS.items():
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
    # with a handler of its own, a program that configured no logging gets nothing on its terminal
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


AskAgain = Callable[[], Awaitable[Sequence[str]]]
"""Multiaddresses of nodes that answer now, or none where that cannot be learnt."""


class HivemindDirectory:
    """A `Directory` that is also a node of the DHT: it keeps others' notices as they keep ours.

    `say` hears, as sentences for a person, what happens to the DHT on its own. Close it: the daemon ends with it.
    """

    def __init__(
        self,
        hive: Hivemind,
        *,
        host: str,
        port: int,
        announce_hosts: Sequence[str],
        initial: dict[str, list[str]],
        clock: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._hive = hive
        self._listen = tcp_multiaddress(host, port)
        self._announce = [tcp_multiaddress(name, port) for name in announce_hosts]
        self._initial = initial
        self._clock = clock
        self._say = say
        self._key = generate_key()
        self._node_id = hive.DHTID.generate()
        self._validator = NoticeValidator(lambda topic: bytes(hive.DHTID.generate(source=topic).to_bytes()), clock)
        self._met: dict[str, list[str]] = {}
        self._own: dict[tuple[str, str], Notice] = {}
        self._node: Node | None = None
        self._up = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._complaint = ""
        self.port = port
        self.restarts = 0
        self.addresses: list[str] = []
        """Multiaddresses from which others start."""

    @classmethod
    async def start(
        cls,
        *,
        host: str,
        port: int,
        announce_hosts: Sequence[str],
        initial: Sequence[str] = (),
        patience_s: float = _PATIENCE_S,
        ask_again: AskAgain | None = None,
        clock: Callable[[], float] = time.time,
        say: Callable[[str], None] = _log.info,
    ) -> HivemindDirectory:
        """Listen at TCP `host`:`port` (0 for a free one) and join the nodes at the multiaddresses `initial`.

        `ask_again` is asked for others in their place while none of them answers: who named them may be gone too.

        `announce_hosts` are the names or IPs by which others reach this machine; without them, those of
        its interfaces. Without `initial` this is the first node of a new DHT.

        Raises AddressError for a malformed address; DirectoryError where the daemon does not start, where
        no node of `initial` answers within `patience_s`, or where the clocks differ by more than 3 s.
        """
        known = _grouped(initial)
        loop = asyncio.get_running_loop()
        host = await _resolve(host, port)
        hive = await loop.run_in_executor(None, import_hivemind)
        directory = cls(
            hive,
            host=host,
            port=claim_port(host, port),
            announce_hosts=announce_hosts,
            initial=known,
            clock=clock,
            say=say,
        )
        try:
            directory._node = await directory._open()
            directory.addresses = await directory._node.addresses(directory._announce)
            if known:
                await directory._join_first(directory._node, patience_s, ask_again)
        except BaseException:
            await directory.close()
            raise
        directory._up.set()
        directory._keeper = asyncio.create_task(directory._keep(), name="DHT keeper")
        return directory

    async def publish(self, notice: Notice) -> None:
        """Hang up; kept until it expires, through deaths of the daemon too. Raises DirectoryError."""
        self._own[notice.topic, notice.subkey] = notice
        async with self._bounded("publish"):
            node = await self._current()
            if not await node.keep(notice):
                raise DirectoryError(
                    "none of the DHT's nodes took the notice: one that expires later hangs there, or it has expired"
                )

    async def collect(self, topic: str) -> list[Notice]:
        """The current notices, each verified, the latest of each subkey. Raises DirectoryError."""
        async with self._bounded("look up"):
            node = await self._current()
            found = await node.find(topic)
        now = self._clock()
        latest: dict[str, Notice] = {}
        for notice in found:
            before = latest.get(notice.subkey)
            if notice.is_current(now) and (before is None or before.expires_at < notice.expires_at):
                latest[notice.subkey] = notice
        return list(latest.values())

    @property
    def neighbours(self) -> int:
        """Other nodes of the DHT that this one knows."""
        return len(self._node.neighbours) if self._node is not None else 0

    @property
    def daemon_pid(self) -> int | None:
        """The daemon's process, while there is one."""
        return self._node.daemon.pid if self._node is not None else None

    async def close(self) -> None:
        """End the node and the daemon. No process is left, even if this is cancelled. Idempotent."""
        keeper, self._keeper = self._keeper, None
        try:
            if keeper is not None:
                keeper.cancel()
                await asyncio.wait({keeper})
        finally:
            self._up.set()  # whoever waits for the node learns that there is none
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

    async def _current(self) -> Node:
        """The node, once it is up. Raises DirectoryError where that will not be."""
        if self._keeper is not None and self._keeper.done():
            self._keeper.result()  # a bug ended it: it surfaces here
        await self._up.wait()
        if self._keeper is None or self._node is None:
            raise DirectoryError("the directory is closed")
        return self._node

    async def _open(self) -> Node:
        daemon = await Daemon.start(key=self._key, listen=[self._listen], announce=self._announce)
        try:
            return await Node.open(self._hive, daemon, self._node_id, self._validator)
        except BaseException:
            await daemon.end()
            raise

    async def _join_first(self, node: Node, patience_s: float, ask_again: AskAgain | None) -> None:
        deadline = time.monotonic() + patience_s
        attempt = 0
        while problems := await self._join(node, self._initial):
            if len(problems) < len(self._initial):
                break
            listed = "; ".join(f"{self._initial[name][0]}: {problem}" for name, problem in problems.items())
            pause = _BACK_OFF_S[min(attempt, len(_BACK_OFF_S) - 1)]
            if time.monotonic() + pause > deadline:
                raise DirectoryError(f"no node of the DHT can be joined ({listed}); give another initial peer")
            self._complain(f"no node of the DHT answers yet ({listed}); trying again")
            await asyncio.sleep(pause)
            attempt += 1
            if ask_again is not None:
                self._initial = _grouped(await ask_again()) or self._initial

    async def _join(self, node: Node, known: dict[str, list[str]]) -> dict[str, str]:
        """Meet all of `known` at once; what was wrong with whom. Raises DirectoryError for differing clocks."""
        problems = await asyncio.gather(*(node.join(name, places) for name, places in known.items()))
        if not all(problems):
            await node.explore()
        return {name: problem for name, problem in zip(known, problems, strict=True) if problem}

    async def _keep(self) -> None:
        """Repair for ever. Ends only by close()."""
        while True:
            assert self._node is not None
            reason = await self._watch(self._node)
            self._up.clear()
            self._say(f"the DHT daemon {reason}; starting it again")
            await self._node.close()
            self._node = await self._reopen()
            self.restarts += 1
            self._up.set()
            self._say("the DHT daemon runs again")

    async def _watch(self, node: Node) -> str:
        """Look after the neighbourhood until the daemon is of no use any more; says why."""
        death = asyncio.create_task(node.daemon.wait(), name="DHT daemon's end")
        hangs = 0
        alone = False
        try:
            while True:
                done, _ = await asyncio.wait({death}, timeout=_TICK_S)
                if done:
                    return f"ended with code {death.result()}"
                if not await node.daemon.answers(_ANSWER_TIMEOUT_S):
                    hangs += 1
                    if hangs >= _HANGS:
                        return "does not answer"
                    continue
                hangs = 0
                try:
                    places = await node.places()
                except DirectoryError:
                    continue  # it died or hangs since: the next round tells
                self._met = dict(list((self._met | places).items())[-_MAX_KNOWN:])
                expected = bool(self._met or self._initial)
                await self._meet_again(node)
                if node.neighbours and alone:
                    self._say("the DHT answers again")
                elif expected and not node.neighbours and not alone:
                    self._say("no other node of the DHT answers; trying on")
                alone = not node.neighbours and (expected or alone)
        finally:
            death.cancel()

    async def _meet_again(self, node: Node) -> None:
        """Try those that the routing table has lost. Those we only met are then forgotten, the initial ones never."""
        near = node.neighbours
        lost = {name: places for name, places in (self._met | self._initial).items() if name not in near}
        try:
            problems = await self._join(node, lost) if lost else {}
        except DirectoryError as error:  # a clock
            self._complain(str(error))
            return
        for name in problems:
            self._met.pop(name, None)

    def _complain(self, text: str) -> None:
        """Say it once, not at every attempt."""
        if text != self._complaint:
            self._complaint = text
            self._say(text)

    async def _reopen(self) -> Node:
        attempt = 0
        while True:
            try:
                node = await self._open()
                break
            except DirectoryError as error:
                self._say(f"{error}; trying again")
                await asyncio.sleep(_BACK_OFF_S[min(attempt, len(_BACK_OFF_S) - 1)])
                attempt += 1
        try:
            await self._meet_again(node)
            now = self._clock()
            self._own = {place: notice for place, notice in self._own.items() if notice.is_current(now)}
            for notice in self._own.values():
                await node.keep(notice)
        except BaseException:
            await node.daemon.end()
            raise
        return node


def _grouped(addresses: Sequence[str]) -> dict[str, list[str]]:
    """Places by libp2p id. Raises AddressError."""
    known: dict[str, list[str]] = {}
    for address in addresses:
        place, libp2p_id = split_multiaddress(address)
        known.setdefault(libp2p_id, []).append(place)
    return known


async def _resolve(host: str, port: int) -> str:
    """An IP of this machine to listen at: the daemon takes no names. Raises AddressError."""
    if not 0 <= port < 65536:
        raise AddressError(f"{port} is not a port from 0 to 65535")
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise AddressError(f"the DHT cannot listen at {host!r}: {error}") from error
    return str(infos[0][4][0])

"""The DHT with real daemons and nodes. Each test waits for conditions, not for times."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from swarm.discovery import dht
from swarm.discovery.dht import HivemindDirectory, import_hivemind
from swarm.discovery.dht_node import NoticeStore, NoticeValidator, pack
from swarm.discovery.directory import MAX_TTL_S, Notice
from swarm.discovery.p2p_daemon import Daemon, generate_key, remove_stale_folders, split_multiaddress
from swarm.errors import AddressError, DirectoryError
from swarm.transport.identity import Identity
from tests.harness import ROOT, wait_until

TOPIC = "models"
TIMEOUT_S = 60.0


def run(test: Awaitable[object]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await test

    asyncio.run(bounded())


async def wait_for(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not await condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {TIMEOUT_S:.0f} s: {what}")
        await asyncio.sleep(0.05)


async def start(initial: list[str] | None = None, **options: Any) -> HivemindDirectory:
    return await HivemindDirectory.start(
        host="127.0.0.1", port=0, announce_hosts=["127.0.0.1"], initial=initial or [], **options
    )


@contextlib.asynccontextmanager
async def two_nodes() -> AsyncIterator[tuple[HivemindDirectory, HivemindDirectory]]:
    first = await start()
    try:
        second = await start(first.addresses)
        try:
            yield first, second
        finally:
            await second.close()
    finally:
        await first.close()


def notice(identity: Identity, body: bytes = b"here", ttl_s: float = 30.0, topic: str = TOPIC) -> Notice:
    return Notice.sign(identity, topic=topic, body=body, expires_at=time.time() + ttl_s)


async def bodies(directory: HivemindDirectory, topic: str = TOPIC) -> set[bytes]:
    return {found.body for found in await directory.collect(topic)}


def test_a_notice_published_on_one_node_is_found_and_refreshed_on_the_other() -> None:
    async def test() -> None:
        async with two_nodes() as (first, second):
            one, two = Identity.generate(), Identity.generate()
            await first.publish(notice(one, b"one"))
            await second.publish(notice(two, b"two"))
            assert await bodies(first) == await bodies(second) == {b"one", b"two"}
            await first.publish(notice(one, b"one again", ttl_s=31.0))
            assert await bodies(first) == await bodies(second) == {b"one again", b"two"}
            assert await bodies(second, "another topic") == set()

    run(test())


@contextlib.asynccontextmanager
async def joined_attacker(victim: HivemindDirectory) -> AsyncIterator[tuple[Any, Any]]:
    """A hivemind node without `NoticeValidator`, joined to `victim`; and the victim's libp2p id."""
    hive = import_hivemind()
    daemon = await Daemon.start(key=generate_key(), listen=["/ip4/127.0.0.1/tcp/0"])
    p2p = await hive.P2P.replicate(hive.Multiaddr(daemon.control))
    try:
        node = await hive.DHTNode.create(p2p=p2p)
        address, libp2p_id = split_multiaddress(victim.addresses[0])
        peer = hive.PeerID.from_base58(libp2p_id)
        control = await hive.Control.create(
            hive.Connector(control_maddr=hive.Multiaddr(daemon.control)), use_persistent_conn=False
        )
        await control.connect(peer, [hive.Multiaddr(address)])
        assert await node.protocol.call_ping(peer) is not None
        yield node, peer
    finally:
        await p2p.shutdown()
        await daemon.stop()


def test_an_attacker_cannot_overwrite_or_erase_the_notices_of_others() -> None:
    async def test() -> None:
        from hivemind.dht.storage import DictionaryDHTValue

        async with two_nodes() as (first, second), joined_attacker(first) as (node, peer):
            owner, other = Identity.generate(), Identity.generate()
            good = notice(owner, b"good")
            await second.publish(good)
            later = time.time() + 300
            theirs = Notice.sign(other, topic=TOPIC, body=b"mine now", expires_at=later)
            elsewhere = Notice.sign(owner, topic="elsewhere", body=b"moved", expires_at=later)
            forged = DictionaryDHTValue()
            forged.store(good.subkey, pack(theirs.signed_bytes), later)
            emptied = DictionaryDHTValue()
            key = import_hivemind().DHTID.generate(source=TOPIC)

            async def store(value: Any, subkey: str | None, expires: float = later, in_cache: bool = False) -> Any:
                answers = await node.protocol.call_store(
                    peer, keys=[key], values=[value], expiration_time=[expires], subkeys=[subkey], in_cache=in_cache
                )
                assert answers is not None  # the node refused the value instead of failing
                return answers[0]

            for in_cache in (False, True):
                assert not await store(pack(b"garbage"), good.subkey, in_cache=in_cache)
                assert not await store(pack(theirs.signed_bytes), good.subkey, in_cache=in_cache)
                assert not await store(pack(elsewhere.signed_bytes), good.subkey, in_cache=in_cache)
                # The same notice with a later expiry.
                assert not await store(pack(good.signed_bytes), good.subkey, in_cache=in_cache)
                assert not await store(pack(b"plain"), None, in_cache=in_cache)
                assert not await store(pack(good.signed_bytes), None, good.expires_at, in_cache=in_cache)
                assert not await store(forged, None, in_cache=in_cache)
                await store(emptied, None, in_cache=in_cache)
            # The same through hivemind's own store, which also puts the values on the attacker's node.
            await node.store(TOPIC, b"garbage", later, subkey=good.subkey)
            await node.store(TOPIC, b"plain", later + 1)
            assert await bodies(first) == await bodies(second) == {b"good"}

            # The attacker claims that the latest value is an empty dictionary.
            node.protocol.storage.data.clear()
            node.protocol.storage.store(key, emptied, math.inf)
            assert await bodies(first) == await bodies(second) == {b"good"}

            await second.publish(notice(owner, b"better", ttl_s=40))
            assert await bodies(first) == await bodies(second) == {b"better"}

    run(test())


def test_a_killed_daemon_is_restarted_and_its_notices_are_published_again() -> None:
    async def test() -> None:
        messages: list[str] = []
        first = await start(say=messages.append)
        try:
            second = await start(first.addresses)
            try:
                addresses, pid = first.addresses, first.daemon_pid
                await first.publish(notice(Identity.generate(), b"first"))
                await second.publish(notice(Identity.generate(), b"second"))
                assert pid is not None
                os.kill(pid, signal.SIGKILL)

                async def repaired() -> bool:
                    return first.restarts == 1 and await bodies(second) == {b"first", b"second"}

                await wait_for(repaired, "the killed daemon is replaced")

                async def rejoined() -> bool:
                    return await bodies(first) == {b"first", b"second"}

                await wait_for(rejoined, "the new node has joined the old ones")
                assert first.addresses == addresses
                assert first.daemon_pid != pid
                third = await start(addresses)
                try:
                    assert await bodies(third) == {b"first", b"second"}
                finally:
                    await third.close()
                assert any("ended with code -9" in text for text in messages)
            finally:
                await second.close()
        finally:
            await first.close()

    run(test())


def test_other_nodes_are_looked_for_where_the_initial_ones_do_not_answer() -> None:
    async def test() -> None:
        gone = await start()
        addresses = gone.addresses
        await gone.close()
        messages: list[str] = []
        answers: list[list[str]] = [[]]
        async with two_nodes() as (first, second):
            answers.append(first.addresses)

            async def next_answer() -> list[str]:
                return answers.pop(0)

            late = await start(addresses, find_other_nodes=next_answer, say=messages.append, join_timeout_s=math.inf)
            try:
                published = notice(Identity.generate(), b"late")
                await late.publish(published)
                assert await bodies(second) == {b"late"}
            finally:
                await late.close()
        assert answers == []
        assert [text for text in messages if text.startswith("no node of the DHT answers yet")] == messages

    run(test())


def test_a_daemon_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht, "_CHECK_INTERVAL_S", 0.1)

    async def test() -> None:
        directory = await start()
        try:
            assert directory.daemon_pid is not None
            os.kill(directory.daemon_pid, signal.SIGSTOP)

            async def replaced() -> bool:
                return directory.restarts == 1

            await wait_for(replaced, "the hanging daemon is replaced")
            await directory.publish(notice(Identity.generate(), b"still here"))
            assert await bodies(directory) == {b"still here"}
        finally:
            await directory.close()

    run(test())


async def reset(client: Any, daemon_pid: int) -> Any:
    """Kill the daemon while it has unread data. Returns hivemind's reader task, which then fails without a waiter."""
    os.kill(daemon_pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(daemon_pid).status() == psutil.STATUS_STOPPED, "the daemon reads no more")
    unread = asyncio.create_task(client.add_unary_handler("unread", None))
    await asyncio.sleep(0.05)
    os.kill(daemon_pid, signal.SIGKILL)
    reader = client.control._read_task
    await asyncio.wait({reader})
    unread.cancel()
    return reader


@pytest.mark.parametrize("when", ["while it runs", "while it starts"])
def test_a_connection_reset_by_the_daemon_prints_nothing(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[Any] = []

    async def lost(*, p2p: Any, **_: Any) -> None:
        (daemon,) = (child.pid for child in psutil.Process().children() if "p2pd" in child.name())
        readers.append(await reset(p2p._client, daemon))
        raise OSError("the daemon is gone")

    async def test() -> None:
        if when == "while it starts":
            monkeypatch.setattr(import_hivemind().DHTNode, "create", lost)
            with pytest.raises(DirectoryError, match="the daemon is gone"):
                await start()
            return
        directory = await start()
        assert directory._node is not None
        assert directory.daemon_pid is not None
        readers.append(await reset(directory._node._p2p._client, directory.daemon_pid))
        await directory.close()

    run(test())
    (reader,) = readers
    assert not reader._log_traceback  # else asyncio prints the error when the task is collected
    assert isinstance(reader.exception(), ConnectionResetError)


def test_close_ends_a_daemon_that_hangs_even_when_it_is_cancelled() -> None:
    async def test() -> None:
        directory = await start()
        assert directory.daemon_pid is not None
        process = psutil.Process(directory.daemon_pid)
        os.kill(process.pid, signal.SIGSTOP)
        closing = asyncio.create_task(directory.close())
        await asyncio.sleep(0.1)
        closing.cancel()
        await asyncio.wait({closing})
        wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "it is dead")
        await directory.close()
        with pytest.raises(DirectoryError, match="closed"):
            await directory.collect(TOPIC)

    run(test())


@contextlib.contextmanager
def member(offset: float = 0.0) -> Iterator[tuple[subprocess.Popen[str], int, list[str]]]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.swarm.discovery.dht_node_process", str(offset)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            pid, *addresses = process.stdout.readline().split()
            yield process, int(pid), addresses
        finally:
            process.kill()


def test_the_daemon_ends_with_its_parent_even_after_sigkill() -> None:
    with member() as (process, pid, _):
        daemon = psutil.Process(pid)
        process.kill()
        process.wait()
        wait_until(lambda: not daemon.is_running() or daemon.status() == psutil.STATUS_ZOMBIE, "the daemon is gone")
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_wrong_clock_is_an_error_with_the_difference() -> None:
    async def test(addresses: list[str]) -> None:
        with pytest.raises(DirectoryError, match=r"clock .* differ by -60 s"):
            await start(addresses)

    with member(offset=60.0) as (_, _, addresses):
        run(test(addresses))


def test_unreachable_nodes_are_tried_again_with_a_message_and_named_in_the_error() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            gone = (
                f"/ip4/127.0.0.1/tcp/{deaf.getsockname()[1]}/p2p/12D3KooWP68RwaUufNnv1Nd3UV3TRToasEvEXDRsUMed29ib1Hx2"
            )
        messages: list[str] = []
        with pytest.raises(DirectoryError, match=r"127\.0\.0\.1/tcp/"):
            await start([gone], join_timeout_s=0.5, say=messages.append)
        assert any("trying again" in text for text in messages)
        assert children() == []

    run(test())


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1:4001",
        "/ip4/127.0.0.1/tcp/4001",
        "/ip4/127.0.0.1/tcp/0/p2p/Qmabcdefghijkmnopqrstu",
        "/ip4/a b/tcp/1",
    ],
)
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(AddressError, match="is not an address of a DHT node"):
        run(start([address]))


def test_a_port_in_use_is_an_error_and_never_shared() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(DirectoryError, match=f"port {port}"):
                await HivemindDirectory.start(host="127.0.0.1", port=port, announce_hosts=[])

    run(test())


def test_hivemind_logs_nothing_on_the_terminal() -> None:
    import_hivemind()
    logger = logging.getLogger("hivemind")
    assert [type(handler) for handler in logger.handlers] == [logging.NullHandler]
    assert logger.propagate
    assert logging.getLevelName(logging.WARNING) == "WARNING"


def dht_record(notice: Notice, **changes: Any) -> Any:
    fields = {
        "key": notice.topic.encode(),
        "subkey": pack(notice.subkey),
        "value": pack(notice.signed_bytes),
        "expiration_time": notice.expires_at,
    }
    return SimpleNamespace(**(fields | changes))


def test_the_validator_accepts_a_notice_only_under_its_own_key_and_subkey() -> None:
    validator = NoticeValidator(str.encode)
    good = notice(Identity.generate())
    assert validator.validate(dht_record(good))
    assert validator.validate(dht_record(notice(Identity.generate(), ttl_s=-1.0)))  # hivemind drops it
    for wrong in (
        {"key": b"elsewhere"},
        {"subkey": pack("another")},
        {"subkey": pack(None)},
        {"subkey": b""},
        {"subkey": b"\xd9" + bytes([len(good.subkey)]) + good.subkey.encode() + b"x"},
        {"expiration_time": good.expires_at + 1},
        {"expiration_time": math.nan},
        {"value": good.signed_bytes},
        {"value": pack(good.signed_bytes[:-1])},
        {"value": b""},
    ):
        assert not validator.validate(dht_record(good, **wrong)), wrong
    assert not validator.validate(dht_record(notice(Identity.generate(), ttl_s=MAX_TTL_S + 60)))


def test_a_notice_store_is_bounded_and_stores_no_plain_values() -> None:
    notices = NoticeStore(import_hivemind().Storage(), topic_bytes=100, topics=2)
    later = time.time() + 30
    assert not notices.store(1, b"plain", later)
    assert notices.store(1, b"x" * 60, later, subkey="a")
    assert not notices.store(1, b"x" * 60, later, subkey="b")
    assert notices.store_subkey(1, "a", b"x" * 90, later + 1)  # the value that it replaces is not counted
    assert not notices.store_subkey(1, "a", b"older", later)
    assert notices.store_subkey(2, "a", b"x", later)
    assert not notices.store_subkey(3, "a", b"x", later)
    assert {key for key, _ in notices.items()} == {1, 2}


def test_only_stale_folders_of_ended_daemons_are_removed(tmp_path: Path) -> None:
    long_ago = time.time() - 3600
    with contextlib.ExitStack() as stack:
        for name, listens in (("gone", False), ("alive", True), ("young", False)):
            folder = tmp_path / f"swarm-dht-{name}"
            folder.mkdir()
            daemon = socket.socket(socket.AF_UNIX)
            daemon.bind(str(folder / "control.sock"))
            if listens:
                daemon.listen()
                stack.enter_context(daemon)
            else:
                daemon.close()
            if name != "young":
                os.utime(folder, (long_ago, long_ago))
        for name in ("swarm-dht-empty", "other"):
            (tmp_path / name).mkdir()
            os.utime(tmp_path / name, (long_ago, long_ago))
        remove_stale_folders(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"swarm-dht-alive", "swarm-dht-young", "other"}

"""The life of a peer: `swarm join` and `swarm bootstrap`.

::

    listen ─► ask the initial peers ─┬─► join the DHT ──────────────────────────────────────────┐
                                     └─► choose span ─► fetch ─► check ─► self-test ─► load ────┴─► announce
                                         ▲                                   │
                                         └─ other peers serve the span now ──┘
    ... until Ctrl-C ... ─► announce "leaving" ─► sessions move on ─► close

The port is bound first: a port that is taken ends the start before anything is loaded. The peer answers queries as
soon as its DHT node is up, and takes sessions once it is announced. It announces only a span that passed its
self-test.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import random
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from peer.announcing.announcer import Announcer
from peer.announcing.record import Announcement
from peer.config import JoinConfig
from peer.lifecycle.bootstrap import Bootstrap
from peer.lifecycle.listen_addresses import announced_addresses, listen_addresses
from peer.lifecycle.shutdown import Stop
from peer.loading.self_test import SelfTest, self_test
from peer.loading.self_test_cache import SelfTestRecord, self_test_loaded
from peer.loading.span import load_span
from peer.loading.span_files import SpanFiles, check_span_files, choose_span_files, fetch_span_files, rechoose_span
from peer.report import Report
from peer.serving.queries import QueryHandler, SharedFiles
from peer.serving.server import PeerServer
from peer.sessions.service import ServedSpan, SpanService
from swarm.discovery.peer_directory import PeerDirectory
from swarm.engine.device import check_device
from swarm.errors import ConfigError, DirectoryError, EngineError, PeerError, SwarmError, first_error
from swarm.process.folders import state_folder
from swarm.process.metrics_server import MetricsServer
from swarm.transport.address import Address
from swarm.transport.hello import peer_hello
from swarm.transport.identity import Identity, locked_default_identity, locked_identity
from swarm.wire.messages import Hello

if TYPE_CHECKING:
    from swarm.discovery.dht import HivemindDirectory

_MAX_RECHOICES = 2
_RECHOICE_JITTER_S = 1.0


async def join(config: JoinConfig, report: Report) -> None:
    """Run a peer until a signal stops it.

    Raises Interrupted if the signal comes before the peer is announced, and any SwarmError.
    """
    stop = Stop()
    with stop.on_signals(), _identity(config) as identity:
        await Peer(config, identity, report, stop).run()


class Peer:
    """A peer: its connections, its DHT node, its span."""

    def __init__(self, config: JoinConfig, identity: Identity, report: Report, stop: Stop) -> None:
        self._config = config
        self._identity = identity
        self._report = report
        self._stop = stop
        self._name = config.name or socket.gethostname()[:64]
        self._incarnation = time.time_ns() // 1_000_000
        self._model = ""
        self._device_error: SwarmError | None = None
        self._query_handler = QueryHandler(hello=self._hello)
        self._server = PeerServer(identity=identity, hello=self._hello, query_handler=self._query_handler)
        self._host = ""

    async def run(self) -> None:
        self._report.phase(
            "started",
            f"{self._name} starts as peer {self._identity.peer_id}",
            pid=os.getpid(),
            name=self._name,
            peer_id=self._identity.peer_id,
        )
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._server)
            announcer = await self._stop.until_requested(self._start(stack))
            async with asyncio.TaskGroup() as group:
                announcing = group.create_task(announcer.run()) if announcer is not None else None
                await self._stop.requested.wait()
                await self._stop.until_urgent(self._leave(announcer))
                self._stop.exit_soon()  # Closing may block, on a device or a disk.
                if announcing is not None:
                    announcing.cancel()
        if self._device_error is not None:
            raise EngineError(f"this peer left the swarm: {self._device_error}") from self._device_error

    # -- start

    async def _start(self, stack: contextlib.AsyncExitStack) -> Announcer | None:
        if self._config.package is not None:
            await asyncio.to_thread(check_device, self._config.device)
        await self._listen()
        bootstrap = Bootstrap(self._config, self._report, hello=self._hello, stack=stack)
        directory, service, announcement = await self._join_dht_and_load(bootstrap)
        if service is None or announcement is None:
            self._report_announced(directory, None)
            return None
        self._server.start_service(service)
        await self._serve_metrics(service, stack)
        announcer = Announcer(
            directory,
            self._identity,
            current=lambda: announcement.record(service.load(), name=self._name, addresses=self._addresses()),
            model=announcement.model,
            hello=self._hello,
        )
        await bootstrap.retry(announcer.announce_now)
        self._report_announced(directory, announcement)
        return announcer

    async def _join_dht_and_load(
        self, bootstrap: Bootstrap
    ) -> tuple[HivemindDirectory, SpanService | None, Announcement | None]:
        """Join the DHT and load the span concurrently."""
        dht_addresses, contact = await bootstrap.contact_initial_peers()
        try:
            async with asyncio.TaskGroup() as group:
                dht = group.create_task(self._open_dht(bootstrap, dht_addresses, contact))
                span = group.create_task(self._prepare_span(contact)) if self._config.package is not None else None
        except ExceptionGroup as failed:
            raise first_error(failed) from None
        service, announcement = span.result() if span is not None else (None, None)
        return dht.result(), service, announcement

    async def _serve_metrics(self, service: SpanService, stack: contextlib.AsyncExitStack) -> None:
        if self._config.metrics is None:
            return
        from peer.announcing.metrics import PeerMetrics  # Imported late: few peers need prometheus_client.

        metrics = PeerMetrics(service.load, lambda: self._server.connections)
        service.set_observers(on_step=metrics.on_step, on_error=metrics.on_error)
        page = MetricsServer(metrics.page)
        await page.start(self._config.metrics)
        stack.push_async_callback(page.close)
        url = f"http://{dataclasses.replace(self._config.metrics, port=page.port).host_port}/metrics"
        self._report.phase("metrics", f"metrics at {url}", metrics=url)

    async def _listen(self) -> None:
        addresses = listen_addresses(self._config.listen)
        for address in addresses:
            try:
                await self._server.start(address.host, address.port)
            except ConfigError as error:
                taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
                if taken and address is not addresses[-1]:
                    continue
                raise
            self._host = address.host
            return

    async def _open_dht(
        self, bootstrap: Bootstrap, dht_addresses: tuple[str, ...], contact: PeerDirectory | None
    ) -> HivemindDirectory:
        directory = await bootstrap.open_dht(self._host, self._server.port, dht_addresses, contact)
        self._query_handler.open_directory(directory, lambda: directory.addresses)
        self._report.phase(
            "listening",
            f"listening at {self._join_address()}",
            address=self._join_address(),
            peer_id=self._identity.peer_id,
            dht=directory.addresses,
        )
        return directory

    async def _prepare_span(self, contact: PeerDirectory | None) -> tuple[SpanService, Announcement]:
        """Choose the span, get its files, test and load it."""
        config = self._config
        span_files = await choose_span_files(config, contact, self._hello(), peer_id=self._identity.peer_id)
        shared_files, test_record, tested = await self._fetch_and_test(span_files, contact)
        for _ in range(_MAX_RECHOICES):
            better = await self._rechoose(span_files, contact)
            if better is span_files:
                break
            span_files = better
            shared_files, test_record, tested = await self._fetch_and_test(span_files, contact)
        serving, tested = await self._load(span_files, tested)
        test_record.put(tested)
        service = SpanService(serving, peer_id=self._identity.peer_id, hello=self._hello, on_failed=self._device_failed)
        self._query_handler.share_files(shared_files)
        self._model = span_files.manifest.digest
        return service, Announcement.of(
            serving,
            shared_files,
            tested,
            peer_id=self._identity.peer_id,
            incarnation=self._incarnation,
            device=config.device,
        )

    async def _load(self, span_files: SpanFiles, tested: SelfTest) -> tuple[ServedSpan, SelfTest]:
        """Load the span; test it in this process if no child process has tested it."""
        config = self._config
        serving = await asyncio.to_thread(load_span, config, span_files, tested)
        self._report.phase(
            "loaded",
            f"loaded on {config.device}, room for {serving.limits.kv_total} tokens",
            kv_total=serving.limits.kv_total,
        )
        if tested.remembered:
            tested = await asyncio.to_thread(self_test_loaded, serving, tested)
            self._report_tested(tested)
        return serving, tested

    async def _rechoose(self, span_files: SpanFiles, contact: PeerDirectory | None) -> SpanFiles:
        """Choose the span again if other peers serve its layers by now: peers that start together choose the same."""
        if contact is None or self._config.layers is not None:
            return span_files
        # Jitter: peers that start together must not choose again at the same moment.
        await asyncio.sleep(random.SystemRandom().uniform(0, _RECHOICE_JITTER_S))
        try:
            better = await rechoose_span(self._config, span_files, contact, peer_id=self._identity.peer_id)
        except (PeerError, DirectoryError) as error:
            self._report.message(f"cannot look up whether other peers serve layers {span_files.span} now: {error}")
            return span_files
        if better is not span_files:
            self._report.message(
                f"other peers serve layers {span_files.span} now; this peer serves layers {better.span} instead"
            )
        return better

    async def _fetch_and_test(
        self, span_files: SpanFiles, contact: PeerDirectory | None
    ) -> tuple[SharedFiles, SelfTestRecord, SelfTest]:
        """Fetch and check the files of a span, then self-test it unless a remembered test exists."""
        config, report = self._config, self._report
        manifest, span = span_files.manifest, span_files.span
        report.phase(
            "chosen",
            f"layers {span} of {manifest.name} ({manifest.digest[:12]})",
            span=str(span),
            model={"name": manifest.name, "digest": manifest.digest},
        )
        for edge in sorted({span.first, span.last} - set(manifest.grid)):
            report.message(
                f"layer {edge} is not on the grid {manifest.grid}: only spans with the same boundary connect to it"
            )
        if span_files.fetched and contact is not None:
            await fetch_span_files(span_files, contact, self._hello(), report)
            report.phase("fetched", f"fetched the files of layers {span}")
        shared_files = await check_span_files(span_files, report)
        report.phase("checked", f"the files of layers {span} are intact; {len(shared_files.entries)} files are shared")
        test_record = await asyncio.to_thread(SelfTestRecord.of, config, span_files)
        tested = test_record.take()
        if tested is None:
            tested = await self_test(
                span_files.package,
                span,
                engine=config.engine,
                device=config.device,
                precision=config.precision,
                threads=config.threads,
                cache_dir=config.cache_dir / "graphs",
            )
            self._report_tested(tested)
        return shared_files, test_record, tested

    def _report_tested(self, tested: SelfTest) -> None:
        if tested.fallback_reason:
            self._report.message(f"the {tested.engine} engine is used instead: {tested.fallback_reason}")
        self._report.phase(
            "tested",
            f"self-test passed: {tested.layer_time_s * 1e3:.2f} ms a layer, numerics {tested.numerics}, "
            f"{tested.engine} engine",
            layer_time_s=tested.layer_time_s,
            prefill_time_s=tested.prefill_time_s,
            numerics=tested.numerics,
            engine=tested.engine,
        )

    def _report_announced(self, directory: HivemindDirectory, announcement: Announcement | None) -> None:
        address = self._join_address()
        service = (
            "serves the directory"
            if announcement is None
            else f"serves layers {announcement.span} of {announcement.manifest.name}"
        )
        self._report.phase(
            "announced",
            f"{self._name} {service} at {address}",
            address=address,
            addresses=self._addresses(),
            peer_id=self._identity.peer_id,
            name=self._name,
            pid=os.getpid(),
            span=str(announcement.span) if announcement is not None else None,
            entries=list(announcement.entries) if announcement is not None else [],
            model={"name": announcement.manifest.name, "digest": announcement.manifest.digest}
            if announcement is not None
            else None,
            dht=directory.addresses,
        )

    # -- shutdown

    async def _leave(self, announcer: Announcer | None) -> None:
        self._report.phase("leaving", "leaving; sessions move on. Ctrl-C again to go at once")
        if announcer is not None:
            # First: no new session should come while the others move on.
            await announcer.leave()
        await self._server.leave(self._config.grace_s)

    def _device_failed(self, error: SwarmError) -> None:
        self._report.message(f"the device failed: {error}")
        self._device_error = error
        self._stop.requested.set()

    # -- identity and addresses

    def _hello(self) -> Hello:
        return peer_hello(model=self._model, name=self._name, incarnation=self._incarnation)

    def _addresses(self) -> list[str]:
        return announced_addresses(self._host, self._server.port)

    def _join_address(self) -> str:
        """HOST:PORT#PEER_ID, with which others join."""
        address = Address.parse(self._addresses()[0])
        return str(dataclasses.replace(address, peer_id=self._identity.peer_id))


@contextlib.contextmanager
def _identity(config: JoinConfig) -> Iterator[Identity]:
    """This peer's key, locked for this process."""
    if config.identity is not None:
        with locked_identity(config.identity) as identity:
            yield identity
    else:
        with locked_default_identity(state_folder()) as identity:
            yield identity

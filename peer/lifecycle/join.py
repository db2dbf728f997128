"""`swarm join` and `swarm bootstrap` from their start to their end.

::

    listen ─► meet the initial peers ─┬─► DHT ─────────────────────────────────────► listening ─┐
    (as a member without layers)      └─► choose span ─► fetch ─► check ─► self-test ─► load ───┴─► announce
                                          ▲                         │
                                          └─── others serve it now ─┘
    ... until Ctrl-C ... ─► say "leaving" ─► sessions move on ─► close

The port is taken first, so that nothing is loaded in vain; the peer answers look-ups from the moment its
DHT is up, and takes sessions when it is announced. It announces only what passed its self-test.
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
from peer.loading.self_test_cache import SelfTestRecord, test_loaded
from peer.loading.span import load_span
from peer.loading.span_files import SpanFiles, check_span_files, choose_span_files, fetch_span_files, reconsider
from peer.report import Report
from peer.serving.queries import QueryHandler, SharedFiles
from peer.serving.server import PeerServer
from peer.sessions.service import Serving, SpanService
from swarm.discovery.remote_directory import PeerDirectory
from swarm.engine.device import check_device
from swarm.errors import ConfigError, DirectoryError, EngineError, PeerError, SwarmError, first_error
from swarm.process.folders import state_folder
from swarm.process.prometheus import ScrapePage
from swarm.transport.address import Address
from swarm.transport.hello import peer_hello
from swarm.transport.identity import Identity, held_default_identity, held_identity
from swarm.wire.messages import Hello

if TYPE_CHECKING:
    from swarm.discovery.dht import HivemindDirectory

_SECOND_THOUGHTS = 2
_APART_S = 1.0


async def join(config: JoinConfig, report: Report) -> None:
    """Be a peer until told to stop. Raises Interrupted if that was before it was announced; any SwarmError."""
    stop = Stop()
    with stop.on_signals(), _identity(config) as identity:
        await Peer(config, identity, report, stop).run()


class Peer:
    """One peer's life."""

    def __init__(
        self,
        config: JoinConfig,
        identity: Identity,
        report: Report,
        stop: Stop,
        *,
        rng: random.Random | None = None,
    ) -> None:
        self._config = config
        self._identity = identity
        self._report = report
        self._stop = stop
        self._rng = rng or random.SystemRandom()
        self._name = config.name or socket.gethostname()[:64]
        self._incarnation = time.time_ns() // 1_000_000
        self._model = ""
        self._failure: SwarmError | None = None
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
            announcer = await self._stop.interrupting(self._begin(stack))
            async with asyncio.TaskGroup() as group:
                announcing = group.create_task(announcer.run()) if announcer is not None else None
                await self._stop.asked.wait()
                await self._stop.hurrying(self._leave(announcer))
                self._stop.end_soon()  # whatever may still hang: a device, a disk
                if announcing is not None:
                    announcing.cancel()
        if self._failure is not None:
            raise EngineError(f"this peer left the swarm: {self._failure}") from self._failure

    # -- the beginning

    async def _begin(self, stack: contextlib.AsyncExitStack) -> Announcer | None:
        if self._config.package is not None:
            await asyncio.to_thread(check_device, self._config.device)
        await self._listen()
        bootstrap = Bootstrap(self._config, self._report, hello=self._hello, stack=stack)
        directory, service, announcement = await self._prepare(bootstrap)
        if service is None or announcement is None:
            self._announced(directory, None)
            return None
        self._server.begin(service)
        await self._serve_metrics(service, stack)
        announcer = Announcer(
            directory,
            self._identity,
            current=lambda: announcement.record(service.load(), name=self._name, addresses=self._addresses()),
            model=announcement.model,
            hello=self._hello,
        )
        await bootstrap.until_it_works(announcer.announce_now)
        self._announced(directory, announcement)
        return announcer

    async def _prepare(self, bootstrap: Bootstrap) -> tuple[HivemindDirectory, SpanService | None, Announcement | None]:
        """The DHT and the span, side by side."""
        seeds, contact = await bootstrap.meet()
        try:
            async with asyncio.TaskGroup() as group:
                dht = group.create_task(self._open_dht(bootstrap, seeds, contact))
                span = group.create_task(self._load(contact)) if self._config.package is not None else None
        except ExceptionGroup as failed:
            raise first_error(failed) from None
        service, announcement = span.result() if span is not None else (None, None)
        return dht.result(), service, announcement

    async def _serve_metrics(self, service: SpanService, stack: contextlib.AsyncExitStack) -> None:
        if self._config.metrics is None:
            return
        from peer.announcing.metrics import PeerGauges  # loads prometheus_client, which few peers need

        gauges = PeerGauges(service.load, lambda: self._server.connections)
        service.watched_by(on_step=gauges.step, on_error=gauges.failed)
        page = ScrapePage(gauges.page)
        await page.start(self._config.metrics)
        stack.push_async_callback(page.close)
        place = dataclasses.replace(self._config.metrics, port=page.port).place
        self._report.phase("metrics", f"metrics at http://{place}/metrics", metrics=f"http://{place}/metrics")

    async def _listen(self) -> None:
        places = listen_addresses(self._config.listen)
        for place in places:
            try:
                await self._server.start(place.host, place.port)
            except ConfigError as error:
                taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
                if taken and place is not places[-1]:
                    continue
                raise
            self._host = place.host
            return

    async def _open_dht(
        self, bootstrap: Bootstrap, seeds: tuple[str, ...], contact: PeerDirectory | None
    ) -> HivemindDirectory:
        directory = await bootstrap.open_dht(self._host, self._server.port, seeds, contact)
        self._query_handler.open_directory(directory, lambda: directory.addresses)
        self._report.phase(
            "listening",
            f"listening at {self._address()}",
            address=self._address(),
            peer_id=self._identity.peer_id,
            dht=directory.addresses,
        )
        return directory

    async def _load(self, contact: PeerDirectory | None) -> tuple[SpanService, Announcement]:
        """From PACKAGE to a span that computes and passed its test."""
        config = self._config
        span_files = await choose_span_files(config, contact, self._hello(), peer_id=self._identity.peer_id)
        shared_files, passed, tested = await self._try(span_files, contact)
        for _ in range(_SECOND_THOUGHTS):
            better = await self._reconsider(span_files, contact)
            if better is span_files:
                break
            span_files = better
            shared_files, passed, tested = await self._try(span_files, contact)
        serving, tested = await self._open(span_files, tested)
        passed.put(tested)
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

    async def _open(self, span_files: SpanFiles, tested: SelfTest) -> tuple[Serving, SelfTest]:
        """Load the span, and test it here where no child did."""
        config = self._config
        serving = await asyncio.to_thread(load_span, config, span_files, tested)
        self._report.phase(
            "loaded",
            f"loaded on {config.device}, room for {serving.limits.kv_total} tokens",
            kv_total=serving.limits.kv_total,
        )
        if tested.remembered:
            tested = await asyncio.to_thread(test_loaded, serving, tested)
            self._tell_tested(tested)
        return serving, tested

    async def _reconsider(self, span_files: SpanFiles, contact: PeerDirectory | None) -> SpanFiles:
        """Another choice where others have filled the gap meanwhile: volunteers that come together choose the same."""
        if contact is None or self._config.layers is not None:
            return span_files
        # so that they do not all look again, and choose alike, at the same moment
        await asyncio.sleep(self._rng.uniform(0, _APART_S))
        try:
            better = await reconsider(self._config, span_files, contact, peer_id=self._identity.peer_id)
        except (PeerError, DirectoryError) as error:
            self._report.say(f"whether others serve layers {span_files.span} by now cannot be told: {error}")
            return span_files
        if better is not span_files:
            self._report.say(f"others serve layers {span_files.span} by now; layers {better.span} are missing more")
        return better

    async def _try(
        self, span_files: SpanFiles, contact: PeerDirectory | None
    ) -> tuple[SharedFiles, SelfTestRecord, SelfTest]:
        """Bring the files of a span here, check them, and see whether it runs."""
        config, report = self._config, self._report
        manifest, span = span_files.manifest, span_files.span
        report.phase(
            "chosen",
            f"layers {span} of {manifest.name} ({manifest.digest[:12]})",
            span=str(span),
            model={"name": manifest.name, "digest": manifest.digest},
        )
        for edge in sorted({span.first, span.last} - set(manifest.grid)):
            report.say(f"layer {edge} is not on the grid {manifest.grid}: only spans that end there too can join it")
        if span_files.fetched and contact is not None:
            await fetch_span_files(span_files, contact, self._hello(), report)
            report.phase("fetched", f"files of layers {span} are here")
        shared_files = await check_span_files(span_files, report)
        report.phase("checked", f"{len(shared_files.entries)} files can be had here, those of layers {span} are whole")
        passed = await asyncio.to_thread(SelfTestRecord.of, config, span_files)
        tested = passed.take()
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
            self._tell_tested(tested)
        return shared_files, passed, tested

    def _tell_tested(self, tested: SelfTest) -> None:
        if tested.instead:
            self._report.say(f"the {tested.engine} engine serves: {tested.instead}")
        self._report.phase(
            "tested",
            f"self-test passed: {tested.layer_time_s * 1e3:.2f} ms a layer, numerics {tested.numerics}, "
            f"{tested.engine} engine",
            layer_time_s=tested.layer_time_s,
            prefill_time_s=tested.prefill_time_s,
            numerics=tested.numerics,
            engine=tested.engine,
        )

    def _announced(self, directory: HivemindDirectory, announcement: Announcement | None) -> None:
        address = self._address()
        what = (
            "keeps the directory"
            if announcement is None
            else f"serves layers {announcement.span} of {announcement.manifest.name}"
        )
        self._report.phase(
            "announced",
            f"{self._name} {what} at {address}",
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

    # -- the end

    async def _leave(self, announcer: Announcer | None) -> None:
        self._report.phase("leaving", "leaving; sessions move on. Ctrl-C again to go at once")
        if announcer is not None:
            # the record first: nobody is to be sent here while sessions move away
            await announcer.leave()
        await self._server.leave(self._config.grace_s)

    def _device_failed(self, error: SwarmError) -> None:
        self._report.say(f"the device fails: {error}")
        self._failure = error
        self._stop.asked.set()

    # -- what others see

    def _hello(self) -> Hello:
        return peer_hello(model=self._model, name=self._name, incarnation=self._incarnation)

    def _addresses(self) -> list[str]:
        return announced_addresses(self._host, self._server.port)

    def _address(self) -> str:
        """The one that others need."""
        place = Address.parse(self._addresses()[0])
        return str(dataclasses.replace(place, peer_id=self._identity.peer_id))


@contextlib.contextmanager
def _identity(config: JoinConfig) -> Iterator[Identity]:
    """This peer's key, for this process alone."""
    if config.identity is not None:
        with held_identity(config.identity) as identity:
            yield identity
    else:
        with held_default_identity(state_folder()) as identity:
            yield identity

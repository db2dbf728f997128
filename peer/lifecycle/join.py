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
from peer.announcing.record import Offer
from peer.config import JoinConfig
from peer.lifecycle.bootstrap import Meeting
from peer.lifecycle.listen_addresses import advertised_addresses, listening_places
from peer.lifecycle.shutdown import Stop
from peer.loading.self_test import SelfTest, self_test
from peer.loading.self_test_cache import PassedTest, test_loaded
from peer.loading.span import load_span
from peer.loading.span_files import Supply, check_supply, choose_supply, fetch_supply, reconsider
from peer.report import Report
from peer.serving.queries import Desk, Shelf
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
        self._desk = Desk(hello=self._hello)
        self._server = PeerServer(identity=identity, hello=self._hello, desk=self._desk)
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
        meeting = Meeting(self._config, self._report, hello=self._hello, stack=stack)
        directory, service, offer = await self._prepare(meeting)
        if service is None or offer is None:
            self._announced(directory, None)
            return None
        self._server.begin(service)
        await self._serve_metrics(service, stack)
        announcer = Announcer(
            directory,
            self._identity,
            current=lambda: offer.record(service.load(), name=self._name, addresses=self._addresses()),
            model=offer.model,
            hello=self._hello,
        )
        await meeting.until_it_works(announcer.announce_now)
        self._announced(directory, offer)
        return announcer

    async def _prepare(self, meeting: Meeting) -> tuple[HivemindDirectory, SpanService | None, Offer | None]:
        """The DHT and the span, side by side."""
        seeds, contact = await meeting.meet()
        try:
            async with asyncio.TaskGroup() as group:
                dht = group.create_task(self._open_dht(meeting, seeds, contact))
                span = group.create_task(self._load(contact)) if self._config.package is not None else None
        except ExceptionGroup as failed:
            raise first_error(failed) from None
        service, offer = span.result() if span is not None else (None, None)
        return dht.result(), service, offer

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
        places = listening_places(self._config.listen)
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
        self, meeting: Meeting, seeds: tuple[str, ...], contact: PeerDirectory | None
    ) -> HivemindDirectory:
        directory = await meeting.open_dht(self._host, self._server.port, seeds, contact)
        self._desk.open_directory(directory, lambda: directory.addresses)
        self._report.phase(
            "listening",
            f"listening at {self._address()}",
            address=self._address(),
            peer_id=self._identity.peer_id,
            dht=directory.addresses,
        )
        return directory

    async def _load(self, contact: PeerDirectory | None) -> tuple[SpanService, Offer]:
        """From PACKAGE to a span that computes and passed its test."""
        config = self._config
        supply = await choose_supply(config, contact, self._hello(), peer_id=self._identity.peer_id)
        shelf, passed, tested = await self._try(supply, contact)
        for _ in range(_SECOND_THOUGHTS):
            better = await self._reconsider(supply, contact)
            if better is supply:
                break
            supply = better
            shelf, passed, tested = await self._try(supply, contact)
        serving, tested = await self._open(supply, tested)
        passed.put(tested)
        service = SpanService(serving, peer_id=self._identity.peer_id, hello=self._hello, on_failed=self._device_failed)
        self._desk.stock(shelf)
        self._model = supply.manifest.digest
        return service, Offer.of(
            serving, shelf, tested, peer_id=self._identity.peer_id, incarnation=self._incarnation, device=config.device
        )

    async def _open(self, supply: Supply, tested: SelfTest) -> tuple[Serving, SelfTest]:
        """Load the span, and test it here where no child did."""
        config = self._config
        serving = await asyncio.to_thread(load_span, config, supply, tested)
        self._report.phase(
            "loaded",
            f"loaded on {config.device}, room for {serving.limits.kv_total} tokens",
            kv_total=serving.limits.kv_total,
        )
        if tested.remembered:
            tested = await asyncio.to_thread(test_loaded, serving, tested)
            self._tell_tested(tested)
        return serving, tested

    async def _reconsider(self, supply: Supply, contact: PeerDirectory | None) -> Supply:
        """Another choice where others have filled the gap meanwhile: volunteers that come together choose the same."""
        if contact is None or self._config.layers is not None:
            return supply
        # so that they do not all look again, and choose alike, at the same moment
        await asyncio.sleep(self._rng.uniform(0, _APART_S))
        try:
            better = await reconsider(self._config, supply, contact, peer_id=self._identity.peer_id)
        except (PeerError, DirectoryError) as error:
            self._report.say(f"whether others serve layers {supply.span} by now cannot be told: {error}")
            return supply
        if better is not supply:
            self._report.say(f"others serve layers {supply.span} by now; layers {better.span} are missing more")
        return better

    async def _try(self, supply: Supply, contact: PeerDirectory | None) -> tuple[Shelf, PassedTest, SelfTest]:
        """Bring the files of a span here, check them, and see whether it runs."""
        config, report = self._config, self._report
        manifest, span = supply.manifest, supply.span
        report.phase(
            "chosen",
            f"layers {span} of {manifest.name} ({manifest.digest[:12]})",
            span=str(span),
            model={"name": manifest.name, "digest": manifest.digest},
        )
        for edge in sorted({span.first, span.last} - set(manifest.grid)):
            report.say(f"layer {edge} is not on the grid {manifest.grid}: only spans that end there too can join it")
        if supply.fetched and contact is not None:
            await fetch_supply(supply, contact, self._hello(), report)
            report.phase("fetched", f"files of layers {span} are here")
        shelf = await check_supply(supply, report)
        report.phase("checked", f"{len(shelf.entries)} files can be had here, those of layers {span} are whole")
        passed = await asyncio.to_thread(PassedTest.of, config, supply)
        tested = passed.take()
        if tested is None:
            tested = await self_test(
                supply.package,
                span,
                engine=config.engine,
                device=config.device,
                precision=config.precision,
                threads=config.threads,
                cache_dir=config.cache_dir / "graphs",
            )
            self._tell_tested(tested)
        return shelf, passed, tested

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

    def _announced(self, directory: HivemindDirectory, offer: Offer | None) -> None:
        address = self._address()
        what = "keeps the directory" if offer is None else f"serves layers {offer.span} of {offer.manifest.name}"
        self._report.phase(
            "announced",
            f"{self._name} {what} at {address}",
            address=address,
            addresses=self._addresses(),
            peer_id=self._identity.peer_id,
            name=self._name,
            pid=os.getpid(),
            span=str(offer.span) if offer is not None else None,
            entries=list(offer.entries) if offer is not None else [],
            model={"name": offer.manifest.name, "digest": offer.manifest.digest} if offer is not None else None,
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
        return advertised_addresses(self._host, self._server.port)

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

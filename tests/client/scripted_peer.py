"""Peers for tests: the real protocol over real sockets, a toy model that reveals every mistake, faults on demand.

The toy: layer L turns x[0..p] into y[p] = (31 y[p-1] + x[p] + L + 1) mod 65521 and caches its y. A token that
is lost, repeated or computed on a stale cache changes all tokens after it, on any route.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from swarm.discovery.directory import Directory, MemoryDirectory
from swarm.discovery.records import LEAVING, SERVING, ModelRecord, PeerRecord
from swarm.errors import (
    BadStep,
    PeerBusy,
    PeerError,
    PeerLeaving,
    PeerLost,
    PeerUnreachable,
    SwarmError,
    UnknownSession,
)
from swarm.model.manifest import EMBED, HEAD, TOKENIZER, FileEntry, LayerSpec, Manifest, layer_part
from swarm.model.numerics import Numerics
from swarm.model.spans import LayerRange
from swarm.sampling import Sampling
from swarm.transport.address import Address
from swarm.transport.channel import Channel
from swarm.transport.identity import Identity
from swarm.transport.listener import Listener
from swarm.transport.stream import Stream, listen
from swarm.wire.base_message import Message
from swarm.wire.failures import error_to_failure, failure_to_error
from swarm.wire.messages import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    CloseSession,
    Failure,
    Forward,
    Hello,
    Hidden,
    HopTrace,
    Leaving,
    Link,
    Linked,
    OpenSession,
    Output,
    SessionClosed,
    SessionOpened,
)
from swarm.wire.queries import AskFile, AskManifest, AskTopic, FilePiece, ManifestFile, Ping, Pong, Topic

VOCAB = 97
WIDTH = 4
CONTEXT = 400
_PRIME = 65521
_NO_IDS = np.empty(0, np.int32)


def toy_manifest(layers: int = 6, eos: Sequence[int] = ()) -> Manifest:
    def entry(name: str) -> tuple[FileEntry, ...]:
        return (FileEntry(path=f"{name}.bin", size=1, sha256=hashlib.sha256(name.encode()).hexdigest()),)

    names = [EMBED, HEAD, TOKENIZER, *map(layer_part, range(layers))]
    return Manifest(
        name="toy",
        architecture="toy",
        source="test",
        licence="none",
        weights="f32",
        hidden_size=WIDTH,
        vocab_size=VOCAB,
        context_length=CONTEXT,
        eos_token_ids=tuple(eos),
        layers=(LayerSpec(kv_heads=1, key_size=1, value_size=1),) * layers,
        grid=tuple(range(layers + 1)),
        parts={name: entry(name) for name in names},
    )


def run_layer(layer: int, cached: list[int], start: int, values: Sequence[int]) -> list[int]:
    """y for `values` at `start`; `cached` is this layer's y so far, which is cut at `start` and extended."""
    assert start <= len(cached), "a step beyond the cache"
    del cached[start:]
    for value in values:
        cached.append((31 * (cached[-1] if cached else 7) + value + layer + 1) % _PRIME)
    return cached[start:]


def pick(value: int, sampling: Sampling, position: int) -> int:
    return (value if sampling.greedy else value + (sampling.seed % 1009 + 1) * (position + 1)) % VOCAB


def toy_text(prompt: Sequence[int], count: int, sampling: Sampling | None = None, layers: int = 6) -> list[int]:
    """The expected text: `count` tokens after `prompt`."""
    sampling = sampling or Sampling()
    caches: list[list[int]] = [[] for _ in range(layers)]
    known = list(prompt)
    values: list[int] = []
    fresh = known
    while True:
        values = list(fresh)
        for layer, cached in enumerate(caches):
            values = run_layer(layer, cached, len(known) - len(fresh), values)
        if len(known) == len(prompt) + count:
            return known[len(prompt) :]
        known.append(pick(values[-1], sampling, len(known)))
        fresh = known[-1:]


@dataclass(eq=False)
class _Session:
    opener: Stream
    ask: OpenSession
    caches: dict[int, list[int]]
    previous_hop: Stream | None = None
    next_hop: Channel | None = None
    next_peer_id: str = ""
    received: int = 0
    computed: int = 0
    sent: int = 0
    waiting: deque[Forward] = field(default_factory=deque)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class ScriptedPeer:
    """One peer of the toy model.

    `on_step` is called before each step is computed (the count is from 0 over all sessions): it may raise an error,
    which is sent as a Failure, or call one of the faults below. `on_open` is called for each OpenSession,
    `make_hello` for each connection. `alter_output` and `alter_hidden` change what is sent.
    """

    def __init__(self, name: str, span: LayerRange, manifest: Manifest, *, incarnation: int = 1) -> None:
        self.name = name
        self.span = span
        self.manifest = manifest
        self.incarnation = incarnation
        self.identity = Identity.generate()
        self.sessions: dict[str, _Session] = {}
        self.on_step: Callable[[int, Forward], None] = lambda count, forward: None
        self.on_open: Callable[[OpenSession], None] = lambda ask: None
        self.alter_output: Callable[[Output], Output] = lambda output: output
        self.alter_hidden: Callable[[Hidden], Hidden] = lambda hidden: hidden
        self.make_hello: Callable[[], Hello] = self.hello
        self.unreachable: set[str] = set()
        self.files: dict[str, bytes] = {}
        self.directory: Directory | None = None
        self.steps: list[Forward] = []
        self.opened = 0
        self.relayed = 0
        self.void_steps = 0
        self.kv_free = 10_000
        self.state = SERVING
        self.layer_time_s = 1e-6
        self.attends_to = 0
        self.is_stuck = False
        self.computes_for_others = False
        self.rounds = 0
        self.dead = False
        self.delay_s = 0.0
        self._running = asyncio.Event()
        self._running.set()
        self._streams: set[Stream] = set()
        self._listener: Listener | None = None

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    @property
    def address(self) -> Address:
        assert self._listener is not None
        return Address("127.0.0.1", self._listener.port, self.peer_id)

    def record(self) -> PeerRecord:
        now = time.time()
        return PeerRecord(
            model=self.manifest.digest,
            peer_id=self.peer_id,
            name=self.name,
            incarnation=self.incarnation,
            span=self.span,
            holds=(self.span,),
            addresses=(self.address.host_port,),
            device="TOY",
            numerics=Numerics(inference="f32", kv="f32"),
            layer_time_s=self.layer_time_s,
            prefill_time_s=self.layer_time_s,
            attends_to=self.attends_to,
            kv_free=self.kv_free,
            kv_total=10_000,
            sessions=len(self.sessions),
            queue=0,
            state=self.state,
            software="test",
            announced_at=now,
            expires_at=now + 60,
        )

    def hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            software="test",
            role="peer",
            model=self.manifest.digest,
            name=self.name,
            incarnation=self.incarnation,
        )

    async def start(self) -> None:
        self._listener = await listen("127.0.0.1", 0, self.identity, lambda: self.make_hello(), self._serve)

    async def close(self) -> None:
        self._running.set()
        for session in list(self.sessions.values()):
            await self._close_session(session)
        if self._listener is not None:
            await self._listener.close()

    # -- faults

    def die(self) -> None:
        """As SIGKILL does: close port and connections at once."""
        assert self._listener is not None
        self.dead = True
        self._dying = asyncio.create_task(self._listener.close())
        self.cut()

    def cut(self) -> None:
        """Break all connections; the port stays open."""
        for stream in list(self._streams):
            stream.abort(PeerLost("cut by the test"))

    def freeze(self) -> None:
        """As SIGSTOP does: read, compute and answer nothing."""
        self._running.clear()

    def get_stuck(self) -> None:
        """Answer messages and compute nothing."""
        self.is_stuck = True

    async def leave(self) -> None:
        """Take no new sessions, and announce that the peer leaves."""
        self.state = LEAVING
        for stream in list(self._streams):
            stream.send(Leaving(grace_s=30.0))

    # -- connections

    async def _serve(self, stream: Stream) -> None:
        self._streams.add(stream)
        try:
            while True:
                message = await stream.receive()
                await self._running.wait()
                try:
                    await self._on_message(stream, message)
                except SwarmError as error:
                    stream.send(error_to_failure(error, request=getattr(message, "request", 0)))
        finally:
            self._streams.discard(stream)
            for session in [s for s in self.sessions.values() if s.opener is stream]:
                await self._close_session(session)

    async def _on_message(self, stream: Stream, message: Message) -> None:
        match message:
            case Ping():
                session = self.sessions.get(message.session)
                counts = (session.received, session.computed, session.sent) if session else (0, 0, 0)
                received, computed, sent = counts
                self.rounds += self.computes_for_others
                stream.send(
                    Pong(
                        request=message.request,
                        time=time.time(),
                        received=received,
                        computed=computed,
                        sent=sent,
                        rounds=self.rounds,
                    )
                )
            case AskTopic() if self.directory is not None:
                notices = await self.directory.collect(message.topic)
                stream.send(Topic(request=message.request, notices=tuple(notice.signed_bytes for notice in notices)))
            case AskManifest():
                stream.send(ManifestFile(request=message.request, raw=self.manifest.to_json()))
            case AskFile():
                data = self.files[message.sha256][message.offset : message.offset + message.length]
                stream.send(FilePiece(request=message.request, data=data))
            case OpenSession():
                await self._open(stream, message)
            case Link():
                await self._link(stream, message)
            case Attach():
                session = self.sessions.get(message.session)
                if session is None or session.ask.secret != message.secret or session.ask.epoch != message.epoch:
                    raise UnknownSession("no such session under this secret")
                session.previous_hop = stream
                stream.send(Attached(request=message.request))
            case CloseSession():
                session = self.sessions.get(message.session)
                if session is not None and session.opener is stream:
                    await self._close_session(session)
                stream.send(SessionClosed(request=message.request))
            case Forward():
                self._forward(stream, message)
            case _:
                raise BadStep(f"{message.kind} is not for this peer")

    async def _open(self, stream: Stream, ask: OpenSession) -> None:
        self.opened += 1
        self.on_open(ask)
        if self.state == LEAVING:
            raise PeerLeaving("this peer is leaving")
        known = self.sessions.get(ask.session)
        if known is not None:
            if known.opener is not stream:
                raise PeerBusy("open elsewhere", retry_after=0.1)
            if ask.epoch <= known.ask.epoch:
                raise BadStep("the epoch does not follow")
            await self._close_session(known)
        session = _Session(stream, ask, {layer: [] for layer in range(ask.first, ask.last)})
        session.task = asyncio.create_task(self._run(session))
        self.sessions[ask.session] = session
        stream.send(SessionOpened(request=ask.request, kv_free=self.kv_free))

    async def _link(self, stream: Stream, ask: Link) -> None:
        session = self.sessions.get(ask.session)
        if session is None or session.opener is not stream or session.ask.epoch != ask.epoch:
            raise UnknownSession("no such session")
        if ask.addresses:
            if ask.peer_id in self.unreachable:
                raise PeerUnreachable("the next hop cannot be reached from here", peer=ask.peer_id)
            places = [Address.parse(text) for text in ask.addresses]
            try:
                session.next_hop = await Channel.open(
                    [Address(place.host, place.port, ask.peer_id) for place in places],
                    self.hello(),
                    on_message=lambda message: self._on_next_hop_message(session, message),
                    on_lost=lambda error: self._on_next_hop_lost(session, error),
                )
            except PeerError as error:
                raise PeerUnreachable(str(error), peer=ask.peer_id) from error
            session.next_peer_id = ask.peer_id
            attach = Attach(
                request=session.next_hop.next_request(), session=ask.session, epoch=ask.epoch, secret=ask.secret
            )
            await session.next_hop.ask(attach, Attached, timeout=2.0)
        stream.send(Linked(request=ask.request))

    async def _close_session(self, session: _Session) -> None:
        if self.sessions.get(session.ask.session) is session:
            del self.sessions[session.ask.session]
        if session.task is not None:
            session.task.cancel()
        if session.next_hop is not None:
            await session.next_hop.close()

    # -- steps

    def _forward(self, stream: Stream, forward: Forward) -> None:
        session = self.sessions.get(forward.session)
        if session is None or stream not in (session.opener, session.previous_hop):
            failure = error_to_failure(
                UnknownSession("not open here"), session=forward.session, epoch=forward.epoch, step=forward.step
            )
            stream.send(failure)
        elif forward.epoch == session.ask.epoch:
            session.received += 1
            while session.waiting and session.waiting[-1].start >= forward.start:
                session.waiting.pop()
                session.computed += 1
                self.void_steps += 1
            session.waiting.append(forward)
            session.arrived.set()

    async def _run(self, session: _Session) -> None:
        while True:
            while not session.waiting:
                session.arrived.clear()
                await session.arrived.wait()
            forward = session.waiting.popleft()
            await self._running.wait()
            received_at = time.monotonic()
            try:
                self.on_step(len(self.steps), forward)
                await self._running.wait()
                await asyncio.sleep(self.delay_s)
                if self.is_stuck:
                    await asyncio.Event().wait()
                self.steps.append(forward)
                values = self._compute(session, forward)
            except SwarmError as error:
                self._send_failure(session, error, forward.step)
                continue
            finally:
                session.computed += not self.is_stuck
            trace = HopTrace(
                peer=self.peer_id,
                queue_s=0.0,
                compute_s=0.0,
                codec_s=0.0,
                received_at=received_at,
                sent_at=time.monotonic(),
            )
            session.sent += 1
            self._deliver(session, forward, values, (*forward.trace, trace))

    def _compute(self, session: _Session, forward: Forward) -> list[int]:
        ask = session.ask
        if forward.start + len(forward.tokens) > ask.max_tokens:
            raise BadStep("beyond the reservation")
        if ask.first == 0:
            values = [int(token) for token in forward.tokens]
        elif forward.hidden is None or forward.hidden.shape != (len(forward.tokens), WIDTH):
            raise BadStep("no hidden states")
        elif not np.isfinite(forward.hidden).all():
            raise BadStep("hidden states that are not numbers")
        else:
            values = [int(value) for value in forward.hidden[:, 0]]
        for layer, cached in session.caches.items():
            if forward.start > len(cached):
                raise BadStep(f"{self.name}: a step at {forward.start}, the cache ends at {len(cached)}")
            values = run_layer(layer, cached, forward.start, values)
        return values

    def _deliver(self, session: _Session, forward: Forward, values: list[int], trace: tuple[HopTrace, ...]) -> None:
        output = Output(session=forward.session, epoch=forward.epoch, step=forward.step, ids=_NO_IDS, trace=trace)
        with contextlib.suppress(PeerError):
            if session.ask.last == len(self.manifest.layers):
                end = forward.start + len(forward.tokens)
                first = len(values) - forward.rows
                ids = [pick(values[i], forward.sampling, end - len(values) + i + 1) for i in range(first, len(values))]
                wanted = forward.sampling.logprobs is not None
                output = dataclasses.replace(
                    output,
                    ids=np.array(ids, np.int32),
                    logprobs=np.array([-0.5] * len(ids), np.float32) if wanted else None,
                )
                session.opener.send(self.alter_output(output))
                return
            hidden = self.alter_hidden(np.tile(np.array(values, np.float32)[:, None], (1, WIDTH)))
            if session.next_hop is None:
                self.relayed += 1
                session.opener.send(self.alter_output(dataclasses.replace(output, hidden=hidden)))
            else:
                session.next_hop.send(dataclasses.replace(forward, hidden=hidden, trace=trace))

    def _send_failure(self, session: _Session, error: SwarmError, step: int) -> None:
        with contextlib.suppress(PeerError):
            session.opener.send(
                error_to_failure(error, session=session.ask.session, epoch=session.ask.epoch, step=step)
            )

    def _on_next_hop_message(self, session: _Session, message: Message) -> None:
        if isinstance(message, Failure):
            self._send_failure(session, failure_to_error(message, session.next_peer_id), message.step)

    def _on_next_hop_lost(self, session: _Session, error: SwarmError) -> None:
        self._send_failure(session, PeerLost(str(error), peer=session.next_peer_id), 0)


class ToySwarm:
    """Scripted peers and the directory in which they are announced."""

    def __init__(self, manifest: Manifest | None = None) -> None:
        self.manifest = manifest or toy_manifest()
        self.directory = MemoryDirectory()
        self.peers: dict[str, ScriptedPeer] = {}

    async def add(self, name: str, span: str, *, layer_time_s: float = 1e-6, attends_to: int = 0) -> ScriptedPeer:
        """Start a peer and announce it. A larger `layer_time_s` makes it a spare."""
        peer = ScriptedPeer(name, LayerRange.parse(span), self.manifest)
        peer.layer_time_s = layer_time_s
        peer.attends_to = attends_to
        peer.directory = self.directory
        await peer.start()
        self.peers[name] = peer
        await self.announce(peer)
        return peer

    async def announce(self, peer: ScriptedPeer) -> None:
        await self.directory.publish(peer.record().sign(peer.identity))
        manifest = self.manifest
        model = ModelRecord(
            digest=manifest.digest,
            name=manifest.name,
            source=manifest.source,
            licence=manifest.licence,
            weights=manifest.weights,
            layers=len(manifest.layers),
            layer_bytes=1,
            kv_layer_elements=2,
            expires_at=time.time() + 60,
        )
        await self.directory.publish(model.sign(peer.identity))

    @property
    def open_sessions(self) -> int:
        return sum(len(peer.sessions) for peer in self.peers.values() if not peer.dead)

    async def close(self) -> None:
        for peer in self.peers.values():
            await peer.close()

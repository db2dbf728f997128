"""A client of a swarm: finds a model, gets its tokenizer from its peers, and generates across them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from client.config import ClientConfig, GenerationConfig, check_whole_number
from client.events import Event, OnEvent, Stage, ignore_event
from client.generation.chat import ChatSession
from client.generation.generate import GenerationTask, Piece, generate
from client.generation.tokenizer import Codec, Message, Tokenizer
from client.metrics import Meter
from client.pipeline.connections import ConnectionPool
from client.pipeline.pipeline import Pipeline
from client.pipeline.planner import Planner
from client.speculation.draft_pool import Drafts, SessionDrafts
from swarm.discovery.download import fetch_manifest, fetch_parts
from swarm.discovery.peer_directory import PeerDirectory, find_model, find_peers, first_contact_note
from swarm.discovery.records import PeerRecord
from swarm.errors import (
    ConfigError,
    LocalProtocolError,
    NotCovered,
    PackageError,
    PeerError,
    RemoteProtocolError,
    RouteError,
    SwarmError,
)
from swarm.model.manifest import TOKENIZER, Manifest, check_files, load_manifest, package_folder
from swarm.transport.address import Address
from swarm.transport.hello import client_hello

Prompt = str | Sequence[Message] | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class RouteInUse:
    """One session's route: `hops` as (peer id, name, layers), and how many `tokens` they have cached."""

    session: int
    hops: tuple[tuple[str, str, str], ...]
    tokens: int
    repairs: int


@dataclass(frozen=True)
class _OpenSession:
    """A session that is not closed yet."""

    number: int
    drafts: SessionDrafts


class SwarmClient:
    """One model on one swarm; any number of generations and chats at once. Made by `connect`.

    >>> # async with await SwarmClient.connect("smollm2", initial_peers=["192.168.1.7:31337"]) as swarm:
    >>> #     async for piece in swarm.generate("What is the capital of France?"):
    >>> #         print(piece.text, end="", flush=True)
    """

    def __init__(
        self,
        *,
        manifest: Manifest,
        tokenizer: Codec,
        connections: ConnectionPool,
        planner: Planner,
        config: ClientConfig,
        on_event: OnEvent,
        clock: Callable[[], float],
        rng: random.Random,
        resources: contextlib.AsyncExitStack,
    ) -> None:
        """`resources` are what `close` closes, `connections` and `planner` among them."""
        self.manifest = manifest
        self.tokenizer = tokenizer
        self._connections = connections
        self._planner = planner
        self._config = config
        self._on_event = on_event
        self._clock = clock
        self._rng = rng
        self._resources = resources
        self._cleans_up_spaces = tokenizer.cleans_up_spaces  # asked once: it costs a decoding
        self._drafts = Drafts(manifest, config=config, on_event=on_event, clock=clock)
        self._open_sessions: dict[Pipeline, _OpenSession] = {}
        self._numbers = itertools.count(1)
        self._closed = False

    @classmethod
    async def connect(
        cls,
        model: str | Path,
        *,
        initial_peers: Sequence[str | Address] | str | Address,
        config: ClientConfig | None = None,
        on_event: OnEvent = ignore_event,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> SwarmClient:
        """Find `model`: a package's directory, or the name or digest of a model that the swarm serves.

        Manifest and tokenizer are fetched once, checked, and kept in `config.cache_dir`. Raises ConfigError
        (AddressError) naming a wrong address, PeerUnreachable, UnknownModel, MixedModels, NotCovered,
        PackageError.
        """
        config = config or ClientConfig()
        rng = rng or random.SystemRandom()
        peers = [initial_peers] if isinstance(initial_peers, (str, Address)) else initial_peers
        addresses = [peer if isinstance(peer, Address) else Address.parse(peer) for peer in peers]
        async with contextlib.AsyncExitStack() as stack:
            directory = PeerDirectory(addresses, hello=client_hello(), timeout=config.connect_timeout_s, clock=wall)
            stack.push_async_callback(directory.close)
            on_event(Event(stage=Stage.LOOKING, text=f"looking for {model}"))
            package = await asyncio.to_thread(package_folder, model)
            local = await asyncio.to_thread(load_manifest, package) if package else None
            digest = local.digest if local else (await find_model(directory, str(model), wall=wall)).digest
            connections = ConnectionPool(hello=client_hello(digest), config=config, clock=clock)
            stack.push_async_callback(connections.close)
            if local and package:
                manifest, folder = local, package
                await asyncio.to_thread(check_files, folder, manifest.files([TOKENIZER]))
            else:
                folder = config.cache_dir / "tokenizers" / digest[:16]
                records = await find_peers(directory, digest, now=wall())
                manifest = await _fetch_tokenizer(digest, records, folder, connections, on_event)
            for address in directory.trusted:
                on_event(Event(stage=Stage.TRUSTED, text=first_contact_note(address)))
            tokenizer = await Tokenizer.load(folder)
            planner = Planner(
                directory,
                manifest,
                connections=connections,
                config=config,
                seed=f"{rng.getrandbits(64):x}",
                clock=clock,
                wall=wall,
            )
            stack.push_async_callback(planner.close)
            return cls(
                manifest=manifest,
                tokenizer=tokenizer,
                connections=connections,
                planner=planner,
                config=config,
                on_event=on_event,
                clock=clock,
                rng=rng,
                resources=stack.pop_all(),
            )

    async def generate(
        self, prompt: Prompt, config: GenerationConfig | None = None, *, raw: bool = False
    ) -> AsyncGenerator[Piece, None]:
        """The answer to a text (as a user's message) or a conversation, piece by piece. With `raw`, and for token ids,
        the continuation of the prompt as it is.

        Raises ConfigError and ContextExceeded before anything is sent; PackageError and EngineError if a draft cannot
        be loaded; NotCovered naming the layers that no peer serves, PeerBusy if no peer has room, or the last peer's
        error, when repairs fail. Leaving the loop early closes the session.
        """
        config = config or GenerationConfig()
        meter = Meter(self._clock)
        ids = self.encode(prompt, raw=raw)
        pipeline = self._pipeline(len(ids) + config.max_new_tokens)
        try:
            async with contextlib.aclosing(self._answer(pipeline, ids, config, meter)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            await self._close_session(pipeline)

    def session(
        self,
        config: GenerationConfig | None = None,
        *,
        system: str | None = None,
        max_tokens: int | None = None,
    ) -> ChatSession:
        """A conversation whose KV cache stays on the peers between turns; close it, or use `async with`.

        `config` is the turns' default. `max_tokens` of context (`ClientConfig.chat_tokens` by default) are
        reserved on each peer. Raises ConfigError if `max_tokens` is not a whole number of at least 2.
        """
        if max_tokens is not None:
            check_whole_number("max_tokens", max_tokens, 2, 1 << 31)
        pipeline = self._pipeline(max_tokens or self._config.chat_tokens)
        return ChatSession(
            answer=lambda messages, chosen: self._answer(pipeline, self.encode(messages), chosen, Meter(self._clock)),
            close=lambda: self._close_session(pipeline),
            route=pipeline.describe_route,
            config=config or GenerationConfig(),
            system=system,
        )

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """The token ids of a prompt. A text becomes a user's message, unless `raw` or the model has no chat template.
        Ids are taken as they are. Raises ConfigError naming an id that the model does not have."""
        if not isinstance(prompt, str):
            if isinstance(prompt, (bytes, Mapping)) or not hasattr(prompt, "__iter__"):
                raise ConfigError(f"the prompt is {prompt!r:.100}; it must be a text, messages, or token ids")
            # NumPy's integers too, as tokenizers return them; a bool is no id
            if ids := [int(token) for token in prompt if isinstance(token, Integral) and not isinstance(token, bool)]:
                self._check_ids(ids, len(prompt))
                return ids
            return self.tokenizer.chat(cast(Sequence[Message], prompt))
        if raw or not self.tokenizer.has_chat_template:
            return self.tokenizer.encode(prompt)
        return self.tokenizer.chat([{"role": "user", "content": prompt}])

    async def load_draft(self, draft: str | Path) -> None:
        """Load the draft that `GenerationConfig.draft` would name now, instead of at the first answer.

        Raises ConfigError, PackageError and EngineError, as `generate` does.
        """
        await self._drafts.load(draft)

    @property
    def routes(self) -> list[RouteInUse]:
        """The routes of this client's open sessions, without those that have none yet."""
        return [
            RouteInUse(
                session=session.number, hops=tuple(hops), tokens=pipeline.cached_tokens, repairs=pipeline.repairs
            )
            for pipeline, session in self._open_sessions.items()
            if (hops := pipeline.hops())
        ]

    def _check_ids(self, ids: list[int], count: int) -> None:
        wrong = next((token for token in ids if not 0 <= token < self.manifest.vocab_size), None)
        if wrong is not None or len(ids) != count:
            found = "something else among its token ids" if wrong is None else f"token id {wrong}"
            raise ConfigError(f"the prompt has {found}; this model has ids from 0 to {self.manifest.vocab_size - 1}")

    async def close(self) -> None:
        """End every generation and chat, and all connections. Idempotent, bounded."""
        self._closed = True
        await asyncio.gather(*(self._close_session(pipeline) for pipeline in list(self._open_sessions)))
        await self._drafts.close()
        await self._resources.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _pipeline(self, max_tokens: int) -> Pipeline:
        if self._closed:
            raise LocalProtocolError("this client is closed: connect another one")
        pipeline = Pipeline(
            planner=self._planner,
            manifest=self.manifest,
            connections=self._connections,
            config=self._config,
            max_tokens=min(max_tokens, self.manifest.context_length),
            clock=self._clock,
            on_event=self._on_event,
        )
        drafts = SessionDrafts(self._drafts, max_tokens=pipeline.max_tokens, clock=self._clock)
        self._open_sessions[pipeline] = _OpenSession(next(self._numbers), drafts)
        return pipeline

    async def _close_session(self, pipeline: Pipeline) -> None:
        session = self._open_sessions.pop(pipeline, None)
        if session is not None:
            session.drafts.close()
        await pipeline.close()

    async def _answer(
        self, pipeline: Pipeline, ids: Sequence[int], config: GenerationConfig, meter: Meter
    ) -> AsyncGenerator[Piece, None]:
        task = GenerationTask(
            prompt=ids,
            config=config,
            sampling=config.sampling(self._rng, answer_start=len(ids)),
            manifest=self.manifest,
            decode=self.tokenizer.decode,
            cleans_up_spaces=self._cleans_up_spaces,
            max_positions=pipeline.max_tokens,
        )
        session = self._open_sessions.get(pipeline)
        guesser = await session.drafts.guesser(config) if session is not None else None
        async with contextlib.aclosing(generate(pipeline, task, meter, guesser)) as pieces:
            async for piece in pieces:
                yield piece


async def _fetch_tokenizer(
    digest: str, records: Sequence[PeerRecord], folder: Path, connections: ConnectionPool, on_event: OnEvent
) -> Manifest:
    """Have a model's manifest and tokenizer in `folder`: the files there if they are intact, else from its peers."""
    with contextlib.suppress(PackageError):
        manifest = await asyncio.to_thread(load_manifest, folder)
        if manifest.digest == digest:
            await asyncio.to_thread(check_files, folder, manifest.files([TOKENIZER]))
            return manifest
    on_event(Event(stage=Stage.FETCHING, text="fetching the tokenizer"))
    manifest = await _fetch_manifest(digest, records, connections)

    def progress(done: int, total: int) -> None:
        on_event(Event(stage=Stage.FETCHING, text="fetching the tokenizer", done=done, total=total))

    await fetch_parts(manifest, [TOKENIZER], records, folder, hello=client_hello(digest), progress=progress)
    return manifest


async def _fetch_manifest(digest: str, records: Sequence[PeerRecord], connections: ConnectionPool) -> Manifest:
    """Fetch it from the first peer that has it. Raises the last peer's error, or NotCovered if there is no peer."""
    last_error: SwarmError = NotCovered(f"no peer serves a layer of {digest[:12]} now; try again later")
    for record in records:
        try:
            return await fetch_manifest((await connections.connection(record)).channel, digest)
        except (PeerError, RemoteProtocolError, RouteError, PackageError) as error:
            last_error = error
    raise last_error

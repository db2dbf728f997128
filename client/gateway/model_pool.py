"""The models that a gateway offers: a client of the swarm for each, and whether tokens come through it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from client.client import SwarmClient
from client.config import ClientConfig, GenerationConfig
from client.generation.generate import Piece
from swarm.discovery.directory import MODELS_TOPIC, Directory
from swarm.discovery.records import model_records
from swarm.discovery.remote_directory import MIN_DIGEST_PREFIX, PeerDirectory, served_models
from swarm.errors import RequestError, SwarmError
from swarm.transport.address import Address
from swarm.transport.hello import client_hello

_log = logging.getLogger(__name__)
_PROBE_LIMIT_S = 30.0
_STALE = 3
_LOOK_AGAIN_S = 15.0
_MAX_MODELS = 64


class ServedModel:
    """One model under the name that callers use. `heard` is told of every token that came through."""

    def __init__(self, name: str, client: SwarmClient, *, clock: Callable[[], float]) -> None:
        self.name = name
        self.client = client
        self.created = int(time.time())
        self.problem = ""
        self._clock = clock
        self._last_token_at: float | None = None

    @property
    def digest(self) -> str:
        return self.client.manifest.digest

    @property
    def token_age_s(self) -> float | None:
        """Seconds since a token came through a route; None before the first."""
        return None if self._last_token_at is None else self._clock() - self._last_token_at

    def heard(self) -> None:
        self._last_token_at = self._clock()
        self.problem = ""

    async def probe(self) -> None:
        """Have one token made. Raises nothing of its own; `problem` says what was wrong."""
        try:
            async with asyncio.timeout(_PROBE_LIMIT_S), contextlib.aclosing(self._one_token()) as pieces:
                async for piece in pieces:
                    if piece.token_ids:
                        self.heard()
        except TimeoutError:
            self.problem = f"no token came through within {_PROBE_LIMIT_S:g} s"
        except SwarmError as error:
            self.problem = str(error)
        except Exception:  # the other models, and this one later, are asked all the same
            _log.exception("a bug of this program, while it asked %s for a token", self.name)
            self.problem = "the gateway made a mistake; its log says which"

    def _one_token(self) -> AsyncGenerator[Piece, None]:
        return self.client.generate([1], GenerationConfig(max_new_tokens=1))


Connect = Callable[[str], Awaitable[SwarmClient]]


class ModelPool:
    """A context that closes what it was offered and what it connected to. `connect` makes the client of a model.

    Of the models that the swarm names by itself `most` are taken: anybody may name more.
    """

    def __init__(
        self,
        directory: Directory,
        connect: Connect,
        *,
        probe_s: float,
        most: int = _MAX_MODELS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self._connect = connect
        self._probe_s = probe_s
        self._most = most
        self._found: set[str] = set()  # digests of those that were not asked for by name
        self._told: dict[str, str] = {}  # of each digest that was left out, why
        self._clock = clock
        self._served: dict[str, ServedModel] = {}
        self._background: list[asyncio.Task[None]] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def of(
        cls,
        models: Sequence[str],
        initial_peers: Sequence[Address],
        *,
        client_config: ClientConfig,
        probe_s: float,
        follow: bool = False,
    ) -> AsyncIterator[Self]:
        """Clients of each of `models`; with `follow` of all that the swarm serves, now and later.

        Raises what `SwarmClient.connect` raises.
        """

        async def connect(model: str) -> SwarmClient:
            return await SwarmClient.connect(model, initial_peers=initial_peers, config=client_config)

        directory = PeerDirectory(initial_peers, hello=client_hello())
        async with _closed(directory), cls(directory, connect, probe_s=probe_s) as pool:
            for model in models:
                await pool.add(model)
            if follow:
                await pool.add_new()
            pool.begin(follow=follow)
            yield pool

    @property
    def served(self) -> list[ServedModel]:
        return list(self._served.values())

    def find(self, model: str) -> ServedModel:
        """By name, digest, or the first digits of one. Raises RequestError (404) that lists what there is."""
        wanted = model.casefold()
        for served in self.served:
            by_digest = len(wanted) >= MIN_DIGEST_PREFIX and served.digest.startswith(wanted)
            if served.name.casefold() == wanted or by_digest:
                return served
        names = ", ".join(self._served) or "none yet"
        raise RequestError(
            f"there is no model {model[:80]!r} here; there are {names}",
            status=404,
            reason="model_not_found",
            param="model",
        )

    def is_ready(self, served: ServedModel) -> bool:
        """A token came through lately."""
        age = served.token_age_s
        return age is not None and age <= _STALE * self._probe_s

    def begin(self, *, follow: bool = False) -> None:
        """See to it that tokens come through; with `follow` look for new models too."""
        self._background.append(asyncio.create_task(self._probe_quiet(), name="probe"))
        if follow:
            self._background.append(asyncio.create_task(self._follow(), name="follow the swarm"))

    async def add(self, model: str) -> None:
        """Raises what `SwarmClient.connect` raises."""
        client = await self._connect(model)
        if any(served.digest == client.manifest.digest for served in self.served):
            await client.close()
        else:
            self.offer(client)

    def offer(self, client: SwarmClient) -> None:
        """From now on it belongs to the fleet."""
        name = client.manifest.name
        if name in self._served:  # another model of the same name
            name = f"{name}@{client.manifest.digest[:12]}"
        self._served[name] = ServedModel(name, client, clock=self._clock)

    async def add_new(self) -> None:
        """Every model of the swarm that is not there yet; those that nobody serves whole may come later."""
        found = served_models(model_records(await self.directory.collect(MODELS_TOPIC)))
        if len(self._served) >= self._most:
            await self._make_room({model.digest for model in found})
        known = {served.digest for served in self.served}
        told, self._told = self._told, {}
        # those that could not be had come last: they must not keep others waiting
        for model in sorted(found, key=lambda model: model.digest in told):
            if model.digest in known:
                continue
            why = f"{self._most} models are offered already"
            if len(self._served) < self._most:
                try:
                    await self.add(model.digest)
                    self._found.add(model.digest)
                    continue
                except SwarmError as error:
                    why = str(error)
            self._told[model.digest] = why
            if told.get(model.digest) != why:
                _log.warning("%s is left out for now: %s", model.name, why)

    async def _make_room(self, announced: set[str]) -> None:
        """Part with models that the swarm named once and names no more, and that nobody uses."""
        for name, served in list(self._served.items()):
            if served.digest in self._found - announced and not served.client.routes:
                del self._served[name]
                self._found.discard(served.digest)
                await served.client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await asyncio.gather(*(served.client.close() for served in self.served))

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_AGAIN_S)
            try:
                await self.add_new()
            except SwarmError as error:
                _log.warning("what the swarm serves cannot be looked up: %s", error)
            except Exception:  # it may be better the next time
                _log.exception("a bug of this program, while it looked for models")

    async def _probe_quiet(self) -> None:
        """Ask for a token where nobody else has lately."""
        while True:
            quiet = [s for s in self.served if s.token_age_s is None or s.token_age_s >= self._probe_s]
            await asyncio.gather(*(served.probe() for served in quiet))
            await asyncio.sleep(min(self._probe_s, 5.0))


@contextlib.asynccontextmanager
async def _closed(directory: PeerDirectory) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await directory.close()

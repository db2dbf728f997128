"""The models that a gateway offers: a client of the swarm for each, and whether it is ready."""

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
from client.gateway.api.errors import INTERNAL_ERROR
from client.generation.generate import Piece
from swarm.discovery.directory import MODELS_TOPIC, Directory
from swarm.discovery.peer_directory import MIN_DIGEST_PREFIX, PeerDirectory, served_models
from swarm.discovery.records import model_records
from swarm.errors import RequestError, SwarmError
from swarm.transport.address import Address
from swarm.transport.hello import client_hello

_log = logging.getLogger(__name__)
_PROBE_TIMEOUT_S = 30.0
_READY_PERIODS = 3
_DISCOVERY_INTERVAL_S = 15.0
_MAX_MODELS = 64


class ServedModel:
    """One model under the name that callers use. `problem` says why the last probe failed, or is empty."""

    def __init__(self, name: str, client: SwarmClient) -> None:
        self.name = name
        self.client = client
        self.created = int(time.time())
        self.problem = ""
        self._last_token_at: float | None = None

    @property
    def digest(self) -> str:
        return self.client.manifest.digest

    @property
    def token_age_s(self) -> float | None:
        """Seconds since the last generated token; None before the first."""
        return None if self._last_token_at is None else time.monotonic() - self._last_token_at

    def record_token(self) -> None:
        self._last_token_at = time.monotonic()
        self.problem = ""

    async def probe(self) -> None:
        """Generate one token. Raises nothing of its own; failures are kept in `problem`."""
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S), contextlib.aclosing(self._generate_one()) as pieces:
                async for piece in pieces:
                    if piece.token_ids:
                        self.record_token()
        except TimeoutError:
            self.problem = f"no token was generated within {_PROBE_TIMEOUT_S:g} s"
        except SwarmError as error:
            self.problem = str(error)
        except Exception:  # other models, and later probes of this one, must go on
            _log.exception("a bug of this program, while it asked %s for a token", self.name)
            self.problem = INTERNAL_ERROR.message

    def _generate_one(self) -> AsyncGenerator[Piece, None]:
        return self.client.generate([1], GenerationConfig(max_new_tokens=1))


Connect = Callable[[str], Awaitable[SwarmClient]]


class ModelPool:
    """The clients of all offered models, by name. An async context manager that closes them.

    `connect` makes the client of a model. Discovery stops at `max_models` models: any peer may announce more.
    """

    def __init__(
        self, directory: Directory, connect: Connect, *, probe_s: float, max_models: int = _MAX_MODELS
    ) -> None:
        self.directory = directory
        self._connect = connect
        self._probe_s = probe_s
        self._max_models = max_models
        self._discovered: set[str] = set()  # digests of models that were not asked for by name
        self._skipped: dict[str, str] = {}  # digest -> why the model is not offered
        self._served: dict[str, ServedModel] = {}
        self._background: list[asyncio.Task[None]] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        models: Sequence[str],
        initial_peers: Sequence[Address],
        *,
        client_config: ClientConfig,
        probe_s: float,
        follow: bool = False,
    ) -> AsyncIterator[Self]:
        """Connect to each of `models`; with `follow`, to all models that the swarm serves, now and later.

        Raises what `SwarmClient.connect` raises.
        """

        async def connect(model: str) -> SwarmClient:
            return await SwarmClient.connect(model, initial_peers=initial_peers, config=client_config)

        directory = PeerDirectory(initial_peers, hello=client_hello())
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(directory.close)
            async with cls(directory, connect, probe_s=probe_s) as pool:
                for model in models:
                    await pool.add(model)
                if follow:
                    await pool.discover()
                pool.start(follow=follow)
                yield pool

    @property
    def served(self) -> list[ServedModel]:
        return list(self._served.values())

    def find(self, model: str) -> ServedModel:
        """Find a model by name, digest or prefix of a digest. Raises RequestError (404) that lists the names."""
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
        """Whether the last token is at most three probe periods old."""
        age = served.token_age_s
        return age is not None and age <= _READY_PERIODS * self._probe_s

    def start(self, *, follow: bool = False) -> None:
        """Probe idle models in the background; with `follow`, discover new models too."""
        self._background.append(asyncio.create_task(self._probe_idle(), name="probe"))
        if follow:
            self._background.append(asyncio.create_task(self._discover_periodically(), name="discover models"))

    async def add(self, model: str) -> None:
        """Raises what `SwarmClient.connect` raises."""
        client = await self._connect(model)
        if any(served.digest == client.manifest.digest for served in self.served):
            await client.close()
        else:
            self.add_client(client)

    def add_client(self, client: SwarmClient) -> None:
        """Offer the model of `client`. The pool closes the client."""
        name = client.manifest.name
        if name in self._served:  # another model of the same name
            name = f"{name}@{client.manifest.digest[:12]}"
        self._served[name] = ServedModel(name, client)

    async def discover(self) -> None:
        """Add every model of the swarm that is not offered yet. A model with missing layers is tried again later."""
        found = served_models(model_records(await self.directory.collect(MODELS_TOPIC)))
        if len(self._served) >= self._max_models:
            await self._remove_unused({model.digest for model in found})
        offered = {served.digest for served in self.served}
        skipped_before, self._skipped = self._skipped, {}
        # Models that were skipped before come last: their timeouts must not delay the others.
        for model in sorted(found, key=lambda model: model.digest in skipped_before):
            if model.digest in offered:
                continue
            reason = f"{self._max_models} models are offered already"
            if len(self._served) < self._max_models:
                try:
                    await self.add(model.digest)
                    self._discovered.add(model.digest)
                    continue
                except SwarmError as error:
                    reason = str(error)
            self._skipped[model.digest] = reason
            if skipped_before.get(model.digest) != reason:
                _log.warning("%s is left out for now: %s", model.name, reason)

    async def _remove_unused(self, announced: set[str]) -> None:
        """Remove discovered models that are not announced any more and have no session."""
        for name, served in list(self._served.items()):
            if served.digest in self._discovered - announced and not served.client.routes:
                del self._served[name]
                self._discovered.discard(served.digest)
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

    async def _discover_periodically(self) -> None:
        while True:
            await asyncio.sleep(_DISCOVERY_INTERVAL_S)
            try:
                await self.discover()
            except SwarmError as error:
                _log.warning("the models of the swarm cannot be looked up: %s", error)
            except Exception:  # the next attempt may succeed
                _log.exception("a bug of this program, while it looked for models")

    async def _probe_idle(self) -> None:
        while True:
            idle = [s for s in self.served if s.token_age_s is None or s.token_age_s >= self._probe_s]
            await asyncio.gather(*(served.probe() for served in idle))
            await asyncio.sleep(min(self._probe_s, 5.0))

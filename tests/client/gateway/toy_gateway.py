"""A real gateway on a real port over toy peers, in its own thread: tests call it over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import httpx

from client.client import SwarmClient
from client.config import ClientConfig
from client.gateway.app import Gateway
from client.gateway.config import GatewayConfig
from client.gateway.http.server import Shutdown
from client.gateway.http.server import run as serve
from client.gateway.model_pool import ModelPool
from swarm.transport.address import Address
from tests.client.scripted_peer import ScriptedPeer
from tests.client.toy_world import QUICK, World

T = TypeVar("T")
PATIENCE_S = 30.0
# Long timeouts: callers, gateway and peers share one process, and a busy machine must not look like a failed peer.
PATIENT = replace(
    QUICK,
    connect_timeout_s=PATIENCE_S,
    measure_timeout_s=PATIENCE_S,
    open_timeout_s=PATIENCE_S,
    ping_timeout_s=PATIENCE_S,
    step_floor_s=PATIENCE_S,
    stall_s=PATIENCE_S,
)
ANYWHERE = Address("127.0.0.1", 0)


@dataclass
class ToyGateway:
    """Handle of a running toy gateway."""

    url: str
    world: World
    pool: ModelPool
    shutdown: Shutdown
    loop: asyncio.AbstractEventLoop
    http: httpx.Client
    ended: threading.Event = field(default_factory=threading.Event)

    def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` in the gateway's event loop and return its result."""

        async def run() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE_S)

    def request_shutdown(self) -> None:
        self.loop.call_soon_threadsafe(self.shutdown.requested.set)

    def slow_down(self, delay_s: float) -> None:
        """Delay every later step at each peer."""
        for peer in self.peers:
            peer.delay_s = delay_s

    @property
    def peers(self) -> list[ScriptedPeer]:
        return list(self.world.swarm.peers.values())

    @property
    def sessions(self) -> int:
        async def count() -> int:
            return self.world.swarm.open_sessions

        return self.call(count)


@contextlib.contextmanager
def toy_gateway(
    *, eos: tuple[int, ...] = (), probing: bool = False, client: ClientConfig = PATIENT, **options: Any
) -> Iterator[ToyGateway]:
    """Run a gateway. `options` are GatewayConfig's; without `probing` it sends no requests of its own."""
    config = GatewayConfig(**{"listen": ANYWHERE, "grace_s": 5.0, "temperature": 0.0, **options})
    listening = threading.Event()
    gateways: list[ToyGateway] = []
    errors: list[BaseException] = []

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            world = World(client, eos)
            stack.push_async_callback(world.swarm.close)
            await world.add_three_peers()

            async def connect(model: str) -> SwarmClient:
                return world.client()

            pool = await stack.enter_async_context(ModelPool(world.swarm.directory, connect, probe_s=config.probe_s))
            pool.add_client(world.client())
            stack.push_async_callback(world.planner.close)
            if probing:
                pool.start()
            shutdown = Shutdown()
            gateway = await stack.enter_async_context(Gateway(pool, config, stopping=shutdown.requested))

            def on_listening(address: Address) -> None:
                url, loop = f"http://{address.host_port}", asyncio.get_running_loop()
                http = httpx.Client(base_url=url, timeout=PATIENCE_S, verify=False)
                gateways.append(ToyGateway(url, world, pool, shutdown, loop, http))
                listening.set()

            await serve(gateway.app(), config, shutdown=shutdown, on_listening=on_listening)
        gateways[0].ended.set()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            errors.append(error)
            raise
        finally:
            listening.set()

    thread = threading.Thread(target=run, name="toy gateway")
    thread.start()
    try:
        assert listening.wait(PATIENCE_S)
        assert gateways, errors
        yield gateways[0]
    finally:
        if gateways and thread.is_alive():
            with contextlib.suppress(RuntimeError):
                gateways[0].request_shutdown()
        thread.join(PATIENCE_S)
        for gateway in gateways:
            gateway.http.close()
    assert not thread.is_alive()
    assert not errors

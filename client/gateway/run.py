"""Runs a gateway: connects to its models, listens, and stops on a signal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from client.config import ClientConfig
from client.gateway.app import Gateway
from client.gateway.config import GatewayConfig
from client.gateway.http.server import Shutdown
from client.gateway.http.server import run as run_server
from client.gateway.model_pool import ModelPool
from swarm.transport.address import Address

OnListening = Callable[[Address, Sequence[str]], None]
"""Called with the address that the gateway listens at, and the names of its models."""


async def run(
    models: Sequence[str],
    initial_peers: Sequence[Address],
    config: GatewayConfig,
    *,
    client_config: ClientConfig,
    follow: bool,
    on_listening: OnListening,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises ConfigError where it cannot listen, and what `ModelPool.open` and `SwarmClient.load_draft` raise.
    """
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(
            ModelPool.open(models, initial_peers, client_config=client_config, probe_s=config.probe_s, follow=follow)
        )
        for served in pool.served:
            await served.client.load_draft(config.draft)  # a wrong draft must fail here, not at the first request
        shutdown = Shutdown()
        gateway = await stack.enter_async_context(Gateway(pool, config, stopping=shutdown.requested))
        stack.enter_context(shutdown.on_signals())
        await run_server(
            gateway.app(),
            config,
            shutdown=shutdown,
            on_listening=lambda address: on_listening(address, [served.name for served in pool.served]),
        )

"""A gateway from its start to its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from client.config import ClientConfig
from client.gateway.app import Gateway
from client.gateway.config import GatewayConfig
from client.gateway.http.server import Ending
from client.gateway.http.server import run as run_server
from client.gateway.model_pool import ModelPool
from swarm.transport.address import Address

Listening = Callable[[Address, Sequence[str]], None]
"""Hears where the gateway listens, and the names of its models."""


async def run(
    models: Sequence[str],
    initial_peers: Sequence[Address],
    config: GatewayConfig,
    *,
    client_config: ClientConfig,
    follow: bool,
    listening: Listening,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises ConfigError where it cannot listen, and what `ModelPool.of` and `SwarmClient.load_draft` raise.
    """
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(
            ModelPool.of(models, initial_peers, client_config=client_config, probe_s=config.probe_s, follow=follow)
        )
        for served in pool.served:
            await served.client.load_draft(config.draft)  # a wrong one is its operator's fault, and no caller's
        ending = Ending()
        gateway = await stack.enter_async_context(Gateway(pool, config, ending=ending.asked))
        stack.enter_context(ending.on_signals())
        await run_server(
            gateway.app(),
            config,
            ending=ending,
            listening=lambda place: listening(place, [served.name for served in pool.served]),
        )

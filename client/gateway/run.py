"""A gateway from its start to its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from client.config import ClientConfig
from client.gateway.app import Gateway
from client.gateway.config import GatewayConfig
from client.gateway.fleet import Fleet
from client.gateway.server import run as run_server
from swarm.address import Address

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
    """Until SIGINT or SIGTERM. Raises what `Fleet.open` raises, and ConfigError where it cannot listen."""
    async with contextlib.AsyncExitStack() as stack:
        fleet = await Fleet.open(
            models, initial_peers, client_config=client_config, probe_s=config.probe_s, follow=follow
        )
        stack.push_async_callback(fleet.close)
        gateway = Gateway(fleet, config)
        stack.push_async_callback(gateway.close)
        await run_server(
            gateway.app(),
            config,
            ending=gateway.ending,
            listening=lambda place: listening(place, [served.name for served in fleet.served]),
        )

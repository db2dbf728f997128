"""`swarm serve`: a gateway to a swarm, or to a demo swarm on this machine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from client.config import AUTO, NGRAM, OFF, ClientConfig
from client.gateway.config import DEFAULT_LISTEN, GatewayConfig, check_exposure
from client.gateway.keys import Keys
from client.options import (
    DraftOption,
    JsonFlag,
    NumericsOption,
    parse_initial_peers,
    parse_numerics,
    stderr_console,
    write_json,
)
from swarm.errors import ConfigError
from swarm.process import event_loop
from swarm.transport.address import Address


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL...", help="Directories of packages, or names or digests of models to serve."),
    ] = None,
    initial_peers: Annotated[
        list[str] | None,
        typer.Option("--initial-peer", metavar="HOST:PORT[#PEER_ID]", help="A peer to start from; repeatable."),
    ] = None,
    all_models: Annotated[bool, typer.Option("--all", help="Offer every model that the swarm serves.")] = False,
    demo: Annotated[
        bool, typer.Option("--demo", help="Start a swarm on this machine first, like `swarm demo`.")
    ] = False,
    peers: Annotated[int, typer.Option(min=1, help="Number of peers that --demo starts.")] = 3,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 takes a free one.")
    ] = DEFAULT_LISTEN.host_port,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with the accepted API keys, one on each line.")
    ] = None,
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Accept requests without an API key from anywhere.")
    ] = False,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="https://HOST", help="Accept requests of pages of this origin (CORS); repeatable."),
    ] = None,
    max_concurrent: Annotated[
        int, typer.Option(min=1, help="Maximum number of answers generated at the same time.")
    ] = GatewayConfig.max_concurrent,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Maximum number of waiting requests; more are refused with 429.")
    ] = GatewayConfig.max_waiting,
    default_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum length of a chat answer in tokens if the request does not set one.")
    ] = GatewayConfig.default_tokens,
    temperature: Annotated[
        float, typer.Option(min=0, max=2, help="The temperature if the request does not set one; OpenAI's is 1.")
    ] = GatewayConfig.temperature,
    draft: DraftOption = AUTO,
    numerics: NumericsOption = "",
    grace: Annotated[
        float, typer.Option(min=1, help="Seconds that running answers may take after Ctrl-C.")
    ] = GatewayConfig.grace_s,
    as_json: JsonFlag = False,
) -> None:
    """Serve OpenAI's API over a swarm, and a page with a chat and the swarm's state.

    After Ctrl-C it accepts no more requests, finishes running answers, and exits with 0. Ctrl-C twice exits at once.
    """
    listen_address = Address.parse(listen, any_port=True)
    keys = Keys.read(api_key_file) if api_key_file is not None else None
    check_exposure(listen_address, keys, no_auth=no_auth)
    if demo and (models or initial_peers or all_models):
        raise ConfigError("--demo has its own model and peers: remove MODEL, --initial-peer and --all")
    if not demo and not models and not all_models:
        raise ConfigError("no model to serve: name one, or add --all; `swarm serve --demo` needs neither")
    if draft not in (AUTO, NGRAM, OFF) and (all_models or len(models or []) > 1):
        raise ConfigError(f"--draft {draft} fits only one model, the one with its tokenizer: serve that model alone")
    config = GatewayConfig(
        listen=listen_address,
        keys=keys,
        allow_origins=tuple(allow_origin or ()),
        max_concurrent=max_concurrent,
        max_waiting=max_waiting,
        default_tokens=default_tokens,
        temperature=temperature,
        draft=draft,
        grace_s=grace,
    )
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    client_config = ClientConfig(numerics=parse_numerics(numerics), draft_engine="auto")
    if demo:
        from client.gateway.http.server import bind
        from swarm.app.demo import demo_swarm

        bind(listen_address).close()  # Fail before the start of the peers, which takes half a minute.
        with demo_swarm(stderr_console(), peers=peers, precision="accuracy") as (swarm, manifest):
            _serve([manifest.digest], parse_initial_peers(swarm.addresses), config, client_config, False, as_json)
            stderr_console().print("stopping the peers", style="dim")
    else:
        _serve(models or [], parse_initial_peers(initial_peers or []), config, client_config, all_models, as_json)


def _serve(
    models: Sequence[str],
    initial_peers: Sequence[Address],
    config: GatewayConfig,
    client_config: ClientConfig,
    follow: bool,
    as_json: bool,
) -> None:
    # Imported here: `swarm serve --help` must not wait for the web server's import.
    from client.gateway.run import run

    def on_listening(address: Address, names: Sequence[str]) -> None:
        url = f"http://{address.host_port}"
        if as_json:
            write_json({"phase": "listening", "url": url, "models": list(names)}, indent=None)
            return
        console = stderr_console()
        console.print(
            f"{', '.join(names) or 'no model yet'}: a page at {url}, OpenAI's API at {url}/v1", soft_wrap=True
        )
        typer.echo(url)

    event_loop.run(
        run(models, initial_peers, config, client_config=client_config, follow=follow, on_listening=on_listening)
    )

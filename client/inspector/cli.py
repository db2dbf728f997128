"""The commands `swarm routes` and `swarm models`. Data goes to stdout, everything else to stderr."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from client.inspector.picture import Picture, picture_models
from client.inspector.report import SCHEMA, Inspection, ModelView, view_model
from client.inspector.swarm_inspector import SwarmInspector
from client.options import (
    DEFAULT_SESSION_TOKENS,
    InitialPeers,
    JsonFlag,
    ModelArgument,
    NumericsOption,
    package_manifest,
    parse_initial_peers,
    parse_numerics,
    stderr_console,
    stdout_console,
    write_json,
)
from swarm.discovery.directory import MODELS_TOPIC
from swarm.discovery.peer_directory import PeerDirectory, find_peers, first_contact_note, served_models
from swarm.discovery.records import model_records
from swarm.errors import DirectoryError, NotCovered, PeerError, RemoteProtocolError
from swarm.model.manifest import MAX_LAYERS
from swarm.process import event_loop
from swarm.routing.plan import Objective
from swarm.transport.address import Address
from swarm.transport.hello import client_hello

_MAX_MODELS = 64
_REMOTE_ERRORS = (DirectoryError, PeerError, RemoteProtocolError)


def routes(
    model: ModelArgument,
    initial_peers: InitialPeers,
    as_json: JsonFlag = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Repeat until Ctrl-C; with --json, one object a line.")
    ] = False,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="The interval of --watch.")] = 2.0,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens in a step: 1 to decode, more for a prompt's chunk.")] = 1,
    kv_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of KV cache that must be free on each peer; a longer prompt needs more.")
    ] = DEFAULT_SESSION_TOKENS,
    objective: Annotated[
        Objective,
        typer.Option(help="latency: the shortest step, for one user; throughput: the least slow hop, for many."),
    ] = "latency",
    numerics: NumericsOption = "",
) -> None:
    """Show which peers serve which layers, the route that a client would take, and why others lost.

    PACKAGE_OR_NAME is a model package's directory, or the name or digest of a model that is served.

    Exit code 3 where no route covers the model; the missing layers are named.
    """
    initial = parse_initial_peers(initial_peers)
    inspector = SwarmInspector(
        model=model,
        manifest=package_manifest(model),
        tokens=tokens,
        kv_tokens=kv_tokens,
        objective=objective,
        numerics=parse_numerics(numerics),
    )
    event_loop.run(_watch(inspector, initial, every, as_json) if watch else _show_once(inspector, initial, as_json))


def models(initial_peers: InitialPeers, as_json: JsonFlag = False) -> None:
    """List the models that a swarm serves: name, digest, source, licence, layers covered, peers, size of a layer."""
    event_loop.run(_list_models(parse_initial_peers(initial_peers), as_json))


@contextlib.asynccontextmanager
async def _directory(initial: Sequence[Address]) -> AsyncIterator[PeerDirectory]:
    directory = PeerDirectory(initial, hello=client_hello())
    try:
        yield directory
    finally:
        await directory.close()


async def _show_once(inspector: SwarmInspector, initial: Sequence[Address], as_json: bool) -> None:
    """Raises NotCovered after showing the inspection, where layers are missing."""
    console = stderr_console()
    async with _directory(initial) as directory:
        with console.status("") as status:
            inspection = await inspector.inspect(directory, lambda text: status.update(Text(text)))
        _note_trusted(directory)
    if inspector.assumption:
        _note(inspector.assumption)
    if as_json:
        write_json(inspection.to_plain())
    else:
        stdout_console().print(Picture(inspection))
    if not inspection.covered:
        raise NotCovered(inspection.problem, missing=[(span.first, span.last) for span in inspection.missing])


async def _watch(inspector: SwarmInspector, initial: Sequence[Address], every: float, as_json: bool) -> None:
    """Raises what the first inspection raises. Where a later one fails, the last picture stays, with the reason."""
    console = stdout_console()
    async with _directory(initial) as directory:
        inspection, problem = await inspector.inspect(directory), ""
        _note_trusted(directory)
        if inspector.assumption:
            _note(inspector.assumption)
        with contextlib.ExitStack() as stack:
            live = None
            if console.is_terminal and not as_json:
                live = stack.enter_context(Live(console=console, auto_refresh=False))
            while True:
                if as_json and not problem:
                    write_json(inspection.to_plain(), indent=None)
                elif as_json:
                    _note(f"trying again: {problem}")
                else:
                    frame = Group(Picture(inspection), Text(), _footer(inspection, every, problem))
                    console.print(frame) if live is None else live.update(frame, refresh=True)
                await asyncio.sleep(every)
                try:
                    inspection, problem = await inspector.inspect(directory), ""
                except _REMOTE_ERRORS as error:
                    problem = str(error)


def _footer(inspection: Inspection, every: float, problem: str) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(inspection.at))
    if problem:
        return Text(f"as of {at}; trying again: {problem}", "bold red")
    return Text(f"as of {at}, every {every:g} s, until Ctrl-C", "dim")


async def _list_models(initial: Sequence[Address], as_json: bool) -> None:
    console = stderr_console()
    async with _directory(initial) as directory:
        with console.status("looking up models and their peers"):
            served = served_models(model_records(await directory.collect(MODELS_TOPIC)))
            served = [model for model in served if 0 < model.layers <= MAX_LAYERS]
            async with asyncio.TaskGroup() as group:
                lookups = [
                    group.create_task(find_peers(directory, model.digest, now=time.time()))
                    for model in served[:_MAX_MODELS]
                ]
        _note_trusted(directory)
    views: list[ModelView] = [view_model(model, task.result()) for model, task in zip(served, lookups, strict=False)]
    if len(served) > _MAX_MODELS:
        _note(f"the first {_MAX_MODELS} of {len(served)} models")
    if as_json:
        write_json({"schema": SCHEMA, "models": [view.to_plain() for view in views]})
    elif views:
        stdout_console().print(picture_models(views))
    else:
        _note("no model is served here yet; start a peer with `swarm join PACKAGE`")


def _note_trusted(directory: PeerDirectory) -> None:
    for address in directory.trusted:
        _note(first_contact_note(address))


def _note(text: str) -> None:
    """Print a note without wrapping it: people copy addresses out of it."""
    stderr_console().print(f"note: {text}", soft_wrap=True)

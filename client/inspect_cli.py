"""The commands `swarm routes` and `swarm models`. Data goes to stdout, everything else to stderr."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from client.inspect import SCHEMA, Inspection, MeasuredLink, ModelView, inspect_swarm, measure, view_model
from client.options import (
    USUAL_SESSION_TOKENS,
    InitialPeers,
    JsonFlag,
    ModelArgument,
    NumericsOption,
    messages,
    package_manifest,
    parse_initial_peers,
    parse_numerics,
    results,
    write_json,
)
from client.picture import Picture, picture_models
from swarm import loops
from swarm.address import Address
from swarm.channel import Channel
from swarm.directory import MODELS_TOPIC
from swarm.engine.base import Numerics
from swarm.errors import DirectoryError, NotCovered, PeerError, RemoteProtocolError, UnknownModel
from swarm.fetch import fetch_manifest
from swarm.greeting import client_hello
from swarm.manifest import MAX_LAYERS, Manifest
from swarm.peers import PeerDirectory, find_model, find_peers, served_models, told_on_trust
from swarm.records import PeerRecord, model_records
from swarm.routes import Objective, RouteRequest

_HIDDEN_BYTES = 4  # f32, the default on the wire
_ASSUMED_HIDDEN_SIZE = 4096
_MOST_MODELS = 64
_ASKED_FOR_MANIFEST = 3
_OTHERS_FAULT = (DirectoryError, PeerError, RemoteProtocolError)


def routes(
    model: ModelArgument,
    initial_peers: InitialPeers,
    as_json: JsonFlag = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again and again, until Ctrl-C; with --json, one object a line.")
    ] = False,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="How often --watch looks.")] = 2.0,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens in a step: 1 to decode, more for a prompt's chunk.")] = 1,
    kv_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of KV cache that must be free on each peer; a longer prompt needs more.")
    ] = USUAL_SESSION_TOKENS,
    objective: Annotated[
        Objective, typer.Option(help="The shortest step for one user, or the least slow stage for many.")
    ] = "latency",
    numerics: NumericsOption = "",
) -> None:
    """Show who serves which layers, the route that a client would take, and why others lost.

    PACKAGE_OR_NAME is a model package's directory, or the name or digest of a model that is served.

    Exit code 3 where no route covers the model; the missing layers are named.
    """
    initial = parse_initial_peers(initial_peers)
    look = _Look(
        text=model,
        manifest=package_manifest(model),
        tokens=tokens,
        kv_tokens=kv_tokens,
        objective=objective,
        numerics=parse_numerics(numerics),
    )
    loops.run(_watch(look, initial, every, as_json) if watch else _once(look, initial, as_json))


def models(initial_peers: InitialPeers, as_json: JsonFlag = False) -> None:
    """List the models that a swarm serves: name, digest, source, licence, layers covered, peers, size of a layer."""
    loops.run(_models(parse_initial_peers(initial_peers), as_json))


class _Look:
    """Everything that one look at a model's swarm takes, and what the first one learned for the next."""

    def __init__(
        self,
        *,
        text: str,
        manifest: Manifest | None,
        tokens: int,
        kv_tokens: int,
        objective: Objective,
        numerics: Numerics | None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._text = text
        self._tokens = tokens
        self._kv_tokens = kv_tokens
        self._objective = objective
        self._numerics = numerics
        self._wall = wall
        self._hello = client_hello()
        self._manifest = manifest
        self._model = (manifest.name, manifest.digest, len(manifest.layers)) if manifest else None

    async def __call__(self, directory: PeerDirectory, say: Callable[[str], None]) -> Inspection:
        """Raises UnknownModel, MixedModels, and what the directory raises; never for a single peer."""
        say("looking up who serves what")
        if self._model is None:
            found = await find_model(directory, self._text)
            self._model = (found.name, found.digest, found.layers)
        name, digest, layers = self._model
        records = await find_peers(directory, digest, now=self._wall())
        say(f"measuring the way to {len(records)} peers")
        links = await measure(records, self._hello)
        if self._manifest is None:
            say("asking for the manifest")
            self._manifest = await self._ask_manifest(records, links, digest)
        request = RouteRequest(
            layers=layers,
            hidden_bytes=(self._manifest.hidden_size if self._manifest else _ASSUMED_HIDDEN_SIZE) * _HIDDEN_BYTES,
            tokens=self._tokens,
            kv_tokens=min(self._kv_tokens, self._manifest.context_length) if self._manifest else self._kv_tokens,
            objective=self._objective,
            numerics=self._numerics,
        )
        return inspect_swarm(name, digest, records, request, links=links, now=self._wall())

    @property
    def assumed(self) -> str:
        """What the costs rest on that nobody said; empty where there is nothing."""
        if self._manifest is not None:
            return ""
        return f"no peer gave its manifest: transfers are counted for a hidden size of {_ASSUMED_HIDDEN_SIZE}"

    async def _ask_manifest(
        self, records: Sequence[PeerRecord], links: dict[str, MeasuredLink], digest: str
    ) -> Manifest | None:
        """From a peer nearby; None where none of a few gives it."""
        reached = [record for record in records if record.peer_id in links and links[record.peer_id].reachable]
        reached.sort(key=lambda record: links[record.peer_id].rtt_s)
        for record in reached[:_ASKED_FOR_MANIFEST]:
            try:
                channel = await Channel.open(record.places, self._hello)
                try:
                    return await fetch_manifest(channel, digest)
                finally:
                    await channel.close()
            except (*_OTHERS_FAULT, UnknownModel):
                continue  # the next one; `assumed` says so if there is none
        return None


@contextlib.asynccontextmanager
async def _directory(initial: Sequence[Address]) -> AsyncIterator[PeerDirectory]:
    directory = PeerDirectory(initial, hello=client_hello())
    try:
        yield directory
    finally:
        await directory.close()


async def _once(look: _Look, initial: Sequence[Address], as_json: bool) -> None:
    """Raises NotCovered after showing what there is."""
    console = messages()
    async with _directory(initial) as directory:
        with console.status("") as status:
            seen = await look(directory, lambda text: status.update(Text(text)))
        _say_trusted(directory)
    if look.assumed:
        _note(look.assumed)
    if as_json:
        write_json(seen.to_plain())
    else:
        results().print(Picture(seen))
    if not seen.covered:
        raise NotCovered(seen.problem, missing=[(span.first, span.last) for span in seen.missing])


async def _watch(look: _Look, initial: Sequence[Address], every: float, as_json: bool) -> None:
    """The first look may fail; later ones leave the last picture and say why it is old."""
    console = results()
    async with _directory(initial) as directory:
        seen, problem = await look(directory, lambda _: None), ""
        _say_trusted(directory)
        with contextlib.ExitStack() as stack:
            live = None
            if console.is_terminal and not as_json:
                live = stack.enter_context(Live(console=console, auto_refresh=False))
            while True:
                if as_json and not problem:
                    write_json(seen.to_plain(), indent=None)
                elif as_json:
                    _note(f"trying again: {problem}")
                else:
                    frame = Group(Picture(seen), Text(), _footer(seen, every, problem))
                    console.print(frame) if live is None else live.update(frame, refresh=True)
                await asyncio.sleep(every)
                try:
                    seen, problem = await look(directory, lambda _: None), ""
                except _OTHERS_FAULT as error:
                    problem = str(error)


def _footer(seen: Inspection, every: float, problem: str) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(seen.at))
    if problem:
        return Text(f"as of {at}; trying again: {problem}", "bold red")
    return Text(f"as of {at}, every {every:g} s, until Ctrl-C", "dim")


async def _models(initial: Sequence[Address], as_json: bool) -> None:
    console = messages()
    async with _directory(initial) as directory:
        with console.status("looking up what is served"):
            served = served_models(model_records(await directory.collect(MODELS_TOPIC)))
            served = [model for model in served if 0 < model.layers <= MAX_LAYERS]
            async with asyncio.TaskGroup() as group:
                looks = [
                    group.create_task(find_peers(directory, model.digest, now=time.time()))
                    for model in served[:_MOST_MODELS]
                ]
        _say_trusted(directory)
    views: list[ModelView] = [view_model(model, task.result()) for model, task in zip(served, looks, strict=False)]
    if len(served) > _MOST_MODELS:
        _note(f"the first {_MOST_MODELS} of {len(served)} models")
    if as_json:
        write_json({"schema": SCHEMA, "models": [view.to_plain() for view in views]})
    elif views:
        results().print(picture_models(views))
    else:
        _note("nothing is served here yet; `swarm join PACKAGE` would be the first")


def _say_trusted(directory: PeerDirectory) -> None:
    for address in directory.trusted:
        _note(told_on_trust(address))


def _note(text: str) -> None:
    """Whole on one line, off a terminal too: there are addresses in it to copy."""
    messages().print(f"note: {text}", soft_wrap=True)

"""`swarm demo`: a real model served by local peers answers one prompt, followed by a table of the time it took."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from client.client import SwarmClient
from client.config import GenerationConfig
from client.generation.generate import Piece, Reply, collect
from client.inspector.picture import Picture
from client.inspector.report import Inspection, inspect_swarm, measure_links
from client.metrics import Metrics
from client.options import DEFAULT_SESSION_TOKENS, stderr_console, write_json
from swarm import __version__
from swarm.app.demo_model import fetch_demo_model
from swarm.app.local_swarm import ANNOUNCED, LocalSwarm, Member
from swarm.discovery.peer_directory import PeerDirectory, find_peers
from swarm.engine.compile_cache import locked
from swarm.errors import PackageError
from swarm.model.manifest import Manifest, check_files, even_grid, load_manifest, sha256_of
from swarm.model.numerics import Precision
from swarm.model.span_cost import balanced_spans, check_span_count
from swarm.model.spans import LayerRange
from swarm.process import event_loop
from swarm.process.folders import cache_folder
from swarm.routing.plan import RouteRequest
from swarm.transport.address import Address
from swarm.transport.hello import client_hello

PROMPT = "Name three things that bees do."
GRID = even_grid(30)  # The demo model's grid, needed before its file is downloaded.
_KV_TOKENS = 8192  # The model's context. The demo runs one session: more would only reserve memory.


def demo(
    prompt: Annotated[str, typer.Option(help="The prompt.")] = PROMPT,
    peers: Annotated[int, typer.Option(min=1, help="How many peers share the layers.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of the answer, in tokens.")] = 128,
    precision: Annotated[
        Precision,
        typer.Option(help="accuracy: f32, with the tokens of the unsplit model; performance: the device's default."),
    ] = "accuracy",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
) -> None:
    """Download a small model, split it into layers, start peers that find each other, and stream an answer across them.

    Everything runs on this machine and is stopped at the end.
    """
    config = GenerationConfig(max_new_tokens=max_new_tokens)
    console = stderr_console()
    with demo_swarm(console, peers=peers, precision=precision) as (swarm, manifest):
        reply = event_loop.run(_generate_answer(swarm.addresses, manifest, prompt, config, console, stream=not as_json))
        console.print("\nstopping the peers", style="dim")
    if as_json:
        write_json(reply.to_plain(), indent=None)
    else:
        console.print(_time_table(reply.metrics))
        console.print(_speed(reply.metrics))


@contextmanager
def demo_swarm(console: Console, *, peers: int, precision: Precision) -> Iterator[tuple[LocalSwarm, Manifest]]:
    """Serve the demo model by `peers` peers on this machine until the context ends."""
    check_span_count(GRID, peers)  # Fail before anything is downloaded.
    package = prepare_package(console)
    manifest = load_manifest(package)
    spans = balanced_spans(manifest, peers)
    threads = max(1, (os.cpu_count() or 1) // peers)
    options = ["--precision", precision, "--threads", str(threads), "--kv-tokens", str(_KV_TOKENS), "--grace", "1"]
    with _log_folder() as folder, LocalSwarm(folder, options=options) as swarm:
        with _StartupProgress(console, spans) as startup:
            swarm.serve(package, spans, progress=startup.on_event)
        yield swarm, manifest


async def _generate_answer(
    addresses: list[str], manifest: Manifest, prompt: str, config: GenerationConfig, console: Console, *, stream: bool
) -> Reply:
    """Show the route, then generate the answer, and print it as it arrives if `stream`."""
    console.print(Picture(await _inspect_route(addresses, manifest)))
    show_prompt(console, prompt)
    async with (
        await SwarmClient.connect(manifest.digest, initial_peers=addresses) as client,
        aclosing(client.generate(prompt, config)) as pieces,
    ):
        return await collect(_print_pieces(pieces) if stream else pieces)


def show_prompt(console: Console, prompt: str) -> None:
    console.print(f"\n{prompt}\n", style="bold")


async def _print_pieces(pieces: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    """Pass the pieces on and write their text to stdout."""
    async for piece in pieces:
        sys.stdout.write(piece.text + "\n" * (piece.finish_reason is not None))
        sys.stdout.flush()
        yield piece


async def _inspect_route(addresses: list[str], manifest: Manifest) -> Inspection:
    """The route and its peers, as `swarm routes` shows them."""
    directory = PeerDirectory([Address.parse(text) for text in addresses], hello=client_hello())
    try:
        records = await find_peers(directory, manifest.digest, now=time.time())
        links = await measure_links(records, client_hello(manifest.digest))
    finally:
        await directory.close()
    request = RouteRequest(
        layers=len(manifest.layers), hidden_bytes=4 * manifest.hidden_size, kv_tokens=DEFAULT_SESSION_TOKENS
    )
    return inspect_swarm(manifest.name, manifest.digest, records, request, links=links, now=time.time())


# -- the model -----------------------------------------------------------------------------------------------------


def prepare_package(console: Console) -> Path:
    """The folder of the demo model's package in the cache. Exports it if it is missing or damaged."""
    with _progress_bars(console) as report:
        gguf = fetch_demo_model(cache_folder(), report)
    package = cache_folder() / "demo" / f"{gguf.stem}-{sha256_of(gguf)[:12]}-{__version__}"
    if _is_whole(package):
        return package  # Without the lock: the cache may be read-only.
    with locked(package):  # Of two demos at the same time, only one exports.
        if not _is_whole(package):
            from export.package.from_graph import export_package  # Loads OpenVINO: slow, and only needed here.

            shutil.rmtree(package, ignore_errors=True)
            with _progress_bars(console) as report:
                export_package(gguf, package, progress=report)
            console.print(f"exported to {package}", style="dim", soft_wrap=True)
    return package


def _is_whole(package: Path) -> bool:
    try:
        manifest = load_manifest(package)
        check_files(package, manifest.files(manifest.parts))
    except PackageError:
        return False
    return True


@contextmanager
def _progress_bars(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A function that reports progress, with a progress bar for each description."""
    columns = (
        TextColumn("{task.description:28}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what)
            progress.update(tasks[what], completed=done, total=total or None)

        yield report


# -- the peers -----------------------------------------------------------------------------------------------------


@contextmanager
def _log_folder() -> Iterator[Path]:
    """A folder for the peers' logs. It is kept after an error, which names a log in it."""
    folder = Path(tempfile.mkdtemp(prefix="swarm-demo-"))
    try:
        yield folder
    except BaseException as error:
        # Neither an interrupt nor a closed stdout is an error.
        if not isinstance(error, Exception) or isinstance(error, BrokenPipeError):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


class _StartupProgress:
    """Shows a line with the current phase of each peer."""

    def __init__(self, console: Console, spans: Sequence[LayerRange]) -> None:
        columns = (
            TextColumn("{task.description:28}", markup=False),
            TextColumn("{task.fields[phase]:10}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console)
        self._tasks = {
            span: self._progress.add_task(f"layers {span}", start=False, total=1, phase="waiting") for span in spans
        }

    def on_event(self, member: Member, event: dict[str, Any]) -> None:
        if member.span is not None:
            task, phase = self._tasks[member.span], str(event["phase"])
            self._progress.start_task(task)
            self._progress.update(task, phase=phase, completed=int(phase == ANNOUNCED))

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()


# -- times ---------------------------------------------------------------------------------------------------------


def _speed(metrics: Metrics) -> str:
    return (
        f"{metrics.new_tokens} tokens at {metrics.tokens_per_second:.1f} tokens/s, the first after "
        f"{metrics.ttft_s * 1e3:.0f} ms ({metrics.prompt_tokens} tokens of prompt)"
    )


def _time_table(metrics: Metrics) -> Table:
    """The times of the average token after the first, one row for each hop. The rows add up to the total."""
    table = Table(title="where the time of a token went, in ms", title_justify="left", box=None, pad_edge=False)
    for name in ("hop", "layers"):
        table.add_column(name, no_wrap=True)
    for name in ("way there", "queue", "compute", "codec", "other", "sum", "share"):
        table.add_column(name, justify="right")
    total = metrics.token_s or 1.0

    def row(name: str, layers: str, *seconds: float) -> None:
        cells = [f"{second * 1e3:.2f}" for second in seconds] + [""] * (5 - len(seconds))
        table.add_row(name, layers, *cells, f"{sum(seconds) * 1e3:.2f}", f"{sum(seconds) / total:.0%}")

    for hop in metrics.hops:
        row(hop.name, hop.layers, hop.network_s, hop.queue_s, hop.compute_s, hop.codec_s, hop.other_s)
    row("way back", "", metrics.return_s)
    row("client", "", 0.0, 0.0, metrics.client_s)
    table.add_row("a token", "", "", "", "", "", "", f"{metrics.token_s * 1e3:.2f}", "")
    return table

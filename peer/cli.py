"""`swarm join` and `swarm bootstrap`: options in, phases on stderr, the address on stdout."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from peer.config import JoinConfig, parse_bytes
from peer.report import ProgressCallback, Report
from swarm.engine.choice import EngineChoice
from swarm.engine.memory import share_one_heap
from swarm.model.numerics import Precision
from swarm.model.spans import LayerRange
from swarm.process import event_loop
from swarm.process.folders import cache_folder
from swarm.transport.address import Address

InitialPeers = Annotated[
    list[str] | None,
    typer.Option("--initial-peer", metavar="HOST:PORT", help="Any peer of the swarm to join; may be given again."),
]
Listen = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Address to listen on. Default: 0.0.0.0:31337, or the next free port."),
]
DhtPort = Annotated[
    int | None, typer.Option(metavar="PORT", help="Port of its DHT node. Default: the listening port + 1000.")
]
IdentityFile = Annotated[
    Path | None, typer.Option(help="File with this peer's key, created if missing. Default: a key of this user.")
]
Name = Annotated[str, typer.Option(help="Name that others see. Default: the host name.")]
Wait = Annotated[
    float | None, typer.Option(help="Seconds to retry initial peers that do not answer. Default: for ever.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per phase; the last has the address.")]
Verbose = Annotated[int, typer.Option("--verbose", "-v", count=True, help="Log sessions; twice: log everything.")]


def join(
    package: Annotated[
        str, typer.Argument(help="A package's directory, or the name or digest of a model that the swarm serves.")
    ],
    layers: Annotated[str, typer.Option(metavar="A:B|auto", help="Which layers to serve.")] = "auto",
    initial_peer: InitialPeers = None,
    listen: Listen = None,
    dht_port: DhtPort = None,
    device: Annotated[str, typer.Option(help="An OpenVINO device.")] = "CPU",
    precision: Annotated[
        Precision, typer.Option(help="f32, which gives the unsplit model's tokens, or the device's default.")
    ] = "accuracy",
    engine: Annotated[
        EngineChoice,
        typer.Option(help="paged: many sessions at once; stateful: one after another; static: NPUs; auto: what works."),
    ] = "auto",
    max_memory: Annotated[
        str | None, typer.Option(metavar="6GB", help="Memory limit of this peer. Default: 70 % of the free memory.")
    ] = None,
    kv_tokens: Annotated[int | None, typer.Option(help="Maximum tokens of KV cache, over all sessions.")] = None,
    kv_memory: Annotated[
        str | None, typer.Option(metavar="2GB", help="Maximum memory for KV cache. Default: what the span leaves.")
    ] = None,
    kv_spill: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Move the KV cache of paused sessions there when others need memory."),
    ] = None,
    kv_spill_size: Annotated[str, typer.Option(metavar="8GB", help="Maximum disk space for --kv-spill.")] = "8GB",
    shared_prefixes: Annotated[
        bool, typer.Option(help="Keep the KV cache of ended sessions for sessions with the same prefix.")
    ] = True,
    threads: Annotated[int, typer.Option(help="Compute threads; 0 leaves the choice to OpenVINO.")] = 0,
    identity: IdentityFile = None,
    name: Name = "",
    cache_dir: Annotated[Path | None, typer.Option(help="Directory for fetched files and compiled graphs.")] = None,
    wait: Wait = None,
    grace: Annotated[
        float, typer.Option(help="Seconds that a leaving peer gives its sessions to move on.")
    ] = JoinConfig.grace_s,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address of /metrics for Prometheus, without access control."),
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = 0,
) -> None:
    """Serve layers of a model: begin a swarm, or join one with --initial-peer.

    Ctrl-C announces that this peer leaves and lets its sessions move on. Ctrl-C twice leaves at once.
    """
    config = JoinConfig(
        package=package,
        layers=None if layers == "auto" else LayerRange.parse(layers),
        initial_peers=_addresses(initial_peer),
        listen=_listen_address(listen),
        dht_port=dht_port,
        device=device,
        engine=engine,
        precision=precision,
        max_memory=None if max_memory is None else parse_bytes(max_memory),
        kv_tokens=kv_tokens,
        kv_spill=kv_spill,
        kv_spill_size=parse_bytes(kv_spill_size),
        shared_prefixes=shared_prefixes,
        kv_memory=None if kv_memory is None else parse_bytes(kv_memory),
        threads=threads,
        identity=identity,
        name=name,
        cache_dir=cache_dir or cache_folder(),
        wait_s=wait,
        grace_s=grace,
        metrics=_listen_address(metrics),
    )
    _run(config, as_json=as_json, verbose=verbose)


def bootstrap(
    listen: Listen = None,
    dht_port: DhtPort = None,
    initial_peer: InitialPeers = None,
    identity: IdentityFile = None,
    name: Name = "",
    wait: Wait = None,
    as_json: AsJson = False,
    verbose: Verbose = 0,
) -> None:
    """Keep a swarm's directory alive without serving layers: an initial peer that stays."""
    config = JoinConfig(
        package=None,
        initial_peers=_addresses(initial_peer),
        listen=_listen_address(listen),
        dht_port=dht_port,
        identity=identity,
        name=name,
        cache_dir=cache_folder(),
        wait_s=wait,
    )
    _run(config, as_json=as_json, verbose=verbose)


def stderr_console() -> Console:
    """The console on stderr. No markup: names and addresses come from other machines."""
    return Console(stderr=True, markup=False, emoji=False, highlight=False)


class ConsoleReport:
    """`Report` on a terminal: phases and bars on stderr; on stdout the address, or JSON lines."""

    def __init__(self, console: Console, *, as_json: bool) -> None:
        self._console = console
        self._as_json = as_json

    def phase(self, phase: str, text: str, /, **facts: object) -> None:
        with _survive_closed(sys.stderr):
            self._console.print(text, soft_wrap=True, style="bold" if phase == "announced" else None)
            if phase == "announced" and not self._as_json:
                self._console.print("others join with --initial-peer and this address:", style="dim")
        with _survive_closed(sys.stdout):
            if self._as_json:
                typer.echo(json.dumps({"phase": phase, **facts}))
            elif phase == "announced":
                typer.echo(str(facts["address"]))

    def message(self, text: str) -> None:
        with _survive_closed(sys.stderr):
            self._console.print(text, soft_wrap=True, style="yellow")

    @contextmanager
    def progress_bar(self, text: str) -> Iterator[ProgressCallback]:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(
            *columns,
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        ) as progress:
            task = progress.add_task(text, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def _survive_closed(stream: TextIO) -> Iterator[None]:
    """Redirect `stream` to /dev/null when it cannot be written any more, so that the peer runs on.

    Examples: `swarm join --json | grep -m1 announced`, a closed terminal, a full disk.
    """
    try:
        yield
    except (OSError, SystemExit):  # rich exits on a closed pipe.
        devnull = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(devnull, stream.fileno())
        finally:
            os.close(devnull)


def _run(config: JoinConfig, *, as_json: bool, verbose: int) -> None:
    share_one_heap()
    # Imported late: `swarm join --help` must not wait for OpenVINO.
    from peer.lifecycle.join import join as run_peer
    from peer.lifecycle.shutdown import Interrupted

    console = stderr_console()
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    # RichHandler wraps lines and keeps progress bars intact; a file gets whole lines.
    handler = RichHandler(console=console, show_path=False) if console.is_terminal else logging.StreamHandler()
    logging.basicConfig(level=level, format="%(message)s", handlers=[handler])
    report: Report = ConsoleReport(console, as_json=as_json)
    try:
        event_loop.run(run_peer(config, report))
    except Interrupted as error:
        raise KeyboardInterrupt from error


def _addresses(texts: list[str] | None) -> tuple[Address, ...]:
    return tuple(Address.parse(text) for text in texts or ())


def _listen_address(text: str | None) -> Address | None:
    return None if text is None else Address.parse(text, any_port=True)

"""`swarm doctor`: each check a line, OK, WARN or FAIL, with what to do."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from client.options import JsonFlag, results, write_json
from swarm.app.doctor import Finding, Level, examine
from swarm.process import event_loop
from swarm.transport.address import Address

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def doctor(
    package: Annotated[
        Path | None,
        typer.Argument(metavar="[PACKAGE]", help="A model package: are its files whole, how much of it fits?"),
    ] = None,
    initial_peer: Annotated[
        list[str], typer.Option("--initial-peer", metavar="HOST:PORT[#PEER_ID]", help="A peer to check against.")
    ] = [],  # noqa: B006  # typer copies it
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where a peer on this machine would listen.")
    ] = "0.0.0.0:31337",
    as_json: JsonFlag = False,
) -> None:
    """Check this machine: OpenVINO's devices, memory, files, clock, whether others can reach it, the daemon.

    Ends with 1 if anything is FAIL.
    """
    peers = [Address.parse(text) for text in initial_peer]
    where = Address.parse(listen, any_port=True)
    findings = event_loop.run(_collect(package, peers, where, None if as_json else results()))
    if as_json:
        write_json({"findings": [asdict(finding) for finding in findings]})
    if any(finding.level is Level.FAIL for finding in findings):
        raise typer.Exit(1)


async def _collect(
    package: Path | None, peers: list[Address], where: Address, console: Console | None
) -> list[Finding]:
    findings = []
    async for finding in examine(package=package, initial_peers=peers, where=where):
        findings.append(finding)
        if console is not None:
            _show(finding, console)
    return findings


def _show(finding: Finding, console: Console) -> None:
    line = Text.assemble((f"{finding.level:5}", _STYLES[finding.level]), f"{finding.topic:9}", finding.text)
    console.print(line, soft_wrap=True)
    if finding.advice:
        console.print(Text(f"{'':14}→ {finding.advice}"), soft_wrap=True)

"""`swarm doctor`: shows each check as a line with OK, WARN or FAIL, and advice."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from client.options import JsonFlag, stdout_console, write_json
from swarm.app.doctor import Finding, Level, run_checks
from swarm.process import event_loop
from swarm.transport.address import Address

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def doctor(
    package: Annotated[
        Path | None,
        typer.Argument(metavar="[PACKAGE]", help="A model package to check: its files, and how many layers fit."),
    ] = None,
    initial_peer: Annotated[
        list[str],
        typer.Option("--initial-peer", metavar="HOST:PORT[#PEER_ID]", help="A peer to connect to for the check."),
    ] = [],  # noqa: B006  # typer copies it
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where a peer on this machine would listen.")
    ] = "0.0.0.0:31337",
    as_json: JsonFlag = False,
) -> None:
    """Check this machine: OpenVINO's devices, memory, files, clock, reachability, hivemind's daemon.

    The exit code is 1 if a check has the result FAIL.
    """
    peers = [Address.parse(text) for text in initial_peer]
    listen_address = Address.parse(listen, any_port=True)
    findings = event_loop.run(_collect(package, peers, listen_address, None if as_json else stdout_console()))
    if as_json:
        write_json({"findings": [asdict(finding) for finding in findings]})
    if any(finding.level is Level.FAIL for finding in findings):
        raise typer.Exit(1)


async def _collect(
    package: Path | None, peers: list[Address], listen_address: Address, console: Console | None
) -> list[Finding]:
    findings = []
    async for finding in run_checks(package=package, initial_peers=peers, listen_address=listen_address):
        findings.append(finding)
        if console is not None:
            _show(finding, console)
    return findings


def _show(finding: Finding, console: Console) -> None:
    line = Text.assemble((f"{finding.level:5}", _STYLES[finding.level]), f"{finding.topic:9}", finding.text)
    console.print(line, soft_wrap=True)
    if finding.advice:
        console.print(Text(f"{'':14}→ {finding.advice}"), soft_wrap=True)

"""`swarm inspect`: shows what a package contains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from swarm.errors import ConfigError

_MAX_GB = 1e6


def inspect(
    package: Annotated[Path, typer.Argument(help="A directory with a model package.")],
    memory: Annotated[list[float] | None, typer.Option(help="GB of a peer's memory; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a package's layers, sizes, formats, cache a token, and how many layers fit in a machine."""
    from export.package.inspect import as_json as plain
    from export.package.inspect import as_text, describe

    if wrong := [gigabytes for gigabytes in memory or () if not 0 < gigabytes <= _MAX_GB]:
        raise ConfigError(f"--memory {wrong[0]:g} is out of range: name GB, such as --memory 16")
    description = describe(package, tuple(int(gigabytes * 10**9) for gigabytes in memory or ()))
    typer.echo(json.dumps(plain(description)) if as_json else as_text(description))

"""What the commands of a client share: options with their help, and where their output goes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from swarm import __version__
from swarm.address import Address
from swarm.engine.base import Numerics
from swarm.errors import ConfigError
from swarm.manifest import MANIFEST, Manifest, load_manifest
from swarm.wire.messages import PROTOCOL_VERSION, Hello

InitialPeers = Annotated[
    list[str],
    typer.Option(
        "--initial-peer",
        metavar="HOST:PORT[#PEER_ID]",
        help="A peer to start from; repeat it to name several. With #PEER_ID nobody else is accepted there.",
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Write JSON to stdout instead of text.")]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="PACKAGE_OR_NAME", help="A model package's directory, or the name or digest of a model that is served."
    ),
]
NumericsOption = Annotated[
    str,
    typer.Option(
        metavar="INFERENCE/KV", help="Only peers that compute so, for example f32/f32. Default: whatever is cheapest."
    ),
]


def parse_initial_peers(texts: Sequence[str]) -> list[Address]:
    """Raises AddressError quoting the one that is wrong, and ConfigError where there is none."""
    if not texts:
        raise ConfigError("no peer to start from; add --initial-peer HOST:PORT, as `swarm join` prints it")
    return [Address.parse(text) for text in texts]


def parse_numerics(text: str) -> Numerics | None:
    """None for an empty text. Raises ConfigError quoting it."""
    parts = text.split("/") if text else []
    if len(parts) > 2 or not all(part.isalnum() for part in parts):
        raise ConfigError(f"{text!r} is no numerics; write INFERENCE/KV, for example f32/f32")
    return Numerics.parse(text) if text else None


def package_manifest(text: str) -> Manifest | None:
    """The manifest where `text` is a package's directory; None where it is the name of a model or its digest.

    Raises PackageError where it is a path without a package.
    """
    path = Path(text)
    if (path / MANIFEST).is_file() or len(path.parts) > 1:
        return load_manifest(path)
    return None


def client_hello(model: str = "") -> Hello:
    """What a client says of itself; `model` is the digest that it means to use, empty if it only asks."""
    return Hello(protocol=PROTOCOL_VERSION, software=__version__, role="client", model=model)


def results() -> Console:
    """Where data goes: stdout."""
    return Console(highlight=False)


def messages() -> Console:
    """Where everything goes that is not data: stderr."""
    return Console(stderr=True, highlight=False)


def write_json(plain: dict[str, Any], *, indent: int | None = 2) -> None:
    """One object to stdout, readable; with `indent` None on one line."""
    json.dump(plain, sys.stdout, indent=indent, allow_nan=False)
    sys.stdout.write("\n")
    sys.stdout.flush()

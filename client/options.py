"""What the commands of a client share: options with their help, and where their output goes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console

from client.config import GenerationConfig
from swarm.errors import ConfigError
from swarm.model.manifest import Manifest, load_manifest, package_folder
from swarm.model.numerics import Numerics
from swarm.transport.address import Address

USUAL_SESSION_TOKENS = 128 + GenerationConfig.max_new_tokens
"""What `swarm generate` asks of each peer for a short prompt: the routes shown are then those that it takes."""
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
DraftOption = Annotated[
    str,
    typer.Option(
        "--draft",
        metavar="auto|ngram|off|PACKAGE",
        help="Guess tokens that the peers then check, several a trip; never changes the text. "
        "PACKAGE: a small model with the same tokenizer; ngram: look up in the text; auto: ngram where it pays.",
    ),
]
PrefixKey = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="Share what peers keep of prompts with all who give the same key; otherwise with nobody.",
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
    folder = package_folder(text)
    return load_manifest(folder) if folder else None


def results() -> Console:
    """Where data goes: stdout. What is printed is text: peers name themselves, and none of it is markup."""
    return Console(highlight=False, markup=False, emoji=False)


def messages() -> Console:
    """Where everything goes that is not data: stderr. No markup here either."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def write_json(plain: dict[str, Any], *, indent: int | None = 2) -> None:
    """One object to stdout, readable; with `indent` None on one line. All of it or, where it is no JSON, nothing."""
    text = json.dumps(plain, indent=indent, allow_nan=False)
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()

"""What the client's commands share: options with their help texts, and output to stdout and stderr."""

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

DEFAULT_SESSION_TOKENS = 128 + GenerationConfig.max_new_tokens
"""Tokens of KV cache that `swarm generate` reserves on each peer for a short prompt. Routes are shown for as many."""
InitialPeers = Annotated[
    list[str],
    typer.Option(
        "--initial-peer",
        metavar="HOST:PORT[#PEER_ID]",
        help="A peer to start from; repeat it to name several. With #PEER_ID no other peer is accepted there.",
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
        metavar="INFERENCE/KV",
        help="Use only peers with these numerics, for example f32/f32. Default: the cheapest route.",
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
        help="Share cached prompts on the peers with all callers that give the same key. Default: share nothing.",
    ),
]


def parse_initial_peers(texts: Sequence[str]) -> list[Address]:
    """Raises AddressError quoting the malformed address, and ConfigError where the list is empty."""
    if not texts:
        raise ConfigError("no peer to start from; add --initial-peer HOST:PORT, as `swarm join` prints it")
    return [Address.parse(text) for text in texts]


def parse_numerics(text: str) -> Numerics | None:
    """Returns None for an empty text. Raises ConfigError quoting a malformed one."""
    parts = text.split("/") if text else []
    if len(parts) > 2 or not all(part.isalnum() for part in parts):
        raise ConfigError(f"{text!r} is not valid as numerics; write INFERENCE/KV, for example f32/f32")
    return Numerics.parse(text) if text else None


def package_manifest(text: str) -> Manifest | None:
    """Load the manifest where `text` is a package's directory. Returns None for the name or digest of a model.

    Raises PackageError where `text` is a path without a package.
    """
    folder = package_folder(text)
    return load_manifest(folder) if folder else None


def stdout_console() -> Console:
    """The console for data. Without markup: names of peers are untrusted text."""
    return Console(highlight=False, markup=False, emoji=False)


def stderr_console() -> Console:
    """The console for everything but data. Without markup, too."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def write_json(plain: dict[str, Any], *, indent: int | None = 2) -> None:
    """Write one object to stdout, on one line where `indent` is None. Raises ValueError for NaN, and writes nothing."""
    text = json.dumps(plain, indent=indent, allow_nan=False)
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()

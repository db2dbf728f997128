"""Which engine serves a span: by name, or by what the device can run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from swarm.engine.base import Engine
from swarm.errors import ConfigError
from swarm.manifest import Manifest
from swarm.spans import LayerRange

EngineKind = Literal["stateful", "static"]
EngineChoice = Literal["auto", "stateful", "static"]
ENGINE_CHOICES: tuple[EngineChoice, ...] = get_args(EngineChoice)


def resolve_engine(choice: str, device: str) -> EngineKind:
    """What `choice` comes to on `device`. Raises ConfigError where the device cannot run it."""
    on_npu = device.partition(".")[0] == "NPU"
    match choice:
        case "auto":
            return "static" if on_npu else "stateful"
        case "static":
            return "static"
        case "stateful" if not on_npu:
            return "stateful"
        case "stateful":
            raise ConfigError("an NPU takes graphs with neither state nor dynamic shapes: use --engine static there")
    raise ConfigError(f"engine is {choice!r}; it must be {', '.join(ENGINE_CHOICES)}")


def open_chosen_engine(
    kind: EngineKind,
    package: Path,
    manifest: Manifest,
    span: LayerRange,
    *,
    device: str = "CPU",
    precision: str = "accuracy",
    threads: int = 0,
    cache_dir: Path | None = None,
) -> Engine:
    """The engine of `kind` on `span`, compiled and warm. Raises PackageError, EngineError, ConfigError."""
    # Each engine is loaded where it is wanted alone.
    if kind == "static":
        from swarm.engine.static import open_static_engine as open_engine
    else:
        from swarm.engine.compose import open_engine  # type: ignore[assignment]
    return open_engine(
        package, manifest, span, device=device, precision=precision, threads=threads, cache_dir=cache_dir
    )


def most_tokens(kind: EngineKind, manifest: Manifest) -> int:
    """How many tokens an engine of `kind` takes in one go, and attends to."""
    return manifest.static.context if kind == "static" and manifest.static else manifest.context_length


def graphs_of(kind: EngineKind) -> int:
    """How many compiled graphs, each with its weights, an engine of `kind` is."""
    return 2 if kind == "static" else 1

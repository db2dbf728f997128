"""The choice of the engine for a span: by name, or by the device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from swarm.engine.base import Engine
from swarm.errors import ConfigError
from swarm.model.manifest import Manifest
from swarm.model.spans import LayerRange

if TYPE_CHECKING:
    from swarm.engine.paged.store import KvStore

EngineKind = Literal["paged", "stateful", "static"]
EngineChoice = Literal["auto", "paged", "stateful", "static"]
ENGINE_CHOICES: tuple[EngineChoice, ...] = get_args(EngineChoice)


def engines_to_try(choice: str, device: str) -> tuple[EngineKind, ...]:
    """The engines for `choice` on `device`, in order of preference. Raises ConfigError if none can run there."""
    kind = device.partition(".")[0]
    match choice:
        case "auto" if kind == "NPU":
            return ("static",)
        case "auto" if kind == "CPU":
            return "paged", "stateful"
        case "auto":
            return ("stateful",)
        case "static":
            return ("static",)
        case "paged" if kind != "CPU":
            raise ConfigError(f"--engine paged runs on the CPU; on {device} use --engine auto")
        case "paged":
            return ("paged",)
        case "stateful" if kind == "NPU":
            raise ConfigError("an NPU runs only graphs without state or dynamic shapes: use --engine static there")
        case "stateful":
            return ("stateful",)
    raise ConfigError(f"engine is {choice!r}; it must be {', '.join(ENGINE_CHOICES)}")


def resolve_engine(choice: str, device: str) -> EngineKind:
    """The first of `engines_to_try`."""
    return engines_to_try(choice, device)[0]


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
    kv_tokens: int = 0,
    store: KvStore | None = None,
) -> Engine:
    """Open the engine of `kind` on `span`, compiled and warmed up.

    A paged engine holds `kv_tokens` positions over all sessions, or shares `store`. Compiled graphs are cached in
    `cache_dir`, except paged ones, which OpenVINO cannot read back. Raises PackageError, EngineError, ConfigError,
    UnsupportedModel for a graph that cannot be paged.
    """
    # Imported here: each engine is loaded only when it is used.
    if kind == "paged":
        from swarm.engine.paged.engine import open_paged_engine

        return open_paged_engine(
            package,
            manifest,
            span,
            kv_tokens=kv_tokens,
            store=store,
            device=device,
            precision=precision,
            threads=threads,
        )
    if kind == "static":
        from swarm.engine.static.engine import open_static_engine as open_engine
    else:
        from swarm.engine.compose import open_engine  # type: ignore[assignment]
    return open_engine(
        package, manifest, span, device=device, precision=precision, threads=threads, cache_dir=cache_dir
    )


def max_tokens_of(kind: EngineKind, manifest: Manifest) -> int:
    """How many tokens an engine of `kind` accepts in one step, and attends to."""
    return manifest.static.context if kind == "static" and manifest.static else manifest.context_length


def graphs_of(kind: EngineKind) -> int:
    """How many compiled graphs, each with its own weights, an engine of `kind` has."""
    return 2 if kind == "static" else 1

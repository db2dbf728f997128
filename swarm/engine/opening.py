"""Which engine a span gets, and how it is made."""

from __future__ import annotations

from pathlib import Path

from swarm.engine.base import Engine, EngineChoice, EngineKind
from swarm.engine.compose import compose, open_engine
from swarm.engine.device import PAGED_ATTENTION, compile_span
from swarm.engine.memory import release_memory
from swarm.engine.paged import PagedEngine
from swarm.engine.paging import page
from swarm.engine.store import KvStore
from swarm.errors import ConfigError, EngineError
from swarm.manifest import Manifest
from swarm.spans import LayerRange


def engines_to_try(choice: EngineChoice, device: str) -> tuple[EngineKind, ...]:
    """What `choice` means on `device`: the first of these that works.

    Raises ConfigError for a choice that the device cannot have.
    """
    pages = device.partition(".")[0] == "CPU"
    if choice == "paged" and not pages:
        raise ConfigError(f"--engine paged runs on the CPU; on {device} use --engine stateful")
    if choice == "auto":
        return ("paged", "stateful") if pages else ("stateful",)
    return (choice,)


def open_span(
    package: Path,
    manifest: Manifest,
    span: LayerRange,
    *,
    kind: EngineKind,
    kv_tokens: int,
    store: KvStore | None = None,
    device: str = "CPU",
    precision: str = "accuracy",
    threads: int = 0,
    cache_dir: Path | None = None,
) -> Engine:
    """Compose and compile `span`, stand an engine of `kind` on it and warm it up.

    A paged one has room for `kv_tokens` positions, over all sessions; with `store` it shares that one's.

    Raises PackageError for the files, EngineError for the device, ConfigError for the settings, UnsupportedModel
    for a graph that cannot be paged.
    """
    if kind == "stateful":
        return open_engine(
            package, manifest, span, device=device, precision=precision, threads=threads, cache_dir=cache_dir
        )
    compiled = compile_span(
        page(compose(package, manifest, span, rows_axis=0), manifest.hidden_size),
        attention_layers=len(span),
        attention=PAGED_ATTENTION,
        device=device,
        precision=precision,
        threads=threads,
        cache_dir=cache_dir,
        cache_key=(manifest.digest, str(span), kind),
    )
    try:
        store = store or KvStore(compiled.model, span, tokens=kv_tokens)
        engine = PagedEngine(compiled, manifest, span, store)
    except RuntimeError as error:
        raise EngineError(f"{device} has no paged cache for layers {span}: {error}") from error
    engine.warm_up()
    release_memory(package, *([cache_dir] if cache_dir else []))
    return engine

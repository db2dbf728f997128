"""Exports a whole graph (GGUF file or OpenVINO IR) to a package: its parts, their hashes, the manifest.

Everything is written into a directory beside OUT that is renamed at the end. OUT is therefore either a
complete package or does not exist. Two exports of one source give the same bytes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import openvino as ov

from export.checkpoint.checkpoint import is_checkpoint
from export.graph.compress import GROUP, KEEP, Format, check_compressible, weight_format
from export.graph.cut import cut_embed, cut_head, cut_layer, read_graph, read_ir
from export.graph.layers import CausalGraph, Layer
from export.graph.part_file import parts_of, save_part, structure
from export.graph.stateful import drop_beam_gathers, prepare
from export.graph.static import check_fits, write_static
from export.package.from_checkpoint import export_checkpoint
from export.package.output_directory import check_replaceable, put_in_place, workspace
from export.sources.gguf import read_gguf_source
from export.sources.openvino_ir import read_ir_source
from export.sources.source import IR_NAME, ModelSource, Progress, no_progress, slug
from export.verify.runner import require_fused
from export.verify.static_check import check_static_layers
from swarm.errors import ConfigError, PackageError
from swarm.model.manifest import (
    EMBED,
    MANIFEST,
    TOKENIZER,
    FileEntry,
    LayerSpec,
    Manifest,
    StaticSpec,
    describe_file,
    even_grid,
)

Check = Callable[[Path, Path], None]


def export_package(
    source: Path,
    out: Path,
    *,
    weights: str = KEEP,
    group: int = GROUP,
    symmetric: bool = False,
    beam_idx: bool = True,
    name: str | None = None,
    licence: str | None = None,
    force: bool = False,
    static: StaticSpec | None = None,
    check: Check | None = None,
    progress: Progress = no_progress,
) -> Manifest:
    """Export a GGUF file, or a directory with an OpenVINO IR or a checkpoint, to the model package `out`.

    `beam_idx=False` omits the Gather behind the caches, and with it the fused attention, to measure its effect.
    If the export of a checkpoint fails, its unfinished parts stay beside `out`; `export_checkpoint` can continue it.

    `check(package, ir)` is called with the finished package before it is renamed, and may raise to refuse it.
    `force` replaces a package at `out`; anything but a package is never replaced. With `static`, static graphs of
    these sizes are written too, for NPUs.

    Raises ConfigError for a wrong argument, UnsupportedModel for a graph that cannot be cut, PackageError and
    DamagedFile for the files. `out` is then unchanged.
    """
    format = Format(weights=weights, group=group, symmetric=symmetric)
    if source.is_dir() and is_checkpoint(source) and not (source / IR_NAME).is_file():
        if check is not None:
            raise ConfigError("a checkpoint is compared with `swarm export --check PACKAGE --against CHECKPOINT`")
        whole = export_checkpoint(
            source,
            out,
            format,
            name=name,
            licence=licence,
            static=static,
            beam_idx=beam_idx,
            force=force,
            progress=progress,
        )
        assert whole is not None  # None is returned for a range of layers only.
        return whole
    check_replaceable(out, force)
    try:
        with workspace(out) as work:
            model = _open(source, work, progress)
            model = replace(model, ir=prepare(model.ir, work))
            package = work / "package"
            package.mkdir()
            manifest = _write(model, package, format, name, licence, static, progress, beam_idx=beam_idx)
            if check is not None:
                check(package, model.ir)
            put_in_place(package, out, work)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        raise PackageError(f"exporting to {out} failed:{where} {error.strerror}") from error
    return manifest


def _open(source: Path, work: Path, progress: Progress) -> ModelSource:
    if source.is_dir():
        return read_ir_source(source)
    if not source.is_file():
        raise PackageError(f"{source} does not exist: name a GGUF file or a directory with {IR_NAME}")
    scratch = work / "source"
    scratch.mkdir()
    return read_gguf_source(source, scratch, progress)


def _write(
    model: ModelSource,
    package: Path,
    format: Format,
    name: str | None,
    licence: str | None,
    static: StaticSpec | None,
    progress: Progress,
    *,
    beam_idx: bool,
) -> Manifest:
    source = read_ir(model.ir)
    graph = read_graph(source)
    found = weight_format(graph.model)
    check_compressible(found, format.weights)
    parts = _write_graphs(source, package, len(graph.layers), format, progress, beam_idx=beam_idx)
    parts[TOKENIZER] = tuple(_copy(path, package) for path in model.tokenizer)
    if static is not None:
        check_fits(static, model.context_length)
        parts |= write_static(package, len(graph.layers), static, progress)
    manifest = Manifest(
        name=slug(name or model.name),
        architecture=model.architecture,
        source=model.origin,
        licence=licence or model.licence,
        weights=found if format.weights == KEEP else str(format),
        hidden_size=graph.hidden_size,
        vocab_size=graph.vocab_size,
        context_length=model.context_length,
        eos_token_ids=model.eos_token_ids,
        layers=_specs(graph, model),
        grid=even_grid(len(graph.layers)),
        parts=parts,
        static=static,
    )
    if static is not None:
        check_static_layers(package, manifest, progress)
    (package / MANIFEST).write_bytes(manifest.to_json())
    return manifest


def _write_graphs(
    source: ov.Model, package: Path, layers: int, format: Format, progress: Progress, *, beam_idx: bool
) -> dict[str, tuple[FileEntry, ...]]:
    def cut(part: str, layer: int | None) -> ov.Model:
        if layer is not None:
            model = cut_layer(source, layer)
            return model if beam_idx else drop_beam_gathers(model)
        return cut_embed(source) if part == EMBED else cut_head(source)

    plan = parts_of(layers)
    parts = {}
    fused: set[bytes] = set()  # Structures that were checked; layers with equal structure differ only in weights.
    for done, (part, layer) in enumerate(plan):
        progress("cutting layers", done, len(plan))
        path = package / f"{part}.xml"
        parts[part] = save_part(cut(part, layer), path, format, is_layer=layer is not None)
        if layer is not None and beam_idx and (kind := structure(path)) not in fused:
            require_fused(path)
            fused.add(kind)
    progress("cutting layers", len(plan), len(plan))
    return parts


def _copy(path: Path, package: Path) -> FileEntry:
    return describe_file(Path(shutil.copyfile(path, package / path.name)))


def _specs(graph: CausalGraph, model: ModelSource) -> tuple[LayerSpec, ...]:
    windows = model.windows(len(graph.layers))
    return tuple(_spec(layer, window) for layer, window in zip(graph.layers, windows, strict=True))


def _spec(layer: Layer, window: int | None) -> LayerSpec:
    _, heads, _, key_size = layer.keys.shape
    return LayerSpec(
        kv_heads=heads.get_length(),
        key_size=key_size.get_length(),
        value_size=layer.values.shape[3].get_length(),
        window=window,
    )

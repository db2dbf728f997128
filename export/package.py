"""Writing a model package: the source, its parts, their hashes, the manifest, and only then its name.

Everything is written into a directory beside OUT that is renamed at the end, so that OUT is either a
whole package or not there. Two exports of one source give the same bytes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import openvino as ov

from export import compress
from export.cut import cut_embed, cut_head, cut_layer, name_new_ops, read_graph
from export.gguf import read_gguf_source
from export.graph import CausalGraph, Layer
from export.openvino_ir import read_ir_source
from export.source import IR_NAME, ModelSource, Progress, last_line, silent, slug
from export.static import check_fits, write_static
from export.static_check import check_static_layers
from swarm.errors import ConfigError, PackageError
from swarm.manifest import (
    EMBED,
    HEAD,
    MANIFEST,
    TOKENIZER,
    FileEntry,
    LayerSpec,
    Manifest,
    StaticSpec,
    describe_file,
    even_grid,
    layer_part,
)

Check = Callable[[Path, Path], None]


def export_package(
    source: Path,
    out: Path,
    *,
    weights: str = compress.KEEP,
    name: str | None = None,
    licence: str | None = None,
    force: bool = False,
    static: StaticSpec | None = None,
    check: Check | None = None,
    progress: Progress = silent,
) -> Manifest:
    """Turn a GGUF file, or a directory with an OpenVINO IR, into the model package `out`.

    `check(package, ir)` sees the finished package before it gets its name and may raise to refuse it.
    `force` replaces a package at `out`; nothing but a package is ever replaced. With `static` the graphs of those
    sizes are written too, for NPUs.

    Raises ConfigError for a wrong argument, UnsupportedModel for what cannot be cut, PackageError and
    DamagedFile for what is wrong with files. `out` is then as it was before.
    """
    compress.check_choice(weights)
    _check_free(out, force)
    try:
        with _workspace(out) as work:
            model = _open(source, work, progress)
            package = work / "package"
            package.mkdir()
            manifest = _write(model, package, weights, name, licence, static, progress)
            if check is not None:
                check(package, model.ir)
            _put_in_place(package, out, work)
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
    weights: str,
    name: str | None,
    licence: str | None,
    static: StaticSpec | None,
    progress: Progress,
) -> Manifest:
    graph = read_graph(model.ir)
    found = compress.weight_format(graph.model)
    compress.check_compressible(found, weights)
    parts = _write_graphs(model.ir, package, len(graph.layers), weights, progress)
    parts[TOKENIZER] = tuple(_copy(path, package) for path in model.tokenizer)
    if static is not None:
        check_fits(static, model.context_length)
        parts |= write_static(package, len(graph.layers), static, progress)
    manifest = Manifest(
        name=slug(name or model.name),
        architecture=model.architecture,
        source=model.origin,
        licence=licence or model.licence,
        weights=found if weights == compress.KEEP else weights,
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
    ir: Path, package: Path, layers: int, weights: str, progress: Progress
) -> dict[str, tuple[FileEntry, ...]]:
    def cut(part: str, layer: int | None) -> ov.Model:
        if layer is not None:
            return cut_layer(ir, layer)
        return cut_embed(ir) if part == EMBED else cut_head(ir)

    plan: list[tuple[str, int | None]] = [(EMBED, None), *((layer_part(i), i) for i in range(layers)), (HEAD, None)]
    parts = {}
    for done, (part, layer) in enumerate(plan):
        progress("cutting layers", done, len(plan))
        parts[part] = _save(cut(part, layer), package / f"{part}.xml", weights, is_layer=layer is not None)
    progress("cutting layers", len(plan), len(plan))
    return parts


def _save(model: ov.Model, path: Path, weights: str, *, is_layer: bool) -> tuple[FileEntry, ...]:
    known = {op.get_friendly_name() for op in model.get_ops()}
    model = compress.compress(model, weights, is_layer=is_layer)
    name_new_ops(model, path.stem, known)
    try:
        ov.save_model(model, path, compress_to_fp16=weights == compress.F16)
    except RuntimeError as error:
        raise PackageError(f"{path} cannot be written: {last_line(error)}") from error
    return (describe_file(path), describe_file(path.with_suffix(".bin")))


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


def _check_free(out: Path, force: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise ConfigError(f"{out} is a file: name a directory to write the package to")
    if any(out.iterdir()):
        if not (out / MANIFEST).is_file():
            raise ConfigError(f"{out} is not empty and not a model package: name another directory")
        if not force:
            raise ConfigError(
                f"{out} holds a model package already: name another directory, or replace it with --force"
            )


@contextmanager
def _workspace(out: Path) -> Iterator[Path]:
    """A directory beside `out`, on the same file system, that is gone afterwards."""
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=f".{out.name}.") as work:
        yield Path(work)


def _put_in_place(package: Path, out: Path, work: Path) -> None:
    if out.exists():
        os.replace(out, work / "replaced")
    os.replace(package, out)

"""Exports a checkpoint to a package, one part at a time: made, compressed, written, recorded, released.

The package grows in a `Journal` beside OUT and is renamed to OUT when all parts exist. Recorded parts are not made
again (`resume`), a range of layers can be made alone (`layers`), and several processes can share one journal.
"""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openvino as ov

from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.decoder import Decoder
from export.checkpoint.families import Family, check_family
from export.checkpoint.tokenizer import write_tokenizer
from export.checkpoint.torch_stack import versions
from export.graph.compress import F16, INT4, INT8, KEEP, Format, weight_format
from export.graph.part_file import parts_of, save_part, structure
from export.graph.stateful import drop_beam_gathers
from export.graph.static import check_fits, write_static
from export.package.journal import Journal, PartRecord
from export.package.output_directory import check_replaceable, put_in_place
from export.package.part_builder import PartBuilder, PartGraph, TensorTransform
from export.package.row_blocks import compress_rows
from export.sources.openvino_ir import facts, windows_of
from export.sources.source import ModelFacts, Progress, eos_of_tokenizer, no_progress, slug
from export.verify.runner import require_fused
from export.verify.static_check import check_static_layers
from swarm.engine.memory import release_memory
from swarm.errors import ConfigError, PackageError, UnsupportedModel
from swarm.model.manifest import (
    EMBED,
    HEAD,
    MANIFEST,
    TOKENIZER,
    Manifest,
    StaticSpec,
    describe_file,
    even_grid,
    layer_part,
)
from swarm.model.spans import LayerRange

_PROGRAM = 1
"""Incremented when the exporter writes other bytes for the same checkpoint, so that parts of two versions never mix."""
_SAMPLE = 4096
MAX_CONTEXT = 1 << 31
_RELEASE_AT = 16 << 20  # Bytes written. Releasing memory visits all objects, which takes longer than a tiny layer.


@dataclass(frozen=True, kw_only=True)
class CheckpointExport:
    """An export to run: the checkpoint, the format, the name."""

    decoder: Decoder
    family: Family
    facts: ModelFacts
    format: Format
    name: str | None
    licence: str | None
    beam_idx: bool = True

    @classmethod
    def open(
        cls,
        directory: Path,
        format: Format,
        *,
        name: str | None = None,
        licence: str | None = None,
        origin: str | None = None,
        beam_idx: bool = True,
    ) -> CheckpointExport:
        """Raises UnsupportedModel for a refused family, PackageError and DamagedFile for its files."""
        checkpoint = Checkpoint.open(directory)
        family = check_family(checkpoint.config, versions())
        decoder = Decoder.of(checkpoint)
        decoder.require_separable()
        fields = facts(directory, lambda: eos_of_tokenizer(directory))
        config = decoder.config.to_dict()
        fields["windows"] = lambda layers: windows_of(config, layers)
        fields["context_length"] = min(fields["context_length"], _max_context(config))
        if origin is not None:
            fields |= {"origin": origin, "name": origin.rpartition("/")[2]}
        return cls(
            decoder=decoder,
            family=family,
            facts=ModelFacts(**fields),
            format=format,
            name=name,
            licence=licence,
            beam_idx=beam_idx,
        )

    @property
    def layers(self) -> int:
        return self.decoder.layers

    def made_from(self, part: str, layer: int | None) -> str:
        """A digest of everything that the bytes of a part depend on; of each tensor, the first and last numbers."""
        checkpoint = self.decoder.checkpoint
        names = self.decoder.outer_tensors if layer is None else self.decoder.layer_tensors(layer)
        digest = hashlib.sha256()
        for name, tensor in checkpoint.read(names).items():
            info = checkpoint.tensors[name]
            digest.update(f"{name} {info.dtype} {info.shape};".encode())
            flat = tensor.reshape(-1)
            for end in (flat[:_SAMPLE], flat[-_SAMPLE:]):
                digest.update(end.float().numpy().tobytes())
        plain = [_PROGRAM, part, self.decoder.config.to_dict(), str(self.format), versions(), self.beam_idx]
        digest.update(json.dumps(plain, sort_keys=True, default=str).encode())
        return digest.hexdigest()


Make = Callable[[CheckpointExport, Journal, Sequence[str], Progress], None]


def write_parts(
    work: CheckpointExport, journal: Journal, parts: Sequence[str], progress: Progress = no_progress
) -> None:
    """Make the parts among `parts` that are not in the journal.

    Raises UnsupportedModel, PackageError or DamagedFile for the checkpoint; recorded parts stay then.
    """
    journal.create()
    gc.freeze()  # Collecting garbage among the objects of torch and transformers takes longer than a layer.
    chosen = [(part, layer) for part, layer in parts_of(work.layers) if part in parts]
    windows = work.facts.windows(work.layers)
    with tempfile.TemporaryDirectory(dir=journal.folder, prefix="traced-") as scratch:
        pieces = PartBuilder(work.decoder, work.family, Path(scratch))
        fused: set[bytes] = set()  # Structures that were checked; layers with equal structure differ only in weights.
        unreleased = 0
        for done, (part, layer) in enumerate(chosen):
            progress("exporting layers", done, len(chosen))
            made_from = work.made_from(part, layer)
            if journal.finished(part, made_from) is None:
                path = journal.package / f"{part}.xml"
                piece = _make(pieces, part, layer, windows, work.format)
                is_compressed = layer is None and work.format.weights != F16  # by `_make`
                model = piece.model if layer is None or work.beam_idx else drop_beam_gathers(piece.model)
                files = save_part(model, path, Format() if is_compressed else work.format, is_layer=layer is not None)
                record = PartRecord(part=part, made_from=made_from, files=files, facts=dict(piece.facts))
                del model, piece
                if layer is not None and work.beam_idx and (kind := structure(path)) not in fused:
                    require_fused(path)
                    fused.add(kind)
                journal.record(record)
                unreleased += files[-1].size
            if unreleased > _RELEASE_AT:
                release_memory(work.decoder.checkpoint.directory, journal.folder)
                unreleased = 0
        progress("exporting layers", len(chosen), len(chosen))


def assemble(
    work: CheckpointExport, journal: Journal, progress: Progress = no_progress, *, static: StaticSpec | None = None
) -> Manifest:
    """Complete the package in `journal.package`: write the tokenizer and the manifest.

    Raises PackageError naming the missing parts.
    """
    plan = parts_of(work.layers)
    records: dict[str, PartRecord] = {}
    for done, (part, layer) in enumerate(plan):
        progress("checking layers", done, len(plan))
        record = journal.finished(part, work.made_from(part, layer))
        if record is not None:
            records[part] = record
    progress("checking layers", len(plan), len(plan))
    if missing := [part for part, _ in plan if part not in records]:
        raise PackageError(
            f"{journal.folder} lacks {', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}: export these "
            "layers here, or copy their files there from another machine, and continue with --resume"
        )
    parts = {part: record.files for part, record in records.items()}
    parts[TOKENIZER] = tuple(map(describe_file, write_tokenizer(work.decoder.checkpoint.directory, journal.package)))
    if static is not None:
        parts |= write_static(journal.package, work.layers, static, progress)
    manifest = Manifest(
        name=slug(work.name or work.facts.name),
        architecture=work.facts.architecture,
        source=work.facts.origin,
        licence=work.licence or work.facts.licence,
        weights=_weights_name(work.format, journal.package),
        hidden_size=records[EMBED].facts["hidden_size"],
        vocab_size=records[HEAD].facts["vocab_size"],
        context_length=work.facts.context_length,
        eos_token_ids=work.facts.eos_token_ids,
        layers=tuple(records[layer_part(i)].spec() for i in range(work.layers)),
        grid=even_grid(work.layers),
        parts=parts,
        static=static,
    )
    listed = {entry.path for entry in manifest.files(manifest.parts)}
    for stray in journal.package.iterdir():
        if stray.name not in listed:
            stray.unlink()
    (journal.package / MANIFEST).write_bytes(manifest.to_json())
    if static is not None:
        check_static_layers(journal.package, manifest, progress)
    return manifest


def _max_context(config: Mapping[str, Any]) -> int:
    """The context up to which rotary embeddings of earlier positions do not change.

    Beyond the original context, longrope uses other factors for *all* positions. Keys cached before are then wrong;
    transformers computes them again. A swarm does not, therefore such a model is limited to its original context.
    """
    rotary = config.get("rope_parameters") or {}
    if rotary.get("rope_type") != "longrope":
        return MAX_CONTEXT
    original = rotary.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return int(original or MAX_CONTEXT)


def parts_within(layers: int, span: LayerRange | None) -> list[str]:
    """The parts that an export of `span` makes. Raises ConfigError if the model has no such layers."""
    if span is None:
        return [part for part, _ in parts_of(layers)]
    if span.last > layers:
        raise ConfigError(f"--layers {span} are not in the model, which has {layers}: 0:{layers} are all of them")
    ends = {EMBED: span.first == 0, HEAD: span.last == layers}
    return [part for part, layer in parts_of(layers) if (ends[part] if layer is None else layer in span)]


def export_checkpoint(
    source: Path,
    out: Path,
    format: Format,
    *,
    name: str | None = None,
    licence: str | None = None,
    origin: str | None = None,
    layers: LayerRange | None = None,
    static: StaticSpec | None = None,
    beam_idx: bool = True,
    resume: bool = False,
    force: bool = False,
    make: Make | None = None,
    progress: Progress = no_progress,
) -> Manifest | None:
    """Export the checkpoint in `source` to the package `out`; with `layers` make only these beside `out`, return None.

    `resume` continues the unfinished export beside `out`. Without it an unfinished export is an error, unless `force`
    discards it. `make` replaces `write_parts` (see `export.package.jobs`). `beam_idx=False` omits the Gather behind
    the caches, to measure its effect.

    Raises ConfigError for a wrong argument, UnsupportedModel, PackageError and DamagedFile for the checkpoint. The
    parts made until then stay beside `out`.
    """
    check_replaceable(out, force)
    journal = Journal.for_output(out)
    if journal.has_records() and not resume:
        if not force:
            raise ConfigError(
                f"{journal.folder} holds an unfinished export: continue it with --resume, or discard it with --force"
            )
        shutil.rmtree(journal.folder)
    work = CheckpointExport.open(source, format, name=name, licence=licence, origin=origin, beam_idx=beam_idx)
    if static is not None:
        check_fits(static, work.facts.context_length)
        if layers is not None:
            raise ConfigError("--static is for the run that assembles all layers: leave it out with --layers")
    parts = parts_within(work.layers, layers)
    try:
        journal.create()
        (make or write_parts)(work, journal, parts, progress)
        if layers is not None:
            return None
        manifest = assemble(work, journal, progress, static=static)
        put_in_place(journal.package, out, journal.folder)
        shutil.rmtree(journal.folder)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        raise PackageError(f"exporting to {out} failed:{where} {error.strerror}") from error
    return manifest


def _make(
    pieces: PartBuilder, part: str, layer: int | None, windows: Sequence[int | None], format: Format
) -> PartGraph:
    """Make a layer uncompressed; embedding and head compressed, by blocks of rows, to limit memory."""
    if layer is not None or format.weights not in (INT8, INT4):
        return pieces.make(part, layer, windows, _to_f16 if format.weights == F16 else None)
    rows, row_bytes = pieces.rows(part)
    return compress_rows(
        lambda first, last: pieces.make(part, None, windows, _take_rows(rows, first, last)),
        rows,
        row_bytes,
        format,
    )


def _take_rows(rows: int, first: int, last: int) -> TensorTransform:
    return lambda _name, tensor: tensor[first:last] if tensor.dim() and len(tensor) == rows else tensor


def _to_f16(name: str, tensor: Any) -> Any:
    import torch

    half = tensor.to(torch.float16)
    if not bool(torch.isfinite(half).all()):
        raise UnsupportedModel(f"{name} holds numbers too large for f16: export with --weights {KEEP}, int8 or int4")
    return half


def _weights_name(format: Format, package: Path) -> str:
    """The format of the weights for the manifest."""
    if format.weights != KEEP:
        return str(format)
    return weight_format(ov.Core().read_model(package / f"{layer_part(0)}.xml"))

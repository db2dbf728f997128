"""From a checkpoint to a package, one part at a time: made, compressed, written, recorded, released.

The package grows in a `Journal` beside OUT and gets its name when every part is there. What is recorded is not
made again (`resume`), a range of layers can be made alone (`layers`), and several processes can work in one journal.
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
from export.checkpoint.families import Family, check_family
from export.checkpoint.one_layer import Decoder
from export.checkpoint.tokenizer import write_tokenizer
from export.checkpoint.torch_stack import versions
from export.graph.compress import F16, INT4, INT8, KEEP, Format, weight_format
from export.graph.part_file import parts_of, save_part, structure
from export.graph.stateful import drop_beam_gathers
from export.graph.static import check_fits, write_static
from export.package.journal import Journal, PartRecord
from export.package.output import check_free, put_in_place
from export.package.parts import PartBuilder, PartGraph, Weigh
from export.package.row_blocks import compress_rows
from export.sources.openvino_ir import facts, windows_of
from export.sources.source import ModelFacts, Progress, eos_of_tokenizer, silent, slug
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
"""Counts up when this program writes other bytes for the same checkpoint: parts of two programs never mix."""
_SAMPLE = 4096
MAX_CONTEXT = 1 << 31
_RELEASE_AT = 16 << 20  # bytes written; releasing walks through all objects, which takes longer than a tiny layer


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be made: of which checkpoint, in which format, under which name."""

    decoder: Decoder
    family: Family
    facts: ModelFacts
    format: Format
    name: str | None
    licence: str | None
    beam_idx: bool = True

    @classmethod
    def on(
        cls,
        directory: Path,
        format: Format,
        *,
        name: str | None = None,
        licence: str | None = None,
        origin: str | None = None,
        beam_idx: bool = True,
    ) -> Work:
        """Raises UnsupportedModel for a family that is refused, PackageError and DamagedFile for its files."""
        checkpoint = Checkpoint.open(directory)
        family = check_family(checkpoint.config, versions())
        decoder = Decoder.of(checkpoint)
        decoder.require_separable()
        told = facts(directory, lambda: eos_of_tokenizer(directory))
        config = decoder.config.to_dict()
        told["windows"] = lambda layers: windows_of(config, layers)
        told["context_length"] = min(told["context_length"], _steady_context(config))
        if origin is not None:
            told |= {"origin": origin, "name": origin.rpartition("/")[2]}
        return cls(
            decoder=decoder,
            family=family,
            facts=ModelFacts(**told),
            format=format,
            name=name,
            licence=licence,
            beam_idx=beam_idx,
        )

    @property
    def layers(self) -> int:
        return self.decoder.layers

    def made_from(self, part: str, layer: int | None) -> str:
        """A digest of everything that the bytes of a part depend on; of each tensor's numbers, both ends."""
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


Make = Callable[[Work, Journal, Sequence[str], Progress], None]


def write_parts(work: Work, journal: Journal, parts: Sequence[str], progress: Progress = silent) -> None:
    """Make those of `parts` that the journal lacks.

    Raises UnsupportedModel, PackageError or DamagedFile for the checkpoint; what is recorded then stays.
    """
    journal.begin()
    gc.freeze()  # torch's and transformers' own objects: looking through them for garbage takes longer than a layer
    chosen = [(part, layer) for part, layer in parts_of(work.layers) if part in parts]
    windows = work.facts.windows(work.layers)
    with tempfile.TemporaryDirectory(dir=journal.folder, prefix="traced-") as scratch:
        pieces = PartBuilder(work.decoder, work.family, Path(scratch))
        fused: set[bytes] = set()  # what is true of one layer is true of those that differ in their weights alone
        unreleased = 0
        for done, (part, layer) in enumerate(chosen):
            progress("exporting layers", done, len(chosen))
            made_from = work.made_from(part, layer)
            if journal.done(part, made_from) is None:
                path = journal.package / f"{part}.xml"
                piece = _make(pieces, part, layer, windows, work.format)
                ready = layer is None and work.format.weights != F16  # `_make` has compressed it
                model = piece.model if layer is None or work.beam_idx else drop_beam_gathers(piece.model)
                files = save_part(model, path, Format() if ready else work.format, is_layer=layer is not None)
                record = PartRecord(part=part, made_from=made_from, files=files, facts=dict(piece.facts))
                del model, piece
                if layer is not None and work.beam_idx and (kind := structure(path)) not in fused:
                    require_fused(path)
                    fused.add(kind)
                journal.finish(record)
                unreleased += files[-1].size
            if unreleased > _RELEASE_AT:
                release_memory(work.decoder.checkpoint.directory, journal.folder)
                unreleased = 0
        progress("exporting layers", len(chosen), len(chosen))


def assemble(
    work: Work, journal: Journal, progress: Progress = silent, *, static: StaticSpec | None = None
) -> Manifest:
    """Make the journal's directory a package: tokenizer and manifest. The files are then `journal.package`.

    Raises PackageError naming the parts that are missing.
    """
    plan = parts_of(work.layers)
    records: dict[str, PartRecord] = {}
    for done, (part, layer) in enumerate(plan):
        progress("checking layers", done, len(plan))
        record = journal.done(part, work.made_from(part, layer))
        if record is not None:
            records[part] = record
    progress("checking layers", len(plan), len(plan))
    if missing := [part for part, _ in plan if part not in records]:
        raise PackageError(
            f"{journal.folder} lacks {', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}: export these "
            "layers, here or on another machine whose files are put there, and go on with --resume"
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
        weights=_told(work.format, journal.package),
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


def _steady_context(config: Mapping[str, Any]) -> int:
    """Positions up to which a text's rotary embedding stays as it began.

    Beyond its original context, longrope turns *all* positions by other factors: keys that are cached by then are
    wrong, and transformers computes them anew. A swarm does not, and so such a model keeps its original context.
    """
    rotary = config.get("rope_parameters") or {}
    if rotary.get("rope_type") != "longrope":
        return MAX_CONTEXT
    original = rotary.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return int(original or MAX_CONTEXT)


def parts_within(layers: int, span: LayerRange | None) -> list[str]:
    """The parts that an export of `span` makes. Raises ConfigError where the model has no such layers."""
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
    progress: Progress = silent,
) -> Manifest | None:
    """Turn the checkpoint in `source` into the package `out`; None where only `layers` were made, beside `out`.

    `resume` goes on with what is beside `out`; without it an unfinished export there is an error, unless `force`
    discards it. `make` does the work instead of this process (`export.package.jobs`). `beam_idx=False` leaves out the
    Gather behind the caches, to measure its worth.

    Raises ConfigError for a wrong argument, UnsupportedModel, PackageError and DamagedFile for the checkpoint. What
    was made until then stays beside `out`.
    """
    check_free(out, force)
    journal = Journal.beside(out)
    if journal.holds_anything() and not resume:
        if not force:
            raise ConfigError(
                f"{journal.folder} holds an unfinished export: go on with --resume, or discard it with --force"
            )
        shutil.rmtree(journal.folder)
    work = Work.on(source, format, name=name, licence=licence, origin=origin, beam_idx=beam_idx)
    if static is not None:
        check_fits(static, work.facts.context_length)
        if layers is not None:
            raise ConfigError("--static is for the run that brings all layers together: leave it out with --layers")
    parts = parts_within(work.layers, layers)
    try:
        journal.begin()
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
    """A layer as it is; embedding and head compressed already, by rows: each is one matrix, maybe the largest."""
    if layer is not None or format.weights not in (INT8, INT4):
        return pieces.make(part, layer, windows, _half if format.weights == F16 else None)
    rows, row_bytes = pieces.rows(part)
    return compress_rows(
        lambda first, last: pieces.make(part, None, windows, _block(rows, first, last)),
        rows,
        row_bytes,
        format,
    )


def _block(rows: int, first: int, last: int) -> Weigh:
    return lambda _name, tensor: tensor[first:last] if tensor.dim() and len(tensor) == rows else tensor


def _half(name: str, tensor: Any) -> Any:
    import torch

    half = tensor.to(torch.float16)
    if not bool(torch.isfinite(half).all()):
        raise UnsupportedModel(f"{name} holds numbers that f16 cannot: export with --weights {KEEP}, int8 or int4")
    return half


def _told(format: Format, package: Path) -> str:
    if format.weights != KEEP:
        return str(format)
    return weight_format(ov.Core().read_model(package / f"{layer_part(0)}.xml"))

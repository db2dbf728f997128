"""Is a package what it says, and how far are its layers from the checkpoint that they were made of?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from export.checkpoint import Checkpoint
from export.families import check_family
from export.onelayer import Decoder
from export.output import parts_of
from export.reference import Floats, ends, passage, random_hidden, run_layer
from export.runner import Runner, Step
from export.source import Progress, silent
from export.torch_stack import versions
from swarm.engine.base import Step as EngineStep
from swarm.engine.compose import open_engine
from swarm.errors import ConfigError, PackageError, SwarmError
from swarm.footprint import needed_bytes, share_of
from swarm.manifest import EMBED, HEAD, Manifest, check_files, load_manifest

# Of what a layer adds, in root mean squares. Rounding to 4 bits in groups of 128 is about 0.12 of a weight.
_TOLERANCES = {"f32": 1e-4, "bf16": 1e-4, "f16": 5e-3, "int8": 0.05, "int4": 0.35}
_TOKENS, _PREFILL, _NEW_TOKENS = 32, 24, 16
PROMPT = "The capital of France is"


@dataclass(frozen=True, kw_only=True)
class PartCheck:
    """`deviation` from transformers as a share of what the part adds, None where there is nothing to compare with."""

    part: str
    deviation: float | None


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """`text` is what the package continues `PROMPT` with, None where it does not fit in this machine's memory."""

    digest: str
    parts: tuple[PartCheck, ...]
    tolerance: float
    text: str | None

    @property
    def worst(self) -> PartCheck | None:
        compared = [check for check in self.parts if check.deviation is not None]
        return max(compared, key=lambda check: check.deviation or 0.0, default=None)

    def require(self) -> None:
        """Raises PackageError where a part deviates by more than its format explains."""
        if (worst := self.worst) is not None and not (worst.deviation or 0.0) <= self.tolerance:
            raise PackageError(
                f"{worst.part} deviates from the checkpoint by {worst.deviation:.3g} of what it adds; its format "
                f"explains {self.tolerance:g}: export it again, or from the checkpoint that it was made of"
            )


def check_package(package: Path, against: Path | None = None, progress: Progress = silent) -> CheckReport:
    """Check hashes, compile every part, run it on random inputs, and compare it with the checkpoint `against`.

    Holds one part at a time, except for the text. Raises DamagedFile, EngineError for a part that does not run,
    PackageError where attention is not fused or a result is not finite, ConfigError where `against` is another model.
    """
    manifest = load_manifest(package)
    check_files(package, manifest.files(manifest.parts))
    decoder = None if against is None else _decoder(manifest, against)
    checks = []
    plan = parts_of(len(manifest.layers))
    expected = None if decoder is None else ends(decoder, _TOKENS)
    for done, (part, layer) in enumerate(plan):
        progress("checking layers", done, len(plan))
        runner = Runner(package / f"{part}.xml")
        if layer is not None:
            deviation = _layer(runner, part, layer, manifest, decoder)
        else:
            tokens = np.arange(_TOKENS, dtype=np.int64)[None] % manifest.vocab_size
            hidden = random_hidden(manifest.hidden_size, _TOKENS) if expected is None else expected.after
            found = runner.run(Step(tokens=tokens, past=0), hidden if part == HEAD else None)
            _require_finite(part, found)
            true = None if expected is None else (expected.embedded if part == EMBED else expected.logits)
            deviation = None if true is None else _share(true, found)
        checks.append(PartCheck(part=part, deviation=deviation))
    progress("checking layers", len(plan), len(plan))
    tolerance = _TOLERANCES.get(manifest.weights.partition("-")[0], _TOLERANCES["int4"])
    return CheckReport(digest=manifest.digest, parts=tuple(checks), tolerance=tolerance, text=_text(package, manifest))


def _decoder(manifest: Manifest, against: Path) -> Decoder:
    checkpoint = Checkpoint.open(against)
    check_family(checkpoint.config, versions())
    decoder = Decoder.of(checkpoint)
    if decoder.layers != len(manifest.layers) or decoder.config.model_type != manifest.architecture:
        raise ConfigError(
            f"{against} is a {decoder.config.model_type} of {decoder.layers} layers, the package a "
            f"{manifest.architecture} of {len(manifest.layers)}: name the checkpoint that it was made of"
        )
    return decoder


def _layer(runner: Runner, part: str, layer: int, manifest: Manifest, decoder: Decoder | None) -> float | None:
    if runner.fused_attentions != 1:
        raise PackageError(f"the attention of {part} is not fused on this machine's CPU: export it again")
    hidden = random_hidden(manifest.hidden_size, _TOKENS)
    expected = None if decoder is None else passage(decoder, layer, hidden)
    found = run_layer(runner, hidden if expected is None else expected.before, prefill=_PREFILL)
    _require_finite(part, found)
    return None if expected is None else expected.deviation(found)


def _share(true: Floats, found: Floats) -> float:
    return float(np.sqrt(np.mean((true - found) ** 2))) / max(float(np.sqrt(np.mean(true**2))), 1e-30)


def _require_finite(part: str, found: Floats) -> None:
    if not np.isfinite(found).all():
        raise PackageError(f"{part} gives numbers that are not finite: export it again")


def _text(package: Path, manifest: Manifest) -> str | None:
    room = min(len(PROMPT) + _NEW_TOKENS, manifest.context_length)
    needed = needed_bytes(manifest, manifest.span, kv="f32", kv_tokens=room)
    if needed > share_of(psutil.virtual_memory().available):
        return None
    import openvino_genai

    tokenizer = openvino_genai.Tokenizer(str(package))
    ids = [int(token) for token in tokenizer.encode(PROMPT).input_ids.data[0]]
    room = max(min(_NEW_TOKENS, manifest.context_length - len(ids)), 0)
    return str(tokenizer.decode(list(_continue(package, manifest, ids, room))))


def _continue(package: Path, manifest: Manifest, ids: list[int], count: int) -> Iterator[int]:
    engine = open_engine(package, manifest, manifest.span)
    engine.open("check", len(ids) + count)
    tokens, start = np.array(ids, np.int32), 0
    for _ in range(count):
        (logits,) = engine.forward([EngineStep(session="check", start=start, tokens=tokens, rows=1)])
        if isinstance(logits, SwarmError):
            raise logits
        start += len(tokens)
        tokens = np.array([logits[-1].argmax()], np.int32)
        yield int(tokens[0])
        if int(tokens[0]) in manifest.eos_token_ids:
            return

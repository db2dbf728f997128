"""Checks a package, and compares each part and the generated text with the checkpoint that it was made of.

With a checkpoint, each part runs on random inputs, and one text (a prompt and the package's continuation of it) runs
through package and checkpoint, one layer of each at a time. This works for models larger than this machine's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.decoder import Decoder
from export.checkpoint.families import check_family
from export.checkpoint.torch_stack import versions
from export.graph.part_file import parts_of
from export.sources.source import Progress, no_progress
from export.verify.reference import EmbedAndHead, Floats, deviation, random_hidden, run_layer, run_reference_layer
from export.verify.runner import Runner, Step
from swarm.engine.base import Step as EngineStep
from swarm.engine.compose import open_engine
from swarm.errors import ConfigError, PackageError, SwarmError
from swarm.model.manifest import EMBED, Manifest, check_files, load_manifest
from swarm.model.memory_footprint import default_memory_limit, needed_bytes

# As a share of what a layer adds (root mean squares). Rounding to 4 bits in groups of 128 is about 0.12 of a weight.
TOLERANCES = {"f32": 1e-4, "bf16": 1e-4, "f16": 5e-3, "int8": 0.05, "int4": 0.35}
_UNROUNDED = ("f32", "bf16")  # formats of unchanged weights
_TOKENS, _PREFILL, _NEW_TOKENS = 32, 24, 16
PROMPT = "The capital of France is"


@dataclass(frozen=True, kw_only=True)
class PartCheck:
    """`deviation` from transformers as a share of what the part adds, None without a checkpoint."""

    part: str
    deviation: float | None


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The next token at each of `places` positions, chosen by package and transformers; `alike`: how many are equal.

    `apart`: where they differ, the largest difference between transformers' logits of the two tokens, in standard
    deviations of its logits.
    """

    places: int
    alike: int
    apart: float


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """`text` is the package's continuation of `PROMPT`, None if the package does not fit in this machine's memory.

    `choices` is None without a checkpoint. `rounds`: the weights are rounded, and a different text is not an error.
    """

    digest: str
    parts: tuple[PartCheck, ...]
    tolerance: float
    text: str | None
    choices: Choices | None = None
    rounds: bool = True

    @property
    def worst(self) -> PartCheck | None:
        compared = [check for check in self.parts if check.deviation is not None]
        return max(compared, key=lambda check: check.deviation or 0.0, default=None)

    def require(self) -> None:
        """Raises PackageError if a part or the text deviates by more than the format of the weights allows."""
        if (worst := self.worst) is not None and not (worst.deviation or 0.0) <= self.tolerance:
            raise PackageError(
                f"{worst.part} deviates from the checkpoint by {worst.deviation:.3g} of what it adds; its format "
                f"allows {self.tolerance:g}: export it again, or name the checkpoint that it was made of"
            )
        if (choices := self.choices) is not None and not self.rounds and not choices.apart <= self.tolerance:
            raise PackageError(
                f"transformers chooses another token at {choices.places - choices.alike} of {choices.places} "
                f"positions, by up to {choices.apart:.3g} standard deviations of its logits, more than rounding "
                f"({self.tolerance:g}): export it again"
            )


def check_package(package: Path, against: Path | None = None, progress: Progress = no_progress) -> CheckReport:
    """Check hashes, compile every part, run it on random inputs, and compare it with the checkpoint `against`.

    Loads one part at a time, except to generate the text. Raises DamagedFile, EngineError for a part that does not run,
    PackageError if attention is not fused or a result is not finite, ConfigError if `against` is another model.
    """
    manifest = load_manifest(package)
    check_files(package, manifest.files(manifest.parts))
    decoder = None if against is None else _decoder(manifest, against)
    prompt = _prompt(package, manifest)
    written = _write(package, manifest, prompt, progress)
    checks, choices = [], None
    if decoder is None:
        checks = list(_run_parts(package, manifest, progress))
    else:
        known = np.array([*prompt, *(written or [])[:-1]], np.int64)
        comparison = _Comparison(package, manifest, decoder, known)
        plan = parts_of(len(manifest.layers))
        for done, (part, layer) in enumerate(plan):
            progress("checking layers", done, len(plan))
            checks.append(PartCheck(part=part, deviation=comparison.part(part, layer)))
        progress("checking layers", len(plan), len(plan))
        choices = comparison.choices(written or [])
    format = manifest.weights.partition("-")[0]
    return CheckReport(
        digest=manifest.digest,
        parts=tuple(checks),
        tolerance=TOLERANCES.get(format, TOLERANCES["int4"]),
        text=None if written is None else str(_tokenizer(package).decode(written)),
        choices=choices,
        rounds=format not in _UNROUNDED,
    )


def _run_parts(package: Path, manifest: Manifest, progress: Progress) -> Iterator[PartCheck]:
    """Run every part on random input, without a comparison."""
    plan = parts_of(len(manifest.layers))
    hidden = random_hidden(manifest.hidden_size, _TOKENS)
    for done, (part, layer) in enumerate(plan):
        progress("checking layers", done, len(plan))
        runner = _runner(package, part, layer)
        step = Step(tokens=_some_tokens(manifest), past=0)
        _finite(part, runner.run(step, hidden) if layer is None else run_layer(runner, hidden, prefill=_PREFILL))
        yield PartCheck(part=part, deviation=None)
    progress("checking layers", len(plan), len(plan))


class _Comparison:
    """Runs a package and its checkpoint part by part: each part on random inputs, and all on one text [n]."""

    def __init__(self, package: Path, manifest: Manifest, decoder: Decoder, text: NDArray[np.int64]) -> None:
        self._package, self._manifest, self._decoder = package, manifest, decoder
        self._text = Step(tokens=text[None], past=0)
        # The text's hidden states, later its logits, as computed by transformers and by the package.
        self._reference = self._package_output = np.zeros(0, np.float32)

    def part(self, part: str, layer: int | None) -> float:
        """The deviation of `part` on random inputs, as a share of what it adds. Call it for all parts in order."""
        runner = _runner(self._package, part, layer)
        if layer is None:
            return self._compare_end(runner, part)
        hidden = random_hidden(self._manifest.hidden_size, _TOKENS)
        expected, text = run_reference_layer(self._decoder, layer, [hidden, self._reference])
        found = _finite(part, run_layer(runner, hidden, prefill=_PREFILL))
        runner.reset()
        self._reference, self._package_output = text.after, _finite(part, runner.run(self._text, self._package_output))
        return expected.deviation(found)

    def _compare_end(self, runner: Runner, part: str) -> float:
        true, tokens = EmbedAndHead(self._decoder), _some_tokens(self._manifest)
        if part == EMBED:
            found = _finite(part, runner.run(Step(tokens=tokens, past=0), None))
            expected = true.embed(tokens[0])
            self._reference, self._package_output = true.embed(self._text.tokens[0]), runner.run(self._text, None)
        else:
            # The head is compared on real hidden states, which have the magnitude that it expects.
            expected = true.logits(self._reference)
            found = _finite(part, runner.run(self._text, self._reference))
            self._reference, self._package_output = expected, runner.run(self._text, self._package_output)
        return deviation(expected, found)

    def choices(self, written: list[int]) -> Choices:
        """Compare the choices after every token of the text; at the end, the package's are the `written` tokens."""
        logits, chosen = self._reference[0], self._package_output[0].argmax(axis=-1)
        chosen[len(chosen) - len(written) :] = written
        deficit = logits.max(axis=-1) - logits[np.arange(len(logits)), chosen]
        apart = deficit / np.maximum(logits.std(axis=-1), 1e-30)
        return Choices(places=len(logits), alike=int((deficit == 0).sum()), apart=float(apart.max()))


def _runner(package: Path, part: str, layer: int | None) -> Runner:
    runner = Runner(package / f"{part}.xml")
    if layer is not None and runner.fused_attentions != 1:
        raise PackageError(f"the attention of {part} is not fused on this machine's CPU: export it again")
    return runner


def _some_tokens(manifest: Manifest) -> NDArray[np.int64]:
    return np.arange(_TOKENS, dtype=np.int64)[None] % manifest.vocab_size


def _decoder(manifest: Manifest, against: Path) -> Decoder:
    checkpoint = Checkpoint.open(against)
    check_family(checkpoint.config, versions())
    decoder = Decoder.of(checkpoint)
    if decoder.layers != len(manifest.layers) or decoder.config.model_type != manifest.architecture:
        raise ConfigError(
            f"{against} is a {decoder.config.model_type} with {decoder.layers} layers, the package a "
            f"{manifest.architecture} with {len(manifest.layers)}: name the checkpoint that it was made of"
        )
    return decoder


def _finite(part: str, found: Floats) -> Floats:
    if not np.isfinite(found).all():
        raise PackageError(f"{part} gives numbers that are not finite: export it again")
    return found


def _tokenizer(package: Path) -> Any:
    import openvino_genai

    return openvino_genai.Tokenizer(str(package))


def _prompt(package: Path, manifest: Manifest) -> list[int]:
    ids = [int(token) for token in _tokenizer(package).encode(PROMPT).input_ids.data[0]]
    return ids[: manifest.context_length]


def _write(package: Path, manifest: Manifest, prompt: list[int], progress: Progress) -> list[int] | None:
    """The package's continuation of `prompt`; None if the package does not fit in this machine's memory."""
    tokens = len(prompt) + _NEW_TOKENS
    if needed_bytes(manifest, manifest.span, kv="f32", kv_tokens=tokens) > default_memory_limit(
        psutil.virtual_memory().available
    ):
        return None
    count = min(_NEW_TOKENS, manifest.context_length - len(prompt))
    written: list[int] = []
    progress("writing", 0, count)
    for token in _continue(package, manifest, prompt, count):
        written.append(token)
        progress("writing", len(written), count)
    progress("writing", count, count)
    return written


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

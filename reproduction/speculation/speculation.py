"""Speed with and without a draft, and its acceptance: one process, eight kinds of prompts, 128 tokens.

There are three drafts. `look-up` and `model` (SmolLM2 INT4 for SmolLM2 f16) are real; a draft that costs as much as its
target cannot win here. `scripted` knows the text, errs as often as the published acceptance of the kind says, and takes
the time of a model a fifth of the target's size: it shows the gain from a good draft. It drafts for SmolLM2 INT4, and
for a random model with the shape of Llama 3.2 1B, once for each published acceptance, because the prompt does not
matter there. The latter runs in both modes: in f32 a step of four tokens takes nearly twice as long as a step of one;
with int8 activations, the device's default, both are bound by memory.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import openvino_genai

from client.speculation.draft import Draft, NgramDraft
from client.speculation.draft_model import DraftModel
from client.speculation.speculation import SpeculationReport
from reproduction.bounds.one_process import write
from reproduction.experiment import Log, Report, Row
from reproduction.harness.machine import machine
from reproduction.harness.prompt_kinds import KINDS
from reproduction.harness.scripted_draft import COST_SHARE, GUESSES, ScriptedDraft, chance_of
from reproduction.models.checkpoints import llama_1b_shaped
from reproduction.models.real import Model, smollm2, smollm2_f16
from swarm.engine.base import Engine
from swarm.engine.compose import open_engine

TOKENS = 128
_SCRIPTS = 12
_ACCEPTANCES = {0.93: 1.50, 0.707: 1.33, 0.50: 1.11}  # acceptance -> published gain
DraftOf = Callable[[list[int], float], Draft]
"""Creates a draft from the whole text and the seconds of a token without a draft."""


@dataclass(frozen=True, kw_only=True)
class DraftSetup:
    """A draft, and its number of guesses per trip if that is fixed."""

    draft: DraftOf
    fixed: int | None = None
    published: float | None = None


LOOK_UP = DraftSetup(draft=lambda text, token_s: NgramDraft())


def run(log: Log) -> Report:
    small, target, large = smollm2(log), smollm2_f16(log), llama_1b_shaped(log)
    gains: dict[str, list[float]] = {"look_up": [], "model": [], "scripted": []}
    rows: list[Row] = []
    with asyncio.Runner() as runner:

        def compare(bench: Bench, prompt: str, setups: Mapping[str, DraftSetup]) -> list[float]:
            found = bench.gains(prompt, setups, TOKENS)
            for name, (gain, report) in found.items():
                share = report.accepted / report.proposed if report.proposed else 0.0
                label = f"{name} ({share:.0%} of {report.proposed} accepted)"
                rows.append(Row(configuration=label, value=gain, unit="x", published=setups[name].published))
                log(f"{label}: {gain:.2f}")
            return [gain for gain, _ in found.values()]

        model = runner.run(DraftModel.open(small.package, target.manifest, threads=1))
        int4, f16 = Bench(small, runner), Bench(target, runner)
        for kind in KINDS:
            setups = {f"{kind.name}, look-up": LOOK_UP, f"{kind.name}, scripted": scripted(kind.acceptance, kind.gain)}
            for name, gain in zip(("look_up", "scripted"), compare(int4, kind.prompt, setups), strict=True):
                gains[name].append(gain)
            setups = {f"{kind.name}, model": DraftSetup(draft=lambda text, _: model.draft(len(text) + 64))}
            gains["model"] += compare(f16, kind.prompt, setups)
        model.close()
        del int4, f16  # The large model needs the memory.
        changed = 0
        for mode in ("accuracy", "performance"):
            setups = {
                f"1B-shaped in {mode} mode, scripted, {share:.0%} meant": scripted(share, gain)
                for share, gain in _ACCEPTANCES.items()
            }
            bench = Bench(large, runner, mode)
            by_acceptance = dict(zip(_ACCEPTANCES, compare(bench, KINDS[0].prompt, setups), strict=True))
            gains[f"scripted_1b_{mode}"] = [by_acceptance[kind.acceptance] for kind in KINDS]
            changed += bench.changed
    return Report(
        experiment="speculation",
        machine=machine(),
        rows=rows,
        ratios={f"{name}_mean": statistics.fmean(values) for name, values in gains.items()},
        goals={f"scripted{of}_mean": (">=", 1.33) for of in ("", "_1b_accuracy", "_1b_performance")},
        notes=[
            f"{TOKENS} tokens, one process, one thread; against the mean of an answer without before and one after",
            "look-up and model have adaptive windows; model is SmolLM2 INT4 drafting for SmolLM2 f16",
            f"scripted: {GUESSES} guesses per trip, the published acceptance of its kind (70.7 % if unpublished), "
            f"each guess takes {COST_SHARE:.0%} of the target's time for a token; it is no real model",
            "1B: random weights of Llama 3.2 1B's shape in int4; its mean is over the eight kinds by their acceptances",
            f"of the 1B in performance mode {changed} of {len(_ACCEPTANCES)} texts differ from the one without a "
            "draft; no other may",
        ],
    )


def scripted(acceptance: float, published: float) -> DraftSetup:
    """A scripted draft: `acceptance` of `GUESSES` per trip, each at `COST_SHARE` of the target's time."""
    errors = 1 - chance_of(acceptance)
    return DraftSetup(
        draft=lambda text, token_s: ScriptedDraft(text, errors=errors, seconds=COST_SHARE * token_s),
        fixed=GUESSES,
        published=published,
    )


class Bench:
    """Generates with a model in this process.

    `changed` counts the texts that differ with a draft; in accuracy mode there must be none.
    """

    def __init__(self, model: Model, runner: asyncio.Runner, precision: str = "accuracy") -> None:
        self.changed = 0
        self._exact = precision == "accuracy"
        self._engine: Engine = open_engine(
            model.package, model.manifest, model.manifest.span, threads=1, precision=precision
        )
        self._tokenizer = openvino_genai.Tokenizer(str(model.package))
        self._runner = runner

    def gains(
        self, prompt: str, setups: Mapping[str, DraftSetup], tokens: int
    ) -> dict[str, tuple[float, SpeculationReport]]:
        """The gain of each setup over the mean of an answer before all of them and one after, and its speculation.

        Raises AssertionError if a text changes in accuracy mode.
        """
        text = self._tokenizer.apply_chat_template([{"role": "user", "content": prompt}], True)
        ids = [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False).input_ids.data[0]]
        before_s, reference, _ = self._write(ids, tokens)
        results = {name: self._guess(ids, reference, setup, before_s / tokens) for name, setup in setups.items()}
        after_s, repeated, _ = self._write(ids, tokens)
        self.changed += sum(text != reference for _, text, _ in results.values())
        if repeated != reference or (self._exact and self.changed):
            raise AssertionError("a draft changed the text")
        found = {}
        for name, (took_s, _, report) in results.items():
            assert report is not None
            found[name] = (statistics.fmean((before_s, after_s)) / took_s, report)
        return found

    def _guess(
        self, ids: Sequence[int], reference: Sequence[int], setup: DraftSetup, token_s: float
    ) -> tuple[float, list[int], SpeculationReport | None]:
        """Like `_write`, with a draft that knows the text `reference`.

        In performance mode windows can change the text, and the draft must know the changed one: each answer becomes
        the script of the next one until the text stays the same.
        """
        script = list(reference)
        for _ in range(1 if self._exact else _SCRIPTS):
            written = self._write(ids, len(reference), setup.draft([*ids, *script], token_s), k=setup.fixed)
            if written[1] == script:
                break
            script = written[1]
        return written

    def _write(
        self, ids: Sequence[int], tokens: int, draft: Draft | None = None, *, k: int | None = None
    ) -> tuple[float, list[int], SpeculationReport | None]:
        return self._runner.run(write(self._engine, list(ids), tokens, draft, k=k))

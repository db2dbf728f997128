"""One process, eight kinds of prompts, 128 tokens: with a draft and without, by kind, with its acceptance.

Three drafts. `look-up` and `model` (SmolLM2 INT4 for SmolLM2 f16) are real; a draft that costs as much as its target
cannot win here, and the figures say so. `scripted` knows the text, errs so often that its acceptance is the published
one of its kind, and is charged the time of a model a fifth the target's size: what the machinery makes of a good draft.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
from collections.abc import Callable

import openvino_genai

from client.draft import Draft, NgramDraft
from client.draftmodel import DraftModel
from client.speculation import Guesser, Speculation, SpeculationReport
from client.tuner import Prior, Tuner
from reproduction.experiment import Report, Row, Say
from reproduction.kinds import KINDS
from reproduction.machine import machine
from reproduction.models import Model, smollm2, smollm2_f16
from reproduction.one_process import EnginePipeline
from reproduction.scripted_draft import ScriptedDraft
from swarm.engine.base import Engine
from swarm.engine.compose import open_engine
from swarm.sampling import Sampling

TOKENS = 128
ROUNDS = 2
GUESSES = 3
SHARE = 0.2  # of the target's time that the scripted draft is charged


def run(say: Say) -> Report:
    target, small = smollm2_f16(say), smollm2(say)
    gains: dict[str, list[float]] = {"look-up": [], "model": [], "scripted": []}
    rows: list[Row] = []
    with asyncio.Runner() as runner:
        int4, f16 = _Bench(small, runner), _Bench(target, runner)
        model = runner.run(DraftModel.open(small.package, target.manifest, threads=1))
        for kind in KINDS:
            tests: dict[str, tuple[_Bench, Callable[[list[int], float], Draft]]] = {
                "look-up": (int4, lambda text, token_s: NgramDraft()),
                "model": (f16, lambda text, token_s: model.draft(len(text) + 64)),
                "scripted": (int4, functools.partial(_scripted, 1 - chance_of(kind.acceptance))),
            }
            for name, (bench, draft) in tests.items():
                gain, report = bench.gain(kind.prompt, draft, fixed=GUESSES if name == "scripted" else None)
                gains[name].append(gain)
                share = report.accepted / report.proposed if report.proposed else 0.0
                told = f"{kind.name}, {name} ({share:.0%} of {report.proposed} accepted)"
                rows.append(
                    Row(configuration=told, value=gain, unit="x", published=kind.gain if name == "scripted" else None)
                )
                say(f"{told}: {gain:.2f}")
        model.close()
    return Report(
        experiment="speculation",
        machine=machine(),
        rows=rows,
        ratios={f"{name.replace('-', '_')}_mean": statistics.fmean(values) for name, values in gains.items()},
        goals={"scripted_mean": (">=", 1.33)},
        notes=[
            f"{TOKENS} tokens, one process, one thread; ratios of tokens/s with and without in one run, interleaved",
            "look-up and model choose their windows themselves; model is SmolLM2 INT4 drafting for SmolLM2 f16",
            f"scripted: {GUESSES} guesses a trip, the published acceptance of its kind (70.7 % where there is none), "
            f"each guess charged {SHARE:.0%} of the target's time for a token; it is no real model",
        ],
    )


def _scripted(errors: float, text: list[int], token_s: float) -> Draft:
    return ScriptedDraft(text, errors=errors, seconds=SHARE * token_s)


class _Bench:
    """A model in this process, and answers over it."""

    def __init__(self, model: Model, runner: asyncio.Runner) -> None:
        self._engine: Engine = open_engine(model.package, model.manifest, model.manifest.span, threads=1)
        self._tokenizer = openvino_genai.Tokenizer(str(model.package))
        self._runner = runner

    def gain(
        self, prompt: str, draft: Callable[[list[int], float], Draft], *, fixed: int | None
    ) -> tuple[float, SpeculationReport]:
        """By how much `draft(text, seconds a token)` makes it faster: the median over the rounds, and a report."""
        text = self._tokenizer.apply_chat_template([{"role": "user", "content": prompt}], True)
        ids = [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False).input_ids.data[0]]
        ratios: list[float] = []
        report: SpeculationReport | None = None
        for _ in range(ROUNDS):
            without_s, said, _ = self._runner.run(write(self._engine, ids, TOKENS, None))
            guessing = draft([*ids, *said], without_s / TOKENS)
            with_s, again, report = self._runner.run(write(self._engine, ids, TOKENS, guessing, k=fixed))
            if again != said:
                raise AssertionError("a draft changed the text")
            ratios.append(without_s / with_s)
        assert report is not None
        return statistics.median(ratios), report


async def write(
    engine: Engine, prompt: list[int], count: int, draft: Draft | None, *, k: int | None = None
) -> tuple[float, list[int], SpeculationReport | None]:
    """Seconds from the first token to the last, the tokens, and how guessing went."""
    loop = asyncio.get_running_loop()
    guesser = None
    if draft is not None:
        tuner = Tuner(Prior(chance=0.6, draft_s=0.002), free_guesses=draft.instant, k=k, depth=1)
        guesser = Guesser(draft, tuner, loop.time)
    pipeline = EnginePipeline(engine, len(prompt) + count)
    known = list(prompt)
    speculation = Speculation(pipeline, known, Sampling(), limit=len(prompt) + count - 1, guesser=guesser)  # type: ignore[arg-type]
    pipeline.on_answer = speculation.hear
    await speculation.next()
    began = loop.time()
    while len(known) < len(prompt) + count:
        await speculation.go_on()
        await speculation.next()
    took = loop.time() - began
    await speculation.close()
    return took, known[len(prompt) :][:count], speculation.report()


def chance_of(acceptance: float) -> float:
    """The chance of each guess whose predecessors were right, from the share of all `GUESSES` a trip accepted."""
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, GUESSES + 1)) / GUESSES < acceptance:
            low = middle
        else:
            high = middle
    return low

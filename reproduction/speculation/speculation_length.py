"""The gain of a scripted draft over 128 to 2,048 tokens, and the cache slots that its rewinds waste."""

from __future__ import annotations

import asyncio

import numpy as np

from reproduction.bounds.one_process import write
from reproduction.experiment import Log, Report, Row
from reproduction.harness.machine import machine
from reproduction.harness.scripted_draft import COST_SHARE, GUESSES, ScriptedDraft, chance_of
from reproduction.models.real import smollm2
from swarm.engine.compose import open_engine
from swarm.engine.stateful import StatefulEngine

PUBLISHED = {128: (1.33, 0.707), 512: (1.56, 0.906), 1024: (1.57, 0.951), 2048: (1.58, 0.975)}
_PROMPT = 32


def run(log: Log) -> Report:
    model = smollm2(log)
    engine = open_engine(model.package, model.manifest, model.manifest.span, threads=1)
    prompt = np.random.default_rng(0).integers(10, 10_000, _PROMPT).tolist()
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    with asyncio.Runner() as runner:
        for count, (gain, acceptance) in PUBLISHED.items():
            without_s, text, _ = runner.run(write(engine, prompt, count, None))
            draft = ScriptedDraft(
                [*prompt, *text], errors=1 - chance_of(acceptance), seconds=COST_SHARE * without_s / count
            )
            with_s, again, report = runner.run(write(engine, prompt, count, draft, k=GUESSES))
            if again != text:
                raise AssertionError("a draft changed the text")
            assert report is not None
            bloat = slots_for_a_position(engine)
            ratios[f"gain_{count}"] = without_s / with_s
            accepted = report.accepted / max(report.proposed, 1)
            rows += [
                Row(
                    configuration=f"{count} tokens, {accepted:.1%} accepted",
                    value=without_s / with_s,
                    unit="x",
                    published=gain,
                ),
                Row(configuration=f"{count} tokens, cache", value=bloat, unit="of logical"),
            ]
            log(f"{count} tokens: {without_s / with_s:.2f}, cache {bloat:.2f}")
    return Report(
        experiment="speculation_length",
        machine=machine(),
        rows=rows,
        ratios=ratios,
        notes=[
            f"scripted draft with the published acceptance of each length, {GUESSES} guesses per trip, each takes "
            f"{COST_SHARE:.0%} of a token's time; SmolLM2 INT4, one thread, one run each",
            "cache: slots used at the end by positions; published 1.02 at 2,048",
        ],
    )


def slots_for_a_position(engine: StatefulEngine) -> float:
    """The slots per position in the session that `write` left open."""
    (session,) = engine._sessions.values()
    return session.ledger.slots / session.ledger.length

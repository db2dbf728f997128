"""The acceptance of a draft model that samples: the same random numbers for both models, against the optimal rule.

Over the positions of one text, the chance that draft (SmolLM2 INT4) and target (SmolLM2 f16) draw the same token: with
the same random numbers (as in this project), and with the optimal rule, 1 - TV(p, q), which min(1, p/q) reaches
(Leviathan et al. 2023). Also with independent draws, and with the draft's most likely token.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import openvino_genai
from numpy.typing import NDArray

from reproduction.experiment import Log, Report, Row
from reproduction.harness.machine import machine
from reproduction.harness.prompt_kinds import KINDS
from reproduction.models.real import Model, smollm2, smollm2_f16
from swarm.engine.base import Step
from swarm.engine.compose import open_engine
from swarm.sampling import Sampling, choose, probabilities

TOKENS = 160
DRAWS = 20
SETTINGS = {
    "temperature 0.7": Sampling(temperature=0.7),
    "temperature 1": Sampling(temperature=1.0),
    "temperature 1, top-p 0.9": Sampling(temperature=1.0, top_p=0.9),
}


def run(log: Log) -> Report:
    target, small = smollm2_f16(log), smollm2(log)
    tokenizer = openvino_genai.Tokenizer(str(target.package))
    text = tokenizer.apply_chat_template([{"role": "user", "content": KINDS[4].prompt}], True)
    ids = [int(i) for i in tokenizer.encode(text, add_special_tokens=False).input_ids.data[0]]
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    for name, sampling in SETTINGS.items():
        ids, p = _generate(target, ids, sampling)
        q = _logits(small, ids, len(ids))
        chances = np.mean([_chances(a, b, sampling) for a, b in zip(p, q, strict=True)], axis=0)
        labels = ("the same random numbers", "optimum, 1 - TV", "independent draws", "the draft's likeliest token")
        for label, chance in zip(labels, chances, strict=True):
            rows.append(Row(configuration=f"{name}: {label}", value=float(chance), unit="accepted"))
        ratios[f"same_number_vs_optimum_{len(ratios)}"] = float(chances[0] / chances[1])
        log(f"{name}: {', '.join(f'{chance:.3f}' for chance in chances)}")
    return Report(
        experiment="coupling",
        machine=machine(),
        rows=rows,
        ratios=ratios,
        notes=[f"{TOKENS} tokens that the target generated in each setting; the first is counted over {DRAWS} seeds"],
    )


def _generate(model: Model, prompt: list[int], sampling: Sampling) -> tuple[list[int], NDArray[np.float32]]:
    """The token ids of prompt and text, and the logits [TOKENS, vocab] of the text."""
    engine = open_engine(model.package, model.manifest, model.manifest.span)
    engine.open("text", len(prompt) + TOKENS)
    ids, fed = list(prompt), 0
    rows: list[NDArray[np.float32]] = []
    while len(rows) < TOKENS:
        (logits,) = engine.forward([Step(session="text", start=fed, tokens=np.array(ids[fed:], np.int32), rows=1)])
        assert isinstance(logits, np.ndarray)
        fed = len(ids)
        rows.append(logits[0])
        ids.append(choose(logits[0], sampling, position=fed).token)
    return ids, np.stack(rows)


def _logits(model: Model, ids: list[int], prompt: int) -> NDArray[np.float32]:
    """The logits of another model for the same text."""
    engine = open_engine(model.package, model.manifest, model.manifest.span)
    engine.open("text", len(ids))
    tokens = np.array(ids[:-1], np.int32)
    (logits,) = engine.forward([Step(session="text", start=0, tokens=tokens, rows=len(ids) - prompt)])
    assert isinstance(logits, np.ndarray)
    return logits


def _chances(target: NDArray[np.float32], draft: NDArray[np.float32], sampling: Sampling) -> tuple[float, ...]:
    """The chance of each rule above, in order; the first is counted over `DRAWS` seeds."""
    ids_p, p = probabilities(target, sampling)
    ids_q, q = probabilities(draft, sampling)
    dense_p, dense_q = np.zeros(len(target)), np.zeros(len(target))
    dense_p[ids_p], dense_q[ids_q] = p, q
    seeded = [dataclasses.replace(sampling, seed=seed) for seed in range(DRAWS)]
    same = [choose(target, s, position=0).token == choose(draft, s, position=0).token for s in seeded]
    return (
        float(np.mean(same)),
        float(np.minimum(dense_p, dense_q).sum()),
        float(dense_p @ dense_q),
        float(dense_p[ids_q[0]]),
    )

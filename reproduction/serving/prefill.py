"""A prompt of 2,000 tokens: two peers with chunks of it in flight against the unsplit model, one core each.

The peers have half of the layers each: a prompt wants the head for its last token only.
"""

from __future__ import annotations

from reproduction.bounds.unsplit import Single
from reproduction.experiment import ROUNDS, Report, Row, Say, interleaved, median_ratio, medians
from reproduction.harness.machine import machine
from reproduction.harness.users import crowd_on, prompts_of
from reproduction.models.real import smollm2
from swarm.model.spans import LayerRange

LENGTH = 2000


def run(say: Say, *, length: int = LENGTH, rounds: int = ROUNDS) -> Report:
    model = smollm2(say)
    single = Single(model)
    # another each time: both keep the cache of the last one
    prompts = iter(prompts_of(2 * (rounds + 1), length))
    layers = len(model.manifest.layers)
    halves = [LayerRange(0, layers // 2), LayerRange(layers // 2, layers)]
    with crowd_on(model, 2, spans=halves) as crowd:

        def peers() -> float:
            written = crowd.write(next(prompts), 1)
            return length / (written.times[0] - written.began)

        def mono() -> float:
            return length / single.write(next(prompts), 1)[1]

        samples = interleaved({"mono": mono, "two_peers": peers}, say, rounds)
    middle = medians(samples)
    return Report(
        experiment="prefill",
        machine=machine(),
        rows=[
            Row(configuration="unsplit, one core", value=middle["mono"], unit="prompt tok/s"),
            Row(configuration="two peers", value=middle["two_peers"], unit="prompt tok/s"),
        ],
        ratios={"two_peers_vs_mono": median_ratio(samples, "two_peers", "mono")},
        goals={"two_peers_vs_mono": (">=", 1.7)},
        notes=[f"f32, {length} tokens, from the question to the first token; opening the session included"],
    )

"""A prompt of 2,000 tokens: two peers with its chunks in flight against the unsplit model, one core each.

Each peer has half of the layers: a prompt needs the head only for its last token.
"""

from __future__ import annotations

from reproduction.bounds.unsplit import Single
from reproduction.experiment import ROUNDS, Log, Report, Row, interleaved, median_ratio, medians
from reproduction.harness.machine import machine
from reproduction.harness.users import prompts_of, users_on_peers
from reproduction.models.real import smollm2
from swarm.model.spans import LayerRange

LENGTH = 2000


def run(log: Log) -> Report:
    model = smollm2(log)
    single = Single(model)
    # A new prompt each time: both keep the KV cache of the last one.
    prompts = iter(prompts_of(2 * (ROUNDS + 1), LENGTH))
    layers = len(model.manifest.layers)
    halves = [LayerRange(0, layers // 2), LayerRange(layers // 2, layers)]
    with users_on_peers(model, 2, spans=halves) as sync_users:

        def peers() -> float:
            written = sync_users.write(next(prompts), 1)
            return LENGTH / (written.times[0] - written.started_at)

        def mono() -> float:
            return LENGTH / single.write(next(prompts), 1)[1]

        samples = interleaved({"mono": mono, "two_peers": peers}, log, ROUNDS)
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
        notes=[f"f32, {LENGTH} tokens, from the request to the first token; opening the session included"],
    )

"""From one node to two, one user to two: the unsplit model on one core = 1, as the published progression."""

from __future__ import annotations

from functools import partial

from reproduction.experiment import ROUNDS, Report, Row, Say, interleaved, median_ratio, medians
from reproduction.machine import machine
from reproduction.models import smollm2
from reproduction.mono import Single
from reproduction.users import crowd_on, prompts_of

TOKENS = 96


def run(say: Say, *, tokens: int = TOKENS, rounds: int = ROUNDS) -> Report:
    model = smollm2(say)
    single = Single(model)
    prompts = prompts_of(2)
    with crowd_on(model, 2) as crowd:
        alone = [crowd.write(prompt, tokens).ids for prompt in prompts]
        samples = interleaved(
            {
                "mono": lambda: single.write(prompts[0], tokens)[0],
                "one_stream": partial(crowd.together, prompts[:1], alone[:1]),
                "two_streams": partial(crowd.together, prompts, alone),
            },
            say,
            rounds,
        )
    middle = medians(samples)
    return Report(
        experiment="progression",
        machine=machine(),
        rows=[
            Row(configuration="unsplit, one user, one core", value=middle["mono"], unit="tok/s"),
            Row(configuration="two peers, one stream", value=middle["one_stream"], unit="tok/s"),
            Row(configuration="two peers, two streams", value=middle["two_streams"], unit="tok/s"),
        ],
        ratios={
            "one_stream_vs_mono": median_ratio(samples, "one_stream", "mono"),
            "two_streams_vs_mono": median_ratio(samples, "two_streams", "mono"),
        },
        goals={"two_streams_vs_mono": (">=", 1.8)},
        notes=[
            "published: two streams 1.20 times one unsplit user",
            f"f32, {tokens} tokens after prompts of {len(prompts[0])}, prompts included for the peers",
        ],
    )

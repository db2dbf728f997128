"""1 to 32 users on two peers, one core each, against the unsplit model on one core: for one user, and for as many.

Users ask at the same time; what is told is the sum of their tokens a second from the first question to the last
token, prompts included. Each user's text is compared with the one that it gets alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from reproduction.experiment import Report, Row, Say, interleaved, median_ratio, medians
from reproduction.machine import machine
from reproduction.models import smollm2
from reproduction.mono import Batched, Single
from reproduction.users import crowd_on, prompts_of

TOKENS = 64
USERS = (1, 2, 4, 8, 16, 32)
BATCHED = (1, 8, 16)
ROUNDS = 3


def run(say: Say, *, tokens: int = TOKENS, users: tuple[int, ...] = USERS, rounds: int = ROUNDS) -> Report:
    model = smollm2(say)
    single, batched = Single(model), Batched(model)
    prompts = prompts_of(max(users))
    with crowd_on(model, 2) as crowd:
        alone = [crowd.write(prompt, tokens).ids for prompt in prompts]
        configurations: dict[str, Callable[[], float]] = {"mono": lambda: single.write(prompts[0], tokens)[0]}
        for n in BATCHED:
            configurations[f"genai_cb{n}"] = partial(_batched, batched, prompts[:n], tokens)
        for n in users:
            configurations[f"users{n}"] = partial(crowd.together, prompts[:n], alone[:n])
        samples = interleaved(configurations, say, rounds)
    middle = medians(samples)
    ratios = {f"users{n}_vs_mono": median_ratio(samples, f"users{n}", "mono") for n in users}
    ratios |= {
        f"users{n}_vs_genai_cb": median_ratio(samples, f"users{n}", f"genai_cb{n}") for n in BATCHED if n in users
    }
    return Report(
        experiment="batching",
        machine=machine(),
        rows=[
            Row(configuration="unsplit, one user, one core", value=middle["mono"], unit="tok/s"),
            *(
                Row(configuration=f"ContinuousBatchingPipeline, {n} users", value=middle[f"genai_cb{n}"], unit="tok/s")
                for n in BATCHED
            ),
            *(Row(configuration=f"two peers, {n} users", value=middle[f"users{n}"], unit="tok/s") for n in users),
        ],
        ratios=ratios,
        goals={
            "users16_vs_mono": (">=", 10.0),
            "users8_vs_genai_cb": (">=", 1.7),
            "users16_vs_genai_cb": (">=", 1.7),
        },
        notes=[
            f"f32, {tokens} tokens each after prompts of {len(prompts[0])}; every user got the text that it gets alone",
            "one user's figure on one core is its decoding alone; all others include prompts",
            "the client, which stands for all users, shares the peers' cores",
        ],
    )


def _batched(pipeline: Batched, prompts: list[list[int]], tokens: int) -> float:
    return pipeline.together(prompts, tokens)[0]

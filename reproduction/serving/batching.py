"""1 to 32 users on two peers, one core each, against the unsplit model on one core: for one user, and for as many.

Users ask at the same time; what is told is the sum of their tokens a second from the first question to the last
token, prompts included. In both modes; in accuracy mode each user's text is the one that it gets alone. Beside them,
what two stages reach that are never idle (`reproduction.bounds.never_idle`): the bound of what two peers can do on
this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from reproduction.bounds.never_idle import busy_stages
from reproduction.bounds.unsplit import Batched, Single
from reproduction.experiment import Report, Row, Say, interleaved, median_ratio, medians
from reproduction.harness.local import even
from reproduction.harness.machine import machine
from reproduction.harness.users import Crowd, crowd_on, prompts_of
from reproduction.models.real import Model, smollm2

TOKENS = 64
USERS = (1, 2, 4, 8, 16, 32)
BATCHED = (1, 8, 16)
ROUNDS = 3
_GOALS = {"users16_vs_mono": 10.0, "users8_vs_genai_cb": 1.7, "users16_vs_genai_cb": 1.7}


def run(say: Say, *, tokens: int = TOKENS, users: tuple[int, ...] = USERS, rounds: int = ROUNDS) -> Report:
    model = smollm2(say)
    rows, ratios, notes = [], {}, []
    for precision, prefix in (("accuracy", ""), ("performance", "performance_")):
        samples, changed = _measured(model, precision, say, tokens, users, rounds)
        middle = medians(samples)
        rows += [
            Row(configuration=f"{precision}: {told}", value=middle[name], unit="tok/s")
            for name, told in _names(users).items()
        ]
        for n in users:
            ratios[f"{prefix}users{n}_vs_mono"] = median_ratio(samples, f"users{n}", "mono")
        for n in BATCHED:
            if n in users:
                ratios[f"{prefix}users{n}_vs_genai_cb"] = median_ratio(samples, f"users{n}", f"genai_cb{n}")
            if n in users and n > 1:
                ratios[f"{prefix}users{n}_vs_busy"] = median_ratio(samples, f"users{n}", f"busy{n}")
                ratios[f"{prefix}busy{n}_vs_genai_cb"] = median_ratio(samples, f"busy{n}", f"genai_cb{n}")
                ratios[f"{prefix}busy{n}_vs_mono"] = median_ratio(samples, f"busy{n}", "mono")
        notes.append(
            f"{precision} mode: {changed} texts of {(rounds + 1) * sum(users)} differ from those written alone"
        )
    return Report(
        experiment="batching",
        machine=machine(),
        rows=rows,
        ratios=ratios,
        goals={f"{prefix}{name}": (">=", goal) for prefix in ("", "performance_") for name, goal in _GOALS.items()},
        notes=[
            f"{tokens} tokens each after prompts of {len(prompts_of(1)[0])}; all sides compute in the same mode",
            *notes,
            "the client, which stands for all users, shares the peers' cores",
            "never idle: each stage decodes batches of half of the users without end, both at once; no prompts",
        ],
    )


def _names(users: Sequence[int]) -> dict[str, str]:
    names = {"mono": "unsplit, one user, one core"}
    names |= {f"genai_cb{n}": f"ContinuousBatchingPipeline, {n} users" for n in BATCHED}
    names |= {f"users{n}": f"two peers, {n} users" for n in users}
    return names | {f"busy{n}": f"two stages never idle, {n} users" for n in BATCHED if n in users and n > 1}


def _measured(
    model: Model, precision: str, say: Say, tokens: int, users: Sequence[int], rounds: int
) -> tuple[dict[str, list[float]], int]:
    """Samples by name, and how many texts were not those written alone, of which accuracy mode has none."""
    single, batched = Single(model, precision), Batched(model, precision)
    prompts, spans, changed = prompts_of(max(users)), even(model, 2), 0
    with (
        crowd_on(model, 2, "--precision", precision, spans=spans) as crowd,
        busy_stages(model, spans, precision) as busy,
    ):
        alone = [crowd.write(prompt, tokens).ids for prompt in prompts]

        def together(n: int) -> float:
            nonlocal changed
            speed, different = _together(crowd, prompts[:n], alone[:n])
            if different and precision == "accuracy":
                raise AssertionError(f"{different} of {n} users got another text than alone")
            changed += different
            return speed

        configurations: dict[str, Callable[[], float]] = {"mono": lambda: single.speed(prompts[0], tokens)}
        for n in BATCHED:
            configurations[f"genai_cb{n}"] = partial(_batched, batched, prompts[:n], tokens)
            if n in users and n > 1:
                configurations[f"busy{n}"] = partial(busy.speed, n)
        for n in users:
            configurations[f"users{n}"] = partial(together, n)
        return interleaved(configurations, say, rounds), changed


def _together(crowd: Crowd, prompts: list[list[int]], alone: Sequence[tuple[int, ...]]) -> tuple[float, int]:
    speed, written = crowd.run(crowd.users.together(prompts, len(alone[0])))
    return speed, sum(each.ids != ids for each, ids in zip(written, alone, strict=True))


def _batched(pipeline: Batched, prompts: list[list[int]], tokens: int) -> float:
    return pipeline.together(prompts, tokens)[0]

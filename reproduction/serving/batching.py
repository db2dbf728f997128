"""1 to 32 users on two peers, one core each, against the unsplit model on one core, for one user and for all.

All users start at the same time. The speed is the tokens of all users per second, from the first request to the last
token, prompts included, in both modes. In accuracy mode each user's text must be the one that it gets alone. Two stages
that are never idle (`reproduction.bounds.never_idle`) are the upper bound of two peers on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from reproduction.bounds.never_idle import busy_stages
from reproduction.bounds.unsplit import Batched, Single
from reproduction.experiment import Log, Report, Row, interleaved, median_ratio, medians
from reproduction.harness.local import even_spans
from reproduction.harness.machine import machine
from reproduction.harness.users import SyncUsers, prompts_of, users_on_peers
from reproduction.models.real import Model, smollm2

TOKENS = 64
USERS = (1, 2, 4, 8, 16, 32)
BATCHED = (1, 8, 16)
ROUNDS = 3
_GOALS = {"users16_vs_mono": 10.0, "users8_vs_genai_cb": 1.7, "users16_vs_genai_cb": 1.7}


def run(log: Log) -> Report:
    model = smollm2(log)
    rows, ratios, notes = [], {}, []
    for precision, prefix in (("accuracy", ""), ("performance", "performance_")):
        samples, changed = _measured(model, precision, log, TOKENS, USERS, ROUNDS)
        middle = medians(samples)
        rows += [
            Row(configuration=f"{precision}: {label}", value=middle[name], unit="tok/s")
            for name, label in _names(USERS).items()
        ]
        for n in USERS:
            ratios[f"{prefix}users{n}_vs_mono"] = median_ratio(samples, f"users{n}", "mono")
        for n in BATCHED:
            if n in USERS:
                ratios[f"{prefix}users{n}_vs_genai_cb"] = median_ratio(samples, f"users{n}", f"genai_cb{n}")
            if n in USERS and n > 1:
                ratios[f"{prefix}users{n}_vs_busy"] = median_ratio(samples, f"users{n}", f"busy{n}")
                ratios[f"{prefix}busy{n}_vs_genai_cb"] = median_ratio(samples, f"busy{n}", f"genai_cb{n}")
                ratios[f"{prefix}busy{n}_vs_mono"] = median_ratio(samples, f"busy{n}", "mono")
        notes.append(
            f"{precision} mode: {changed} texts of {(ROUNDS + 1) * sum(USERS)} differ from those generated alone"
        )
    return Report(
        experiment="batching",
        machine=machine(),
        rows=rows,
        ratios=ratios,
        goals={f"{prefix}{name}": (">=", goal) for prefix in ("", "performance_") for name, goal in _GOALS.items()},
        notes=[
            f"{TOKENS} tokens each after prompts of {len(prompts_of(1)[0])}; all sides compute in the same mode",
            *notes,
            "the client of all users shares the peers' cores",
            "never idle: each stage always decodes batches of half of the users, both at once; no prompts",
        ],
    )


def _names(users: Sequence[int]) -> dict[str, str]:
    names = {"mono": "unsplit, one user, one core"}
    names |= {f"genai_cb{n}": f"ContinuousBatchingPipeline, {n} users" for n in BATCHED}
    names |= {f"users{n}": f"two peers, {n} users" for n in users}
    return names | {f"busy{n}": f"two stages never idle, {n} users" for n in BATCHED if n in users and n > 1}


def _measured(
    model: Model, precision: str, log: Log, tokens: int, users: Sequence[int], rounds: int
) -> tuple[dict[str, list[float]], int]:
    """Samples by name, and the number of texts that differ from those generated alone."""
    single, batched = Single(model, precision), Batched(model, precision)
    prompts, spans, changed = prompts_of(max(users)), even_spans(model, 2), 0
    with (
        users_on_peers(model, 2, "--precision", precision, spans=spans) as sync_users,
        busy_stages(model, spans, precision) as busy,
    ):
        expected = [sync_users.write(prompt, tokens).ids for prompt in prompts]

        def run_all(n: int) -> float:
            nonlocal changed
            speed, different = _run_all(sync_users, prompts[:n], expected[:n])
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
            configurations[f"users{n}"] = partial(run_all, n)
        return interleaved(configurations, log, rounds), changed


def _run_all(sync_users: SyncUsers, prompts: list[list[int]], expected: Sequence[tuple[int, ...]]) -> tuple[float, int]:
    speed, written = sync_users.run(sync_users.users.run_all(prompts, len(expected[0])))
    return speed, sum(result.ids != ids for result, ids in zip(written, expected, strict=True))


def _batched(pipeline: Batched, prompts: list[list[int]], tokens: int) -> float:
    return pipeline.run_all(prompts, tokens)[0]

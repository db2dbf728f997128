"""From one node to two, one user to two, without drafts and with: the unsplit model on one core = 1, as published.

The draft is scripted: it knows the text, errs so often that its acceptance is the published one, and is charged the
time of a model a fifth the target's size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from client.speculation.speculation import Guesser
from client.speculation.tuner import Prior, Tuner
from reproduction.bounds.never_idle import busy_stages
from reproduction.bounds.unsplit import Single
from reproduction.experiment import ROUNDS_OF_ONE, Report, Row, Say, interleaved, median_ratio, medians
from reproduction.harness.local import even
from reproduction.harness.machine import machine
from reproduction.harness.scripted_draft import GUESSES, SHARE, ScriptedDraft, chance_of
from reproduction.harness.users import crowd_on, prompts_of
from reproduction.models.real import smollm2

TOKENS = 96
ACCEPTANCE = 0.707


def run(say: Say, *, tokens: int = TOKENS, rounds: int = ROUNDS_OF_ONE) -> Report:
    model = smollm2(say)
    single = Single(model)
    prompts = prompts_of(2)
    draft_s = SHARE / single.write(prompts[0], tokens)[0]
    spans = even(model, 2)
    with crowd_on(model, 2, spans=spans) as crowd, busy_stages(model, spans, "accuracy") as busy:
        alone = [crowd.write(prompt, tokens).ids for prompt in prompts]

        def with_drafts() -> float:
            guessers = [_guesser([*prompt, *ids], draft_s) for prompt, ids in zip(prompts, alone, strict=True)]
            return crowd.together(prompts, alone, guessers)

        samples = interleaved(
            {
                "mono": lambda: single.speed(prompts[0], tokens),
                "one_stream": partial(crowd.together, prompts[:1], alone[:1]),
                "two_streams": partial(crowd.together, prompts, alone),
                "never_idle": lambda: busy.speed(2),
                "two_streams_drafts": with_drafts,
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
            Row(configuration="two stages never idle, a stream in each", value=middle["never_idle"], unit="tok/s"),
            Row(configuration="two peers, two streams, drafts", value=middle["two_streams_drafts"], unit="tok/s"),
        ],
        ratios={
            "one_stream_vs_mono": median_ratio(samples, "one_stream", "mono"),
            "two_streams_vs_mono": median_ratio(samples, "two_streams", "mono"),
            "never_idle_vs_mono": median_ratio(samples, "never_idle", "mono"),
            "two_streams_drafts_vs_mono": median_ratio(samples, "two_streams_drafts", "mono"),
        },
        goals={"two_streams_vs_mono": (">=", 1.8), "two_streams_drafts_vs_mono": (">=", 2.6)},
        notes=[
            "published: two streams 1.20 times one unsplit user, with drafts 1.79",
            f"drafts: scripted, {GUESSES} guesses a window, {ACCEPTANCE:.1%} accepted (published), each charged "
            f"{SHARE:.0%} of the unsplit model's time for a token",
            f"f32, {tokens} tokens after prompts of {len(prompts[0])}, from the question to the last token",
            "never idle: each stage decodes without end, both at once; no network, client, prompt: the bound",
        ],
    )


def _guesser(text: Sequence[int], draft_s: float) -> Guesser:
    chance = chance_of(ACCEPTANCE)
    draft = ScriptedDraft(text, errors=1 - chance, seconds=draft_s)
    return Guesser(draft, Tuner(Prior(chance=chance, draft_s=draft_s), free_guesses=False, k=GUESSES), time.monotonic)

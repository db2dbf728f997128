"""From one machine to two, from one user to two, without and with drafts; the unsplit model on one core is 1.

The draft is scripted: it knows the text, errs as often as the published acceptance says, and takes the time of a model
a fifth of the target's size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from client.speculation.speculation import Guesser
from client.speculation.tuner import Prior, Tuner
from reproduction.bounds.never_idle import busy_stages
from reproduction.bounds.unsplit import Single
from reproduction.experiment import ROUNDS_OF_ONE, Log, Report, Row, interleaved, median_ratio, medians
from reproduction.harness.local import even_spans
from reproduction.harness.machine import machine
from reproduction.harness.scripted_draft import COST_SHARE, GUESSES, ScriptedDraft, chance_of
from reproduction.harness.users import prompts_of, users_on_peers
from reproduction.models.real import smollm2

TOKENS = 96
ACCEPTANCE = 0.707


def run(log: Log) -> Report:
    model = smollm2(log)
    single = Single(model)
    prompts = prompts_of(2)
    draft_s = COST_SHARE / single.write(prompts[0], TOKENS)[0]
    spans = even_spans(model, 2)
    with users_on_peers(model, 2, spans=spans) as sync_users, busy_stages(model, spans, "accuracy") as busy:
        expected = [sync_users.write(prompt, TOKENS).ids for prompt in prompts]

        def with_drafts() -> float:
            guessers = [_guesser([*prompt, *ids], draft_s) for prompt, ids in zip(prompts, expected, strict=True)]
            return sync_users.run_all(prompts, expected, guessers)

        samples = interleaved(
            {
                "mono": lambda: single.speed(prompts[0], TOKENS),
                "one_stream": partial(sync_users.run_all, prompts[:1], expected[:1]),
                "two_streams": partial(sync_users.run_all, prompts, expected),
                "never_idle": lambda: busy.speed(2),
                "two_streams_drafts": with_drafts,
            },
            log,
            ROUNDS_OF_ONE,
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
            f"drafts: scripted, {GUESSES} guesses a window, {ACCEPTANCE:.1%} accepted (published), each takes "
            f"{COST_SHARE:.0%} of the unsplit model's time for a token",
            f"f32, {TOKENS} tokens after prompts of {len(prompts[0])}, from the request to the last token",
            "never idle: each stage always decodes, both at once; no network, client, prompt: the upper bound",
        ],
    )


def _guesser(text: Sequence[int], draft_s: float) -> Guesser:
    chance = chance_of(ACCEPTANCE)
    draft = ScriptedDraft(text, errors=1 - chance, seconds=draft_s)
    return Guesser(draft, Tuner(Prior(chance=chance, draft_s=draft_s), free_guesses=False, k=GUESSES), time.monotonic)

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from client.speculation.speculation import SpeculationReport
from client.speculation.tuner import Contention, Prior, Tuner
from tests.client.speculation.simulated import in_virtual_time, speed
from tests.client.test_metrics import answer

PRIOR = Prior(chance=0.6, draft_s=0.0001)


def taught(tuner: Tuner) -> Tuner:
    """The tuner after a prompt of 8 tokens and a step of one, both of 5 ms on the hops and 5 ms elsewhere."""
    tuner.record_answer(answer(1.0, tokens=8))
    tuner.record_answer(answer(1.1))
    return tuner


def verdicts(tuner: Tuner, right: int, compared: int, times: int) -> None:
    for _ in range(times):
        tuner.record_verdict(right, compared, corrected=right < compared)
        tuner.retune(right + 1)


def test_a_draft_guesses_during_the_prompt_and_the_time_of_a_step_decides_what_is_sent() -> None:
    tuner = Tuner(PRIOR, free_guesses=False)
    tuner.retune(1)
    assert (tuner.costs, tuner.window.depth, tuner.rate_without_draft()) == (None, 1, 0.0)
    assert tuner.wants_guesses
    tuner.record_answer(answer(1.0, tokens=40))
    # a token's share of the prompt's time is a lower bound
    assert tuner.costs is not None
    assert tuner.costs.hops.at(1) == tuner.costs.hops.at(40) / 40
    taught(tuner).retune(1)
    assert tuner.window.k > 0
    assert tuner.costs.hops.at(1) > 0.004
    assert tuner.rate_without_draft() > 0


def test_right_guesses_make_the_window_larger_and_wrong_ones_end_guessing() -> None:
    good, bad = taught(Tuner(PRIOR, free_guesses=True)), taught(Tuner(PRIOR, free_guesses=True))
    verdicts(good, 4, 4, 30)
    verdicts(bad, 0, 4, 30)
    assert good.window.k > 4
    assert good.off_reason() == ""
    good.record_verdict(0, 1, corrected=True)
    # the hops of this test take as long for eight tokens as for one: only guesses that are never right do not pay
    assert next(bad.chances.after(0)) < 0.1
    assert next(good.chances.after(9)) > 0.9


def test_the_chance_of_a_guess_depends_on_the_right_ones_before_it() -> None:
    tuner = Tuner(PRIOR, free_guesses=True)
    for _ in range(40):
        tuner.record_verdict(3, 4, corrected=True)  # three right, then one wrong, each time
    chances = list(itertools.islice(tuner.chances.after(0), 4))
    assert min(chances[:3]) > 0.8
    assert chances[3] < 0.3


def test_a_draft_that_takes_too_long_is_switched_off_and_says_why() -> None:
    tuner = taught(Tuner(PRIOR, free_guesses=False))
    for _ in range(30):
        tuner.record_guesses(1, 0.050)
    verdicts(tuner, 0, 1, 3)
    assert tuner.window.k == 0
    assert not tuner.wants_guesses
    assert "of the guesses were right: 3 of them would take 15" in tuner.off_reason()
    verdicts(tuner, 0, 0, 200)
    assert tuner.window.k == 0  # even the best draft would not pay


def test_a_wrong_draft_is_tried_again_less_and_less_often() -> None:
    tuner = taught(Tuner(Prior(chance=0.05, draft_s=0.002), free_guesses=False))
    used = []
    for _ in range(600):
        tuner.record_verdict(0, 1 if tuner.window.k else 0, corrected=True)
        tuner.retune(1)
        used.append(tuner.window.k)
    trials = [place for place in range(1, len(used)) if used[place] and not used[place - 1]]
    assert 2 <= len(trials) <= 5
    gaps = [b - a for a, b in itertools.pairwise(trials)]
    assert gaps == sorted(gaps)


def test_one_slow_step_does_not_end_guessing() -> None:
    tuner = taught(Tuner(PRIOR, free_guesses=False))
    verdicts(tuner, 3, 3, 4)
    usual = tuner.window.k
    tuner.record_guesses(1, 5.0)
    bad = answer(1.3, tokens=2, rows=2)
    slow = tuple(replace(hop, compute_s=5.0) for hop in bad.output.trace)
    tuner.record_answer(replace(bad, output=replace(bad.output, trace=slow), received_at=12.0))
    verdicts(tuner, 3, 3, 1)
    assert tuner.window.k > 0
    for _ in range(150):
        tuner.record_answer(answer(1.4))
    verdicts(tuner, 3, 3, 1)
    assert tuner.window.k >= usual  # the slow step is forgotten


@pytest.mark.parametrize("claimed", [1e308, -1e308, 0.0])
def test_a_hop_that_lies_about_its_times_breaks_nothing(claimed: float) -> None:
    tuner = Tuner(Prior(chance=0.6, draft_s=0.0), free_guesses=True)
    for tokens in (8, 1, 3):
        measured = answer(1.0, tokens=tokens, rows=min(tokens, 3))
        claims = tuple(replace(hop, compute_s=claimed, queue_s=abs(claimed)) for hop in measured.output.trace)
        tuner.record_answer(
            replace(measured, output=replace(measured.output, trace=claims), received_at=1.0 if claimed else 2.0)
        )
        verdicts(tuner, 1, 2, 1)
    assert 0 < tuner.rate_without_draft() < float("inf")
    assert tuner.off_reason() is not None


def test_a_fixed_window_is_not_tuned() -> None:
    tuner = taught(Tuner(PRIOR, free_guesses=True, k=5, depth=2))
    verdicts(tuner, 0, 5, 20)
    assert (tuner.window.k, tuner.window.depth) == (5, 2)
    none = Tuner(PRIOR, free_guesses=True, k=0)
    assert not none.wants_guesses


def test_a_new_route_resets_the_costs() -> None:
    tuner = taught(Tuner(PRIOR, free_guesses=True))
    before = tuner.rate_without_draft()
    measured = answer(200.0)
    trace = tuple(replace(hop, peer=f"{place}" * 32) for place, hop in enumerate(measured.output.trace))
    tuner.record_answer(replace(measured, output=replace(measured.output, trace=trace), received_at=210.0))
    assert tuner.rate_without_draft() < before / 9  # by that answer alone


def test_a_tuner_starts_from_the_measurements_of_the_same_route() -> None:
    before = taught(Tuner(PRIOR, free_guesses=False))
    learned = before.learned
    assert learned is not None
    tuner = Tuner(replace(PRIOR, draft_s=9.0), free_guesses=False, learned=learned)
    assert tuner.window.k > 0
    for _ in range(2):
        assert tuner.costs is not None
        assert before.costs is not None
        assert tuner.costs.draft_s == before.costs.draft_s
        assert tuner.costs.trip_s(1) == pytest.approx(before.costs.trip_s(1))
        tuner.record_answer(answer(1.0, tokens=8))  # the next prompt


def test_measurements_of_another_route_do_not_count() -> None:
    learned = taught(Tuner(PRIOR, free_guesses=False)).learned
    assert learned is not None
    slow = replace(learned, peers=("another", "and another"), network_s=9.0, hops={1: 9.0}, slowest={1: 9.0})
    tuner, fresh = Tuner(PRIOR, free_guesses=False, learned=slow), Tuner(PRIOR, free_guesses=False)
    for each in (tuner, fresh):
        each.record_answer(answer(1.0, tokens=8))
    assert tuner.costs is not None
    assert fresh.costs is not None
    assert tuner.costs.trip_s(1) == fresh.costs.trip_s(1) < 1.0


def test_nothing_is_learned_before_something_was_decoded() -> None:
    tuner = Tuner(PRIOR, free_guesses=False)
    assert tuner.learned is None
    tuner.record_answer(answer(1.0, tokens=8, rows=1))
    assert tuner.learned is None
    assert taught(tuner).learned is not None


@pytest.mark.parametrize(
    ("link_s", "right", "draft_s", "cores"),
    [
        (0.0002, 0.5, 0.0, None),
        (0.0002, 0.83, 0.0024, None),
        (0.0002, 0.83, 0.0024, 2),
        (0.1, 0.83, 0.0024, None),
    ],
)
def test_the_chosen_window_comes_near_the_best_fixed_one(
    link_s: float, right: float, draft_s: float, cores: int | None
) -> None:
    """In virtual time: three hops, near and far, with cores of their own and not, a draft that is free or not."""

    def rate(k: int | None, depth: int | None) -> float:
        given = {"link_s": link_s, "right": right, "draft_s": draft_s, "k": k, "depth": depth, "count": 160}
        given["cores"] = cores
        return in_virtual_time(lambda: speed(**given))[0]  # type: ignore[arg-type]

    best = max(rate(k, 1) for k in (0, 1, 2, 3, 5, 7, 10))
    assert rate(None, None) > 0.95 * best


def test_several_windows_under_way_beat_a_single_one_over_a_wan() -> None:
    def rate(k: int | None, depth: int | None) -> float:
        given = {"link_s": 0.1, "right": 0.95, "draft_s": 0.0024, "k": k, "depth": depth, "count": 160}
        return in_virtual_time(lambda: speed(**given))[0]  # type: ignore[arg-type]

    assert rate(None, None) > 1.2 * max(rate(k, 1) for k in (5, 10, 16))


def test_no_trip_waits_while_a_draft_reads_a_long_prompt() -> None:
    def run_with(unread_s: float) -> tuple[float, SpeculationReport]:
        given = {"link_s": 0.02, "right": 0.9, "draft_s": 0.002, "k": None, "depth": None, "count": 160}
        return in_virtual_time(lambda: speed(**given, unread_s=unread_s))  # type: ignore[arg-type]

    (at_once, _), (late, report) = run_with(0.0), run_with(2.0)
    assert report.windows[0][1] == 0 or report.windows[0][0] == 1  # tokens came before it could guess
    assert report.tokens_a_trip > 2
    assert report.off == ""
    assert late < at_once


def test_contention_is_measured_and_forgotten() -> None:
    contention = Contention()
    prior = contention.share(0.0, 0.02)
    # over slow links hops are rarely busy at the same time
    assert contention.share(0.18, 0.02) == pytest.approx(prior / 10)
    for _ in range(30):
        contention.observe(0.030, 0.020, others=1)
    assert contention.share(0.0, 0.02) == pytest.approx(0.5, abs=0.1)
    for _ in range(600):
        contention.fade()
    assert contention.share(0.0, 0.02) == pytest.approx(prior, abs=0.01)
    for _ in range(30):
        contention.observe(0.010, 0.020, others=1)
    assert contention.share(0.0, 0.02) == 0.0

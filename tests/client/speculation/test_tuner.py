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
    """It has seen a prompt of 8 tokens and a step of one, both of 5 ms on the hops and 5 ms elsewhere."""
    tuner.record_answer(answer(1.0, tokens=8))
    tuner.record_answer(answer(1.1))
    return tuner


def verdicts(tuner: Tuner, right: int, compared: int, times: int) -> None:
    for _ in range(times):
        tuner.record_verdict(right, compared, corrected=right < compared)
        tuner.retune(right + 1)


def test_a_draft_guesses_beside_the_prompt_and_the_time_of_a_step_decides_what_is_sent() -> None:
    tuner = Tuner(PRIOR, free_guesses=False)
    tuner.retune(1)
    assert (tuner.costs, tuner.window.depth, tuner.rate_without_draft()) == (None, 1, 0.0)
    assert tuner.guesses
    tuner.record_answer(answer(1.0, tokens=40))
    # a prompt's token is as much of its time as it can be, and so is a guess
    assert tuner.costs is not None
    assert tuner.costs.hops.at(1) == tuner.costs.hops.at(40) / 40
    taught(tuner).retune(1)
    assert tuner.window.k > 0
    assert tuner.costs.hops.at(1) > 0.004
    assert tuner.rate_without_draft() > 0


def test_it_guesses_more_where_more_was_right_and_nothing_where_nothing_was() -> None:
    good, bad = taught(Tuner(PRIOR, free_guesses=True)), taught(Tuner(PRIOR, free_guesses=True))
    verdicts(good, 4, 4, 30)
    verdicts(bad, 0, 4, 30)
    assert good.window.k > 4
    assert good.off_reason() == ""
    good.record_verdict(0, 1, corrected=True)
    # the hops of this test take as long for eight tokens as for one: only what is never right is not worth a try
    assert next(bad.chances.after(0)) < 0.1
    assert next(good.chances.after(9)) > 0.9


def test_a_guess_after_many_right_ones_has_its_own_chance() -> None:
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
    assert not tuner.guesses
    assert "of the guesses were right: 3 of them would take 15" in tuner.off_reason()
    verdicts(tuner, 0, 0, 200)
    assert tuner.window.k == 0  # the best draft would not do at this price


def test_a_draft_that_was_wrong_is_tried_again_and_less_and_less() -> None:
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


def test_one_bad_moment_does_not_end_guessing() -> None:
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
    assert tuner.window.k >= usual  # nobody remembers that two tokens took seconds


@pytest.mark.parametrize("said", [1e308, -1e308, 0.0])
def test_a_hop_that_lies_about_its_times_breaks_nothing(said: float) -> None:
    tuner = Tuner(Prior(chance=0.6, draft_s=0.0), free_guesses=True)
    for tokens in (8, 1, 3):
        told = answer(1.0, tokens=tokens, rows=min(tokens, 3))
        lies = tuple(replace(hop, compute_s=said, queue_s=abs(said)) for hop in told.output.trace)
        tuner.record_answer(replace(told, output=replace(told.output, trace=lies), received_at=1.0 if said else 2.0))
        verdicts(tuner, 1, 2, 1)
    assert 0 < tuner.rate_without_draft() < float("inf")
    assert tuner.off_reason() is not None


def test_what_is_fixed_is_not_tuned() -> None:
    tuner = taught(Tuner(PRIOR, free_guesses=True, k=5, depth=2))
    verdicts(tuner, 0, 5, 20)
    assert (tuner.window.k, tuner.window.depth) == (5, 2)
    none = Tuner(PRIOR, free_guesses=True, k=0)
    assert not none.guesses


def test_another_route_has_other_costs() -> None:
    tuner = taught(Tuner(PRIOR, free_guesses=True))
    before = tuner.rate_without_draft()
    told = answer(200.0)
    trace = tuple(replace(hop, peer=f"{place}" * 32) for place, hop in enumerate(told.output.trace))
    tuner.record_answer(replace(told, output=replace(told.output, trace=trace), received_at=210.0))
    assert tuner.rate_without_draft() < before / 9  # by that answer alone


def test_a_session_begins_with_what_the_one_before_found_out_of_the_same_route() -> None:
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


def test_what_was_found_out_of_another_route_counts_for_nothing() -> None:
    learned = taught(Tuner(PRIOR, free_guesses=False)).learned
    assert learned is not None
    slow = replace(learned, peers=("another", "and another"), network_s=9.0, hops={1: 9.0}, slowest={1: 9.0})
    tuner, fresh = Tuner(PRIOR, free_guesses=False, learned=slow), Tuner(PRIOR, free_guesses=False)
    for each in (tuner, fresh):
        each.record_answer(answer(1.0, tokens=8))
    assert tuner.costs is not None
    assert fresh.costs is not None
    assert tuner.costs.trip_s(1) == fresh.costs.trip_s(1) < 1.0


def test_nothing_was_found_out_where_nothing_was_decoded() -> None:
    tuner = Tuner(PRIOR, free_guesses=False)
    assert tuner.learned is None
    tuner.record_answer(answer(1.0, tokens=8, rows=1))
    assert tuner.learned is None
    assert taught(tuner).learned is not None


@pytest.mark.parametrize(
    ("way_s", "right", "draft_s", "cores"),
    [
        (0.0002, 0.5, 0.0, None),
        (0.0002, 0.83, 0.0024, None),
        (0.0002, 0.83, 0.0024, 2),
        (0.1, 0.83, 0.0024, None),
    ],
)
def test_what_is_chosen_comes_near_the_best_fixed_size(
    way_s: float, right: float, draft_s: float, cores: int | None
) -> None:
    """In virtual time: three hops, near and far, with cores of their own and not, a draft that is free or not."""

    def tried(k: int | None, depth: int | None) -> float:
        given = {"way_s": way_s, "right": right, "draft_s": draft_s, "k": k, "depth": depth, "count": 160}
        given["cores"] = cores
        return in_virtual_time(lambda: speed(**given))[0]  # type: ignore[arg-type]

    best = max(tried(k, 1) for k in (0, 1, 2, 3, 5, 7, 10))
    assert tried(None, None) > 0.95 * best


def test_several_windows_under_way_beat_any_single_one_where_peers_are_far() -> None:
    def tried(k: int | None, depth: int | None) -> float:
        given = {"way_s": 0.1, "right": 0.95, "draft_s": 0.0024, "k": k, "depth": depth, "count": 160}
        return in_virtual_time(lambda: speed(**given))[0]  # type: ignore[arg-type]

    assert tried(None, None) > 1.2 * max(tried(k, 1) for k in (5, 10, 16))


def test_a_draft_that_reads_a_long_prompt_keeps_nobody_waiting_and_is_not_dear_for_it() -> None:
    def tried(unread_s: float) -> tuple[float, SpeculationReport]:
        given = {"way_s": 0.02, "right": 0.9, "draft_s": 0.002, "k": None, "depth": None, "count": 160}
        return in_virtual_time(lambda: speed(**given, unread_s=unread_s))  # type: ignore[arg-type]

    (at_once, _), (late, report) = tried(0.0), tried(2.0)
    assert report.windows[0][1] == 0 or report.windows[0][0] == 1  # tokens came before it could guess
    assert report.tokens_a_trip > 2
    assert report.off == ""
    assert late < at_once


def test_how_much_several_windows_disturb_each_other_is_measured_and_forgotten() -> None:
    crowd = Contention()
    believed = crowd.share(0.0, 0.02)
    assert crowd.share(0.18, 0.02) == pytest.approx(believed / 10)  # far hops hardly meet
    for _ in range(30):
        crowd.observe(0.030, 0.020, others=1)
    assert crowd.share(0.0, 0.02) == pytest.approx(0.5, abs=0.1)
    for _ in range(600):
        crowd.fade()
    assert crowd.share(0.0, 0.02) == pytest.approx(believed, abs=0.01)
    for _ in range(30):
        crowd.observe(0.010, 0.020, others=1)
    assert crowd.share(0.0, 0.02) == 0.0

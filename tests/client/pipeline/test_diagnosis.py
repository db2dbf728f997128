"""What is found from the Pongs of three hops, in virtual time: stalled after 5 s, slow after 20 s."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from client.pipeline.diagnosis import Cause, Diagnosis, Finding
from swarm.wire.queries import Pong


def pong(received: int, computed: int, sent: int, rounds: int = 0) -> Pong:
    return Pong(request=1, time=0.0, received=received, computed=computed, sent=sent, rounds=rounds)


def first_finding(
    pongs_at: Callable[[int], Sequence[Pong]], relayed: Sequence[bool] = (False, False, False)
) -> tuple[int, Finding] | None:
    """The first finding and its second, with pongs once a second for a minute."""
    diagnosis = Diagnosis(stall_s=5.0, slow_s=20.0)
    for second in range(60):
        finding = diagnosis.update(pongs_at(second), relayed=relayed, now=100.0 + second)
        if finding is not None:
            return second, finding
    return None


def test_a_hop_that_has_a_step_and_computes_nothing_is_stalled() -> None:
    found = first_finding(lambda second: [pong(3, 3, 3), pong(3, 2, 2), pong(2, 2, 2)])
    assert found == (6, Finding(place=1, cause=Cause.STALLED))


def test_a_hop_that_computes_for_other_sessions_is_slow_and_has_more_time() -> None:
    found = first_finding(lambda second: [pong(3, 3, 3), pong(3, 2, 2, rounds=second), pong(2, 2, 2)])
    assert found == (21, Finding(place=1, cause=Cause.SLOW))


def test_a_hop_that_stops_computing_for_others_is_stalled_from_then_on() -> None:
    found = first_finding(lambda second: [pong(3, 3, 3), pong(3, 2, 2, rounds=min(second, 8)), pong(2, 2, 2)])
    assert found == (14, Finding(place=1, cause=Cause.STALLED))


def test_another_hops_rounds_excuse_no_hop() -> None:
    found = first_finding(lambda second: [pong(3, 3, 3, rounds=second), pong(3, 2, 2), pong(2, 2, 2, rounds=second)])
    assert found == (6, Finding(place=1, cause=Cause.STALLED))


def test_progress_of_the_session_begins_the_time_anew() -> None:
    found = first_finding(lambda second: [pong(9, 9, 9), pong(9, min(second // 4, 3), 0), pong(0, 0, 0)])
    assert found == (12 + 6, Finding(place=1, cause=Cause.STALLED))
    assert first_finding(lambda second: [pong(99, 99, 99), pong(99, second, 0), pong(0, 0, 0)]) is None


def test_a_step_that_was_sent_and_never_received_is_a_lost_link() -> None:
    found = first_finding(lambda second: [pong(3, 3, 3), pong(3, 3, 3), pong(2, 2, 2)])
    assert found == (6, Finding(place=2, cause=Cause.LOST_LINK))


def test_an_answer_that_does_not_arrive_is_the_last_hops_fault() -> None:
    pongs = [pong(3, 3, 3)] * 3
    assert first_finding(lambda second: pongs) == (6, Finding(place=2, cause=Cause.UNANSWERED))
    behind = [pong(3, 3, 3), pong(2, 2, 2), pong(2, 2, 2)]
    assert first_finding(lambda second: behind, relayed=(False, True, False)) == (
        6,
        Finding(place=2, cause=Cause.UNANSWERED),
    )

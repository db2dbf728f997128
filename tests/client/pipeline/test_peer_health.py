from __future__ import annotations

from client.pipeline.peer_health import PeerHealth


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def new_health(clock: Clock) -> PeerHealth:
    return PeerHealth(first_s=5.0, limit_s=60.0, clock=clock)


def ban(health: PeerHealth, clock: Clock, incarnation: int = 1) -> float:
    """A failure of work that begins now. Returns the seconds of the ban."""
    clock.now += 1.0
    health.record_failure("a", incarnation, began=clock.now)
    return health.remaining([("a", incarnation)])["a"]


def test_a_ban_grows_with_each_failure_up_to_a_limit() -> None:
    clock = Clock()
    health = new_health(clock)
    assert [ban(health, clock) for _ in range(6)] == [5, 10, 20, 40, 60, 60]
    for _ in range(5000):
        assert ban(health, clock) == 60


def test_many_sessions_that_see_one_incident_count_it_once() -> None:
    clock = Clock()
    health = new_health(clock)
    for _ in range(64):  # their circuits were open when the peer stalled; they notice it one after the other
        clock.now += 0.01
        health.record_failure("a", 1, began=99.0)
    assert health.remaining([("a", 1)])["a"] <= 5.0
    assert ban(health, clock) == 10.0  # the next incident


def test_a_ban_ends() -> None:
    clock = Clock()
    health = new_health(clock)
    assert ban(health, clock) == 5
    assert health.remaining([("b", 1)]) == {}
    clock.now += 5.0
    assert health.remaining([("a", 1)]) == {}
    # the failure still counts
    assert ban(health, clock) == 10


def test_a_restarted_peer_has_no_ban_and_no_failures() -> None:
    clock = Clock()
    health = new_health(clock)
    ban(health, clock)
    assert health.remaining([("a", 2)]) == {}
    assert ban(health, clock, incarnation=2) == 5


def test_a_success_ends_a_ban_and_the_next_failure_counts_as_the_first() -> None:
    clock = Clock()
    health = new_health(clock)
    ban(health, clock)
    health.record_success("a", 1)
    assert health.remaining([("a", 1)]) == {}
    assert ban(health, clock) == 5


def test_a_pause_is_no_failure_and_never_shortens_a_ban_or_another_pause() -> None:
    clock = Clock()
    health = new_health(clock)
    health.pause("a", 1, 30.0)
    assert health.remaining([("a", 1)]) == {"a": 30.0}
    health.record_failure("a", 1, began=clock.now)
    assert health.remaining([("a", 1)]) == {"a": 30.0}
    health.pause("a", 1, 1.0)
    assert health.remaining([("a", 1)]) == {"a": 30.0}


def test_a_trial_ends_a_ban_and_its_failures_still_count() -> None:
    clock = Clock()
    health = new_health(clock)
    ban(health, clock)
    health.end_ban("a", 1)
    assert health.remaining([("a", 1)]) == {}
    assert ban(health, clock) == 10


def test_a_silent_peer_may_be_tried_at_once_and_another_after_the_first_bans_time() -> None:
    clock = Clock()
    health = new_health(clock)
    health.record_failure("silent", 1, began=clock.now, silent=True)
    health.record_failure("failed", 1, began=clock.now)
    clock.now += 1.0
    health.record_failure("failed", 1, began=clock.now)  # banned for 10 s
    assert health.may_be_tried("silent", 1)
    assert not health.may_be_tried("failed", 1)
    clock.now += 5.0
    assert not health.may_be_tried("silent", 1)  # its ban has ended
    assert health.may_be_tried("failed", 1)
    health.pause("failed", 1, 1.0)
    assert not health.may_be_tried("failed", 1)
    assert not health.may_be_tried("unknown", 1)


def test_peers_that_come_and_go_leave_nothing_behind() -> None:
    clock = Clock()
    health = new_health(clock)
    for number in range(20_000):
        clock.now += 1.0
        health.record_failure(f"peer-{number}", 1, began=clock.now)
    assert len(health._states) <= 1024
    assert health.remaining([("peer-19999", 1)]) == {"peer-19999": 5.0}

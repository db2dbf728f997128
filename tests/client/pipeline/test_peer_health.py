from __future__ import annotations

from client.pipeline.peer_health import PeerHealth


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def new_health(clock: Clock) -> PeerHealth:
    return PeerHealth(first_s=5.0, limit_s=60.0, clock=clock)


def test_a_ban_grows_with_each_failure_up_to_a_limit() -> None:
    clock = Clock()
    health = new_health(clock)
    assert [health.record_failure("a", 1) for _ in range(6)] == [5, 10, 20, 40, 60, 60]
    for _ in range(5000):
        assert health.record_failure("a", 1) == 60


def test_a_ban_ends() -> None:
    clock = Clock()
    health = new_health(clock)
    health.record_failure("a", 1)
    assert health.remaining([("a", 1), ("b", 1)]) == {"a": 5.0}
    clock.now += 5.0
    assert health.remaining([("a", 1)]) == {}
    # the failure still counts
    assert health.record_failure("a", 1) == 10


def test_a_restarted_peer_has_no_ban_and_no_failures() -> None:
    health = new_health(Clock())
    health.record_failure("a", 1)
    assert health.remaining([("a", 2)]) == {}
    assert health.record_failure("a", 2) == 5


def test_a_success_ends_a_ban_and_the_next_failure_counts_as_the_first() -> None:
    health = new_health(Clock())
    health.record_failure("a", 1)
    health.record_success("a", 1)
    assert health.remaining([("a", 1)]) == {}
    assert health.record_failure("a", 1) == 5


def test_a_pause_is_no_failure_and_never_shortens_a_ban_or_another_pause() -> None:
    clock = Clock()
    health = new_health(clock)
    health.pause("a", 1, 30.0)
    assert health.remaining([("a", 1)]) == {"a": 30.0}
    assert health.record_failure("a", 1) == 5
    assert health.remaining([("a", 1)]) == {"a": 30.0}
    health.pause("a", 1, 1.0)
    assert health.remaining([("a", 1)]) == {"a": 30.0}

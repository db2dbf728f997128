from __future__ import annotations

from client.pipeline.peer_health import PeerHealth


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def peer_health(clock: Clock) -> PeerHealth:
    return PeerHealth(first_s=5.0, limit_s=60.0, clock=clock)


def test_a_ban_grows_with_each_failure_up_to_a_limit() -> None:
    clock = Clock()
    table = peer_health(clock)
    assert [table.record_failure("a", 1, "broke") for _ in range(6)] == [5, 10, 20, 40, 60, 60]
    for _ in range(5000):
        assert table.record_failure("a", 1, "broke") == 60


def test_a_ban_ends() -> None:
    clock = Clock()
    table = peer_health(clock)
    table.record_failure("a", 1, "broke")
    assert table.remaining([("a", 1), ("b", 1)]) == {"a": 5.0}
    assert table.reason("a", 1) == "broke"
    clock.now += 5.0
    assert table.remaining([("a", 1)]) == {}
    assert table.reason("a", 1) == ""
    # what it did is not forgotten by that
    assert table.record_failure("a", 1, "broke") == 10


def test_a_restarted_peer_has_a_clean_slate() -> None:
    table = peer_health(Clock())
    table.record_failure("a", 1, "broke")
    assert table.remaining([("a", 2)]) == {}
    assert table.record_failure("a", 2, "broke") == 5


def test_good_work_is_remembered() -> None:
    table = peer_health(Clock())
    table.record_failure("a", 1, "broke")
    table.record_success("a", 1)
    assert table.remaining([("a", 1)]) == {}
    assert table.record_failure("a", 1, "broke") == 5


def test_a_rest_counts_for_nothing_and_shortens_no_ban() -> None:
    clock = Clock()
    table = peer_health(clock)
    table.pause("a", 1, 30.0, "busy")
    assert table.remaining([("a", 1)]) == {"a": 30.0}
    assert table.record_failure("a", 1, "broke") == 5
    assert table.remaining([("a", 1)]) == {"a": 30.0}
    table.pause("a", 1, 1.0, "busy")
    assert table.remaining([("a", 1)]) == {"a": 30.0}

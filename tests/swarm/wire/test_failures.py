from __future__ import annotations

import pytest
from hypothesis import given

from swarm import errors
from swarm.errors import (
    ConfigError,
    DamagedFile,
    EngineError,
    LocalProtocolError,
    NotCovered,
    PeerError,
    PeerFailed,
    ProtocolError,
    RemoteProtocolError,
    SwarmError,
    WrongPeer,
)
from swarm.wire.failures import error_to_failure, failure_to_error
from swarm.wire.message import MAX_TEXT
from swarm.wire.messages import Failure
from tests.swarm.wire.strategies import failures

SENDER, OTHER = "s" * 32, "o" * 32


def tree(kind: type[SwarmError]) -> list[type[SwarmError]]:
    return [kind, *(child for direct in kind.__subclasses__() for child in tree(direct))]


SAME_ON_BOTH_SIDES = [
    kind
    for base in (errors.RouteError, errors.StepError, errors.DirectoryError, errors.PeerError)
    for kind in tree(base)
    if kind.__module__ == errors.__name__
]


@pytest.mark.parametrize("kind", SAME_ON_BOTH_SIDES, ids=lambda kind: kind.code)
def test_these_errors_mean_the_same_on_both_sides(kind: type[SwarmError]) -> None:
    back = failure_to_error(error_to_failure(kind("what happened; what to do")), SENDER)
    assert type(back) is kind
    assert str(back) == "what happened; what to do"


@pytest.mark.parametrize("kind", [EngineError, DamagedFile, ConfigError, LocalProtocolError, SwarmError])
def test_trouble_of_the_senders_own_machine_is_a_peer_that_failed(kind: type[SwarmError]) -> None:
    back = failure_to_error(error_to_failure(kind("the device is gone")), SENDER)
    assert type(back) is PeerFailed
    assert back.peer == SENDER
    assert str(back) == f"peer {SENDER[:8]} failed: the device is gone"


def test_an_unknown_code_is_a_peer_that_failed() -> None:
    assert type(failure_to_error(Failure(code="from_the_future", text=""), SENDER)) is PeerFailed


def test_a_complaint_about_our_bytes_is_our_own_bug() -> None:
    back = failure_to_error(error_to_failure(RemoteProtocolError("Forward: tokens is 7")), SENDER)
    assert type(back) is LocalProtocolError
    assert "Forward: tokens is 7" in str(back)


def test_another_version_is_the_other_sides_trouble() -> None:
    back = failure_to_error(error_to_failure(ProtocolError("version 1 and version 2")), SENDER)
    assert type(back) is RemoteProtocolError


def test_the_peer_at_fault_is_who_was_named_or_else_who_sent() -> None:
    named = failure_to_error(error_to_failure(WrongPeer("somebody else", peer=OTHER)), SENDER)
    unnamed = failure_to_error(error_to_failure(WrongPeer("somebody else")), SENDER)
    assert isinstance(named, PeerError)
    assert isinstance(unnamed, PeerError)
    assert (named.peer, unnamed.peer) == (OTHER, SENDER)


def test_the_numbers_of_an_error_travel_with_it() -> None:
    back = failure_to_error(error_to_failure(NotCovered("missing", [(0, 3), (7, 9)])), SENDER)
    assert isinstance(back, NotCovered)
    assert back.missing == ((0, 3), (7, 9))
    busy = failure_to_error(error_to_failure(errors.PeerBusy("later", retry_after=2.5)), SENDER)
    assert isinstance(busy, PeerError)
    assert busy.retry_after == 2.5


def test_what_the_failure_is_about_is_said() -> None:
    failure = error_to_failure(PeerFailed("no"), request=1, session="session-1", epoch=2, step=3)
    assert (failure.request, failure.session, failure.epoch, failure.step) == (1, "session-1", 2, 3)


def test_a_long_text_is_cut_and_never_refused() -> None:
    assert len(error_to_failure(PeerFailed("x" * 10_000)).text) == MAX_TEXT


def test_a_text_from_elsewhere_does_not_steer_the_terminal() -> None:
    back = failure_to_error(Failure(code="bad_step", text="\x1b[2J\nall is well"), SENDER)
    assert str(back).isprintable()
    assert "all is well" in str(back)


@pytest.mark.parametrize("missing", [5, "ab", ("a", "b"), (3,), (5, 2), (-1, 4), (1.5, 2.5)])
def test_numbers_that_are_none_are_left_out(missing: int | str | tuple[int, ...]) -> None:
    back = failure_to_error(Failure(code="not_covered", text="", detail={"missing": missing}), SENDER)
    assert isinstance(back, NotCovered)
    assert back.missing == ()


@given(failures)
def test_any_failure_is_an_error_of_the_tree(failure: Failure) -> None:
    back = failure_to_error(failure, SENDER)
    assert isinstance(back, SwarmError)
    if isinstance(back, PeerError):
        assert 0 <= back.retry_after <= 3600

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
from swarm.wire.base_message import MAX_TEXT
from swarm.wire.failures import error_to_failure, failure_to_error
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
    decoded = failure_to_error(error_to_failure(kind("what happened; what to do")), SENDER)
    assert type(decoded) is kind
    assert str(decoded) == "what happened; what to do"


@pytest.mark.parametrize("kind", [EngineError, DamagedFile, ConfigError, LocalProtocolError, SwarmError])
def test_an_error_of_the_senders_own_machine_becomes_peer_failed(kind: type[SwarmError]) -> None:
    decoded = failure_to_error(error_to_failure(kind("the device is gone")), SENDER)
    assert type(decoded) is PeerFailed
    assert decoded.peer == SENDER
    assert str(decoded) == f"peer {SENDER[:8]} failed: the device is gone"


def test_an_unknown_code_becomes_peer_failed() -> None:
    assert type(failure_to_error(Failure(code="from_the_future", text=""), SENDER)) is PeerFailed


def test_a_protocol_error_about_our_bytes_becomes_local() -> None:
    decoded = failure_to_error(error_to_failure(RemoteProtocolError("Forward: tokens is 7")), SENDER)
    assert type(decoded) is LocalProtocolError
    assert "Forward: tokens is 7" in str(decoded)


def test_another_protocol_version_becomes_remote() -> None:
    decoded = failure_to_error(error_to_failure(ProtocolError("version 1 and version 2")), SENDER)
    assert type(decoded) is RemoteProtocolError


def test_the_peer_at_fault_is_the_named_one_or_else_the_sender() -> None:
    named = failure_to_error(error_to_failure(WrongPeer("another key", peer=OTHER)), SENDER)
    unnamed = failure_to_error(error_to_failure(WrongPeer("another key")), SENDER)
    assert isinstance(named, PeerError)
    assert isinstance(unnamed, PeerError)
    assert (named.peer, unnamed.peer) == (OTHER, SENDER)


def test_the_values_of_an_error_are_sent_with_it() -> None:
    decoded = failure_to_error(error_to_failure(NotCovered("missing", [(0, 3), (7, 9)])), SENDER)
    assert isinstance(decoded, NotCovered)
    assert decoded.missing == ((0, 3), (7, 9))
    busy = failure_to_error(error_to_failure(errors.PeerBusy("later", retry_after=2.5)), SENDER)
    assert isinstance(busy, PeerError)
    assert busy.retry_after == 2.5


def test_a_failure_names_its_request_or_step() -> None:
    failure = error_to_failure(PeerFailed("no"), request=1, session="session-1", epoch=2, step=3)
    assert (failure.request, failure.session, failure.epoch, failure.step) == (1, "session-1", 2, 3)


def test_a_long_text_is_truncated() -> None:
    assert len(error_to_failure(PeerFailed("x" * 10_000)).text) == MAX_TEXT


def test_control_characters_in_a_text_are_replaced() -> None:
    decoded = failure_to_error(Failure(code="bad_step", text="\x1b[2J\nall is well"), SENDER)
    assert str(decoded).isprintable()
    assert "all is well" in str(decoded)


@pytest.mark.parametrize("missing", [5, "ab", ("a", "b"), (3,), (5, 2), (-1, 4), (1.5, 2.5)])
def test_invalid_missing_layers_are_ignored(missing: int | str | tuple[int, ...]) -> None:
    decoded = failure_to_error(Failure(code="not_covered", text="", detail={"missing": missing}), SENDER)
    assert isinstance(decoded, NotCovered)
    assert decoded.missing == ()


@given(failures)
def test_any_failure_becomes_an_error_of_the_tree(failure: Failure) -> None:
    decoded = failure_to_error(failure, SENDER)
    assert isinstance(decoded, SwarmError)
    if isinstance(decoded, PeerError):
        assert 0 <= decoded.retry_after <= 3600

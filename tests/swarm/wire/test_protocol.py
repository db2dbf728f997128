from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from swarm.wire.base_message import Message
from swarm.wire.framing import PREFIX
from swarm.wire.messages import PROTOCOL_VERSION, Failure, Forward, Hello, Output
from swarm.wire.protocol import MAX_HELLO, MAX_PAYLOAD, Connection, Role, State
from swarm.wire.queries import AskDht, Ping, Pong
from tests.swarm.wire.strategies import CALLER_MESSAGES, PEER_MESSAGES, hellos, same

CALLER_HELLO = Hello(protocol=PROTOCOL_VERSION, software="test", role="client")
PEER_HELLO = Hello(protocol=PROTOCOL_VERSION, software="test", role="peer", model="m" * 64)


@dataclass
class Pair:
    """Two connections joined by bytes."""

    caller: Connection = field(default_factory=lambda: Connection(Role.CALLER))
    peer: Connection = field(default_factory=lambda: Connection(Role.PEER))

    @classmethod
    def opened(cls) -> Pair:
        pair = cls()
        assert pair.to_peer(CALLER_HELLO) == [CALLER_HELLO]
        assert pair.to_caller(PEER_HELLO) == [PEER_HELLO]
        return pair

    def to_peer(self, *messages: Message) -> list[Any]:
        return self.peer.receive_data(b"".join(b"".join(self.caller.data_to_send(message)) for message in messages))

    def to_caller(self, *messages: Message) -> list[Any]:
        return self.caller.receive_data(b"".join(b"".join(self.peer.data_to_send(message)) for message in messages))

    @property
    def states(self) -> tuple[State, State]:
        return self.caller.state, self.peer.state


def framed(plain: Any, payload: bytes = b"") -> bytes:
    header = plain if isinstance(plain, bytes) else msgpack.packb(plain)
    return PREFIX.pack(len(header), len(payload)) + header + payload


@given(hellos, hellos)
def test_both_sides_send_hello_and_see_the_same_states(first: Hello, second: Hello) -> None:
    pair = Pair()
    assert pair.states == (State.START, State.START)
    assert pair.to_peer(first) == [first]
    assert pair.states == (State.HELLO_SENT, State.HELLO_SENT)
    assert pair.to_caller(second) == [second]
    assert pair.states == (State.OPEN, State.OPEN)


@given(
    st.lists(st.one_of(*CALLER_MESSAGES.values()), max_size=4), st.lists(st.one_of(*PEER_MESSAGES.values()), max_size=4)
)
def test_messages_arrive_in_order(requests: list[Message], answers: list[Message]) -> None:
    pair = Pair.opened()
    for sent, received in ((requests, pair.to_peer(*requests)), (answers, pair.to_caller(*answers))):
        assert len(sent) == len(received)
        assert all(map(same, sent, received))
    assert pair.states == (State.OPEN, State.OPEN)


@pytest.mark.parametrize("kind", [*CALLER_MESSAGES, *PEER_MESSAGES], ids=lambda kind: kind.__name__)
@settings(max_examples=5)
@given(data=st.data())
def test_a_message_of_the_wrong_side_or_state_is_refused(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw((CALLER_MESSAGES | PEER_MESSAGES)[kind])
    pair = Pair.opened()
    wrong, right = (pair.peer, pair.caller) if kind in CALLER_MESSAGES else (pair.caller, pair.peer)
    with pytest.raises(LocalProtocolError, match=f"cannot send {kind.__name__} when OPEN"):
        wrong.data_to_send(message)
    with pytest.raises(LocalProtocolError, match=f"cannot send {kind.__name__} when START"):
        Connection(right.role).data_to_send(message)
    # A receiver of the same role as the sender refuses it.
    receiver: Connection = getattr(Pair.opened(), right.role.value)
    (error,) = receiver.receive_data(b"".join(right.data_to_send(message)))
    assert isinstance(error, RemoteProtocolError)
    assert f"sent {kind.__name__} when OPEN" in str(error)


def test_a_second_hello_is_refused() -> None:
    pair = Pair.opened()
    with pytest.raises(LocalProtocolError, match="cannot send Hello"):
        pair.caller.data_to_send(CALLER_HELLO)
    (error,) = pair.peer.receive_data(b"".join(Connection(Role.CALLER).data_to_send(CALLER_HELLO)))
    assert isinstance(error, RemoteProtocolError)


def test_the_peer_can_answer_hello_with_a_failure() -> None:
    pair = Pair()
    pair.to_peer(CALLER_HELLO)
    refusal = Failure(code="peer_busy", text="no room", retry_after=5.0)
    assert pair.to_caller(refusal) == [refusal]
    assert pair.states == (State.CLOSED, State.CLOSED)


def test_a_failure_of_a_request_before_hello_is_refused() -> None:
    pair = Pair()
    pair.to_peer(CALLER_HELLO)
    (error,) = pair.to_caller(Failure(code="peer_busy", text="", request=3))
    assert isinstance(error, RemoteProtocolError)


def test_after_a_failure_of_the_connection_nothing_is_sent_or_received() -> None:
    pair = Pair.opened()
    last = Failure(code="remote_protocol", text="invalid")
    assert pair.to_caller(last) == [last]
    assert pair.states == (State.CLOSED, State.CLOSED)
    for side, message in ((pair.caller, AskDht(request=1)), (pair.peer, Pong(request=1, time=0.0))):
        with pytest.raises(LocalProtocolError, match="when CLOSED"):
            side.data_to_send(message)
        assert side.receive_data(framed({"kind": "ping"})) == []


def test_a_failure_of_a_request_or_a_step_leaves_the_connection_open() -> None:
    pair = Pair.opened()
    failures = [Failure(code="bad_step", text="", request=1), Failure(code="bad_step", text="", session="session-1")]
    assert pair.to_caller(*failures) == failures
    assert pair.states == (State.OPEN, State.OPEN)


def test_messages_before_invalid_data_are_received() -> None:
    pair = Pair.opened()
    ping = Ping(request=1)
    data = b"".join(pair.caller.data_to_send(ping))
    *messages, error = pair.peer.receive_data(data + data + framed({"kind": "ping"}) + data)
    assert messages == [ping, ping]
    assert isinstance(error, RemoteProtocolError)
    assert pair.peer.receive_failed


def test_after_invalid_data_nothing_is_received_but_answers_and_a_failure_can_be_sent() -> None:
    pair = Pair.opened()
    pair.peer.receive_data(framed(b"\xc1"))
    assert pair.peer.receive_data(framed({"kind": "ping", "request": 1})) == []
    pong, failure = Pong(request=1, time=0.0), Failure(code="remote_protocol", text="")
    assert pair.to_caller(pong, failure) == [pong, failure]
    assert pair.states == (State.CLOSED, State.CLOSED)


@pytest.mark.parametrize("extra", [{}, {"a_field_of_the_future": 1}])
def test_another_version_is_named_by_the_peer(extra: dict[str, Any]) -> None:
    peer = Connection(Role.PEER)
    (error,) = peer.receive_data(framed({"kind": "hello", "protocol": 99, "software": "x", "role": "client"} | extra))
    assert type(error) is ProtocolError
    assert f"version {PROTOCOL_VERSION}" in str(error)
    assert "version 99" in str(error)
    assert peer.data_to_send(Failure(code=error.code, text=str(error)))


def test_another_version_is_named_by_the_caller() -> None:
    caller = Connection(Role.CALLER)
    caller.data_to_send(CALLER_HELLO)
    (error,) = caller.receive_data(framed({"kind": "hello", "protocol": 99, "else": 1}))
    assert isinstance(error, RemoteProtocolError)
    assert "version 99" in str(error)


def test_before_hello_frames_must_be_small() -> None:
    for prefix in (PREFIX.pack(MAX_HELLO + 1, 0), PREFIX.pack(10, 1), PREFIX.pack(10, 2 << 30)):
        (error,) = Connection(Role.PEER).receive_data(prefix)
        assert isinstance(error, RemoteProtocolError)


def test_after_hello_the_payload_limit_applies() -> None:
    pair = Pair(peer=Connection(Role.PEER, max_payload=100))
    pair.to_peer(CALLER_HELLO)
    pair.to_caller(PEER_HELLO)
    assert len(pair.to_peer(Ping(request=1, payload=bytes(100)))) == 1
    (error,) = pair.to_peer(Ping(request=1, payload=bytes(101)))
    assert "payload has 101 bytes; 100 are allowed" in str(error)


def test_the_payload_limit_can_be_raised_up_to_the_protocols_maximum() -> None:
    def opened() -> Pair:
        pair = Pair(peer=Connection(Role.PEER, max_payload=10))
        pair.peer.allow_payload(5)  # Less than before: no effect.
        assert pair.to_peer(CALLER_HELLO) == [CALLER_HELLO]
        pair.to_caller(PEER_HELLO)
        return pair

    large = Ping(request=1, payload=bytes(11))
    assert opened().to_peer(replace(large, payload=bytes(10))) == [replace(large, payload=bytes(10))]
    assert isinstance(opened().to_peer(large)[0], RemoteProtocolError)
    pair = opened()
    pair.peer.allow_payload(11)
    assert pair.to_peer(large) == [large]
    pair.peer.allow_payload(1 << 40)
    assert isinstance(pair.peer.receive_data(PREFIX.pack(10, MAX_PAYLOAD + 1))[0], RemoteProtocolError)


def test_a_message_that_cannot_be_encoded_does_not_change_the_connection() -> None:
    pair = Pair.opened()
    big = Forward(
        session="session-1",
        epoch=0,
        step=0,
        start=0,
        rows=0,
        tokens=np.zeros(2, np.int32),
        hidden=np.full((2, 2), 1e6, np.float32),
        dtype="f16",
    )
    with pytest.raises(LocalProtocolError, match="f16"):
        pair.caller.data_to_send(big)
    assert pair.to_peer(AskDht(request=1)) == [AskDht(request=1)]


def test_tensors_are_sent_as_views() -> None:
    pair = Pair.opened()
    hidden = np.zeros((4, 8), np.float32)
    answer = Output(session="session-1", epoch=0, step=0, ids=np.zeros(0, np.int32), hidden=hidden)
    *_, last = pair.peer.data_to_send(answer)
    assert np.shares_memory(np.frombuffer(last, np.uint8), hidden)


@given(st.lists(st.binary(max_size=60), max_size=8), st.booleans())
def test_random_bytes_raise_only_protocol_errors(data: list[bytes], opened: bool) -> None:
    peer = Pair.opened().peer if opened else Connection(Role.PEER)
    for chunk in data:
        for received in peer.receive_data(chunk):
            assert isinstance(received, (Message, RemoteProtocolError))


@settings(max_examples=200)
@given(
    st.lists(st.one_of(*CALLER_MESSAGES.values()), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=6),
    st.lists(st.integers(0, 1 << 16), max_size=4),
)
def test_mutated_frames_give_messages_or_protocol_errors(
    messages: list[Message], damages: list[tuple[int, int]], cuts: list[int]
) -> None:
    pair = Pair.opened()
    data = bytearray(b"".join(b"".join(pair.caller.data_to_send(message)) for message in messages))
    for position, value in damages:
        data[position % len(data)] = value
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for begin, end in itertools.pairwise(edges):
        for received in pair.peer.receive_data(bytes(data[begin:end])):
            assert isinstance(received, (Message, RemoteProtocolError))

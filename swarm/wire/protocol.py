"""The protocol of one connection, without I/O: which side may send which message in which state.

The rules:

* A connection has a CALLER (the side that connected) and a PEER (the side that listens).
* Both sides see the same states, START -> HELLO_SENT -> OPEN -> CLOSED, and change them only by `_TABLE`. A message
  that `_TABLE` does not list for the state and the sender is invalid.
* The caller sends its Hello first. The peer answers with its own Hello, or refuses with a Failure.
* Before OPEN, a frame has at most a few kilobytes of header and no payload. Afterwards `max_payload` applies, which
  this side may raise with `allow_payload`: a caller with small sessions has no reason to send much.
* A Failure of neither a request nor a step is about the connection: the sender closes it.
* Invalid data from the other side is a RemoteProtocolError. This side ignores all data after it (`receive_failed`).
  It may still send in its current state: answers, and the Failure that says why it closes.
* A mistake of this side is a LocalProtocolError, and nothing is sent.
* The protocol version is checked before any other field of a Hello.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from swarm.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from swarm.wire.base_message import Message
from swarm.wire.codec import MESSAGES, encode, read_header, read_message
from swarm.wire.framing import Buffer, Frame, Framer, frame_buffers
from swarm.wire.messages import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    CloseSession,
    Failure,
    Forward,
    Hello,
    Leaving,
    Link,
    Linked,
    OpenSession,
    Output,
    SessionClosed,
    SessionOpened,
)
from swarm.wire.queries import (
    AskDht,
    AskFile,
    AskManifest,
    AskReach,
    AskTopic,
    DhtAddresses,
    FilePiece,
    ManifestFile,
    Ping,
    Pong,
    Reach,
    Topic,
)

MAX_HEADER = 64 << 10
# 2,048 positions of 8,192 numbers in f32, and their token ids.
MAX_PAYLOAD = 65 << 20
MAX_HELLO = 4 << 10


class Role(enum.Enum):
    CALLER = "caller"
    PEER = "peer"

    @property
    def other(self) -> Role:
        return Role.PEER if self is Role.CALLER else Role.CALLER


class State(enum.Enum):
    START = enum.auto()
    HELLO_SENT = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


def _stay_open(*kinds: type[Message]) -> dict[type[Message], State]:
    return dict.fromkeys(kinds, State.OPEN)


_TABLE: Mapping[tuple[State, Role], Mapping[type[Message], State]] = {
    (State.START, Role.CALLER): {Hello: State.HELLO_SENT},
    (State.START, Role.PEER): {Failure: State.CLOSED},
    (State.HELLO_SENT, Role.CALLER): {},
    (State.HELLO_SENT, Role.PEER): {Hello: State.OPEN, Failure: State.CLOSED},
    (State.OPEN, Role.CALLER): _stay_open(
        *(OpenSession, Link, Attach, CloseSession, Forward, Failure),
        *(Ping, AskTopic, AskDht, AskManifest, AskFile, AskReach),
    ),
    (State.OPEN, Role.PEER): _stay_open(
        *(SessionOpened, Linked, Attached, SessionClosed, Output, Failure, Leaving),
        *(Pong, Topic, DhtAddresses, ManifestFile, FilePiece, Reach),
    ),
    (State.CLOSED, Role.CALLER): {},
    (State.CLOSED, Role.PEER): {},
}


def ends_connection(message: Message) -> bool:
    """Whether `message` is a Failure of the whole connection."""
    return isinstance(message, Failure) and not message.request and not message.session


class Connection:
    """One side of a connection. `receive_data` takes received bytes; `data_to_send` gives the bytes to send."""

    def __init__(self, role: Role, *, max_payload: int = MAX_PAYLOAD) -> None:
        self.role = role
        self.receive_failed = False
        self._max_payload = max_payload
        self._framer = Framer(max_header=MAX_HELLO, max_payload=0)
        self._set_state(State.START)

    def allow_payload(self, size: int) -> None:
        """Raise the payload limit to `size` bytes from the next frame on. It never shrinks or exceeds MAX_PAYLOAD."""
        self._max_payload = max(self._max_payload, min(size, MAX_PAYLOAD))
        if self.state is State.OPEN:
            self._framer.max_payload = self._max_payload

    @property
    def between_frames(self) -> bool:
        """Whether the bytes received until now end at the end of a frame, where a connection may end cleanly."""
        return self._framer.between_frames

    def receive_data(self, data: Buffer) -> list[Message | ProtocolError]:
        """The messages that `data` completes, in order. An error is the last item and sets `receive_failed`.

        The error is a RemoteProtocolError, or a plain ProtocolError if a caller has another protocol version.
        """
        received: list[Message | ProtocolError] = []
        if self.receive_failed or self.state is State.CLOSED:
            return received
        try:
            for frame in self._framer.feed(data):
                received.append(message := self._receive(frame))
                if ends_connection(message):
                    break
        except ProtocolError as error:
            self.receive_failed = True
            received.append(error)
        return received

    def data_to_send(self, message: Message) -> list[Buffer]:
        """The bytes of `message`. Tensors are views, not copies: write them before the arrays change.

        Raises LocalProtocolError if this side may not send it in this state.
        """
        next_state = self._sendable.get(type(message))
        if next_state is None:
            raise LocalProtocolError(f"a {self.role.value} cannot send {type(message).__name__} when {self.state.name}")
        header, payload = encode(message)
        buffers = frame_buffers(header, payload, max_header=MAX_HEADER, max_payload=MAX_PAYLOAD)
        self._apply(message, next_state)
        return buffers

    def _receive(self, frame: Frame) -> Message:
        plain = read_header(frame.header)
        kind = MESSAGES[plain["kind"]]
        next_state = self._receivable.get(kind)
        if next_state is None:
            raise RemoteProtocolError(f"a {self.role.other.value} sent {kind.__name__} when {self.state.name}")
        if kind is Hello:
            self._check_version(plain.get("protocol"))
        message = read_message(plain, frame.payload)
        if kind is Failure and self.state is not State.OPEN and not ends_connection(message):
            raise RemoteProtocolError("Failure: it is about a request or a session, but the connection is not open yet")
        self._apply(message, next_state)
        return message

    def _check_version(self, theirs: object) -> None:
        if type(theirs) is int and theirs != PROTOCOL_VERSION:
            text = (
                f"this {self.role.value} speaks protocol version {PROTOCOL_VERSION}, the {self.role.other.value} "
                f"version {theirs}: update the older one"
            )
            raise ProtocolError(text) if self.role is Role.PEER else RemoteProtocolError(text)

    def _apply(self, message: Message, next_state: State) -> None:
        if ends_connection(message):
            next_state = State.CLOSED
        if next_state is not self.state:
            self._set_state(next_state)

    def _set_state(self, state: State) -> None:
        self.state = state
        self._sendable, self._receivable = _TABLE[state, self.role], _TABLE[state, self.role.other]
        if state is State.OPEN:
            self._framer.max_header, self._framer.max_payload = MAX_HEADER, self._max_payload

"""One connection without I/O: who may say what, and when.

The rules:

* A connection has a CALLER (who connected) and a PEER (who listens).
* Both sides see the same states, START -> GREETING -> GREETED -> CLOSED, and change them only by `_TABLE`: a
  message that is not in the table for its state and its sender is nonsense.
* The caller greets first. The peer answers with its own Hello, or with a Failure, and that is the end.
* Before GREETED a frame is small: a few kilobytes of header and no payload. How large a payload may be afterwards
  this side may raise later, with `allow_payload`: who has not asked for much need not send much.
* A Failure about neither a request nor a step is about the connection: the sender closes it.
* Nonsense from the other side is a RemoteProtocolError and makes this side deaf: what comes after it is not
  looked at. It may still speak, as in the state before: its answers, and the Failure that says why it closes.
* What this side does wrong is a LocalProtocolError, and nothing was sent.
* Another protocol version is told from nonsense before anything else of a Hello is read.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from swarm.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from swarm.wire.codec import MESSAGES, encode, read_header, read_message
from swarm.wire.framing import Buffer, Frame, Framer, frame_buffers
from swarm.wire.message import Message
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
# 2,048 positions of 8,192 numbers in f32, and the ids beside them
MAX_PAYLOAD = 65 << 20
MAX_GREETING = 4 << 10


class Role(enum.Enum):
    CALLER = "caller"
    PEER = "peer"

    @property
    def other(self) -> Role:
        return Role.PEER if self is Role.CALLER else Role.CALLER


class State(enum.Enum):
    START = enum.auto()
    GREETING = enum.auto()
    GREETED = enum.auto()
    CLOSED = enum.auto()


def _keep(*kinds: type[Message]) -> dict[type[Message], State]:
    return dict.fromkeys(kinds, State.GREETED)


_TABLE: Mapping[tuple[State, Role], Mapping[type[Message], State]] = {
    (State.START, Role.CALLER): {Hello: State.GREETING},
    (State.START, Role.PEER): {Failure: State.CLOSED},
    (State.GREETING, Role.CALLER): {},
    (State.GREETING, Role.PEER): {Hello: State.GREETED, Failure: State.CLOSED},
    (State.GREETED, Role.CALLER): _keep(
        *(OpenSession, Link, Attach, CloseSession, Forward, Failure),
        *(Ping, AskTopic, AskDht, AskManifest, AskFile, AskReach),
    ),
    (State.GREETED, Role.PEER): _keep(
        *(SessionOpened, Linked, Attached, SessionClosed, Output, Failure, Leaving),
        *(Pong, Topic, DhtAddresses, ManifestFile, FilePiece, Reach),
    ),
    (State.CLOSED, Role.CALLER): {},
    (State.CLOSED, Role.PEER): {},
}


def ends_connection(message: Message) -> bool:
    """Whether it is a Failure about the whole connection."""
    return isinstance(message, Failure) and not message.request and not message.session


class Connection:
    """The state of one side. Feed it what arrives; send what it says."""

    def __init__(self, role: Role, *, max_header: int = MAX_HEADER, max_payload: int = MAX_PAYLOAD) -> None:
        self.role = role
        self.deaf = False
        self._max_header = max_header
        self._max_payload = max_payload
        self._framer = Framer(max_header=min(MAX_GREETING, max_header), max_payload=0)
        self._enter(State.START)

    def allow_payload(self, size: int) -> None:
        """Accept payloads of `size` bytes from the next frame on. Never less than before, never over MAX_PAYLOAD."""
        self._max_payload = max(self._max_payload, min(size, MAX_PAYLOAD))
        if self.state is State.GREETED:
            self._framer.max_payload = self._max_payload

    @property
    def between_frames(self) -> bool:
        """Whether the bytes so far end where a frame ends: only there is an end of them no accident."""
        return self._framer.between_frames

    def receive_data(self, data: Buffer) -> list[Message | ProtocolError]:
        """The messages that `data` completes, in order. An error is the last: this side is deaf then.

        The error is a RemoteProtocolError, or a plain ProtocolError where a peer hears another version greet.
        """
        received: list[Message | ProtocolError] = []
        if self.deaf or self.state is State.CLOSED:
            return received
        try:
            for frame in self._framer.feed(data):
                received.append(message := self._receive(frame))
                if ends_connection(message):
                    break
        except ProtocolError as error:
            self.deaf = True
            received.append(error)
        return received

    def data_to_send(self, message: Message) -> list[Buffer]:
        """The bytes of `message`: tensors are views, not copies, so write them before the arrays change.

        Raises LocalProtocolError where this side may not say it now.
        """
        following = self._may_say.get(type(message))
        if following is None:
            raise LocalProtocolError(f"a {self.role.value} cannot send {type(message).__name__} when {self.state.name}")
        header, payload = encode(message)
        buffers = frame_buffers(header, payload, max_header=MAX_HEADER, max_payload=MAX_PAYLOAD)
        self._follow(message, following)
        return buffers

    def _receive(self, frame: Frame) -> Message:
        plain = read_header(frame.header)
        kind = MESSAGES[plain["kind"]]
        following = self._may_hear.get(kind)
        if following is None:
            raise RemoteProtocolError(f"a {self.role.other.value} sent {kind.__name__} when {self.state.name}")
        if kind is Hello:
            self._check_version(plain.get("protocol"))
        message = read_message(plain, frame.payload)
        if kind is Failure and self.state is not State.GREETED and not ends_connection(message):
            raise RemoteProtocolError("Failure: it is about a request or a session, but nobody has greeted")
        self._follow(message, following)
        return message

    def _check_version(self, theirs: object) -> None:
        if type(theirs) is int and theirs != PROTOCOL_VERSION:
            text = (
                f"this {self.role.value} speaks protocol version {PROTOCOL_VERSION}, the {self.role.other.value} "
                f"version {theirs}: update the older one"
            )
            raise ProtocolError(text) if self.role is Role.PEER else RemoteProtocolError(text)

    def _follow(self, message: Message, following: State) -> None:
        if ends_connection(message):
            following = State.CLOSED
        if following is not self.state:
            self._enter(following)

    def _enter(self, state: State) -> None:
        self.state = state
        self._may_say, self._may_hear = _TABLE[state, self.role], _TABLE[state, self.role.other]
        if state is State.GREETED:
            self._framer.max_header, self._framer.max_payload = self._max_header, self._max_payload

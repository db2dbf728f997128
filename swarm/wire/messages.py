"""Every message that crosses a connection. Frozen; each checks its own fields.

A message that is wrong raises LocalProtocolError where it is made: that is a bug of this program. `wire.codec`
turns it into RemoteProtocolError where the message was read from a connection.

A connection joins a *caller* (who connected: a client, or the peer of the hop before) and a *peer* (who
listens). Sessions are opened by a client on every hop of its route; steps then run from hop to hop.

::

    greeting    caller -> peer  Hello            peer -> caller  Hello | Failure
    session     caller -> peer  OpenSession      peer -> caller  SessionOpened | Failure
                                Link                             Linked | Failure
                                Attach (hop before, with the secret)  Attached | Failure
                                CloseSession                     SessionClosed
    step        caller -> peer  Forward          peer -> opener  Output | Failure      (last hop, or relayed)
                                                 peer -> next peer  Forward            (every other hop)
    questions   caller -> peer  Ping             peer -> caller  Pong
                                AskTopic                         Topic | Failure
                                AskDht                           DhtAddresses
                                AskManifest                      ManifestFile | Failure
                                AskFile                          FilePiece | Failure
                                AskReach                         Reach

Requests carry a `request` number that their answer repeats; a Failure repeats it too. Steps are matched by
(session, epoch, step): a client that repairs a route opens its sessions again under the next epoch, and
what is still under way from an earlier one is dropped where it arrives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from swarm.sampling import MAX_LOGPROBS, Sampling
from swarm.wire.message import NAME, Message, check, is_array, wrong
from swarm.wire.tensors import HIDDEN_DTYPES

PROTOCOL_VERSION = 1
MAX_STEP_TOKENS = 2048
MAX_STEP_ROWS = 64
"""Tokens that one step may ask for: choosing each takes milliseconds of the device's thread."""
MAX_HOPS = 256
MAX_PREFIX_BYTES = 32 << 10
MAX_DETAIL = 32
MAX_DETAIL_VALUES = 1024
GREEDY = Sampling()
_TIMES = ("queue_s", "compute_s", "codec_s", "received_at", "sent_at")

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Hidden = NDArray[np.float32]
"""On the wire in the `dtype` of its message."""
Logits = NDArray[np.float32]
"""On the wire in the `logits_dtype` of its message."""
Scalar = int | float | str
Detail = Scalar | Sequence[Scalar]


@dataclass(frozen=True, kw_only=True)
class Hello(Message):
    """First on every connection, from both sides.

    A caller's `model` is the digest that it means to use, empty if it only asks questions; a peer's is
    the digest that it serves, empty on a bootstrap. `incarnation` tells a restarted peer from before.
    """

    kind: ClassVar[str] = "hello"
    protocol: int
    software: str
    role: str
    model: str = ""
    name: str = ""
    incarnation: int = 0

    def __post_init__(self) -> None:
        self._naturals("protocol", "incarnation")
        self._texts("software", "name")
        self._names("model")
        check(self.role in ("client", "peer"), self, "role")


@dataclass(frozen=True, kw_only=True)
class OpenSession(Message):
    """Reserve KV cache for `max_tokens` positions over layers `first`:`last` of the peer's span.

    `secret` (16 ... 64 bytes) is what the hop before must show. `dtype` is how hidden states leave this
    hop: f32, f16, bf16 or int8. Opening a session again, by who opened it, forgets what is cached, keeps the
    reservation and starts `epoch`.

    `prefix` names the text that the session is going to begin with: the name that its chain begins with, then one
    for each full block of tokens, 16 bytes each (`engine.blocks`). Empty: its cache is nobody else's, now and later.

    `hops` of the route, this one included: the peer's device is wanted for about that share of the session's time.
    """

    kind: ClassVar[str] = "open"
    request: int
    session: str
    epoch: int
    secret: bytes
    first: int
    last: int
    max_tokens: int
    dtype: str = "f32"
    prefix: bytes = b""
    hops: int = 1

    def __post_init__(self) -> None:
        self._naturals("request", "epoch", "first", "last", "max_tokens", "hops")
        check(self.hops >= 1, self, "hops")
        check(isinstance(self.prefix, bytes) and len(self.prefix) <= MAX_PREFIX_BYTES, self, "prefix")
        check(len(self.prefix) % 16 == 0, self, "prefix")
        self._session()
        check(isinstance(self.secret, bytes) and 16 <= len(self.secret) <= 64, self, "secret")
        check(self.first < self.last, self, "last")
        check(self.dtype in HIDDEN_DTYPES, self, "dtype")


@dataclass(frozen=True, kw_only=True)
class SessionOpened(Message):
    """Room is there. `kv_free` is what is left for others, in tokens; `held` what is cached already of the prefix."""

    kind: ClassVar[str] = "opened"
    request: int
    kv_free: int
    held: int = 0

    def __post_init__(self) -> None:
        self._naturals("request", "kv_free", "held")


@dataclass(frozen=True, kw_only=True)
class Link(Message):
    """Where this hop's hidden states go: to the peer `peer_id` at one of `addresses`, showing `secret`.

    Without addresses they come back to the opener as Outputs, who relays them. Linking again replaces.
    """

    kind: ClassVar[str] = "link"
    request: int
    session: str
    epoch: int
    addresses: tuple[str, ...] = ()
    peer_id: str = ""
    secret: bytes = b""

    def __post_init__(self) -> None:
        self._naturals("request", "epoch")
        self._session()
        self._names("peer_id")
        check(isinstance(self.addresses, tuple) and len(self.addresses) <= 16, self, "addresses")
        for address in self.addresses:
            check(isinstance(address, str) and NAME.fullmatch(address) is not None, self, "addresses")
        check(isinstance(self.secret, bytes) and len(self.secret) <= 64, self, "secret")


@dataclass(frozen=True, kw_only=True)
class Linked(Message):
    kind: ClassVar[str] = "linked"
    request: int

    def __post_init__(self) -> None:
        self._naturals("request")


@dataclass(frozen=True, kw_only=True)
class Attach(Message):
    """From the hop before: this connection will bring the steps of `session`; here is the secret."""

    kind: ClassVar[str] = "attach"
    request: int
    session: str
    epoch: int
    secret: bytes

    def __post_init__(self) -> None:
        self._naturals("request", "epoch")
        self._session()
        check(isinstance(self.secret, bytes) and len(self.secret) <= 64, self, "secret")


@dataclass(frozen=True, kw_only=True)
class Attached(Message):
    kind: ClassVar[str] = "attached"
    request: int

    def __post_init__(self) -> None:
        self._naturals("request")


@dataclass(frozen=True, kw_only=True)
class HopTrace:
    """Where a step's time went on one hop; seconds.

    `queue_s` it waited for the steps before it and for the device, `compute_s` it was on the device; both were
    measured. `received_at` and `sent_at` are that machine's monotonic clock, comparable between hops only where
    they share a machine: when the step had been read, and when its result was about to be encoded. `codec_s`
    is what encoding took in the session's step before, and so comes after `sent_at`.
    """

    peer: str
    queue_s: float
    compute_s: float
    codec_s: float
    received_at: float
    sent_at: float

    def __post_init__(self) -> None:
        check(isinstance(self.peer, str) and len(self.peer) <= 64, self, "peer")
        for name in _TIMES:
            value = getattr(self, name)
            if not isinstance(value, float) or not math.isfinite(value):
                raise wrong(self, name)


@dataclass(frozen=True, kw_only=True, eq=False)
class Forward(Message):
    """Known tokens that are not computed yet, on their way through the hops.

    `tokens` [n] int32 ids go along to the last hop, which needs them for the repetition penalty.
    `hidden` [n, hidden_size], None on the way to the first hop; on the wire in the dtype that was agreed
    on, float32 here. The last hop answers for the last `rows` positions (0 for a chunk of a prompt that
    is not the last). A `start` below the cached length rewinds. `trace` grows by one at every hop.
    """

    kind: ClassVar[str] = "forward"
    session: str
    epoch: int
    step: int
    start: int
    rows: int
    tokens: Ids
    sampling: Sampling = GREEDY
    hidden: Hidden | None = None
    dtype: str = "f32"
    trace: tuple[HopTrace, ...] = ()

    def __post_init__(self) -> None:
        self._naturals("epoch", "step", "start", "rows")
        self._session()
        check(is_array(self.tokens, np.int32, 1) and 0 < len(self.tokens) <= MAX_STEP_TOKENS, self, "tokens")
        check(self.rows <= min(len(self.tokens), MAX_STEP_ROWS), self, "rows")
        check(self.dtype in HIDDEN_DTYPES, self, "dtype")
        self._check_hidden()
        check(isinstance(self.sampling, Sampling), self, "sampling")
        check(len(self.trace) <= MAX_HOPS, self, "trace")

    def onward(self, hidden: Hidden | None, dtype: str, trace: tuple[HopTrace, ...]) -> Forward:
        """The same tokens with what a hop made of them, for the next one.

        Once a token and hop, so what was checked when it came is not checked again. Raises LocalProtocolError where
        `hidden` is not for these tokens, or it came with as many traces as there may be.
        """
        following = object.__new__(Forward)
        vars(following).update(vars(self), hidden=hidden, dtype=dtype, trace=trace)
        following._check_hidden()
        check(len(trace) <= MAX_HOPS, following, "trace")
        return following

    def _check_hidden(self) -> None:
        if self.hidden is not None:
            check(is_array(self.hidden, np.float32, 2) and len(self.hidden) == len(self.tokens), self, "hidden")
            check(self.hidden.shape[1] > 0, self, "hidden")


@dataclass(frozen=True, kw_only=True, eq=False)
class Output(Message):
    """The answer to a Forward, from the last hop; or a hop's hidden states for the client to relay.

    `ids` [rows] int32: the token chosen for the position after each of the last `rows` positions.
    `logprobs` [rows] float32 and `top_ids`, `top_logprobs` [rows, k] only where they were asked for.
    `logits` [rows, vocab_size] in `logits_dtype` (f16 or f32), only where they were asked for.
    `hidden` [n, hidden_size] only from a hop that is linked to the client.
    """

    kind: ClassVar[str] = "output"
    session: str
    epoch: int
    step: int
    ids: Ids
    logprobs: Floats | None = None
    top_ids: Ids | None = None
    top_logprobs: Floats | None = None
    logits: Logits | None = None
    logits_dtype: str = "f32"
    hidden: Hidden | None = None
    dtype: str = "f32"
    trace: tuple[HopTrace, ...] = ()

    def __post_init__(self) -> None:
        self._naturals("epoch", "step")
        self._session()
        check(is_array(self.ids, np.int32, 1) and len(self.ids) <= MAX_STEP_ROWS, self, "ids")
        rows = len(self.ids)
        if self.logprobs is not None:
            check(is_array(self.logprobs, np.float32, 1) and len(self.logprobs) == rows, self, "logprobs")
        if self.top_ids is not None:
            check(is_array(self.top_ids, np.int32, 2) and len(self.top_ids) == rows, self, "top_ids")
            check(self.top_ids.shape[1] <= MAX_LOGPROBS and self.top_logprobs is not None, self, "top_ids")
        if self.top_logprobs is not None:
            check(is_array(self.top_logprobs, np.float32, 2) and self.top_ids is not None, self, "top_logprobs")
            check(self.top_ids is not None and self.top_logprobs.shape == self.top_ids.shape, self, "top_logprobs")
        check(self.logits_dtype in ("f16", "f32"), self, "logits_dtype")
        if self.logits is not None:
            check(is_array(self.logits, np.float32, 2) and len(self.logits) == rows, self, "logits")
        if self.hidden is not None:
            check(is_array(self.hidden, np.float32, 2) and 0 < len(self.hidden) <= MAX_STEP_TOKENS, self, "hidden")
            check(self.hidden.shape[1] > 0, self, "hidden")
        check(self.dtype in HIDDEN_DTYPES, self, "dtype")
        check(len(self.trace) <= MAX_HOPS, self, "trace")


@dataclass(frozen=True, kw_only=True)
class CloseSession(Message):
    """Give everything back. Closing a session that is not there is answered just the same."""

    kind: ClassVar[str] = "close"
    request: int
    session: str

    def __post_init__(self) -> None:
        self._naturals("request")
        self._session()


@dataclass(frozen=True, kw_only=True)
class SessionClosed(Message):
    kind: ClassVar[str] = "closed"
    request: int

    def __post_init__(self) -> None:
        self._naturals("request")


@dataclass(frozen=True, kw_only=True)
class Failure(Message):
    """What was asked did not happen. `code` is that of an error in `swarm.errors`.

    About a request (`request` > 0), a step (`session` not empty), or the connection (neither: the sender
    then closes it). `peer` is who is at fault where that is another than the sender.
    `detail` holds the numbers, for programs.
    """

    kind: ClassVar[str] = "failure"
    code: str
    text: str
    request: int = 0
    session: str = ""
    epoch: int = 0
    step: int = 0
    peer: str = ""
    retry_after: float = 0.0
    detail: Mapping[str, Detail] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._naturals("request", "epoch", "step")
        self._names("session", "peer", "code")
        self._texts("text")
        self._numbers("retry_after")
        check(isinstance(self.detail, Mapping) and len(self.detail) <= MAX_DETAIL, self, "detail")
        for value in self.detail.values():
            values = value if isinstance(value, (list, tuple)) else (value,)
            fits = len(values) <= MAX_DETAIL_VALUES and all(isinstance(x, (int, float, str)) for x in values)
            check(fits, self, "detail")


@dataclass(frozen=True, kw_only=True)
class Leaving(Message):
    """From a peer to whoever opened sessions on it: move them on, it goes after `grace_s` seconds."""

    kind: ClassVar[str] = "leaving"
    grace_s: float

    def __post_init__(self) -> None:
        self._numbers("grace_s")

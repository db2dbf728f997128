"""Messages of sessions and steps; `wire.queries` has the queries. All are frozen dataclasses that check their fields.

An invalid message raises LocalProtocolError at construction: a bug of this program. `wire.codec` converts that to
RemoteProtocolError if the message was read from a connection.

A connection has a *caller* (the side that connected: a client, or the peer of the previous hop) and a *peer* (the
side that listens). A client opens a session on every hop of its route. Steps then run from hop to hop.

::

    handshake   caller -> peer  Hello            peer -> caller  Hello | Failure
    session     caller -> peer  OpenSession      peer -> caller  SessionOpened | Failure
                                Link                             Linked | Failure
                                Attach (previous hop, with the secret)  Attached | Failure
                                CloseSession                     SessionClosed
    step        caller -> peer  Forward          peer -> opener  Output | Failure      (last hop, or relayed)
                                                 peer -> next peer  Forward            (every other hop)
    leaving                                      peer -> openers    Leaving
    queries     caller -> peer  Ping             peer -> caller  Pong
                                AskTopic                         Topic | Failure
                                AskDht                           DhtAddresses
                                AskManifest                      ManifestFile | Failure
                                AskFile                          FilePiece | Failure
                                AskReach                         Reach

`wire.protocol` has the table of which side may send what in which state.

A request has a `request` number, which its answer or Failure repeats. Steps are matched by (session, epoch, step).
A client that repairs its route opens its sessions again under the next epoch; the receiver drops messages of
earlier epochs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from swarm.sampling import MAX_LOGPROBS, Sampling
from swarm.wire.base_message import NAME, Message, check, field_error, is_array
from swarm.wire.tensors import HIDDEN_DTYPES

PROTOCOL_VERSION = 1
MAX_STEP_TOKENS = 2048
MAX_STEP_ROWS = 64
"""Limit of tokens that one step may request: sampling each takes milliseconds of the worker's thread."""
MAX_HOPS = 256
MAX_PREFIX_BYTES = 32 << 10
MAX_DETAIL = 32
MAX_DETAIL_VALUES = 1024
GREEDY = Sampling()
_TIME_FIELDS = ("queue_s", "compute_s", "codec_s", "received_at", "sent_at")

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
    """The first message on every connection, from both sides.

    A caller's `model` is the digest that it will use, empty if it only sends queries. A peer's `model` is the digest
    that it serves, empty on a bootstrap. `incarnation` distinguishes a restarted peer from the one before.
    """

    kind: ClassVar[str] = "hello"
    protocol: int
    software: str
    role: str
    model: str = ""
    name: str = ""
    incarnation: int = 0

    def __post_init__(self) -> None:
        self._check_naturals("protocol", "incarnation")
        self._check_texts("software", "name")
        self._check_names("model")
        check(self.role in ("client", "peer"), self, "role")


@dataclass(frozen=True, kw_only=True)
class OpenSession(Message):
    """Reserve KV cache for `max_tokens` positions over layers `first`:`last` of the peer's span.

    `secret` (16 ... 64 bytes) must be shown by the previous hop in its Attach. `dtype` is the dtype of the hidden
    states that leave this hop: f32, f16, bf16 or int8. If the opener opens the session again, the peer drops its
    cache, keeps the reservation and starts `epoch`.

    `prefix` identifies the tokens at the session's start: the first hash of the chain, then a hash for each full
    block of tokens, 16 bytes each (`swarm.engine.paged.blocks`). Empty: the session shares no blocks with others.

    `hops` is the number of hops in the route: the session uses this peer's device for about 1/`hops` of the time.
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
        self._check_naturals("request", "epoch", "first", "last", "max_tokens", "hops")
        check(self.hops >= 1, self, "hops")
        check(isinstance(self.prefix, bytes) and len(self.prefix) <= MAX_PREFIX_BYTES, self, "prefix")
        check(len(self.prefix) % 16 == 0, self, "prefix")
        self._check_session()
        check(isinstance(self.secret, bytes) and 16 <= len(self.secret) <= 64, self, "secret")
        check(self.first < self.last, self, "last")
        check(self.dtype in HIDDEN_DTYPES, self, "dtype")


@dataclass(frozen=True, kw_only=True)
class SessionOpened(Message):
    """Reserved. `kv_free` tokens of KV cache remain for others; `held` tokens of the prefix are cached already."""

    kind: ClassVar[str] = "opened"
    request: int
    kv_free: int
    held: int = 0

    def __post_init__(self) -> None:
        self._check_naturals("request", "kv_free", "held")


@dataclass(frozen=True, kw_only=True)
class Link(Message):
    """Send this hop's hidden states to the peer `peer_id` at one of `addresses`, showing it `secret`.

    Without addresses they return to the opener as Outputs, which relays them. A later Link replaces this one.
    """

    kind: ClassVar[str] = "link"
    request: int
    session: str
    epoch: int
    addresses: tuple[str, ...] = ()
    peer_id: str = ""
    secret: bytes = b""

    def __post_init__(self) -> None:
        self._check_naturals("request", "epoch")
        self._check_session()
        self._check_names("peer_id")
        check(isinstance(self.addresses, tuple) and len(self.addresses) <= 16, self, "addresses")
        for address in self.addresses:
            check(isinstance(address, str) and NAME.fullmatch(address) is not None, self, "addresses")
        check(isinstance(self.secret, bytes) and len(self.secret) <= 64, self, "secret")


@dataclass(frozen=True, kw_only=True)
class Linked(Message):
    kind: ClassVar[str] = "linked"
    request: int

    def __post_init__(self) -> None:
        self._check_naturals("request")


@dataclass(frozen=True, kw_only=True)
class Attach(Message):
    """From the previous hop: this connection will send the steps of `session`, authorised by `secret`."""

    kind: ClassVar[str] = "attach"
    request: int
    session: str
    epoch: int
    secret: bytes

    def __post_init__(self) -> None:
        self._check_naturals("request", "epoch")
        self._check_session()
        check(isinstance(self.secret, bytes) and len(self.secret) <= 64, self, "secret")


@dataclass(frozen=True, kw_only=True)
class Attached(Message):
    kind: ClassVar[str] = "attached"
    request: int

    def __post_init__(self) -> None:
        self._check_naturals("request")


@dataclass(frozen=True, kw_only=True)
class HopTrace:
    """A step's times on one hop, in seconds.

    `queue_s`: waiting for earlier steps and for the device. `compute_s`: on the device. `received_at` and `sent_at`:
    the step was decoded, and its result is about to be encoded, on that machine's monotonic clock (comparable only
    between hops on one machine). `codec_s`: encoding the result of the session's previous step, because encoding
    happens after `sent_at`.
    """

    peer: str
    queue_s: float
    compute_s: float
    codec_s: float
    received_at: float
    sent_at: float

    def __post_init__(self) -> None:
        check(isinstance(self.peer, str) and len(self.peer) <= 64, self, "peer")
        for name in _TIME_FIELDS:
            value = getattr(self, name)
            if not isinstance(value, float) or not math.isfinite(value):
                raise field_error(self, name)


@dataclass(frozen=True, kw_only=True, eq=False)
class Forward(Message):
    """A step: known tokens that are not computed yet, on their way through the hops.

    `tokens` [n] int32 ids are passed on to the last hop, which needs them for the repetition penalty.
    `hidden` [n, hidden_size] float32, on the wire in `dtype`; None on the way to the first hop. The last hop samples
    for the last `rows` positions (0 for a chunk of a prompt that is not the last). A `start` below the cached length
    rewinds. Each hop appends to `trace`.
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
        self._check_naturals("epoch", "step", "start", "rows")
        self._check_session()
        check(is_array(self.tokens, np.int32, 1) and 0 < len(self.tokens) <= MAX_STEP_TOKENS, self, "tokens")
        check(self.rows <= min(len(self.tokens), MAX_STEP_ROWS), self, "rows")
        check(self.dtype in HIDDEN_DTYPES, self, "dtype")
        self._check_hidden()
        check(isinstance(self.sampling, Sampling), self, "sampling")
        check(len(self.trace) <= MAX_HOPS, self, "trace")

    def for_next_hop(self, hidden: Hidden | None, dtype: str, trace: tuple[HopTrace, ...]) -> Forward:
        """A copy with this hop's results, for the next hop.

        Skips the checks that passed on receipt: this runs for each token on each hop. Raises LocalProtocolError if
        `hidden` does not fit the tokens, or `trace` is longer than MAX_HOPS.
        """
        forward = object.__new__(Forward)
        vars(forward).update(vars(self), hidden=hidden, dtype=dtype, trace=trace)
        forward._check_hidden()
        check(len(trace) <= MAX_HOPS, forward, "trace")
        return forward

    def _check_hidden(self) -> None:
        if self.hidden is not None:
            check(is_array(self.hidden, np.float32, 2) and len(self.hidden) == len(self.tokens), self, "hidden")
            check(self.hidden.shape[1] > 0, self, "hidden")


@dataclass(frozen=True, kw_only=True, eq=False)
class Output(Message):
    """The answer to a Forward from the last hop, or a hop's hidden states for the client to relay.

    `ids` [rows] int32: the token sampled for the position after each of the last `rows` positions.
    `logprobs` [rows] float32 and `top_ids`, `top_logprobs` [rows, k]: only if requested.
    `logits` [rows, vocab_size] float32, on the wire in `logits_dtype` (f16 or f32): only if requested.
    `hidden` [n, hidden_size] float32, on the wire in `dtype`: only from a hop that the client relays.
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
        self._check_naturals("epoch", "step")
        self._check_session()
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
    """Free the session's reservation. Closing an unknown session is answered in the same way."""

    kind: ClassVar[str] = "close"
    request: int
    session: str

    def __post_init__(self) -> None:
        self._check_naturals("request")
        self._check_session()


@dataclass(frozen=True, kw_only=True)
class SessionClosed(Message):
    kind: ClassVar[str] = "closed"
    request: int

    def __post_init__(self) -> None:
        self._check_naturals("request")


@dataclass(frozen=True, kw_only=True)
class Failure(Message):
    """An error. It ended a request if `request` > 0, a step if `session` is not empty, and otherwise the connection,
    which the sender then closes.

    `code` is the `code` of an error in `swarm.errors`. `peer` is the peer at fault if it is not the sender.
    `detail` holds the error's numbers.
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
        self._check_naturals("request", "epoch", "step")
        self._check_names("session", "peer", "code")
        self._check_texts("text")
        self._check_numbers("retry_after")
        check(isinstance(self.detail, Mapping) and len(self.detail) <= MAX_DETAIL, self, "detail")
        for value in self.detail.values():
            values = value if isinstance(value, (list, tuple)) else (value,)
            fits = len(values) <= MAX_DETAIL_VALUES and all(isinstance(x, (int, float, str)) for x in values)
            check(fits, self, "detail")


@dataclass(frozen=True, kw_only=True)
class Leaving(Message):
    """From a peer to the openers of its sessions: move them elsewhere, the peer stops after `grace_s` seconds."""

    kind: ClassVar[str] = "leaving"
    grace_s: float

    def __post_init__(self) -> None:
        self._check_numbers("grace_s")

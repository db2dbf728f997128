"""Hypothesis strategies for all valid messages, and a comparison of messages."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swarm.sampling import MAX_LOGPROBS, Sampling
from swarm.wire import messages as m
from swarm.wire import queries as q

naturals = st.integers(0, (1 << 62) - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
names = st.text("0123456789abcdefxyzABC_.:/#[]-", max_size=40)
sessions = st.text("0123456789abcdef-_.", min_size=8, max_size=64)
texts = st.text(max_size=40)
secrets = st.binary(max_size=64)
dtypes = st.sampled_from(["f32", "f16", "bf16", "int8"])
scalars = st.one_of(st.integers(-(1 << 60), 1 << 60), finite, texts)

samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 1 << 31),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    seed=st.integers(0, (1 << 63) - 1),
    logprobs=st.none() | st.integers(0, MAX_LOGPROBS),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.lists(st.tuples(st.integers(0, 1 << 20), st.floats(-100, 100)), max_size=3).map(tuple),
    answer_start=st.integers(0, 1 << 20),
)
traces = st.lists(
    st.builds(
        m.HopTrace,
        peer=st.text("abcdefgh234567", max_size=32),
        queue_s=finite,
        compute_s=finite,
        codec_s=finite,
        received_at=finite,
        sent_at=finite,
    ),
    max_size=3,
).map(tuple)


def ids(shape: Any) -> st.SearchStrategy[m.Ids]:
    return hnp.arrays(np.int32, shape)


def floats(shape: Any, dtype: str = "f32") -> st.SearchStrategy[m.Floats]:
    """Numbers that `dtype` represents exactly."""
    if dtype == "bf16":
        return hnp.arrays(np.uint16, shape).map(_from_bf16)
    if dtype == "f16":
        return hnp.arrays(np.float16, shape).map(lambda half: half.astype(np.float32))
    if dtype == "int8":
        return hnp.arrays(np.int8, shape, elements=st.integers(-127, 127)).map(_of_scale_one)
    return hnp.arrays(np.float32, shape)


def _of_scale_one(whole: Any) -> m.Floats:
    values = whole.astype(np.float32)
    values[..., :1] = 127
    return values


def _from_bf16(bits: Any) -> m.Floats:
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    return np.where(np.isnan(values), np.float32(0), values)  # The codec turns a signalling NaN into a quiet one.


@st.composite
def forwards(draw: st.DrawFn) -> m.Forward:
    count, dtype = draw(st.integers(1, 5)), draw(dtypes)
    return m.Forward(
        session=draw(sessions),
        epoch=draw(naturals),
        step=draw(naturals),
        start=draw(naturals),
        rows=draw(st.integers(0, count)),
        tokens=draw(ids(count)),
        sampling=draw(samplings),
        hidden=draw(st.none() | floats((count, draw(st.integers(1, 6))), dtype)),
        dtype=dtype,
        trace=draw(traces),
    )


@st.composite
def outputs(draw: st.DrawFn) -> m.Output:
    rows, top, dtype = draw(st.integers(0, 4)), draw(st.none() | st.integers(0, 3)), draw(dtypes)
    return m.Output(
        session=draw(sessions),
        epoch=draw(naturals),
        step=draw(naturals),
        ids=draw(ids(rows)),
        logprobs=draw(st.none() | floats(rows)),
        top_ids=None if top is None else draw(ids((rows, top))),
        top_logprobs=None if top is None else draw(floats((rows, top))),
        logits=draw(st.none() | floats((rows, 5), "f16")),
        logits_dtype=draw(st.sampled_from(["f16", "f32"])),
        hidden=draw(st.none() | floats((draw(st.integers(1, 4)), 3), dtype)),
        dtype=dtype,
        trace=draw(traces),
    )


hellos = st.builds(
    m.Hello,
    protocol=st.just(m.PROTOCOL_VERSION),
    software=texts,
    role=st.sampled_from(["client", "peer"]),
    model=names,
    name=texts,
    incarnation=naturals,
)
failures = st.builds(
    m.Failure,
    code=names,
    text=texts,
    request=naturals,
    session=names,
    epoch=naturals,
    step=naturals,
    peer=names,
    retry_after=finite,
    detail=st.dictionaries(texts, scalars | st.lists(scalars, max_size=3).map(tuple), max_size=3),
)


@st.composite
def opens(draw: st.DrawFn) -> m.OpenSession:
    first = draw(st.integers(0, 100))
    return m.OpenSession(
        request=draw(naturals),
        session=draw(sessions),
        epoch=draw(naturals),
        secret=draw(st.binary(min_size=16, max_size=64)),
        first=first,
        last=first + draw(st.integers(1, 100)),
        max_tokens=draw(naturals),
        dtype=draw(dtypes),
        hops=draw(st.integers(1, 100)),
    )


CALLER_MESSAGES: dict[type[m.Message], st.SearchStrategy[Any]] = {
    m.OpenSession: opens(),
    m.Link: st.builds(
        m.Link,
        request=naturals,
        session=sessions,
        epoch=naturals,
        addresses=st.lists(names, max_size=3).map(tuple),
        peer_id=names,
        secret=secrets,
    ),
    m.Attach: st.builds(m.Attach, request=naturals, session=sessions, epoch=naturals, secret=secrets),
    m.CloseSession: st.builds(m.CloseSession, request=naturals, session=sessions),
    m.Forward: forwards(),
    q.Ping: st.builds(q.Ping, request=naturals, session=names, payload=st.binary(max_size=50)),
    q.AskTopic: st.builds(q.AskTopic, request=naturals, topic=names),
    q.AskDht: st.builds(q.AskDht, request=naturals),
    q.AskManifest: st.builds(q.AskManifest, request=naturals, model=names),
    q.AskFile: st.builds(
        q.AskFile,
        request=naturals,
        sha256=st.text("0123456789abcdef", min_size=64, max_size=64),
        offset=naturals,
        length=st.integers(1, q.MAX_FILE_PIECE),
    ),
    q.AskReach: st.builds(q.AskReach, request=naturals, port=st.integers(1, 65535), peer_id=names),
}
PEER_MESSAGES: dict[type[m.Message], st.SearchStrategy[Any]] = {
    m.SessionOpened: st.builds(m.SessionOpened, request=naturals, kv_free=naturals),
    m.Linked: st.builds(m.Linked, request=naturals),
    m.Attached: st.builds(m.Attached, request=naturals),
    m.SessionClosed: st.builds(m.SessionClosed, request=naturals),
    m.Output: outputs(),
    m.Leaving: st.builds(m.Leaving, grace_s=finite),
    q.Pong: st.builds(q.Pong, request=naturals, time=finite, received=naturals, computed=naturals, sent=naturals),
    q.Topic: st.builds(q.Topic, request=naturals, notices=st.lists(st.binary(max_size=20), max_size=4).map(tuple)),
    q.DhtAddresses: st.builds(q.DhtAddresses, request=naturals, addresses=st.lists(texts, max_size=3).map(tuple)),
    q.ManifestFile: st.builds(q.ManifestFile, request=naturals, raw=st.binary(max_size=50)),
    q.FilePiece: st.builds(q.FilePiece, request=naturals, data=st.binary(max_size=50)),
    q.Reach: st.builds(q.Reach, request=naturals, address=texts, problem=texts),
}
ALL_MESSAGES: dict[type[m.Message], st.SearchStrategy[Any]] = {
    m.Hello: hellos,
    m.Failure: failures,
    **CALLER_MESSAGES,
    **PEER_MESSAGES,
}
any_message = st.one_of(*ALL_MESSAGES.values())


def same(left: m.Message, right: m.Message) -> bool:
    """Equal field by field, arrays bit by bit."""
    if type(left) is not type(right):
        return False
    pairs = [(getattr(left, entry.name), getattr(right, entry.name)) for entry in fields(left)]  # type: ignore[arg-type]
    return all(_same_value(a, b) for a, b in pairs)


def _same_value(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.discovery.directory import MAX_NOTICE_BYTES, MAX_TTL_S, MemoryDirectory, Notice
from swarm.errors import DirectoryError
from swarm.transport.identity import Identity
from tests.swarm.event_loops import in_loop

NOW = 1000.0
IDENTITY = Identity.generate()


def notice(
    body: bytes = b"body",
    *,
    identity: Identity = IDENTITY,
    topic: str = "topic",
    expires_at: float = NOW + 60,
    label: str = "",
) -> Notice:
    return Notice.sign(identity, topic=topic, body=body, expires_at=expires_at, label=label)


def signed_by_hand(statement: Any, *, key: Any = None, signature: Any = None) -> bytes:
    packed = statement if isinstance(statement, bytes) else msgpack.packb(statement)
    valid = IDENTITY.sign(packed) if signature is None else signature
    return bytes(msgpack.packb([IDENTITY.public_key if key is None else key, valid, packed]))


@given(st.text(max_size=60), st.binary(max_size=200), st.floats(allow_nan=False), st.text(max_size=60))
def test_a_notice_is_read_back_from_its_signed_bytes(topic: str, body: bytes, expires_at: float, label: str) -> None:
    made = Notice.sign(IDENTITY, topic=topic, body=body, expires_at=expires_at, label=label)
    assert Notice.parse(made.signed_bytes) == made
    assert (made.topic, made.body, made.expires_at) == (topic, body, expires_at)
    assert made.author == IDENTITY.peer_id
    assert made.subkey == IDENTITY.peer_id + label


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_notice_with_a_changed_byte_is_refused(position: int, difference: int) -> None:
    made = notice()
    damaged = bytearray(made.signed_bytes)
    damaged[position % len(damaged)] ^= difference
    with pytest.raises(DirectoryError):
        Notice.parse(bytes(damaged))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "cannot be read"),
        (b"\xc1", "cannot be read"),
        (msgpack.packb({"a": 1}), "cannot be read"),
        (msgpack.packb(5), "int instead of a list"),
        (msgpack.packb([1, 2]), "cannot be read"),
        (msgpack.packb([b"key", b"signature", 7]), "not signed"),
        (msgpack.packb([None, None, b""]), "cannot be read"),
        (signed_by_hand(["topic", "", b"", 1.0], signature=bytes(64)), "not signed"),
        (signed_by_hand(["topic", "", b"", 1.0], key=Identity.generate().public_key), "not signed"),
        (signed_by_hand(b"\xc1"), "cannot be read"),
        (signed_by_hand([1, 2, 3]), "cannot be read"),
        (signed_by_hand([b"topic", "", b"", 1.0]), "wrong type"),
        (signed_by_hand(["topic", 5, b"", 1.0]), "wrong type"),
        (signed_by_hand(["topic", "", "text", 1.0]), "wrong type"),
        (signed_by_hand(["topic", "", b"", 1]), "wrong type"),
        (signed_by_hand(["t" * 129, "", b"", 1.0]), "wrong type"),
        (bytes(MAX_NOTICE_BYTES + 1), "over the limit"),
    ],
)
def test_malformed_bytes_are_refused_with_the_reason(raw: bytes, reason: str) -> None:
    with pytest.raises(DirectoryError, match=reason):
        Notice.parse(raw)


@given(st.binary(max_size=300))
def test_random_bytes_raise_directory_error_only(raw: bytes) -> None:
    with pytest.raises(DirectoryError):
        Notice.parse(raw)


def test_a_notice_over_the_size_limit_is_not_signed() -> None:
    with pytest.raises(DirectoryError, match="over the limit"):
        notice(bytes(MAX_NOTICE_BYTES))


@pytest.mark.parametrize(
    ("expires_at", "current"),
    [
        (NOW, False),
        (NOW + 0.1, True),
        (NOW + MAX_TTL_S, True),
        (NOW + MAX_TTL_S + 1, False),
        (float("nan"), False),
        (float("inf"), False),
    ],
)
def test_a_notice_is_current_until_it_expires_and_not_too_far_ahead(expires_at: float, current: bool) -> None:
    assert notice(expires_at=expires_at).is_current(NOW) == current


def memory_directory() -> tuple[MemoryDirectory, Callable[[float], None]]:
    now = [NOW]

    def set_now(value: float) -> None:
        now[0] = value

    return MemoryDirectory(lambda: now[0]), set_now


@in_loop
async def test_a_directory_keeps_one_notice_for_each_author_and_label() -> None:
    directory, _ = memory_directory()
    other = Identity.generate()
    expected = [notice(b"2", expires_at=NOW + 20), notice(b"3", label="label"), notice(b"4", identity=other)]
    for published in [notice(b"1", expires_at=NOW + 10), *expected, notice(b"5", topic="elsewhere")]:
        await directory.publish(published)
    assert await directory.collect("topic") == expected
    assert await directory.collect("nothing here") == []


@in_loop
async def test_an_older_notice_never_replaces_a_newer_one() -> None:
    directory, _ = memory_directory()
    await directory.publish(notice(b"new", expires_at=NOW + 20))
    await directory.publish(notice(b"old", expires_at=NOW + 10))
    assert [found.body for found in await directory.collect("topic")] == [b"new"]


@in_loop
async def test_expired_notices_are_not_returned() -> None:
    directory, set_now = memory_directory()
    await directory.publish(notice(expires_at=NOW + 10))
    set_now(NOW + 10)
    assert await directory.collect("topic") == []

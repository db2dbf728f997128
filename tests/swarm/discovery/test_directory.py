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
    return Notice.seal(identity, topic=topic, body=body, expires_at=expires_at, label=label)


def sealed_by_hand(statement: Any, *, key: Any = None, signature: Any = None) -> bytes:
    packed = statement if isinstance(statement, bytes) else msgpack.packb(statement)
    signed = IDENTITY.sign(packed) if signature is None else signature
    return bytes(msgpack.packb([IDENTITY.public_key if key is None else key, signed, packed]))


@given(st.text(max_size=60), st.binary(max_size=200), st.floats(allow_nan=False), st.text(max_size=60))
def test_a_notice_carries_its_own_proof(topic: str, body: bytes, expires_at: float, label: str) -> None:
    made = Notice.seal(IDENTITY, topic=topic, body=body, expires_at=expires_at, label=label)
    assert Notice.unseal(made.sealed) == made
    assert (made.topic, made.body, made.expires_at) == (topic, body, expires_at)
    assert made.author == IDENTITY.peer_id
    assert made.subkey == IDENTITY.peer_id + label


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_no_byte_of_a_notice_can_be_changed(position: int, difference: int) -> None:
    made = notice()
    damaged = bytearray(made.sealed)
    damaged[position % len(damaged)] ^= difference
    with pytest.raises(DirectoryError):
        Notice.unseal(bytes(damaged))


@pytest.mark.parametrize(
    ("sealed", "reason"),
    [
        (b"", "cannot be read"),
        (b"\xc1", "cannot be read"),
        (msgpack.packb({"a": 1}), "cannot be read"),
        (msgpack.packb(5), "int instead of a list"),
        (msgpack.packb([1, 2]), "cannot be read"),
        (msgpack.packb([b"key", b"signature", 7]), "not signed"),
        (msgpack.packb([None, None, b""]), "cannot be read"),
        (sealed_by_hand(["topic", "", b"", 1.0], signature=bytes(64)), "not signed"),
        (sealed_by_hand(["topic", "", b"", 1.0], key=Identity.generate().public_key), "not signed"),
        (sealed_by_hand(b"\xc1"), "cannot be read"),
        (sealed_by_hand([1, 2, 3]), "cannot be read"),
        (sealed_by_hand([b"topic", "", b"", 1.0]), "wrong type"),
        (sealed_by_hand(["topic", 5, b"", 1.0]), "wrong type"),
        (sealed_by_hand(["topic", "", "text", 1.0]), "wrong type"),
        (sealed_by_hand(["topic", "", b"", 1]), "wrong type"),
        (sealed_by_hand(["t" * 129, "", b"", 1.0]), "wrong type"),
        (bytes(MAX_NOTICE_BYTES + 1), "over the limit"),
    ],
)
def test_hostile_bytes_are_refused_for_a_reason(sealed: bytes, reason: str) -> None:
    with pytest.raises(DirectoryError, match=reason):
        Notice.unseal(sealed)


@given(st.binary(max_size=300))
def test_random_bytes_raise_nothing_else(sealed: bytes) -> None:
    with pytest.raises(DirectoryError):
        Notice.unseal(sealed)


def test_a_notice_over_the_limit_is_not_made() -> None:
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
def test_a_notice_is_current_for_a_while_only(expires_at: float, current: bool) -> None:
    assert notice(expires_at=expires_at).is_current(NOW) == current


def board() -> tuple[MemoryDirectory, Callable[[float], None]]:
    now = [NOW]

    def set_now(value: float) -> None:
        now[0] = value

    return MemoryDirectory(lambda: now[0]), set_now


@in_loop
async def test_a_board_keeps_one_notice_for_each_author_and_label() -> None:
    directory, _ = board()
    other = Identity.generate()
    kept = [notice(b"2", expires_at=NOW + 20), notice(b"3", label="label"), notice(b"4", identity=other)]
    for one in [notice(b"1", expires_at=NOW + 10), *kept, notice(b"5", topic="elsewhere")]:
        await directory.publish(one)
    assert await directory.collect("topic") == kept
    assert await directory.collect("nothing here") == []


@in_loop
async def test_an_older_notice_never_replaces_a_newer_one() -> None:
    directory, _ = board()
    await directory.publish(notice(b"new", expires_at=NOW + 20))
    await directory.publish(notice(b"old", expires_at=NOW + 10))
    assert [one.body for one in await directory.collect("topic")] == [b"new"]


@in_loop
async def test_expired_notices_are_gone() -> None:
    directory, set_now = board()
    await directory.publish(notice(expires_at=NOW + 10))
    set_now(NOW + 10)
    assert await directory.collect("topic") == []

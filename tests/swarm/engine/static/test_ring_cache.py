"""The ring cache compared with a plain record of the positions that were fed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from swarm.engine.static.ring_cache import MASKED, RingCache
from swarm.errors import BadStep, ContextExceeded, UnknownSession
from swarm.model.manifest import StaticSpec

SPEC = StaticSpec(context=12, chunk=4, sinks=2, rewind=3)
ROOM = 200


class RecordedRing:
    """A ring cache, and a record of the position last recorded to each slot."""

    def __init__(self, spec: StaticSpec = SPEC, room: int = ROOM) -> None:
        self.spec = spec
        self.ring = RingCache(spec, room)
        self.slots: dict[int, int] = {}

    def feed(self, start: int, n: int) -> None:
        """Feed in pieces of at most a chunk, as the engine does."""
        self.ring.check(start, n)
        self.ring.rewind(start)
        for at in range(start, start + n, self.spec.chunk):
            count = min(self.spec.chunk, start + n - at)
            slots = self.ring.slots(count).tolist()
            assert len(set(slots)) == count
            self.slots |= dict(zip(slots, range(at, at + count), strict=True))
            self.ring.commit(count)

    def seen_by_next(self, window: int | None = None) -> set[int]:
        """The positions that the next token attends to, without itself, by the record of the slots."""
        row = self.ring.bias(1, window)[0]
        assert set(row.tolist()) <= {0.0, float(MASKED)}
        assert row[-1] == 0
        return {self.slots[slot] for slot in np.flatnonzero(row[:-1] == 0).tolist()}


def attended(spec: StaticSpec, query: int, window: int | None = None) -> set[int]:
    """The expected positions: the sinks and the last ones, inside the layer's own window."""
    positions = {p for p in range(query) if p < spec.sinks or query - p < spec.context - spec.sinks}
    return {p for p in positions if window is None or query - p < window}


def test_within_the_context_a_token_attends_to_all_positions() -> None:
    recorded = RecordedRing()
    for position in range(SPEC.context):
        assert recorded.seen_by_next() == set(range(position))
        recorded.feed(position, 1)


def test_beyond_the_context_a_token_attends_to_the_sinks_and_the_last_positions() -> None:
    recorded = RecordedRing()
    for position in range(5 * SPEC.context):
        assert recorded.seen_by_next() == attended(SPEC, position)
        recorded.feed(position, 1)


@pytest.mark.parametrize("window", [1, 5, 10, 100])
def test_a_layers_own_window_limits_attention_and_excludes_the_sinks_too(window: int) -> None:
    recorded = RecordedRing()
    for position in range(4 * SPEC.context):
        assert recorded.seen_by_next(window) == attended(SPEC, position, window)
        recorded.feed(position, 1)


specs = st.builds(
    StaticSpec,
    context=st.integers(8, 24),
    chunk=st.integers(2, 6),
    sinks=st.integers(0, 2),
    rewind=st.integers(0, 6),
)


@given(spec=specs, steps=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), max_size=40))
def test_no_sequence_of_steps_and_rewinds_gives_a_wrong_mask(spec: StaticSpec, steps: list[tuple[int, int]]) -> None:
    recorded = RecordedRing(spec, room=2000)
    for n, back in steps:
        length = recorded.ring.length
        start = max(0, length - back)
        try:
            recorded.feed(start, min(n, spec.context))
        except UnknownSession:
            assert back > spec.rewind
            assert length > spec.context
            assert recorded.ring.length == length
            recorded.feed(length, 1)
        assert recorded.seen_by_next() == attended(spec, recorded.ring.length)
        assert recorded.seen_by_next(7) == attended(spec, recorded.ring.length, 7)


@given(st.integers(1, 4), st.integers(0, 60), st.sampled_from([None, 3, 8]))
def test_a_chunk_has_the_masks_of_its_tokens_one_by_one(n: int, before: int, window: int | None) -> None:
    recorded = RecordedRing()
    for position in range(before):
        recorded.feed(position, 1)
    bias = recorded.ring.bias(SPEC.chunk, window)
    assert bias.shape == (SPEC.chunk, SPEC.slots + SPEC.chunk)
    assert bias.dtype == np.float32
    for row in range(n):
        old = {recorded.slots[slot] for slot in np.flatnonzero(bias[row, : SPEC.slots] == 0).tolist()}
        new = {before + column for column in np.flatnonzero(bias[row, SPEC.slots :] == 0).tolist()}
        assert old | new == attended(SPEC, before + row, window) | {before + row}


def test_padding_is_masked_for_tokens_and_attends_to_itself() -> None:
    bias = RecordedRing().ring.bias(SPEC.chunk, None)
    fresh: NDArray[np.bool_] = bias[:, SPEC.slots :] == 0
    assert np.array_equal(fresh, np.tril(np.ones((SPEC.chunk, SPEC.chunk), bool)))


def test_invalid_steps_are_refused_and_change_nothing() -> None:
    recorded = RecordedRing(room=30)
    recorded.feed(0, 9)
    for start, n, error, words in (
        (9, 0, BadStep, "0 tokens"),
        (10, 1, BadStep, "start 10"),
        (-1, 1, BadStep, "start -1"),
        (9, 22, ContextExceeded, "beyond the session's 30"),
        (9, 13, ContextExceeded, "13 tokens at once are more than the 12"),
    ):
        with pytest.raises(error, match=words):
            recorded.ring.check(start, n)
    assert recorded.ring.length == 9
    assert recorded.seen_by_next() == attended(SPEC, 9)


def test_a_text_beyond_the_context_can_rewind_a_few_tokens_or_restart() -> None:
    recorded = RecordedRing()
    for position in range(50):
        recorded.feed(position, 1)
    with pytest.raises(UnknownSession, match=r"position 40 .* forget its last 3; open the session again"):
        recorded.ring.check(40, 1)
    recorded.feed(50 - SPEC.rewind, 1)
    assert recorded.seen_by_next() == attended(SPEC, 48)
    recorded.feed(0, 5)
    assert recorded.seen_by_next() == attended(SPEC, 5)


def test_a_session_of_no_tokens_is_refused() -> None:
    with pytest.raises(BadStep, match="0 positions"):
        RingCache(SPEC, 0)

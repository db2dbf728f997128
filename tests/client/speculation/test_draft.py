from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from client.pipeline.prefix import common_prefix
from client.speculation.draft import NgramDraft

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def propose(draft: NgramDraft, k: int) -> list[int]:
    return asyncio.run(draft.propose(k))


def test_the_text_goes_on_as_it_did_before() -> None:
    draft = NgramDraft()
    draft.begin([1, 2, 3, 4, 5, 9, 2, 3])
    assert propose(draft, 3) == [4, 5, 9]


def test_the_longest_match_wins_and_of_equals_the_latest() -> None:
    draft = NgramDraft(3)
    draft.begin([1, 2, 3, 7, 2, 3, 8, 1, 2, 3])
    assert propose(draft, 1) == [7]
    draft.begin([5, 2, 3, 7, 2, 3, 8, 2, 3])
    assert propose(draft, 1) == [8]


def test_a_repeating_text_is_copied_without_end() -> None:
    draft = NgramDraft()
    draft.begin([1, 2, 1, 2])
    assert propose(draft, 5) == [1, 2, 1, 2, 1]
    assert propose(draft, 2) == [2, 1]


def test_a_single_token_is_no_match_unless_asked_for() -> None:
    draft = NgramDraft(3)
    draft.begin([1, 2, 3, 1])
    assert propose(draft, 2) == []
    draft = NgramDraft(1)
    draft.begin([1, 2, 3, 1])
    assert propose(draft, 2) == [2, 3]


def test_after_a_correction_the_draft_looks_up_again() -> None:
    draft = NgramDraft(2)
    draft.begin([1, 2, 3, 4, 1, 2])
    assert propose(draft, 2) == [3, 4]
    draft.accept(1, 7)  # 1 2 3 4 1 2 3 7
    assert propose(draft, 2) == []
    for token in (1, 2):
        draft.accept(0, token)
    assert propose(draft, 2) == [3, 7]


def test_without_a_correction_copying_goes_on() -> None:
    draft = NgramDraft(2)
    draft.begin([1, 2, 3, 4, 5, 6, 1, 2])
    assert propose(draft, 2) == [3, 4]
    draft.accept(2, None)
    assert propose(draft, 2) == [5, 6]


@given(texts, st.data())
def test_the_incremental_index_finds_the_same_as_a_full_search(text: list[int], data: st.DataObject) -> None:
    draft = NgramDraft(3)
    draft.begin(text[:1])
    for end in range(1, len(text)):
        expected = searched(text[:end], 3, data.draw(st.integers(1, 3)))
        assert propose(draft, len(expected) or 1)[: len(expected)] == expected
        draft.accept(0, text[end])


def searched(text: list[int], size: int, count: int) -> list[int]:
    for n in (size, size - 1):
        for end in range(len(text) - 1, n - 1, -1):
            if n <= len(text) and text[end - n : end] == text[-n:]:
                return [*text[end:]][:count]
    return []


@given(texts, texts)
def test_the_common_prefix_is_that_of_a_linear_search(one: list[int], other: list[int]) -> None:
    slow = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert common_prefix(one, other) == slow

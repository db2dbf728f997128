from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from client.generation.detokenizer import Detokenizer, StopStringFinder, TextStream

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def cut(raw: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = sorted({0, len(raw), *(c % (len(raw) + 1) for c in cuts)})
    return [raw[a:b] for a, b in itertools.pairwise(edges)]


class ByteDecoder:
    """Tokens are pieces of bytes, as in a byte-level vocabulary."""

    def __init__(self, vocabulary: Sequence[bytes]) -> None:
        self.vocabulary = vocabulary

    def __call__(self, ids: Sequence[int]) -> str:
        return b"".join(self.vocabulary[i] for i in ids).decode(errors="replace")


def pieces_of(vocabulary: Sequence[bytes]) -> list[str]:
    detokenizer = Detokenizer(ByteDecoder(vocabulary))
    return [*(detokenizer.add(i) for i in range(len(vocabulary))), detokenizer.finish()]


@given(st.text(), st.lists(st.integers(0, 1 << 16)))
@example("日本語 🙂🙂", [1, 2, 4, 5, 11, 12, 13])
def test_a_utf8_sequence_cut_anywhere_is_never_broken(text: str, cuts: list[int]) -> None:
    pieces = pieces_of(cut(text.encode(errors="replace"), cuts))
    assert "".join(pieces) == text.encode(errors="replace").decode()
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@given(st.lists(st.binary(min_size=1, max_size=5)))
def test_the_pieces_of_any_bytes_joined_equal_the_full_decode(vocabulary: list[bytes]) -> None:
    full = ByteDecoder(vocabulary)(range(len(vocabulary)))
    assert "".join(pieces_of(vocabulary)) == full


def clean_up_spaces(text: str) -> str:
    """As some decoders do."""
    for before, after in ((" .", "."), (" ?", "?"), (" ,", ","), (" n't", "n't"), (" 's", "'s"), (" 've", "'ve")):
        text = text.replace(before, after)
    return text


@given(st.lists(st.sampled_from([" it", " '", "s", " .", " ", ",", "n", " n", "'t", " a", "ve", " ?", "x"])))
def test_no_shown_text_changes_if_the_decoder_cleans_up_spaces(words: list[str]) -> None:
    def decode(ids: Sequence[int]) -> str:
        return clean_up_spaces("".join(words[i] for i in ids))

    detokenizer = Detokenizer(decode, cleans_up_spaces=True)
    pieces = [*(detokenizer.add(i) for i in range(len(words))), detokenizer.finish()]
    assert "".join(pieces) == decode(range(len(words)))


def text_before(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first; found character by character."""
    for end in range(1, len(text) + 1):
        hits = [(end - len(stop), stop) for stop in stops if text[:end].endswith(stop)]
        if hits:
            at, stop = min(hits)
            return text[:at], stop
    return text, None


@given(
    st.text("ab.", max_size=30),
    st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 40)),
)
def test_a_stop_string_is_found_wherever_pieces_are_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    finder = StopStringFinder(stops)
    edges = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    shown = "".join(finder.add(text[a:b]) for a, b in itertools.pairwise(edges)) + finder.finish()
    assert (shown, finder.found) == text_before(text, stops)


@given(st.text("ab", max_size=20), st.text("ab", min_size=1, max_size=4))
def test_only_the_beginning_of_a_stop_string_is_held_back(text: str, stop: str) -> None:
    finder = StopStringFinder([stop])
    shown = ""
    for end, character in enumerate(text, 1):
        shown += finder.add(character)
        assert finder.found or stop.startswith(text[len(shown) : end])


def test_a_stop_string_across_three_tokens_is_not_shown() -> None:
    vocabulary = [b"Say: ", b"E", b"N", b"D now", b"more"]
    stream = TextStream(ByteDecoder(vocabulary), stops=["END"])
    assert [stream.add(i) for i in range(4)] == ["Say: ", "", "", ""]
    assert stream.stopped
    assert stream.add(4) == ""
    assert stream.finish() == ""


def test_text_that_only_begins_like_a_stop_string_is_shown() -> None:
    vocabulary = [b"E", b"N", b"ough"]
    stream = TextStream(ByteDecoder(vocabulary), stops=["END"])
    assert [stream.add(i) for i in range(3)] == ["", "", "ENough"]
    assert not stream.stopped
    unfinished = TextStream(ByteDecoder([b"the EN"]), stops=["END"])
    assert unfinished.add(0) + unfinished.finish() == "the EN"


def test_a_stop_string_that_ends_with_a_broken_sequence_is_found_in_the_end() -> None:
    stream = TextStream(ByteDecoder([b"a", b"\xf0\x9f"]), stops=[REPLACEMENT])
    assert [stream.add(0), stream.add(1), stream.finish()] == ["a", "", ""]
    assert stream.stopped

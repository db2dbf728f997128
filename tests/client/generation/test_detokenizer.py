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
def test_a_sequence_cut_anywhere_is_never_broken(text: str, cuts: list[int]) -> None:
    pieces = pieces_of(cut(text.encode(errors="replace"), cuts))
    assert "".join(pieces) == text.encode(errors="replace").decode()
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@given(st.lists(st.binary(min_size=1, max_size=5)))
def test_the_pieces_of_any_bytes_joined_equal_the_full_decode(vocabulary: list[bytes]) -> None:
    full = ByteDecoder(vocabulary)(range(len(vocabulary)))
    assert "".join(pieces_of(vocabulary)) == full


def tidy(text: str) -> str:
    """What some decoders do to a text."""
    for before, after in ((" .", "."), (" ?", "?"), (" ,", ","), (" n't", "n't"), (" 's", "'s"), (" 've", "'ve")):
        text = text.replace(before, after)
    return text


@given(st.lists(st.sampled_from([" it", " '", "s", " .", " ", ",", "n", " n", "'t", " a", "ve", " ?", "x"])))
def test_a_decoder_that_tidies_up_takes_nothing_back(words: list[str]) -> None:
    def decode(ids: Sequence[int]) -> str:
        return tidy("".join(words[i] for i in ids))

    detokenizer = Detokenizer(decode, cleans_up_spaces=True)
    pieces = [*(detokenizer.add(i) for i in range(len(words))), detokenizer.finish()]
    assert "".join(pieces) == decode(range(len(words)))


def text_before(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Character by character: the text before the first stop string to be complete."""
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
    scanner = StopStringFinder(stops)
    edges = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    shown = "".join(scanner.add(text[a:b]) for a, b in itertools.pairwise(edges)) + scanner.finish()
    assert (shown, scanner.found) == text_before(text, stops)


@given(st.text("ab", max_size=20), st.text("ab", min_size=1, max_size=4))
def test_nothing_is_held_that_could_not_become_a_stop_string(text: str, stop: str) -> None:
    scanner = StopStringFinder([stop])
    shown = ""
    for end, character in enumerate(text, 1):
        shown += scanner.add(character)
        assert scanner.found or stop.startswith(text[len(shown) : end])


def test_a_stop_string_across_three_tokens_is_not_shown() -> None:
    vocabulary = [b"Say: ", b"E", b"N", b"D now", b"more"]
    writer = TextStream(ByteDecoder(vocabulary), stops=["END"])
    assert [writer.add(i) for i in range(4)] == ["Say: ", "", "", ""]
    assert writer.stopped
    assert writer.add(4) == ""
    assert writer.finish() == ""


def test_what_only_began_like_a_stop_string_is_shown() -> None:
    vocabulary = [b"E", b"N", b"ough"]
    writer = TextStream(ByteDecoder(vocabulary), stops=["END"])
    assert [writer.add(i) for i in range(3)] == ["", "", "ENough"]
    assert not writer.stopped
    held = TextStream(ByteDecoder([b"the EN"]), stops=["END"])
    assert held.add(0) + held.finish() == "the EN"


def test_a_stop_string_that_ends_with_a_broken_sequence_is_found_in_the_end() -> None:
    writer = TextStream(ByteDecoder([b"a", b"\xf0\x9f"]), stops=[REPLACEMENT])
    assert [writer.add(0), writer.add(1), writer.finish()] == ["a", "", ""]
    assert writer.stopped

"""The demo model's real tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from client.generation.detokenizer import Detokenizer
from client.generation.tokenizer import Tokenizer
from swarm.errors import ConfigError, ContextExceeded, PackageError

TEXT = "The capital of France is Paris. 日本語 🙂👩‍👩‍👧 n't it 's . , ok ?"


@pytest.fixture(scope="module")
def tokenizer(smollm2_package: Path) -> Tokenizer:
    return asyncio.run(Tokenizer.load(smollm2_package))


def streamed(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer.decode, cleans_up_spaces=tokenizer.cleans_up_spaces)
    return [*(detokenizer.add(token) for token in ids), detokenizer.finish()]


def test_decoding_returns_the_text_and_no_piece_is_broken(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == TEXT
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert sum(1 for piece in pieces if piece) > 10
    assert not tokenizer.cleans_up_spaces


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 49_151), max_size=12))
def test_the_pieces_of_any_tokens_joined_equal_the_full_decode(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_the_ids_of_a_conversation_end_where_the_assistant_begins(tokenizer: Tokenizer) -> None:
    ids = tokenizer.chat([{"role": "user", "content": "Hello"}])
    assert ids[0] == 1
    assert tokenizer.decode(ids).endswith("user\nHello\nassistant\n")


def test_a_longer_conversation_begins_like_the_shorter(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    first = tokenizer.chat(messages)
    messages += [{"role": "assistant", "content": "Hi!"}, {"role": "user", "content": "And?"}]
    assert tokenizer.chat(messages)[: len(first)] == first


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([], "no message"),
        ([{"role": "user"}], "message 0 has no content"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], "message 1 has no role"),
        (["hello"], "message 0 has no role"),
        ([{"role": "user", "content": 5}], "message 0 has no content"),
    ],
)
def test_a_malformed_message_is_named(tokenizer: Tokenizer, messages: list[dict[str, str]], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        tokenizer.chat(messages)


def test_a_prompt_is_never_truncated_silently(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("word " * 5000)) > 5000
    with pytest.raises(ContextExceeded, match="8192"):
        tokenizer.encode("word " * 9000)


def test_half_a_surrogate_pair_is_no_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"the prompt is no text at character 1 .*UTF-8"):
        tokenizer.encode("a\ud800b")
    with pytest.raises(ConfigError, match="message 0 is no text at character 3"):
        tokenizer.chat([{"role": "user", "content": "caf\udce9"}])


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=str(tmp_path)):
        asyncio.run(Tokenizer.load(tmp_path))

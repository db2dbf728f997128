"""Slugs of names, and the files of a tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from export.sources.source import TOKENIZER_IR, slug, tokenizer_files
from swarm.errors import PackageError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", "smollm2-135m-instruct"),
        ("Qwen2.5-0.5B-Instruct-int4-ov", "qwen2.5-0.5b-instruct"),
        ("Llama-3.1-8B-Instruct-Q4_K_M", "llama-3.1-8b-instruct"),
        ("mistral-7b-instruct-v0.2-int4-cw-ov", "mistral-7b-instruct-v0.2"),
        ("gemma-3-270m-f16", "gemma-3-270m"),
        ("Phi 3 / mini", "phi-3-mini"),
        ("...", "model"),
    ],
)
def test_a_slug_drops_the_weight_format(name: str, expected: str) -> None:
    assert slug(name) == expected


def test_missing_tokenizer_files_are_named_with_the_command_that_makes_them(tmp_path: Path) -> None:
    for name in TOKENIZER_IR[:3]:
        (tmp_path / name).touch()
    with pytest.raises(PackageError, match=r"openvino_detokenizer\.bin.*convert_tokenizer"):
        tokenizer_files(tmp_path)


def test_chat_templates_belong_to_the_tokenizer(tmp_path: Path) -> None:
    for name in (*TOKENIZER_IR, "chat_template.jinja", "preprocessor_config.json"):
        (tmp_path / name).touch()
    assert [path.name for path in tokenizer_files(tmp_path)] == [*TOKENIZER_IR, "chat_template.jinja"]

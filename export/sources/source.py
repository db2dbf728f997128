"""The common form of all sources of a model, and helpers to read them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.errors import DamagedFile, PackageError

Progress = Callable[[str, int, int], None]
"""Called with (the stage, steps done, steps in all); 0 steps in all if unknown."""

_MAX_JSON = 64 << 20
IR_NAME = "openvino_model.xml"
UNKNOWN = "unknown"

# The files that openvino_genai.Tokenizer reads: TOKENIZER_IR must exist, TOKENIZER_EXTRAS may.
TOKENIZER_IR = (
    "openvino_tokenizer.xml",
    "openvino_tokenizer.bin",
    "openvino_detokenizer.xml",
    "openvino_detokenizer.bin",
)
TOKENIZER_EXTRAS = (
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_WEIGHT_FORMAT = re.compile(
    r"[-_. ](i?q\d\w*|bf16|fp?(16|32)|u?int\d+|\d+bit|ov|openvino|gguf|sym|asym|cw|awq|gptq)$", re.IGNORECASE
)
_NOT_SLUG = re.compile(r"[^a-z0-9.]+")


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The facts of a manifest that are not in the graphs.

    `name` is not yet a slug; `origin` is where the model came from, without local paths; `windows` returns, for a
    number of layers, the sliding window of each in tokens, None for full attention.
    """

    name: str
    architecture: str
    origin: str
    licence: str
    context_length: int
    eos_token_ids: tuple[int, ...]
    windows: Callable[[int], tuple[int | None, ...]]


@dataclass(frozen=True, kw_only=True)
class ModelSource(ModelFacts):
    """An IR on disk: `ir` is the .xml file, `tokenizer` the files that `openvino_genai.Tokenizer` reads."""

    ir: Path
    tokenizer: tuple[Path, ...]


def no_progress(_what: str, _done: int, _total: int) -> None:
    """A `Progress` that does nothing."""


def slug(name: str) -> str:
    """A model's name in the swarm: lower case, without its weight format.

    >>> slug("SmolLM2-135M-Instruct.Q4_1")
    'smollm2-135m-instruct'
    >>> slug("Qwen2.5-0.5B-Instruct-int4-ov")
    'qwen2.5-0.5b-instruct'
    """
    while (shorter := _WEIGHT_FORMAT.sub("", name)) != name:
        name = shorter
    return _NOT_SLUG.sub("-", name.lower()).strip("-.") or "model"


def tokenizer_files(directory: Path) -> tuple[Path, ...]:
    """The tokenizer's files in `directory`. Raises PackageError naming missing ones."""
    missing = [name for name in TOKENIZER_IR if not (directory / name).is_file()]
    if missing:
        raise PackageError(
            f"{directory} lacks {', '.join(missing)}: write the tokenizer's IRs there with "
            "`convert_tokenizer MODEL --with-detokenizer -o DIRECTORY` (from openvino-tokenizers)"
        )
    extras = [directory / name for name in TOKENIZER_EXTRAS if (directory / name).is_file()]
    return (*(directory / name for name in TOKENIZER_IR), *extras)


def eos_of_tokenizer(directory: Path) -> tuple[int, ...]:
    """The end-of-text id of the tokenizer's IR. Raises PackageError if it has none."""
    import openvino_genai

    try:
        token = int(openvino_genai.Tokenizer(str(directory)).get_eos_token_id())
    except RuntimeError as error:
        raise PackageError(f"the tokenizer in {directory} cannot be loaded: {last_line(error)}") from error
    if token < 0:
        raise PackageError(
            f"no end-of-text id is known for {directory}: write eos_token_id into its generation_config.json"
        )
    return (token,)


def last_line(error: object) -> str:
    """The last line of a multi-line message of OpenVINO, which is the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no file. Raises DamagedFile for anything else."""
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > _MAX_JSON:
            raise DamagedFile(f"{path} has {path.stat().st_size} bytes, too many for such a file: fetch it again")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise DamagedFile(f"{path} cannot be read as JSON ({error}): fetch it again") from error
    if not isinstance(value, dict):
        raise DamagedFile(f"{path} holds no JSON object: fetch it again")
    return value

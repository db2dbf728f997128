"""Source: a directory with an OpenVINO IR, as optimum-intel writes it and as model hubs publish it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from export.sources.source import IR_NAME, UNKNOWN, ModelSource, eos_of_tokenizer, read_json, tokenizer_files
from swarm.errors import PackageError

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
# For these families configs without `layer_types` exist: every n-th layer has full attention.
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4}


def read_ir_source(directory: Path) -> ModelSource:
    """Describe the model in `directory`.

    Raises PackageError naming a missing file or value, DamagedFile for unreadable JSON.
    """
    ir = directory / IR_NAME
    weights = ir.with_suffix(".bin")
    for path in (ir, weights):
        if not path.is_file():
            raise PackageError(
                f"{path} does not exist: name a directory with {IR_NAME} and its .bin, as optimum-intel writes "
                "it, or a GGUF file"
            )
    tokenizer = tokenizer_files(directory)
    return ModelSource(ir=ir, tokenizer=tokenizer, **facts(directory, lambda: eos_of_tokenizer(directory)))


def facts(directory: Path, default_eos: Callable[[], tuple[int, ...]]) -> dict[str, Any]:
    """The fields of `ModelFacts`, from config.json, generation_config.json and README.md.

    `default_eos` returns the end-of-text ids if none of these files has them.
    """
    outer = read_json(directory / "config.json")
    config = outer["text_config"] if isinstance(outer.get("text_config"), dict) else outer
    generation = read_json(directory / "generation_config.json")
    model_id = _model_id(directory.resolve())
    eos = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    return {
        "name": model_id.rpartition("/")[2],
        "architecture": str(config.get("model_type") or UNKNOWN),
        "origin": str(outer.get("_name_or_path") or model_id),
        "licence": _licence(directory / "README.md"),
        "context_length": _context_length(config, directory),
        "eos_token_ids": eos or default_eos(),
        "windows": lambda layers: windows_of(config, layers),
    }


def _model_id(directory: Path) -> str:
    """The id of a model in the hub's cache, models--OWNER--MODEL/snapshots/COMMIT; else the directory's name."""
    repository = directory.parent.parent.name
    if directory.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return directory.name


def _ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(int(v) for v in values if isinstance(v, int))


def _context_length(config: dict[str, Any], directory: Path) -> int:
    for name in _CONTEXT_KEYS:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise PackageError(
        f"{directory / 'config.json'} states no context length ({' or '.join(_CONTEXT_KEYS)}): put the model's "
        "own config.json beside the IR"
    )


def windows_of(config: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window. In doubt a layer has it: a window too many costs speed, one too few wrong text."""
    window = config.get("sliding_window")
    if not isinstance(window, int) or window < 1 or config.get("use_sliding_window") is False:
        return (None,) * layers
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return tuple(None if kind == "full_attention" else window for kind in kinds)
    every = config.get("sliding_window_pattern") or _FULL_EVERY.get(str(config.get("model_type")), 0)
    return tuple(None if every and (layer + 1) % every == 0 else window for layer in range(layers))


def _licence(readme: Path) -> str:
    """The value of `license:` in a model card's front matter."""
    if not readme.is_file():
        return UNKNOWN
    with readme.open(encoding="utf-8", errors="replace") as file:
        lines = iter(file)
        if next(lines, "").strip() != "---":
            return UNKNOWN
        found = {}
        for line in lines:
            if line.strip() == "---":
                break
            name, _, value = line.partition(":")
            found[name] = value.strip().strip("\"'")
    licence = found.get("license", "")
    return (found.get("license_name") if licence == "other" else licence) or licence or UNKNOWN

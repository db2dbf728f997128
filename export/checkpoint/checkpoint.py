"""A Hugging Face checkpoint on disk: its config, and its tensors by name, read from safetensors by memory map."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.sources.source import last_line, read_json
from swarm.errors import ConfigError, DamagedFile, PackageError

CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100 << 20  # safetensors' own limit


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """A tensor's file, type and shape: `dtype` as safetensors writes it (BF16, F32 ...), `size` in bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """`config` is the content of config.json; `tensors` are those of all files, by name."""

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Read the config and the files' headers. Raises PackageError for missing files, DamagedFile."""
        config = read_json(directory / CONFIG)
        if not config:
            raise PackageError(f"{directory / CONFIG} does not exist: name a directory with a model's checkpoint")
        tensors: dict[str, TensorInfo] = {}
        for file in _files(directory):
            tensors |= _header(file)
        return cls(directory=directory, config=config, tensors=tensors)

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        """name -> torch tensor over the mapped file, without a copy. Raises PackageError naming missing tensors."""
        import safetensors

        wanted = list(names)
        missing = [name for name in wanted if name not in self.tensors]
        if missing:
            raise PackageError(f"{self.directory} lacks the tensors {', '.join(missing[:3])}: fetch it again")
        found: dict[str, Any] = {}
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for name in wanted:
                file = self.tensors[name].file
                try:
                    if file not in opened:
                        opened[file] = stack.enter_context(safetensors.safe_open(file, framework="pt"))
                    found[name] = opened[file].get_tensor(name)
                except (safetensors.SafetensorError, OSError) as error:
                    raise DamagedFile(f"{file} cannot be read ({last_line(error)}): fetch it again") from error
        return found


def is_checkpoint(directory: Path) -> bool:
    return (directory / CONFIG).is_file() and any(directory.glob("*.safetensors"))


def fetch_checkpoint(name: str) -> Path:
    """Download the checkpoint `name` from the model hub, or find it in the hub's cache.

    Raises ConfigError if it is not a hub id, or cannot be downloaded.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(f"{name} is no local file; fetching it needs pip install 'aipc-swarm[export]'") from error
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "README.md"]
    try:
        # Files that `transformers` does not read are duplicates of the weights: original/, consolidated.safetensors.
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"]))
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{name} is neither a local file or directory nor available from the hub ({last_line(error)}): "
            "name a GGUF file, a directory, or a hub id OWNER/MODEL"
        ) from error


def _files(directory: Path) -> list[Path]:
    """The files that the index names; without an index only `model.safetensors`: others duplicate its weights."""
    index, single = read_json(directory / _INDEX).get("weight_map"), directory / "model.safetensors"
    if isinstance(index, dict):
        files = sorted({directory / Path(str(name)).name for name in index.values()})
    else:
        files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise PackageError(
            f"{directory} lacks {', '.join(missing[:3]) or 'its weights, *.safetensors'}: fetch the checkpoint again "
            "(a checkpoint of *.bin files must be saved as safetensors first)"
        )
    return files


def _header(file: Path) -> dict[str, TensorInfo]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= _MAX_HEADER:
                raise DamagedFile(f"{file} is no safetensors file: its header would have {length} bytes")
            plain = json.loads(stream.read(length))
        return {
            name: TensorInfo(
                file=file,
                dtype=str(entry["dtype"]),
                shape=tuple(int(size) for size in entry["shape"]),
                size=int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
            )
            for name, entry in plain.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OSError, RecursionError) as error:
        raise DamagedFile(f"{file} cannot be read as safetensors ({error}): fetch it again") from error

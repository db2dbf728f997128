"""Source: a GGUF file, which openvino_genai converts to an IR with the same weight format."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

from export.sources.gguf_header import GgufHeader, read_header
from export.sources.source import (
    IR_NAME,
    UNKNOWN,
    ModelSource,
    Progress,
    eos_of_tokenizer,
    last_line,
    no_progress,
    tokenizer_files,
)
from swarm.errors import PackageError, UnsupportedModel

# The pipeline writes the IR beside the GGUF file.
_CONVERT = "import sys, openvino_genai; openvino_genai.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"
_GENERIC_NAMES = {"model", "ggml-model", "weights"}


def read_gguf_source(path: Path, scratch: Path, progress: Progress = no_progress) -> ModelSource:
    """Convert `path` to an IR in the directory `scratch`, and describe it by its header.

    Raises DamagedFile for a damaged file, UnsupportedModel if the architecture cannot be converted.
    """
    header = read_header(path)
    architecture = header.text("general.architecture", UNKNOWN)
    if (header.number("split.count") or 1) > 1:
        raise UnsupportedModel(
            f"{path} is one of {header.number('split.count')} pieces of a model: join them first with "
            "`llama-gguf-split --merge`"
        )
    context = header.number(f"{architecture}.context_length")
    if context is None:
        raise PackageError(f"{path} states no {architecture}.context_length: it is not a language model's GGUF file")
    progress("converting GGUF", 0, 1)
    _convert(path, architecture, scratch)
    progress("converting GGUF", 1, 1)
    window = header.number(f"{architecture}.attention.sliding_window") or None
    return ModelSource(
        ir=scratch / IR_NAME,
        tokenizer=tokenizer_files(scratch),
        name=_name(path, header),
        architecture=architecture,
        origin=path.name,
        licence=header.text("general.license", UNKNOWN),
        context_length=context,
        eos_token_ids=_eos(header) or eos_of_tokenizer(scratch),
        # The header does not say which layers have the window. Assuming it for too many layers only costs speed, for
        # too few it gives wrong text.
        windows=lambda layers: (window,) * layers,
    )


def _convert(path: Path, architecture: str, scratch: Path) -> None:
    """Convert in a child process: openvino_genai compiles the model too, and its memory is freed with the process."""
    link = scratch / "model.gguf"
    link.symlink_to(path.resolve())
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CONVERT, str(link)], cwd=scratch, capture_output=True, text=True, check=False
    )
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise PackageError(
            f"converting {path} was killed by {name}"
            + (": it needs about three times the file's size in memory" if name == "SIGKILL" else "")
        )
    if done.returncode or not (scratch / IR_NAME).is_file():
        free, size = shutil.disk_usage(scratch).free, path.stat().st_size
        if free < size:  # On a full disk openvino_genai reports only a stream error.
            raise PackageError(
                f"converting {path} failed: the disk of {scratch.parent.parent} has {free / 1e6:,.0f} MB free, and it "
                f"writes {size / 1e6:,.0f} MB: make room, or export to another disk"
            )
        raise UnsupportedModel(
            f"openvino_genai cannot convert {path} (architecture {architecture}): {last_line(done.stderr)}"
        )


def _name(path: Path, header: GgufHeader) -> str:
    """The model's name: the file's name, because `general.name` is often that of a training run."""
    if path.stem.lower() not in _GENERIC_NAMES:
        return path.stem
    return header.text("general.name") or path.stem


def _eos(header: GgufHeader) -> tuple[int, ...]:
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = [header.number(name) for name in names]
    return tuple(dict.fromkeys(token for token in ids if token is not None))

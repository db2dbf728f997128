"""Converts the tokenizer of a checkpoint to the graphs that openvino_genai reads."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from export.checkpoint.torch_stack import load_transformers, quiet
from export.graph.cut import name_new_ops
from export.sources.source import TOKENIZER_EXTRAS, TOKENIZER_IR, last_line, tokenizer_files
from swarm.errors import PackageError

_COUNTED = re.compile(r"(Parameter|Result)_\d+")


def write_tokenizer(checkpoint: Path, package: Path) -> tuple[Path, ...]:
    """Write the tokenizer of `checkpoint` into `package`, and return its files.

    Graphs in the checkpoint are copied. Raises PackageError if there is no tokenizer, or openvino_tokenizers cannot
    convert it.
    """
    for name in TOKENIZER_EXTRAS:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, package / name)
    if all((checkpoint / name).is_file() for name in TOKENIZER_IR):
        for name in TOKENIZER_IR:
            shutil.copyfile(checkpoint / name, package / name)
    else:
        _convert(checkpoint, package)
    return tokenizer_files(package)


def _convert(checkpoint: Path, package: Path) -> None:
    import openvino as ov

    transformers = load_transformers()
    try:
        with quiet():
            from openvino_tokenizers import convert_tokenizer

            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
            graphs = convert_tokenizer(tokenizer, with_detokenizer=True)
        for graph, name in zip(graphs, ("openvino_tokenizer", "openvino_detokenizer"), strict=True):
            _name(graph, name)
            ov.save_model(graph, package / f"{name}.xml")
    except (ImportError, OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise PackageError(
            f"the tokenizer of {checkpoint} cannot be converted ({last_line(error)}): put the output of "
            "`convert_tokenizer MODEL --with-detokenizer -o DIRECTORY` into the checkpoint's directory"
        ) from error


def _name(graph: Any, name: str) -> None:
    """Rename graph, ops and ports. The default names contain a process-wide counter; files must not depend on it."""
    graph.set_friendly_name(name)
    name_new_ops(graph, name, set())
    for kind, ports in (("input", graph.inputs), ("output", graph.outputs)):
        for number, port in enumerate(ports):
            names = {name for name in port.get_names() if not _COUNTED.fullmatch(name)}
            port.tensor.set_names(names or {f"{name}_{kind}_{number}"})

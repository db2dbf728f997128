"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, converted from its GGUF file, and packages in many formats.

`python -m reproduction.models.checkpoints GGUF DIRECTORY` writes the checkpoint, as a child process: its end frees the
memory of torch. The weights are the file's 4-bit numbers as f32: experiments compare how formats store *these* numbers.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from export.checkpoint.torch_stack import load_transformers, quiet
from export.package.from_graph import export_package
from reproduction.experiment import Log
from reproduction.models.random_checkpoints import Shape, write_checkpoint
from reproduction.models.real import Model, smollm2
from swarm.app.demo_model import SHA256, fetch_demo_model
from swarm.model.manifest import MANIFEST, load_manifest
from swarm.process.folders import cache_folder

LLAMA_1B = Shape(hidden=2048, intermediate=8192, heads=32, kv_heads=8, head_size=64, vocabulary=128256, tied=True)
LLAMA_1B_LAYERS = 16
_EOS = 2  # `<|im_end|>`. transformers reads another one from the file.


def smollm2_checkpoint(log: Log) -> Path:
    folder = cache_folder() / "reproduction" / SHA256[:12] / "checkpoint"
    if not (folder / "config.json").exists():
        log("making a checkpoint of the demo model (once)")
        gguf, partial = fetch_demo_model(cache_folder()), folder.with_name("checkpoint.making")
        shutil.rmtree(partial, ignore_errors=True)
        subprocess.run(
            [sys.executable, "-m", "reproduction.models.checkpoints", str(gguf), str(partial)],
            check=True,
            capture_output=True,
        )
        for path in smollm2(log).package.glob("openvino_*tokenizer.*"):
            (partial / path.name).write_bytes(path.read_bytes())
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    return folder


def smollm2_as(log: Log, weights: str, *, group: int = 128, symmetric: bool = False) -> Model:
    """A package of the checkpoint in a weight format; cached."""
    sign = "sym" if symmetric else "asym"
    folder = cache_folder() / "reproduction" / SHA256[:12] / f"{weights}-{group}-{sign}"
    if not (folder / MANIFEST).exists():
        log(f"exporting {folder.name} (once)")
        source = smollm2_checkpoint(log)
        export_package(source, folder, weights=weights, group=group, symmetric=symmetric, name="smollm2", force=True)
    return Model(ir=smollm2(log).ir, package=folder, manifest=load_manifest(folder))


def llama_1b_shaped(log: Log) -> Model:
    """A random model with the shape of Llama 3.2 1B in int4; cached."""
    folder = cache_folder() / "reproduction" / "llama-1b-shaped"
    source, package = folder / "checkpoint", folder / "package"
    if not (package / MANIFEST).exists():
        if not (source / "config.json").exists():
            log("writing a checkpoint with the shape of a 1B model (once)")
            write_checkpoint(source, LLAMA_1B, LLAMA_1B_LAYERS, smollm2(log).package)
        log("exporting it (once)")
        export_package(source, package, weights="int4", licence="none: random weights", force=True)
    return Model(ir=source, package=package, manifest=load_manifest(package))


def main(gguf: Path, directory: Path) -> None:
    transformers = load_transformers()
    import torch

    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.resolve().parent, gguf_file=gguf.resolve().name, dtype=torch.float32
        )
    model.config.eos_token_id = model.generation_config.eos_token_id = _EOS
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"_name_or_path": gguf.name}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

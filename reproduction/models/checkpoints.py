"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, made from its GGUF file, and packages of it in many formats.

`python -m reproduction.models.checkpoints GGUF DIRECTORY` makes the checkpoint, in a process of its own: torch's
memory goes
with it. Its weights are those of the file, 4-bit numbers turned into f32: what is compared is how formats store *them*.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from export.checkpoint.torch_stack import load_transformers, quiet
from export.package.from_graph import export_package
from reproduction.experiment import Say
from reproduction.models.made_up import Shape, write_checkpoint
from reproduction.models.real import Model, smollm2
from swarm.app.demo_model import SHA256, fetch_demo_model
from swarm.model.manifest import MANIFEST, load_manifest
from swarm.process.folders import cache_folder

LLAMA_1B = Shape(hidden=2048, intermediate=8192, heads=32, kv_heads=8, head_size=64, vocabulary=128256, tied=True)
LLAMA_1B_LAYERS = 16
_EOS = 2  # `<|im_end|>`; transformers reads another from the file


def smollm2_checkpoint(say: Say) -> Path:
    folder = cache_folder() / "reproduction" / SHA256[:12] / "checkpoint"
    if not (folder / "config.json").exists():
        say("making a checkpoint of the demo model (once)")
        gguf, making = fetch_demo_model(cache_folder()), folder.with_name("checkpoint.making")
        shutil.rmtree(making, ignore_errors=True)
        subprocess.run(
            [sys.executable, "-m", "reproduction.models.checkpoints", str(gguf), str(making)],
            check=True,
            capture_output=True,
        )
        for path in smollm2(say).package.glob("openvino_*tokenizer.*"):
            (making / path.name).write_bytes(path.read_bytes())
        shutil.rmtree(folder, ignore_errors=True)
        making.rename(folder)
    return folder


def smollm2_as(say: Say, weights: str, *, group: int = 128, symmetric: bool = False) -> Model:
    """Its package in a format, exported from the checkpoint; made once, then found in the cache."""
    sign = "sym" if symmetric else "asym"
    folder = cache_folder() / "reproduction" / SHA256[:12] / f"{weights}-{group}-{sign}"
    if not (folder / MANIFEST).exists():
        say(f"exporting {folder.name} (once)")
        source = smollm2_checkpoint(say)
        export_package(source, folder, weights=weights, group=group, symmetric=symmetric, name="smollm2", force=True)
    return Model(ir=smollm2(say).ir, package=folder, manifest=load_manifest(folder))


def llama_1b_shaped(say: Say) -> Model:
    """A made-up model of Llama 3.2 1B's shape in int4; made once, then found in the cache."""
    folder = cache_folder() / "reproduction" / "llama-1b-shaped"
    source, package = folder / "checkpoint", folder / "package"
    if not (package / MANIFEST).exists():
        if not (source / "config.json").exists():
            say("writing a checkpoint of a 1B model's shape (once)")
            write_checkpoint(source, LLAMA_1B, LLAMA_1B_LAYERS, smollm2(say).package)
        say("exporting it (once)")
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

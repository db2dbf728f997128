"""Models of a given shape with random weights, exported by optimum-intel. They measure speed only.

`python -m reproduction.models.random_models DIRECTORY [SHAPE]` writes one, by default with the shape of SmolLM2-135M.
The graph of the GGUF reader cannot serve the ablation of `beam_idx`: without the Gather the CPU plugin (OpenVINO
2026.4.1) never fills its state.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from export.package.from_graph import export_package
from reproduction.experiment import Log
from reproduction.models.real import Model, smollm2
from swarm.model.manifest import MANIFEST, load_manifest
from swarm.process.folders import cache_folder

# All have the vocabulary of SmolLM2, and therefore its tokenizer.
SHAPES: dict[str, dict[str, int]] = {
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    # The widths of Llama-3.2-1B, with six of its sixteen layers.
    "wide": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}


def smollm2_shaped(log: Log) -> Model:
    """The shape of SmolLM2 with random int4 weights (group 64 divides its widths); cached."""
    return _shaped("smollm2", log)


def wide_shaped(log: Log) -> Model:
    """Six layers with the widths of Llama-3.2-1B in int4, groups of 128; cached. Takes a minute and 6 GB."""
    return _shaped("wide", log)


def _shaped(shape: str, log: Log) -> Model:
    folder = cache_folder() / "reproduction" / f"{shape}-shaped"
    ir, package = folder / "ir", folder / "package"
    if not (package / MANIFEST).exists():
        log(f"making a model of the shape {shape} with random weights (once)")
        ir.mkdir(parents=True, exist_ok=True)
        # A child process: its end frees the memory of torch.
        command = [sys.executable, "-m", "reproduction.models.random_models", str(ir), shape]
        subprocess.run(command, check=True, capture_output=True)
        for path in smollm2(log).package.glob("openvino_*tokenizer.*"):
            (ir / path.name).write_bytes(path.read_bytes())
        name = f"{shape}-shaped"
        export_package(ir, package, weights="int4", name=name, licence="none: random weights", force=True)
    return Model(ir=ir, package=package, manifest=load_manifest(package))


def main(directory: Path, shape: str) -> None:
    # optimum-intel requires torchvision, whose import fails with a CPU build of torch. None hides it.
    sys.modules["torchvision"] = None  # type: ignore[assignment]

    import torch
    import transformers
    from optimum.exporters.openvino import export_from_model
    from optimum.intel import OVConfig

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SHAPES[shape],
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    export_from_model(
        model,
        directory,
        task="text-generation-with-past",
        stateful=True,
        preprocessors=None,
        ov_config=OVConfig(dtype="fp32"),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(sys.argv[2:] or ["smollm2"]))

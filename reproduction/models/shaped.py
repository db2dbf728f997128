"""A model of a given shape with random weights, as optimum-intel exports it: right for speed, senseless as text.

`python -m reproduction.models.shaped DIRECTORY [SHAPE]` makes one of SmolLM2-135M's shape, or another of `SHAPES`.
The GGUF
reader's own graph cannot serve the ablation: without its Gather the CPU plugin (OpenVINO 2026.4.1) never fills that
graph's state.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from export.package.from_graph import export_package
from reproduction.experiment import Say
from reproduction.models.real import Model, smollm2
from swarm.model.manifest import MANIFEST, load_manifest
from swarm.process.folders import cache_folder

# Random weights, but true matrices; all with SmolLM2's vocabulary and so its tokenizer.
SHAPES: dict[str, dict[str, int]] = {
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    # the widths of Llama-3.2-1B, six of its sixteen layers
    "wide": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}


def smollm2_shaped(say: Say) -> Model:
    """Random weights in int4 (group 64 divides its widths) and SmolLM2's tokenizer; made once, then in the cache."""
    return _shaped("smollm2", say)


def wide_shaped(say: Say) -> Model:
    """Six layers of Llama-3.2-1B's widths in int4, groups of 128; made once (a minute, 6 GB), then in the cache."""
    return _shaped("wide", say)


def _shaped(shape: str, say: Say) -> Model:
    folder = cache_folder() / "reproduction" / f"{shape}-shaped"
    ir, package = folder / "ir", folder / "package"
    if not (package / MANIFEST).exists():
        say(f"making a model of the shape {shape} with random weights (once)")
        ir.mkdir(parents=True, exist_ok=True)
        # in a child: torch's memory goes with it
        command = [sys.executable, "-m", "reproduction.models.shaped", str(ir), shape]
        subprocess.run(command, check=True, capture_output=True)
        for path in smollm2(say).package.glob("openvino_*tokenizer.*"):
            (ir / path.name).write_bytes(path.read_bytes())
        name = f"{shape}-shaped"
        export_package(ir, package, weights="int4", name=name, licence="none: random weights", force=True)
    return Model(ir=ir, package=package, manifest=load_manifest(package))


def main(directory: Path, shape: str) -> None:
    # optimum-intel brings torchvision, which cannot be imported beside a CPU build of torch; None hides it
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

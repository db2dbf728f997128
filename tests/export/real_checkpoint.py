"""Makes a real model a checkpoint, exports it, and records transformers' text.

Run `python -m tests.export.real_checkpoint GGUF OUT EOS [PACKAGE ID ...]`. With PACKAGE, which was exported from GGUF,
the checkpoint has the weights of PACKAGE, and the text continues the prompt of these ids. Without it, the checkpoint
has the weights that transformers reads from GGUF.

It runs in its own process, to free torch's memory. Afterwards OUT contains `package` and `reference.json`; the
checkpoint is deleted.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino.passes import ConstantFolding, Manager

from export.checkpoint.torch_stack import load_transformers, quiet
from export.package.from_graph import export_package
from export.sources.gguf_header import read_header
from swarm.model.manifest import EMBED, HEAD, layer_part, load_manifest
from tests.export.make_checkpoints import byte_tokenizer

PROMPTS = ("The capital of France is", "Water boils when")
NEW_TOKENS = 12
# In the order in which openvino_genai makes them; its q and k have the row order of checkpoints, not of GGUF files.
_MATRICES = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_NORMS = ("input_layernorm", "post_attention_layernorm")


def main(gguf: Path, out: Path, eos: int, package: Path | None = None, *prompt: int) -> None:
    transformers = load_transformers()
    checkpoint = out / "checkpoint"
    with quiet():
        prompts = [list(prompt)]
        if package is None:
            prompts = _save_read_by_transformers(transformers, gguf.resolve(), eos, checkpoint)
        else:
            _save_weights_of(transformers, package, gguf, eos, checkpoint)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype="float32", attn_implementation="eager"
        ).eval()
        texts = [_continue(model, ids) for ids in prompts]
    del model
    export_package(checkpoint, out / "package", name=gguf.stem)
    shutil.rmtree(checkpoint)
    (out / "reference.json").write_text(json.dumps(texts))


def _save_read_by_transformers(transformers: Any, gguf: Path, eos: int, checkpoint: Path) -> list[list[int]]:
    """Returns the ids of `PROMPTS`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.config.eos_token_id = model.generation_config.eos_token_id = eos
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    return [tokenizer(prompt).input_ids for prompt in PROMPTS]


def _save_weights_of(transformers: Any, package: Path, gguf: Path, eos: int, checkpoint: Path) -> None:
    """Save the package of a Llama as a checkpoint in f32.

    Its tokenizer is byte-level: converting the real one would take longer than everything else, and the test compares
    ids only.
    """
    import torch
    from safetensors.torch import save_file

    manifest, metadata = load_manifest(package), read_header(gguf).metadata
    weights: dict[str, NDArray[Any]] = {}
    (weights["model.embed_tokens.weight"],), _ = _constants(package, EMBED)
    _, (weights["model.norm.weight"],) = _constants(package, HEAD)
    for number in range(len(manifest.layers)):
        matrices, norms = _constants(package, layer_part(number))
        named = [*zip(_MATRICES, matrices, strict=True), *zip(_NORMS, norms, strict=True)]
        weights |= {f"model.layers.{number}.{name}.weight": array for name, array in named}
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=manifest.hidden_size,
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=len(manifest.layers),
        num_attention_heads=metadata["llama.attention.head_count"],
        num_key_value_heads=manifest.layers[0].kv_heads,
        vocab_size=manifest.vocab_size,
        max_position_embeddings=manifest.context_length,
        rms_norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        eos_token_id=eos,
    )
    config.save_pretrained(checkpoint)
    save_file({name: torch.from_numpy(array) for name, array in weights.items()}, checkpoint / "model.safetensors")
    byte_tokenizer(transformers).save_pretrained(checkpoint)


def _constants(package: Path, part: str) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """(matrices, vectors) of a part in f32 as its graph unpacks them, in the order in which they were made."""
    model = ov.Core().read_model(package / f"{part}.xml")
    hidden = load_manifest(package).hidden_size
    folding = Manager()
    folding.register_pass(ConstantFolding())
    folding.run_passes(model)
    found = {op.get_friendly_name(): op for op in model.get_ops() if op.get_type_name() == "Constant"}
    ordered = [found[name] for name in sorted(found, key=lambda name: int(name.rpartition("_")[2]))]
    matrices = [op.data.copy() for op in ordered if len(op.shape) == 2 and min(op.shape) > 1]
    vectors = [op.data.reshape(-1).copy() for op in ordered if np.prod(op.shape) == hidden == op.shape[-1]]
    return matrices, vectors


def _continue(model: Any, prompt: list[int]) -> dict[str, list[int]]:
    import torch

    with torch.no_grad():
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
        )
    return {"prompt": prompt, "greedy": ids[0, len(prompt) :].tolist()}


if __name__ == "__main__":
    package = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), package, *map(int, sys.argv[5:]))

"""A GGUF file as a checkpoint, its package, transformers' text: `python -m tests.export.real_checkpoint GGUF OUT EOS`.

In a process of its own, for torch's memory. OUT then holds `package` and `reference.json`, the checkpoint is gone.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from export.package import export_package
from export.torch_stack import load_transformers, quiet

PROMPTS = ("The capital of France is", "Water boils when")
NEW_TOKENS = 16


def main(gguf: Path, out: Path, eos: int) -> None:
    transformers = load_transformers()
    import torch

    folder, name = gguf.resolve().parent, gguf.resolve().name
    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
        model.config.eos_token_id = model.generation_config.eos_token_id = eos
        texts = [_continue(model, tokenizer(prompt).input_ids) for prompt in PROMPTS]
        model.save_pretrained(out / "checkpoint")
        tokenizer.save_pretrained(out / "checkpoint")
    del model
    export_package(out / "checkpoint", out / "package", name=gguf.stem)
    shutil.rmtree(out / "checkpoint")
    (out / "reference.json").write_text(json.dumps(texts))


def _continue(model: Any, prompt: list[int]) -> dict[str, list[int]]:
    import torch

    with torch.no_grad():
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
        )
    return {"prompt": prompt, "greedy": ids[0, len(prompt) :].tolist()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))

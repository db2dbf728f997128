"""Makes tiny random checkpoints, with transformers' texts: `python -m tests.export.make_checkpoints DIRECTORY`.

::

    DIRECTORY/FAMILY/                a checkpoint as on a hub: config, safetensors, tokenizer
    DIRECTORY/FAMILY/reference.json  {"prompt": ids, "greedy": transformers' continuation in f32, eager}

Weights are larger than at the start of training, so that attention, windows, sinks and caps affect the text.
One child process makes all checkpoints, because the imports take longer than the models.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from export.checkpoint.torch_stack import load_transformers, quiet
from tests.export.make_tiny import LAYERS, WINDOW, common_config

# Saved in 16 bits, like the hub's models; the others in f32.
HALF = ("qwen2", "mixtral", "gemma3_text", "gpt_oss", "granite")
PROMPT_TOKENS, NEW_TOKENS = 20, 12  # both longer than the window
_SPECIALS = ["<pad>", "<s>", "</s>"]
_PATTERN = ["sliding_attention", "full_attention"] * (LAYERS // 2)


def configs(transformers: Any, vocab_size: int) -> dict[str, Any]:
    """Family -> config, each with the family's features beyond a plain decoder's layers."""
    common = common_config(vocab_size)
    experts = {"num_experts_per_tok": 2}
    pattern = {"head_dim": 16, "sliding_window": WINDOW, "layer_types": _PATTERN}
    llama3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0 + 0.05 * i for i in range(8)],
        "long_factor": [1.5 + 0.3 * i for i in range(8)],
    }
    t = transformers
    return {
        "llama": t.LlamaConfig(**common, rope_parameters={**llama3, "original_max_position_embeddings": 64}),
        "mistral": t.MistralConfig(**common, sliding_window=WINDOW),
        "mixtral": t.MixtralConfig(**common, **experts, num_local_experts=4),
        "qwen2": t.Qwen2Config(**common, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
        "qwen3": t.Qwen3Config(**common, head_dim=32, tie_word_embeddings=True),
        "qwen3_moe": t.Qwen3MoeConfig(
            **common, **experts, head_dim=32, num_experts=4, moe_intermediate_size=32, mlp_only_layers=[1]
        ),
        "phi3": t.Phi3Config(**common, original_max_position_embeddings=64, rope_parameters=longrope),
        "gemma2": t.Gemma2Config(**common, **pattern, query_pre_attn_scalar=16),
        "gemma3_text": t.Gemma3TextConfig(**common, **pattern, query_pre_attn_scalar=16),
        "gpt_oss": t.GptOssConfig(**common, **experts, **pattern, num_local_experts=4),
        "granite": t.GraniteConfig(
            **common, embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22, attention_multiplier=0.1
        ),
        "olmo2": t.Olmo2Config(**common),
        "smollm3": t.SmolLM3Config(**common, no_rope_layers=[1, 1, 0, 1]),
    }


def main(directory: Path) -> None:
    transformers = load_transformers()
    tokenizer = byte_tokenizer(transformers)
    with quiet():
        for family, config in configs(transformers, len(tokenizer)).items():
            _make(transformers, config, directory / family)
            tokenizer.save_pretrained(directory / family)


def _make(transformers: Any, config: Any, target: Path) -> None:
    import torch

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() == 1:
                weights.add_(torch.randn_like(weights) * 0.1)
            else:
                weights.mul_(4)
            if config.model_type in HALF:
                weights.copy_(weights.bfloat16())
    model.save_pretrained(target)
    if config.model_type in HALF:
        _halve(target / "model.safetensors")
    (target / "README.md").write_text("---\nlicense: mit\n---\nRandom weights.\n")
    prompt = [i * 7919 % config.vocab_size for i in range(3, 3 + PROMPT_TOKENS)]
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):  # the whole text each time, without a cache, and ignoring end-of-text
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    (target / "reference.json").write_text(json.dumps({"prompt": prompt, "greedy": ids[PROMPT_TOKENS:]}))


def _halve(file: Path) -> None:
    """Round the numbers to bf16 and store them in bf16."""
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def byte_tokenizer(transformers: Any) -> Any:
    """Byte-level, without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-untyped]

    letters = [*_SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    plain = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    pad, begin, end = _SPECIALS
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token=pad, bos_token=begin, eos_token=end)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Makes tiny random models as optimum-intel exports them: `python -m tests.export.make_tiny DIRECTORY`.

Run as one child process for all families: the imports take longer than the models, and torch and
transformers stay out of the process that tests.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen3", "phi3", "mixtral", "mistral", "gpt_oss")
LAYERS, HIDDEN, CONTEXT, WINDOW = 4, 64, 256, 8
_SPECIALS = ["<pad>", "<s>", "</s>"]


def main(directory: Path) -> None:
    # optimum-intel brings torchvision; beside a CPU build of torch its import fails ("operator
    # torchvision::nms does not exist") and takes transformers with it. None marks it as not installed.
    sys.modules["torchvision"] = None  # type: ignore[assignment]

    import torch
    import transformers
    from optimum.exporters.openvino import export_from_model

    tokenizer, detokenizer, vocab_size = _tokenizer()
    for family, config in _configs(transformers, vocab_size).items():
        target = directory / family
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        export_from_model(
            model, target, task="text-generation-with-past", stateful=True, preprocessors=None, ov_config=_keep_f32()
        )
        _save(tokenizer, target / "openvino_tokenizer.xml")
        _save(detokenizer, target / "openvino_detokenizer.xml")
        (target / "README.md").write_text("---\nlicense: mit\n---\nRandom weights.\n")


def common_config(vocab_size: int) -> dict[str, Any]:
    """The settings that all tiny models share."""
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab_size,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _configs(transformers: Any, vocab_size: int) -> dict[str, Any]:
    common = common_config(vocab_size)
    return {
        "llama": transformers.LlamaConfig(**common),
        "qwen3": transformers.Qwen3Config(**common, head_dim=16),
        "phi3": transformers.Phi3Config(**common),
        "mixtral": transformers.MixtralConfig(**common, num_local_experts=4, num_experts_per_tok=2),
        "mistral": transformers.MistralConfig(**common, sliding_window=WINDOW),
        "gpt_oss": transformers.GptOssConfig(
            **common,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
        ),
    }


def _keep_f32() -> Any:
    from optimum.intel import OVConfig

    return OVConfig(dtype="fp32")


def _tokenizer() -> tuple[Any, Any, int]:
    """A byte-level tokenizer without merges, as OpenVINO graphs, and its vocabulary size."""
    import transformers
    from openvino_tokenizers import convert_tokenizer  # type: ignore[import-untyped]
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-untyped]

    letters = [*_SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    plain = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    pad, begin, end = _SPECIALS
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token=pad, bos_token=begin, eos_token=end)
    tokenizer, detokenizer = convert_tokenizer(fast, with_detokenizer=True)
    return tokenizer, detokenizer, len(letters)


def _save(graph: Any, path: Path) -> None:
    import openvino as ov

    ov.save_model(graph, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    json.dump(FAMILIES, sys.stdout)

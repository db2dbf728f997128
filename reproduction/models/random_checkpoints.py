"""Random checkpoints: the shapes of a real model with random bf16 numbers, as safetensors on disk.

They measure memory and speed of an export; their text has no meaning. Each number has a random sign and mantissa and a
fixed exponent: numbers are generated as fast as the disk writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swarm.errors import ConfigError
from swarm.model.manifest import TOKENIZER, load_manifest

_SIGN_AND_MANTISSA, _EXPONENT = np.uint16(0x807F), np.uint16(0x3C80)  # magnitudes of 0.016 to 0.03
_BLOCK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a llama model; `tied`: the head is the embedding."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool = False

    def layer(self, number: int) -> dict[str, tuple[int, ...]]:
        inner, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        shapes = {
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
            "self_attn.q_proj": (inner, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, inner),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        return {f"model.layers.{number}.{name}.weight": shape for name, shape in shapes.items()}

    def embedding_and_head(self) -> dict[str, tuple[int, ...]]:
        matrix = (self.vocabulary, self.hidden)
        head = {} if self.tied else {"lm_head.weight": matrix}
        return {"model.embed_tokens.weight": matrix, "model.norm.weight": (self.hidden,), **head}

    def largest_part(self) -> int:
        """The bytes of the largest part (embedding, layer, head) in bf16."""
        layer = sum(int(np.prod(shape)) for shape in self.layer(0).values())
        return 2 * max(layer, self.vocabulary * self.hidden)


LLAMA_8B = Shape(hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_size=128, vocabulary=128256)


def write_checkpoint(folder: Path, shape: Shape, layers: int, tokenizer_of: Path) -> int:
    """Write a checkpoint with the tokenizer of the package `tokenizer_of`. Returns its bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    for entry in load_manifest(tokenizer_of).parts[TOKENIZER]:
        if entry.path.startswith("openvino_"):
            (folder / entry.path).write_bytes((tokenizer_of / entry.path).read_bytes())
    random = np.random.default_rng(0)
    groups = {"ends": shape.embedding_and_head(), **{f"{number:03d}": shape.layer(number) for number in range(layers)}}
    size = sum(_write(folder / f"model-{name}.safetensors", tensors, random) for name, tensors in groups.items())
    (folder / "config.json").write_text(json.dumps(config))  # Last: it marks a complete checkpoint.
    return size


def _write(file: Path, tensors: dict[str, tuple[int, ...]], random: np.random.Generator) -> int:
    header, at = {}, 0
    for name, shape in tensors.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    plain = json.dumps(header).encode()
    plain += b" " * (-len(plain) % 8)
    with file.open("wb") as stream:
        stream.write(len(plain).to_bytes(8, "little") + plain)
        for block in _blocks(at // 2, random):
            stream.write(block)
    return at


def _blocks(numbers: int, random: np.random.Generator) -> Iterator[bytes]:
    while numbers:
        count = min(numbers, _BLOCK)
        bits = np.frombuffer(random.bytes(2 * count), np.uint16)
        yield ((bits & _SIGN_AND_MANTISSA) | _EXPONENT).tobytes()
        numbers -= count


@contextmanager
def scratch(folder: Path, needed: int) -> Iterator[Path]:
    """A temporary folder. Raises ConfigError if the disk has fewer than `needed` bytes left."""
    import shutil
    import tempfile

    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(f"{needed / 1e9:.0f} GB are needed in {folder}, {free / 1e9:.0f} GB are free there")
    with tempfile.TemporaryDirectory(dir=folder, prefix="made-up-") as work:
        yield Path(work)

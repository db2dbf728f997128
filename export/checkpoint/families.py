"""The families of checkpoints: which can be exported, and why others cannot. docs/how-to/models.md shows this table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarm.errors import UnsupportedModel

_SHARED_KV = "its later layers read the keys and values of an earlier layer, and every layer a second embedding"


@dataclass(frozen=True, kw_only=True)
class Family:
    """`needs`: features of its layers beyond a plain decoder; `refused`: why it cannot be exported, else empty.

    `lift_version_limit`: ignore optimum-intel's own limit on transformers' version, because the tests compare this
    family with the installed transformers.
    """

    needs: str
    refused: str = ""
    lift_version_limit: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family(needs="rotary scaling (llama3, linear, yarn)"),
    "mistral": Family(needs="sliding window"),
    "mixtral": Family(needs="experts"),
    "qwen2": Family(needs="biases; sliding window in its last layers"),
    "qwen3": Family(needs="explicit head size, QK norm"),
    "qwen3_moe": Family(needs="explicit head size, QK norm; experts in some layers"),
    "phi3": Family(needs="fused projections; longrope, whose factors depend on the length so far"),
    "gemma3_text": Family(needs="scaled embedding; two rotary bases, window pattern", lift_version_limit=True),
    "gpt_oss": Family(needs="attention sinks, experts, window pattern"),
    "granite": Family(needs="multipliers of embedding, attention, residual and logits"),
    "olmo2": Family(needs="norms behind attention and MLP, norm over all heads"),
    "smollm3": Family(needs="layers without rotary embedding"),
    "gemma2": Family(
        needs="soft-capped attention",
        refused="optimum-intel traces it with an attention that drops the soft-capping; kept, it is not fused",
    ),
    "gemma3n": Family(needs="shared K/V", refused=_SHARED_KV),
    "gemma3n_text": Family(needs="shared K/V", refused=_SHARED_KV),
    "gemma4": Family(needs="shared K/V", refused=_SHARED_KV),
    "gemma4_text": Family(needs="shared K/V", refused=_SHARED_KV),
}


def check_family(config: Mapping[str, Any], versions: Mapping[str, str]) -> Family:
    """The family of a config.json.

    A family that is not in the table is accepted: its first layer of each kind is compared with transformers
    before anything is written. Raises UnsupportedModel with the reason and the installed versions.
    """
    kind = str(config.get("model_type") or "")
    family = FAMILIES.get(kind, Family(needs="not known here"))
    if family.refused:
        raise UnsupportedModel(f"{kind} cannot be exported: {family.refused} ({format_versions(versions)})")
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method", "quantized") if isinstance(quantized, dict) else quantized
        raise UnsupportedModel(
            f"the checkpoint's weights are quantized already ({method}): take the model's 16-bit checkpoint, or a "
            f"GGUF file or an OpenVINO IR of it ({format_versions(versions)})"
        )
    return family


def format_versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {versions[name]}" for name in ("transformers", "optimum-intel", "openvino"))

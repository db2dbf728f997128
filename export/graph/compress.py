"""Detects and compresses the format of a graph's weights."""

from __future__ import annotations

import contextlib
import io
import logging
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import openvino as ov

from swarm.errors import ConfigError, PackageError

KEEP, INT8, INT4, F16 = "keep", "int8", "int4", "f16"
CHOICES = (KEEP, INT8, INT4, F16)
_NAMES = {"i4": INT4, "u4": INT4, "i8": INT8, "u8": INT8, "f16": F16, "bf16": "bf16", "f32": "f32"}
GROUP = 128


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of weights; `weights` is one of CHOICES.

    For int4: `group` numbers share a scale (fewer if the width is not a multiple of it); `symmetric` has no zero
    point, which is faster on some devices and less exact.

    Raises ConfigError for invalid values, or if nncf is needed and not installed.
    """

    weights: str = KEEP
    group: int = GROUP
    symmetric: bool = False

    def __post_init__(self) -> None:
        if self.weights not in CHOICES:
            raise ConfigError(f"weights {self.weights!r} is not one of {', '.join(CHOICES)}")
        if self.weights != INT4 and (self.group != GROUP or self.symmetric):
            raise ConfigError(f"--group-size and --symmetric are for --weights {INT4}, not {self.weights}")
        if not 16 <= self.group <= 4096 or self.group & (self.group - 1):
            raise ConfigError(f"--group-size is {self.group}; it must be 16, 32, 64, 128 ... or 4096")
        if self.weights in (INT8, INT4):
            _nncf()

    def __str__(self) -> str:
        """The format as in the manifest: int4, int4-sym-g64."""
        sym = "-sym" if self.symmetric else ""
        return self.weights + sym + (f"-g{self.group}" if self.group != GROUP else "")


def weight_format(model: ov.Model) -> str:
    """The most common format among the numbers of a graph's constants: int4, int8, f16, bf16, f32 ..."""
    counts: Counter[str] = Counter()
    for op in model.get_ops():
        if op.get_type_name() == "Constant":
            kind = op.output(0).element_type.to_string()
            counts[_NAMES.get(kind, kind)] += math.prod(op.output(0).shape)
    return max(counts, key=lambda kind: counts[kind])


def check_compressible(found: str, weights: str) -> None:
    """Raises ConfigError if weights would be compressed a second time."""
    if weights != KEEP and found not in ("f32", F16, "bf16"):
        raise ConfigError(
            f"the source's weights are {found} already and cannot be made {weights} without losing more: "
            f"use --weights {KEEP}, or export the model's {F16} weights"
        )


def compress(model: ov.Model, format: Format, *, is_layer: bool) -> ov.Model:
    """Compress the weights of one part. `f16` is applied on saving; the model is returned unchanged.

    With int4 the embedding and the head are int8, which is nncf's default for a whole model. All matrices of a
    layer are int4. This needs the option `all_layers`, because nncf takes the last matrix of a graph for a head.
    """
    if format.weights not in (INT8, INT4):
        return model
    nncf = _nncf()
    options: dict[str, Any] = {"mode": nncf.CompressWeightsMode.INT8_ASYM}
    if format.weights == INT4 and is_layer:
        fallback = nncf.GroupSizeFallbackMode.ADJUST
        options = {
            "mode": nncf.CompressWeightsMode.INT4_SYM if format.symmetric else nncf.CompressWeightsMode.INT4_ASYM,
            "group_size": format.group,
            "all_layers": True,
            "advanced_parameters": nncf.AdvancedCompressionParameters(group_size_fallback_mode=fallback),
        }
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # nncf prints tables and progress bars for every graph.
            return nncf.compress_weights(model, **options)
    except (RuntimeError, nncf.ValidationError, nncf.InternalError, nncf.UnsupportedModelError) as error:
        raise PackageError(f"{model.get_friendly_name()} cannot be compressed to {format}: {error}") from error


def _nncf() -> Any:
    try:
        import nncf
    except ImportError as error:
        raise ConfigError(
            f"compressing weights needs nncf ({error}): install it with pip install 'aipc-swarm[export]', "
            f"or use --weights {KEEP}"
        ) from error
    logging.getLogger("nncf").setLevel(logging.ERROR)
    return nncf

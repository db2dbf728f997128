"""From a graph to a compiled graph: the settings of each device, and what they really came to."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openvino as ov

from swarm.engine.cache import discard, discard_if_damaged, entry_path, evict, locked, seal
from swarm.errors import ConfigError, EngineError
from swarm.model.numerics import PRECISIONS, Numerics
from swarm.process.priority import low_priority

EXACT = Numerics(inference="f32", kv="f32")
STATEFUL_ATTENTION, PAGED_ATTENTION = "ScaledDotProductAttention", "PagedAttention"
"""What the CPU plugin calls a layer's attention that it runs as one operation."""
_KEPT_KERNELS = 64
"""What the CPU plugin makes for a step's size it keeps, 150 KB a layer, for thousands of sizes, and oneDNN beside it: a
peer with many users grew without end. Making it again takes nothing that could be measured."""
_ONEDNN_KEEPS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CompiledSpan:
    """A graph on its device. `numerics` is read back from it; `device` is its name, `CPU` or `GPU.0`."""

    model: ov.CompiledModel
    numerics: Numerics
    device: str


def compile_span(
    model: ov.Model,
    *,
    attention_layers: int,
    device: str = "CPU",
    precision: str = "accuracy",
    threads: int = 0,
    cache_dir: Path | None = None,
    cache_key: tuple[str, ...] = (),
    fused: bool = True,
    attention: str = STATEFUL_ATTENTION,
    settings: Mapping[str, str] | None = None,
) -> CompiledSpan:
    """Compile `model`, which is the caller's to drop afterwards (its weights stay mapped until then).

    `accuracy` is f32 with an f32 KV cache, or an error; `performance` is what the device does by
    default. With `cache_dir` the result is kept under `cache_key`, the settings and OpenVINO's version; a
    damaged cache is deleted and compiled again. With `fused`, each of `attention_layers` must have
    become one operation `attention` on the CPU. `settings` are properties beyond those that follow from the others.

    Raises ConfigError for a setting that cannot be, EngineError for what the device would not do.
    """
    # it is read when the first kernel is made; there is no other way
    os.environ.setdefault(_ONEDNN_KEEPS, str(_KEPT_KERNELS))

    def compiled_model() -> ov.CompiledModel:
        core = ov.Core()
        properties = _properties(core, device, precision, threads) | dict(settings or {})
        if cache_dir is None:
            return core.compile_model(model, device, properties)
        return _compile_cached(core, model, device, properties, cache_dir, cache_key)

    try:
        compiled = low_priority(compiled_model)  # OpenVINO's threads start here
    except RuntimeError as error:
        raise EngineError(f"{device} cannot compile {model.get_friendly_name()}: {_reason(error)}") from error
    span = CompiledSpan(model=compiled, numerics=_numerics(compiled, precision), device=device)
    if precision == "accuracy" and span.numerics != EXACT:
        raise EngineError(
            f"{device} computes in {span.numerics} where {EXACT} was asked for: use --precision performance"
        )
    if fused and device.startswith("CPU"):
        _check_attention(compiled, attention_layers, attention)
    return span


def check_device(device: str) -> None:
    """Raises ConfigError where this machine has no such device, naming those that it has."""
    _check_device(ov.Core(), device)


def device_identity(device: str) -> tuple[str, str]:
    """The name of the hardware and OpenVINO's version. Raises ConfigError where this machine has no such device."""
    core = ov.Core()
    _check_device(core, device)
    return _identity(core, device)


def _identity(core: ov.Core, device: str) -> tuple[str, str]:
    return str(core.get_property(device, "FULL_DEVICE_NAME")), ov.get_version()


def _check_device(core: ov.Core, device: str) -> None:
    available = core.available_devices
    if device.partition(".")[0] not in {name.partition(".")[0] for name in available}:
        raise ConfigError(f"device {device!r} is not on this machine, which has {', '.join(available)}")


def _properties(core: ov.Core, device: str, precision: str, threads: int) -> dict[str, Any]:
    if precision not in PRECISIONS:
        raise ConfigError(f"precision {precision!r} is none of {', '.join(PRECISIONS)}")
    if not 0 <= threads <= 4096:
        raise ConfigError(f"threads is {threads}; 0 leaves the choice to OpenVINO, else 1 or more")
    _check_device(core, device)
    wanted: dict[str, Any] = {"NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
    if precision == "accuracy":
        # The execution mode alone leaves the inference precision open, and a KV precision that the
        # model's own runtime_options ask for would win over it.
        wanted |= {
            "EXECUTION_MODE_HINT": "ACCURACY",
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "KEY_CACHE_PRECISION": "f32",
            "VALUE_CACHE_PRECISION": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        }
    if threads:
        # Pinned threads of several peers on one machine would all sit on the first cores.
        wanted |= {"INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": False}
    supported = core.get_property(device, "SUPPORTED_PROPERTIES")
    properties = {name: value for name, value in wanted.items() if name in supported}
    if device.startswith("CPU"):  # it takes this one without listing it
        properties["CPU_RUNTIME_CACHE_CAPACITY"] = _KEPT_KERNELS
    return properties


def _compile_cached(
    core: ov.Core,
    model: ov.Model,
    device: str,
    properties: Mapping[str, Any],
    cache_dir: Path,
    cache_key: tuple[str, ...],
) -> ov.CompiledModel:
    settings = [f"{name}={value}" for name, value in sorted(properties.items())]
    entry = entry_path(cache_dir, *cache_key, device, *_identity(core, device), *settings)
    try:
        with locked(entry):
            discard_if_damaged(entry)
            cached = {**properties, "CACHE_DIR": str(entry)}
            try:
                compiled = core.compile_model(model, device, cached)
                if device.startswith("CPU") and not compiled.get_property("LOADED_FROM_CACHE"):
                    # A graph that was just compiled keeps the constants that were folded on the way (the scales of
                    # 4-bit weights, in f32) in its heap. Read from the blob they lie in a mapped file that can go.
                    del compiled
                    compiled = core.compile_model(model, device, cached)
            except RuntimeError:
                discard(entry)
                _logger.warning("compiling without the cache: %s would not serve", entry)
                return core.compile_model(model, device, dict(properties))
            seal(entry)
            evict(cache_dir)
            return compiled
    except OSError as error:
        _logger.warning("compiling without the cache: %s", error)
        return core.compile_model(model, device, dict(properties))


def _numerics(compiled: ov.CompiledModel, precision: str) -> Numerics:
    supported = compiled.get_property("SUPPORTED_PROPERTIES")

    def read(name: str) -> str | None:
        value = compiled.get_property(name) if name in supported else None
        text = None if value is None else value.get_type_name()
        return None if text in ("dynamic", "undefined") else text

    inference = read("INFERENCE_PRECISION_HINT") or ("f32" if precision == "accuracy" else "f16")
    key = read("KEY_CACHE_PRECISION") or read("KV_CACHE_PRECISION") or inference
    value = read("VALUE_CACHE_PRECISION") or read("KV_CACHE_PRECISION") or inference
    return Numerics(inference=inference, kv=key if key == value else f"{key}+{value}")


def _check_attention(compiled: ov.CompiledModel, layers: int, attention: str) -> None:
    """Attention that fell apart still answers, at half the speed: better to refuse than to be slow."""
    fused = 0
    for node in compiled.get_runtime_model().get_ops():
        kind = node.get_rt_info()["layerType"]
        fused += str(getattr(kind, "value", kind)) == attention
    if fused != layers:
        raise EngineError(
            f"{fused} of {layers} layers compiled to a fused attention; the graph lacks what the plugin "
            "looks for (beam_idx behind each cached key and value): export the model again"
        )


def _reason(error: Exception) -> str:
    """The last line of an OpenVINO exception: the lines before it are source positions."""
    return ([line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason given"])[-1]

"""Compiles graphs: the settings of each device, and the precisions that resulted."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openvino as ov

from swarm.engine.compile_cache import discard, discard_if_damaged, entry_path, evict, locked, seal
from swarm.errors import ConfigError, EngineError
from swarm.model.numerics import PRECISIONS, Numerics
from swarm.process.priority import run_at_low_priority

EXACT = Numerics(inference="f32", kv="f32")
STATEFUL_ATTENTION, PAGED_ATTENTION = "ScaledDotProductAttention", "PagedAttention"
"""The CPU plugin's names for a layer's attention that runs as one fused operation."""
_MAX_CACHED_KERNELS = 64
"""The CPU plugin caches kernels for each step size, 150 KB a layer, for thousands of sizes, and oneDNN does too: the
memory of a peer with many users grew without bound. Making a kernel again takes no measurable time."""
_ONEDNN_CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CompiledSpan:
    """A compiled graph. `numerics` is read back from it; `device` is a name such as `CPU` or `GPU.0`."""

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
    """Compile `model`. The caller drops it afterwards; its weights stay mapped until then.

    `accuracy` is f32 with an f32 KV cache, or an error; `performance` is the device's default. With `cache_dir` the
    result is cached under `cache_key`, the settings and OpenVINO's version; a damaged entry is deleted and compiled
    again. With `fused`, each of `attention_layers` must be one operation `attention` on the CPU. `settings` are
    additional properties.

    Raises ConfigError for an invalid setting, EngineError if the device cannot compile the graph as required.
    """
    # oneDNN reads the variable when it makes its first kernel, and has no other setting for it.
    os.environ.setdefault(_ONEDNN_CAPACITY, str(_MAX_CACHED_KERNELS))

    def compiled_model() -> ov.CompiledModel:
        core = ov.Core()
        properties = _properties(core, device, precision, threads) | dict(settings or {})
        if cache_dir is None:
            return core.compile_model(model, device, properties)
        return _compile_cached(core, model, device, properties, cache_dir, cache_key)

    try:
        compiled = run_at_low_priority(compiled_model)  # OpenVINO's threads start here
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
    """Raises ConfigError if this machine has no such device, naming the devices that it has."""
    _check_device(ov.Core(), device)


def device_identity(device: str) -> tuple[str, str]:
    """The name of the hardware and OpenVINO's version. Raises ConfigError if this machine has no such device."""
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
        raise ConfigError(f"precision is {precision!r}; it must be {' or '.join(PRECISIONS)}")
    if not 0 <= threads <= 4096:
        raise ConfigError(f"threads is {threads}; 0 leaves the choice to OpenVINO, else 1 or more")
    _check_device(core, device)
    wanted: dict[str, Any] = {"NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
    if precision == "accuracy":
        # The execution mode alone does not fix the inference precision, and a KV precision in the model's own
        # runtime_options would take precedence over it.
        wanted |= {
            "EXECUTION_MODE_HINT": "ACCURACY",
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "KEY_CACHE_PRECISION": "f32",
            "VALUE_CACHE_PRECISION": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        }
    if threads:
        # Pinned threads of several peers on one machine would all run on the first cores.
        wanted |= {"INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": False}
    supported = core.get_property(device, "SUPPORTED_PROPERTIES")
    properties = {name: value for name, value in wanted.items() if name in supported}
    if device.startswith("CPU"):  # The CPU plugin accepts this property but does not list it.
        properties["CPU_RUNTIME_CACHE_CAPACITY"] = _MAX_CACHED_KERNELS
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
                    # A graph that was just compiled holds folded constants (the f32 scales of 4-bit weights) on the
                    # heap. Read from the blob they are in a mapped file whose pages can be dropped.
                    del compiled
                    compiled = core.compile_model(model, device, cached)
            except RuntimeError:
                discard(entry)
                _logger.warning("compiling without the cache: %s cannot be used", entry)
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
    """Refuse a graph whose attention is not fused: it would give the same results at half the speed."""
    fused = 0
    for node in compiled.get_runtime_model().get_ops():
        kind = node.get_rt_info()["layerType"]
        fused += str(getattr(kind, "value", kind)) == attention
    if fused != layers:
        raise EngineError(
            f"{fused} of {layers} layers compiled to a fused attention; the graph lacks the pattern that the plugin "
            "looks for (beam_idx behind each cached key and value): export the model again"
        )


def _reason(error: Exception) -> str:
    """The last line of an OpenVINO exception; the lines before it are source positions."""
    return ([line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason given"])[-1]

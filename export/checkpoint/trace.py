"""Traces the graph of a one-layer model once for all layers of equal structure, and inserts each layer's weights.

Tracing is the slowest stage, and layers of equal structure differ only in their weights. The traced model therefore
has random weights. A constant of the graph that holds one of its tensors is recognized by its numbers, and is later
replaced by the same tensor of any layer. A constant that depends on weights in another way is not replaced; the
comparison of a layer of each structure with transformers detects it (`export.verify.reference`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as op

from export.checkpoint.families import Family
from export.checkpoint.torch_stack import quiet
from export.sources.source import last_line
from swarm.errors import UnsupportedModel

_SEED = 20260101
_PROBE = 64


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The content of a constant: the tensor `name`, or the `index`-th of `pieces` equal pieces along `axis`; with its
    last two axes exchanged if `transposed`; plus 1 if `plus_one`."""

    name: str
    axis: int = 0
    index: int = 0
    pieces: int = 1
    transposed: bool = False
    plus_one: bool = False

    def of(self, tensor: Any) -> Any:
        """The content of the constant, computed from the whole `tensor`."""
        view = self.view(tensor)
        return view.float() + 1.0 if self.plus_one else view.contiguous()

    def view(self, tensor: Any) -> Any:
        """The same without the addition, as a view."""
        if self.pieces > 1:
            tensor = tensor.chunk(self.pieces, dim=self.axis)[self.index]
        return tensor.transpose(-1, -2) if self.transposed else tensor


@dataclass(frozen=True, kw_only=True)
class Template:
    """An IR with random weights; `origins` maps friendly names of constants to the tensors that they hold."""

    ir: Path
    origins: Mapping[str, Origin]


def trace(model_class: Any, config: Any, family: Family, ir: Path) -> Template:
    """Trace a model of `config` (one layer) with random weights, and write it to `ir`.

    Raises UnsupportedModel if optimum-intel does not export the type, or tracing fails.
    """
    import torch

    with quiet(), torch.no_grad():
        model = model_class._from_config(config, dtype=torch.float32).eval()
        markers = dict(model.state_dict())
        generator = torch.Generator().manual_seed(_SEED)
        for tensor in {tensor.data_ptr(): tensor for tensor in markers.values()}.values():
            if tensor.is_floating_point():
                tensor.uniform_(0.01, 0.05, generator=generator)
        _export(model, config, family, ir)
        return Template(ir=ir, origins=_find_origins(ir, markers))


def _export(model: Any, config: Any, family: Family, ir: Path) -> None:
    from optimum.exporters.openvino.convert import export
    from optimum.exporters.tasks import TasksManager

    known = TasksManager._SUPPORTED_MODEL_TYPE.get(config.model_type, {}).get("openvino", {})
    make = known.get("text-generation-with-past")
    if make is None:
        raise UnsupportedModel(f"optimum-intel does not export models of the type {config.model_type}")
    # Like `optimum-cli export openvino --task text-generation-with-past`, except that the version limit can be lifted.
    settings = make(config, use_past=True, use_past_in_inputs=True, int_dtype="int64", float_dtype="fp32")
    if family.lift_version_limit:
        settings.MAX_TRANSFORMERS_VERSION = None
    try:
        export(model, settings, ir, stateful=True, library_name="transformers")
    # For an architecture that it was not written for, the library fails with any of these errors.
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError, NotImplementedError) as error:
        raise UnsupportedModel(f"{config.model_type} cannot be traced by optimum-intel: {last_line(error)}") from error


def _find_origins(ir: Path, markers: Mapping[str, Any]) -> dict[str, Origin]:
    candidates = _candidates(markers)
    origins: dict[str, Origin] = {}
    for node in ov.Core().read_model(ir).get_ops():
        if node.get_type_name() != "Constant" or node.output(0).element_type != ov.Type.f32:
            continue
        data = node.data.reshape(-1)
        probe = data[:_PROBE].tobytes() + data[-_PROBE:].tobytes()
        if (origin := candidates.get((data.size, probe))) is not None:
            origins[node.get_friendly_name()] = origin
    return origins


def _candidates(markers: Mapping[str, Any]) -> dict[tuple[int, bytes], Origin]:
    """All forms in which a graph may hold a tensor, by size and first and last numbers."""
    found: dict[tuple[int, bytes], Origin] = {}
    for name, whole in markers.items():
        if not whole.is_floating_point():
            continue
        origins = [Origin(name=name), Origin(name=name, plus_one=True)]
        # optimum-intel splits fused matrices of experts.
        for axis in range(whole.dim() if whole.dim() > 1 else 0):
            for pieces in (2, 3):
                if whole.shape[axis] % pieces == 0:
                    origins += [Origin(name=name, axis=axis, index=i, pieces=pieces) for i in range(pieces)]
        if whole.dim() > 1:
            origins += [replace(origin, transposed=True) for origin in origins]
        for origin in origins:
            view = origin.view(whole)
            found.setdefault((view.numel(), _probe_bytes(view, plus=1.0 if origin.plus_one else 0.0)), origin)
    return found


def _probe_bytes(view: Any, plus: float) -> bytes:
    """The first and the last numbers of a view, in the order of a contiguous copy, without making that copy."""
    count, size = min(_PROBE, view.numel()), view.numel()
    indices = np.concatenate([np.arange(count), np.arange(size - count, size)])
    numbers = view[tuple(np.unravel_index(indices, tuple(view.shape)))]
    return bytes((numbers.float() + plus).numpy().tobytes() if plus else numbers.numpy().tobytes())


def put_weights(model: ov.Model, origins: Mapping[str, Origin], tensors: Mapping[str, Any]) -> list[Any]:
    """Replace the constants in `origins` by `tensors`, without copying their memory.

    16-bit tensors keep their type; the graph converts them to f32. Returns the owners of the memory, which must live
    as long as the model.
    """
    buffers: list[Any] = []
    for node in model.get_ordered_ops():
        origin = origins.get(node.get_friendly_name()) if node.get_type_name() == "Constant" else None
        if origin is None:
            continue
        tensor = origin.of(tensors[origin.name])
        shape = _shape(list(node.output(0).shape), list(tensor.shape))
        new, data = _constant(tensor, shape)
        buffers.append(data)
        node.output(0).replace(new.output(0))
    model.validate_nodes_and_infer_types()
    return buffers


def origin_names(model: ov.Model, origins: Mapping[str, Origin]) -> set[str]:
    """The tensors that a graph's constants hold."""
    names = (node.get_friendly_name() for node in model.get_ops() if node.get_type_name() == "Constant")
    return {origins[name].name for name in names if name in origins}


def _shape(traced: list[int], true: list[int]) -> list[int]:
    """The shape of a new constant: traced ones may have extra axes of length 1 and have a shorter vocabulary."""
    if math.prod(traced) == math.prod(true):
        return traced
    return [1] * (len(traced) - len(true)) + true


def _constant(tensor: Any, shape: list[int]) -> tuple[Any, Any]:
    import torch

    kinds = {torch.bfloat16: ov.Type.bf16, torch.float16: ov.Type.f16, torch.float32: ov.Type.f32}
    if tensor.dtype not in kinds:
        raise UnsupportedModel(f"weights of the type {tensor.dtype} cannot be exported; f32, bf16 and f16 can")
    kind = kinds[tensor.dtype]
    bits = tensor.view(torch.int16).numpy() if kind == ov.Type.bf16 else tensor.numpy()
    data = ov.Tensor(bits.reshape(-1), ov.Shape(shape), kind)
    constant = op.constant(data, shared_memory=True)
    return (constant if kind == ov.Type.f32 else op.convert(constant, "f32")), (bits, data)

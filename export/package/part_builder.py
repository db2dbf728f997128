"""Makes the parts of a checkpoint as graphs, one at a time: embedding, each layer, head.

Layers of equal structure share a traced graph (`export.checkpoint.trace`). The first layer of each structure is
compared with transformers before anything is written. A family whose graphs would be wrong is therefore refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino.op.util import VariableInfo

from export.checkpoint.decoder import TINY_VOCABULARY, Decoder, first_rows
from export.checkpoint.families import Family, format_versions
from export.checkpoint.torch_stack import versions
from export.checkpoint.trace import Template, origin_names, put_weights, trace
from export.graph.cut import cut_embed, cut_head, cut_layer, name_new_ops
from export.verify.reference import EmbedAndHead, deviation, random_hidden, run_layer, run_reference_layer
from export.verify.runner import Runner, Step
from swarm.engine.memory import release_memory
from swarm.errors import UnsupportedModel
from swarm.model.manifest import EMBED, HEAD, LayerSpec, layer_part

# Both are f32. Rounding differs by 1e-6; a missing operation (a cap, a mask) differs by more than this.
_EXACT = 1e-4
# For steps of few tokens the plugin would pack the weights a second time, in another layout.
_PREFILL, _STEP = 16, 8
_LAYER_NUMBER = re.compile(r"\.0\.")


@dataclass(frozen=True, kw_only=True)
class PartGraph:
    """A part's graph. `buffers` own the memory of its weights and must live as long as the graph."""

    model: ov.Model
    facts: Mapping[str, Any]
    buffers: list[Any]


class PartBuilder:
    """Makes the parts of one checkpoint, in any order. `scratch` is the directory for traced graphs."""

    def __init__(self, decoder: Decoder, family: Family, scratch: Path) -> None:
        self._decoder = decoder
        self._family = family
        self._scratch = scratch
        self._templates: dict[str, Template] = {}
        self._ends_checked = False

    def make(
        self, part: str, layer: int | None, windows: Sequence[int | None], transform: TensorTransform | None = None
    ) -> PartGraph:
        """Make the graph of `part`. `transform` is applied to every tensor first.

        Raises UnsupportedModel if the family cannot be traced or its graph is wrong, PackageError and DamagedFile
        for the checkpoint.
        """
        transform = transform or (lambda _name, tensor: tensor)
        if layer is not None:
            return self._make_layer(layer, windows[layer], transform)
        if not self._ends_checked:
            self._check_ends()
            self._ends_checked = True
        return self._make_end(part, transform)

    def _make_end(self, part: str, transform: TensorTransform) -> PartGraph:
        template = self._template(0)
        model = cut_embed(template.ir) if part == EMBED else cut_head(template.ir)
        tensors = self._read(part, origin_names(model, template.origins))
        buffers = put_weights(model, template.origins, {name: transform(name, t) for name, t in tensors.items()})
        name_new_ops(model, part, set())
        output = model.outputs[0].partial_shape[2].get_length()
        return PartGraph(model=model, facts={"hidden_size" if part == EMBED else "vocab_size": output}, buffers=buffers)

    def _make_layer(self, layer: int, window: int | None, transform: TensorTransform) -> PartGraph:
        template = self._template(layer)
        part = layer_part(layer)
        model = cut_layer(template.ir, 0)
        tensors = dict(self._decoder.load_layer(layer).state_dict())
        needed = origin_names(model, template.origins)
        buffers = put_weights(model, template.origins, {name: transform(name, tensors[name]) for name in needed})
        for variable in model.get_variables():
            _renumber(variable, layer)
        name_new_ops(model, part, set())
        model.set_friendly_name(part)
        return PartGraph(model=model, facts=self._facts(model, layer, window), buffers=buffers)

    def rows(self, part: str) -> tuple[int, int]:
        """The number of rows (the vocabulary's size) of embedding or head, and the bytes of a row."""
        template = self._template(0)
        model = cut_embed(template.ir) if part == EMBED else cut_head(template.ir)
        tensors = self._read(part, origin_names(model, template.origins))
        matrix = max(tensors.values(), key=lambda tensor: tensor.numel())
        return int(matrix.shape[0]), int(matrix.shape[-1]) * matrix.element_size()

    def _facts(self, model: ov.Model, layer: int, window: int | None) -> dict[str, Any]:
        keys, values = (
            next(v.info.data_shape for v in model.get_variables() if f"present.{layer}.{what}" in v.info.variable_id)
            for what in ("key", "value")
        )
        config = self._decoder.one_layer(layer)
        has_experts = any("expert" in name for name in self._decoder.layer_tensors(layer))
        count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
        spec = LayerSpec(
            kv_heads=keys[1].get_length(),
            key_size=keys[3].get_length(),
            value_size=values[3].get_length(),
            window=window,
            experts=count if has_experts else None,
        )
        return dict(vars(spec))

    def _template(self, layer: int) -> Template:
        kind = self._decoder.kind(layer)
        if kind not in self._templates:
            folder = self._scratch / f"kind_{len(self._templates)}"
            folder.mkdir(parents=True)
            config = self._decoder.one_layer(layer)
            template = trace(self._decoder.model_class, config, self._family, folder / "openvino_model.xml")
            release_memory(folder)
            self._check_layer(template, layer)
            release_memory(folder)
            self._templates[kind] = template
        return self._templates[kind]

    def _check_layer(self, template: Template, layer: int) -> None:
        model = cut_layer(template.ir, 0)
        tensors = dict(self._decoder.load_layer(layer).state_dict())
        buffers = put_weights(model, template.origins, tensors)
        hidden = random_hidden(model.inputs[0].partial_shape[2].get_length(), _PREFILL + _STEP)
        (expected,) = run_reference_layer(self._decoder, layer, [hidden])
        runner = Runner(model)
        error = expected.deviation(run_layer(runner, expected.before, prefill=_PREFILL, step=_STEP))
        del buffers
        kind = self._decoder.config.model_type
        if not error <= _EXACT:
            raise UnsupportedModel(
                f"{kind}: the graph of layer {layer} deviates from transformers by {error:.2g} of what the layer "
                f"adds, more than rounding ({_EXACT:g}): the installed versions do not export it correctly "
                f"({format_versions(versions())})"
            )
        if runner.fused_attentions != 1:
            raise UnsupportedModel(
                f"{kind}: the attention of layer {layer} is not fused when OpenVINO compiles it "
                f"({format_versions(versions())})"
            )

    def _check_ends(self) -> None:
        """Compare embedding and head with transformers, with the first few tokens of the vocabulary."""
        size, count = int(self._decoder.config.vocab_size), min(TINY_VOCABULARY, int(self._decoder.config.vocab_size))
        reference = EmbedAndHead(self._decoder, vocabulary=count)
        tokens = np.arange(count, dtype=np.int64)
        hidden = random_hidden(self._decoder.config.hidden_size, count)
        for part, expected in ((EMBED, reference.embed(tokens)), (HEAD, reference.logits(hidden))):
            piece = self._make_end(part, lambda _name, tensor: first_rows(tensor, size, count))
            found = Runner(piece.model).run(Step(tokens=tokens[None], past=0), None if part == EMBED else hidden)
            error = deviation(expected, found) if found.shape == expected.shape else math.inf
            if not error <= _EXACT:
                raise UnsupportedModel(
                    f"{self._decoder.config.model_type}: the graph of the {part} deviates from transformers by "
                    f"{error:.2g}, more than rounding ({_EXACT:g}): the installed versions do not export it correctly "
                    f"({format_versions(versions())})"
                )

    def _read(self, part: str, names: Iterable[str]) -> dict[str, Any]:
        """Read tensors outside the layers, by the model's names."""
        names_in_checkpoint = self._decoder.checkpoint_names(names, head=part == HEAD)
        found = self._decoder.checkpoint.read(set(names_in_checkpoint.values()))
        return {name: found[stored] for name, stored in names_in_checkpoint.items()}


TensorTransform = Callable[[str, Any], Any]
"""Called with a tensor's name and the tensor; returns the tensor to put into the graph."""


def _renumber(variable: Any, layer: int) -> None:
    info, old = VariableInfo(), variable.info
    info.variable_id = _LAYER_NUMBER.sub(f".{layer}.", old.variable_id)
    info.data_shape, info.data_type = old.data_shape, old.data_type
    variable.update(info)

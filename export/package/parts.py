"""The parts of a checkpoint as graphs, one at a time: embedding, each layer, head.

Layers of one structure share a traced graph (`export.checkpoint.trace`). The first of each is compared with
transformers before anything is written: a family that would come out wrong is refused here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino.op.util import VariableInfo

from export.checkpoint.families import Family, described
from export.checkpoint.one_layer import TINY_VOCABULARY, Decoder, first_rows
from export.checkpoint.torch_stack import versions
from export.checkpoint.trace import Template, origin_names, put_weights, trace
from export.graph.cut import cut_embed, cut_head, cut_layer, name_new_ops
from export.verify.reference import EmbedAndHead, deviation, passages, random_hidden, run_layer
from export.verify.runner import Runner, Step
from swarm.engine.memory import release_memory
from swarm.errors import UnsupportedModel
from swarm.model.manifest import EMBED, HEAD, LayerSpec, layer_part

# f32 against f32: rounding differs by 1e-6; what is left out (a cap, a mask) differs by more than this.
_EXACT = 1e-4
# Steps of few tokens would make the plugin pack the weights a second time, in another layout.
_PREFILL, _STEP = 16, 8
_LAYER_NUMBER = re.compile(r"\.0\.")


@dataclass(frozen=True, kw_only=True)
class PartGraph:
    """A part's graph; its weights lie in `alive`, which has to live as long as the graph."""

    model: ov.Model
    facts: Mapping[str, Any]
    alive: list[Any]


class PartBuilder:
    """Makes the parts of one checkpoint, in any order. `scratch` is for traced graphs."""

    def __init__(self, decoder: Decoder, family: Family, scratch: Path) -> None:
        self._decoder = decoder
        self._family = family
        self._scratch = scratch
        self._templates: dict[str, Template] = {}
        self._ends_are_right = False
        self._windows: tuple[int | None, ...] | None = None

    def make(
        self, part: str, layer: int | None, windows: Iterable[int | None], shape: Weigh | None = None
    ) -> PartGraph:
        """The graph of `part`. `shape` is applied to every tensor before it goes in.

        Raises UnsupportedModel where the family cannot be traced or comes out wrong, PackageError and DamagedFile
        for what is wrong with the checkpoint.
        """
        weigh = shape or (lambda _name, tensor: tensor)
        if layer is not None:
            return self._layer(layer, tuple(windows)[layer], weigh)
        if not self._ends_are_right:
            self._require_right_ends()
            self._ends_are_right = True
        return self._end(part, weigh)

    def _end(self, part: str, weigh: Weigh) -> PartGraph:
        template = self._template(0)
        model = cut_embed(template.ir) if part == EMBED else cut_head(template.ir)
        tensors = self._read(part, origin_names(model, template.origins))
        alive = put_weights(model, template.origins, {name: weigh(name, t) for name, t in tensors.items()})
        name_new_ops(model, part, set())
        output = model.outputs[0].partial_shape[2].get_length()
        return PartGraph(model=model, facts={"hidden_size" if part == EMBED else "vocab_size": output}, alive=alive)

    def _layer(self, layer: int, window: int | None, weigh: Weigh) -> PartGraph:
        template = self._template(layer)
        part = layer_part(layer)
        model = cut_layer(template.ir, 0)
        tensors = dict(self._decoder.load_layer(layer).state_dict())
        needed = origin_names(model, template.origins)
        alive = put_weights(model, template.origins, {name: weigh(name, tensors[name]) for name in needed})
        for variable in model.get_variables():
            _number(variable, layer)
        name_new_ops(model, part, set())
        model.set_friendly_name(part)
        return PartGraph(model=model, facts=self._facts(model, layer, window), alive=alive)

    def rows(self, part: str) -> tuple[int, int]:
        """The vocabulary's size and the bytes of one token's numbers, in embedding or head."""
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
            self._require_right(template, layer)
            release_memory(folder)
            self._templates[kind] = template
        return self._templates[kind]

    def _require_right(self, template: Template, layer: int) -> None:
        model = cut_layer(template.ir, 0)
        tensors = dict(self._decoder.load_layer(layer).state_dict())
        alive = put_weights(model, template.origins, tensors)
        hidden = random_hidden(model.inputs[0].partial_shape[2].get_length(), _PREFILL + _STEP)
        (expected,) = passages(self._decoder, layer, [hidden])
        runner = Runner(model)
        apart = expected.deviation(run_layer(runner, expected.before, prefill=_PREFILL, step=_STEP))
        del alive
        kind = self._decoder.config.model_type
        if not apart <= _EXACT:
            raise UnsupportedModel(
                f"{kind}: the graph of layer {layer} deviates from transformers by {apart:.2g} of what the layer "
                f"adds, {_EXACT:g} is rounding: the installed versions do not export it right ({described(versions())})"
            )
        if runner.fused_attentions != 1:
            raise UnsupportedModel(
                f"{kind}: the attention of layer {layer} is not fused when OpenVINO compiles it "
                f"({described(versions())})"
            )

    def _require_right_ends(self) -> None:
        """The same for embedding and head, with the first few tokens of the vocabulary."""
        size, count = int(self._decoder.config.vocab_size), min(TINY_VOCABULARY, int(self._decoder.config.vocab_size))
        true = EmbedAndHead(self._decoder, vocabulary=count)
        tokens = np.arange(count, dtype=np.int64)
        hidden = random_hidden(self._decoder.config.hidden_size, count)
        for part, expected in ((EMBED, true.embed(tokens)), (HEAD, true.logits(hidden))):
            piece = self._end(part, lambda _name, tensor: first_rows(tensor, size, count))
            found = Runner(piece.model).run(Step(tokens=tokens[None], past=0), None if part == EMBED else hidden)
            apart = deviation(expected, found) if found.shape == expected.shape else math.inf
            if not apart <= _EXACT:
                raise UnsupportedModel(
                    f"{self._decoder.config.model_type}: the graph of the {part} deviates from transformers by "
                    f"{apart:.2g}, {_EXACT:g} is rounding: the installed versions do not export it right "
                    f"({described(versions())})"
                )

    def _read(self, part: str, names: Iterable[str]) -> dict[str, Any]:
        """Tensors outside the layers, under the model's names."""
        places = self._decoder.places(names, head=part == HEAD)
        found = self._decoder.checkpoint.read(set(places.values()))
        return {name: found[place] for name, place in places.items()}


Weigh = Callable[[str, Any], Any]
"""Hears a tensor's name and the tensor; gives the one to put into the graph."""


def _number(variable: Any, layer: int) -> None:
    info, old = VariableInfo(), variable.info
    info.variable_id = _LAYER_NUMBER.sub(f".{layer}.", old.variable_id)
    info.data_shape, info.data_type = old.data_shape, old.data_type
    variable.update(info)

"""Joins the static files of a span into one graph of one width, without state or dynamic shapes.

::

    embed ──► layer a ──► ... ──► layer b-1 ──► Gather(logit_rows) ──► head
                │ ▲ past_key.a, past_value.a         the host's caches (`swarm.engine.static.ring_cache`)
                │ └ attention_bias, position_ids     shared by all layers with the same sliding window
                └─► present_key.a, present_value.a   of the new tokens only, for the host's caches

The host computes the masks, because it knows the positions of the keys. The order of the keys in a ring does not
give their positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import openvino as ov
from openvino import opset15 as ops

from swarm.engine.compose import read_part
from swarm.errors import PackageError
from swarm.model.manifest import EMBED, HEAD, Manifest, StaticSpec, layer_part, static_file
from swarm.model.spans import LayerRange

MAX_ROWS = 8
"""Rows of logits of a prefill graph: enough to verify a window of guesses, without running a chunk through the head."""

BIAS, POSITIONS = "attention_bias", "position_ids"
CACHES = ("key", "value")
_HIDDEN, _TOKENS, _ROWS = "hidden_states", "input_ids", "logit_rows"


def compose_static(package: Path, manifest: Manifest, span: LayerRange, kind: str) -> ov.Model:
    """Build one graph for `span` from the package's static files of `kind`, `decode` or `prefill`.

    Inputs, with `w` the kind's width and `s` the slots: `input_ids` [1, w] i64 on the span with layer 0, else
    `hidden_states` [1, w, hidden] f32; `position_ids` [1, w] i64; for each sliding window `attention_bias.WINDOW`
    [1, 1, w, s + w] f32 (`attention_bias.None` for none); `past_key.LAYER`, `past_value.LAYER` [1, heads, s, size]
    f32; with the last layer, in a prefill graph, `logit_rows` [m] i64.
    Outputs: `hidden_states_out` [1, w, hidden] or `logits` [1, 1 or m, vocab] f32, then for each layer
    `present_key.LAYER`, `present_value.LAYER` [1, heads, w, size] f32.

    Raises DamagedFile if a file cannot be read, PackageError if the files do not fit together.
    """
    manifest.static_parts(span)
    assert manifest.static is not None
    width = manifest.static.widths[kind]
    composer = _Composer(width)
    if span.first == 0:
        composer.embed(read_part(package, EMBED))
    for layer in span:
        name = static_file(layer, kind).removesuffix(".xml")
        composer.layer(read_part(package, name, layer_part(layer)), layer, window=manifest.layers[layer].window)
    if span.last == len(manifest.layers):
        composer.head(read_part(package, HEAD), rows=min(MAX_ROWS, width) if width > 1 else 0)
    model = composer.model(f"{manifest.name} {span} {kind}")
    check_static(model)
    return model


def check_static(model: ov.Model) -> None:
    """Raises PackageError naming an operation with a dynamic shape or a state."""
    for node in model.get_ordered_ops():
        dynamic = [str(port.partial_shape) for port in node.outputs() if port.partial_shape.is_dynamic]
        if dynamic or node.get_type_name() in ("ReadValue", "Assign"):
            raise PackageError(
                f"{model.get_friendly_name()} is not static: {node.get_type_name()} {node.get_friendly_name()} "
                f"{'has the shape ' + ', '.join(dynamic) if dynamic else 'keeps a state'}"
            )


def bias_name(window: int | None) -> str:
    return f"{BIAS}.{window}"


def windows_of(manifest: Manifest, span: LayerRange) -> list[int | None]:
    """The different sliding windows of the span's layers."""
    return list(dict.fromkeys(manifest.layers[layer].window for layer in span))


def cache_shapes(manifest: Manifest, span: LayerRange, spec: StaticSpec) -> Iterable[tuple[str, tuple[int, ...]]]:
    """("key.LAYER", [1, heads, slots, size]) of each cache, keys before values."""
    for layer in span:
        layer_spec = manifest.layers[layer]
        for cache, size in zip(CACHES, (layer_spec.key_size, layer_spec.value_size), strict=True):
            yield f"{cache}.{layer}", (1, layer_spec.kv_heads, spec.slots, size)


class _Composer:
    """The graph so far: its inputs and outputs, and the tensor that the next part reads."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._inputs: dict[str, Any] = {}
        self._presents: list[Any] = []
        self._hidden: Any = None
        self._output = "hidden_states_out"

    def embed(self, part: ov.Model) -> None:
        part.reshape({_TOKENS: [1, self._width]})
        self._connect(part, EMBED, {_TOKENS: _TOKENS})
        self._hidden = _results(part)["hidden_states"]

    def layer(self, part: ov.Model, layer: int, *, window: int | None) -> None:
        names = {_HIDDEN: _HIDDEN, POSITIONS: POSITIONS, BIAS: bias_name(window)}
        names |= {f"past_{cache}": f"past_{cache}.{layer}" for cache in CACHES}
        self._connect(part, layer_part(layer), names)
        outputs = _results(part)
        self._hidden = outputs["hidden_states_out"]
        for cache in CACHES:
            present = outputs[f"present_{cache}"]
            present.tensor.set_names({f"present_{cache}.{layer}"})
            self._presents.append(ops.result(present, name=f"present_{cache}.{layer}"))

    def head(self, part: ov.Model, *, rows: int) -> None:
        if rows:
            indices = ops.parameter([rows], ov.Type.i64, name=_ROWS)
            indices.output(0).tensor.set_names({_ROWS})
            self._inputs[_ROWS] = indices
            axis = ops.constant(1, ov.Type.i64, name=f"{_ROWS}/axis")
            self._hidden = ops.gather(self._hidden, indices, axis, name=f"{_ROWS}/gather").output(0)
        part.reshape({_HIDDEN: [1, rows or 1, part.input(_HIDDEN).partial_shape[2].get_length()]})
        self._connect(part, HEAD, {_HIDDEN: _HIDDEN})
        self._hidden = _results(part)["logits"]
        self._output = "logits"

    def model(self, name: str) -> ov.Model:
        result = ops.result(self._hidden, name="output")
        model = ov.Model([result, *self._presents], list(self._inputs.values()), name)
        model.outputs[0].tensor.set_names({self._output})
        model.validate_nodes_and_infer_types()
        return model

    def _connect(self, part: ov.Model, owner: str, names: dict[str, str]) -> None:
        """Connect the inputs of `part` to the graph so far; `names` maps their names to names in the graph."""
        for parameter in part.get_parameters():
            port = parameter.output(0)
            known = port.get_names() & names.keys()
            if len(known) != 1:
                found = sorted(port.get_names()) or [parameter.get_friendly_name()]
                raise PackageError(f"{owner} has an input of unknown meaning, {', '.join(found)}: export it again")
            name = names[known.pop()]
            if name == _HIDDEN and self._hidden is not None:
                source = self._hidden
            elif name in self._inputs:
                source = self._inputs[name].output(0)
            else:
                port.tensor.set_names({name})
                parameter.set_friendly_name(name)
                self._inputs[name] = parameter
                if name == _HIDDEN:
                    self._hidden = port
                continue
            if source.partial_shape != port.partial_shape:
                raise PackageError(
                    f"{owner} reads {name} {port.partial_shape}, but it is {source.partial_shape}: export it again"
                )
            for reader in list(port.get_target_inputs()):
                reader.replace_source_output(source)


def _results(part: ov.Model) -> dict[str, Any]:
    """The output tensors of a part, by each of their names."""
    ports = [result.input(0).get_source_output() for result in part.get_results()]
    return {name: port for port in ports for name in port.get_names()}

"""Joins the files of a span into one graph.

::

    embed ──► layer a ──► layer a+1 ──► ... ──► layer b-1 ──► Gather(logit_rows) ──► head
    (a = 0)      ▲            ▲                     ▲          (b = the last layer)
                 └── attention_mask, position_ids, beam_idx: one input each, for all layers

Each layer's file computes mask and rotary values from the shapes of its own tensors. Unchanged, a span of
thirty layers would compute them thirty times. All layers of a span have the same past length and the same
tokens, so each layer's ShapeOf is redirected to the tensor of the same meaning in the first layer. The copies
are then equal expressions of equal inputs, and OpenVINO's own passes merge them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openvino as ov
from openvino import opset15 as ops

from swarm.engine.device import compile_span
from swarm.engine.memory import release_memory
from swarm.engine.stateful import StatefulEngine
from swarm.errors import DamagedFile, PackageError
from swarm.model.manifest import EMBED, HEAD, Manifest, layer_part
from swarm.model.spans import LayerRange

_SHARED = ("input_ids", "attention_mask", "position_ids", "beam_idx")
_HIDDEN = "hidden_states"
# The CPU plugin (OpenVINO 2026.4.1) computes from 16-bit weights only in graphs that it recognizes as language models.
# It does not recognize a graph read from the cache. Measured: 278 MB for a layer of 116 MB, 125 MB without the cache.
_HALF_FLOATS = ("f16", "bf16")


def compose(
    package: Path,
    manifest: Manifest,
    span: LayerRange,
    *,
    rows_axis: int = 1,
    beam_idx: bool = True,
) -> ov.Model:
    """Build one graph for `span` from the package's files, which are memory-mapped, not copied.

    Inputs: `input_ids` [1, n] i64 on the span with layer 0, else `hidden_states` [1, n, hidden] f32;
    `attention_mask` [1, past + n] i64, `position_ids` [1, n] i64, `beam_idx` [1] i32, each if a layer
    reads it; with the last layer, `logit_rows` [m] i64: the positions among the n that return logits, along
    `rows_axis` (0 in a graph that will be paged). Output: `hidden_states_out` [1, n, hidden], or `logits`
    [1, m, vocab], f32.

    `beam_idx=False` drops the Gather behind the cached keys and values, and with it the fused attention.
    It exists to measure the effect of the Gather.

    Raises DamagedFile if a file cannot be read, PackageError if the files do not fit together.
    """
    parts = manifest.span_parts(span)
    composer = _Composer(keep_beam_idx=beam_idx)
    if EMBED in parts:
        composer.embed(read_part(package, EMBED))
    for layer in span:
        composer.layer(read_part(package, layer_part(layer)), layer_part(layer), window=manifest.layers[layer].window)
    if HEAD in parts:
        composer.head(read_part(package, HEAD), rows_axis)
    return composer.model(f"{manifest.name} {span}")


def open_engine(
    package: Path,
    manifest: Manifest,
    span: LayerRange,
    *,
    device: str = "CPU",
    precision: str = "accuracy",
    threads: int = 0,
    cache_dir: Path | None = None,
) -> StatefulEngine:
    """Compose and compile `span`, create its engine and warm it up. The caller checks the files' hashes.

    16-bit float weights are compiled anew each time, because a graph from the cache would hold them in f32.

    Raises PackageError for the files, EngineError for the device, ConfigError for the settings.
    """
    if manifest.weights in _HALF_FLOATS:
        cache_dir = None
    compiled = compile_span(
        compose(package, manifest, span),
        attention_layers=len(span),
        device=device,
        precision=precision,
        threads=threads,
        cache_dir=cache_dir,
        cache_key=(manifest.digest, str(span)),
    )
    engine = StatefulEngine(compiled, manifest, span)
    engine.warm_up()
    release_memory(package, *([cache_dir] if cache_dir else []))
    return engine


def read_part(package: Path, part: str, weights: str = "") -> ov.Model:
    """Read the graph PART.xml with the weights `weights`.bin (default: PART.bin). Raises DamagedFile."""
    path = package / f"{part}.xml"
    try:
        return ov.Core().read_model(path, package / f"{weights or part}.bin")
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise DamagedFile(f"{path} is not a readable graph ({reason}): fetch or export it again") from error


class _Composer:
    """The graph so far: its inputs, the tensor that the next part reads, and the tensors that shapes are read from."""

    def __init__(self, *, keep_beam_idx: bool) -> None:
        self._keep_beam_idx = keep_beam_idx
        self._inputs: dict[str, Any] = {}
        self._sinks: list[Any] = []
        self._variables: dict[str, Any] = {}
        self._layer_input: Any = None  # the first layer's input: every layer's input has its shape
        self._hidden: Any = None  # the input of the next part
        self._shape_sources: dict[tuple[object, ...], Any] = {}  # meaning of a cache tensor -> the first tensor with it
        self._output = "hidden_states_out"
        self._first_layer: Any = None  # the first layer's own model, for its rt_info

    def embed(self, part: ov.Model) -> None:
        self._share_inputs(part, "embed")
        self._hidden = self._layer_input = _only_result(part, "embed")

    def layer(self, part: ov.Model, name: str, *, window: int | None) -> None:
        self._first_layer = self._first_layer or part
        nodes = part.get_ordered_ops()  # Listed before joining: afterwards it would include earlier layers.
        self._share_inputs(part, name)
        for node in nodes:
            if not self._keep_beam_idx and _is_beam_gather(node):
                node.output(0).replace(node.input(0).get_source_output())
            elif node.get_type_name() == "ShapeOf":
                self._share_shape(node, window)
        for variable in part.get_variables():
            variable_id = variable.info.variable_id
            if variable_id in self._variables:
                raise PackageError(f"two layers of this package keep the state {variable_id!r}: export it again")
            self._variables[variable_id] = variable
        self._sinks += part.get_sinks()
        self._hidden = _only_result(part, name)

    def head(self, part: ov.Model, rows_axis: int) -> None:
        rows = ops.parameter([-1], ov.Type.i64, name="logit_rows")
        rows.output(0).tensor.set_names({"logit_rows"})
        self._inputs["logit_rows"] = rows
        # Named explicitly: OpenVINO keys its cache by names, and generated names contain a counter.
        axis = ops.constant(rows_axis, ov.Type.i64, name="logit_rows/axis")
        self._hidden = ops.gather(self._hidden, rows, axis, name="logit_rows/gather").output(0)
        self._layer_input = self._hidden
        self._share_inputs(part, "head")
        self._hidden = _only_result(part, "head")
        self._output = "logits"

    def model(self, name: str) -> ov.Model:
        result = ops.result(self._hidden, name="output")
        inputs = [p for key, p in self._inputs.items() if self._keep_beam_idx or key != "beam_idx"]
        model = ov.Model([result], self._sinks, inputs, list(self._variables.values()), name)
        model.outputs[0].tensor.set_names({self._output})
        # Without the runtime_options the KV cache would have another precision.
        for key, value in self._first_layer.get_rt_info().items():
            model.set_rt_info(value, key)
        model.validate_nodes_and_infer_types()
        return model

    def _share_inputs(self, part: ov.Model, owner: str) -> None:
        """Connect the inputs of `part`: hidden states to the part before, the others to the shared inputs."""
        for parameter in part.get_parameters():
            port = parameter.output(0)
            names = port.get_names() & {_HIDDEN, *_SHARED}
            if len(names) != 1:
                found = sorted(port.get_names()) or [parameter.get_friendly_name()]
                raise PackageError(f"{owner} has an input of unknown meaning, {', '.join(found)}: export it again")
            (name,) = names
            if name == _HIDDEN and self._hidden is not None:
                for reader in list(port.get_target_inputs()):
                    shape_only = reader.get_node().get_type_name() == "ShapeOf"
                    reader.replace_source_output(self._layer_input if shape_only else self._hidden)
            elif name in self._inputs:
                for reader in list(port.get_target_inputs()):
                    reader.replace_source_output(self._inputs[name].output(0))
            else:
                self._inputs[name] = parameter
                if name == _HIDDEN:
                    self._hidden = self._layer_input = port

    def _share_shape(self, shape_of: Any, window: int | None) -> None:
        """Let ShapeOf read the span's first tensor of the same shape *and* meaning.

        Layers with another head count have another shape. Layers with a sliding window may cache another number
        of positions. Such layers do not share shapes.
        """
        source = shape_of.input(0).get_source_output()
        meaning = _cache_meaning(source.get_node())
        if meaning is not None:
            root = self._shape_sources.setdefault((meaning, str(source.get_partial_shape()), window), source)
            if root is not source:
                shape_of.input(0).replace_source_output(root)


def _only_result(part: ov.Model, owner: str) -> Any:
    results = part.get_results()
    if len(results) != 1:
        raise PackageError(f"{owner} has {len(results)} outputs; a part has one: export it again")
    return results[0].input(0).get_source_output()


def _is_beam_gather(node: Any) -> bool:
    return bool(node.get_type_name() == "Gather" and _producer(node, 0).get_type_name() == "ReadValue")


def _cache_meaning(node: Any) -> str | None:
    """`past` for cached keys or values, `present` for these with the step's own appended, else None."""
    if node.get_type_name() == "ReadValue" or _is_beam_gather(node):
        return "past"
    if node.get_type_name() == "Concat" and _cache_meaning(_producer(node, 0)) == "past":
        return "present"
    return None


def _producer(node: Any, port: int) -> Any:
    return node.input(port).get_source_output().get_node()

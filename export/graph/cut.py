"""Cuts the embedding, one layer or the head out of a causal-LM graph.

Cutting rewires the source graph in place, so every cut reads or copies it anew; the weights stay memory-mapped.

The entry of a part is a Parameter in place of the tensor at its begin. The difficulty is shapes: exporters
compute past length, sequence length and expansion shapes once for all layers, from layer 0 or from the token
ids. Each such ShapeOf is re-rooted: a ShapeOf over a cache to the same op of the part's own cache, any other to
the entry, from whose batch and length it must be computable. If the part still depends on another layer after
that, it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openvino as ov
from openvino import opset15 as op

from export.graph.layers import TOKENS, CausalGraph, Layer, ancestors, key
from export.sources.source import last_line
from swarm.errors import DamagedFile, UnsupportedModel
from swarm.model.manifest import EMBED, HEAD, layer_part

HIDDEN, HIDDEN_OUT, LOGITS = "hidden_states", "hidden_states_out", "logits"
_ENTRY_NAMES = {HIDDEN, "inputs_embeds"}  # the second is what OpenVINO's own transformations look for
_LAYER_INPUTS = ("attention_mask", "position_ids", "beam_idx")


def read_graph(source: Path | ov.Model) -> CausalGraph:
    """Read an IR, or copy a model that was read; copies share its weights.

    Raises DamagedFile if it cannot be read, UnsupportedModel if it cannot be cut.
    """
    return CausalGraph(source.clone() if isinstance(source, ov.Model) else read_ir(source))


def read_ir(path: Path) -> ov.Model:
    """Read an IR. Raises DamagedFile if `path` is none."""
    try:
        return ov.Core().read_model(path)
    except RuntimeError as error:
        raise DamagedFile(f"{path} cannot be read as an OpenVINO model ({last_line(error)}): fetch it again") from error


def cut_embed(source: Path | ov.Model) -> ov.Model:
    """input_ids [batch, length] i64 -> hidden_states [batch, length, hidden] f32."""
    graph = read_graph(source)
    entry = graph.inputs[TOKENS]
    _name_input(entry, TOKENS)
    return _make_part(graph, EMBED, entry, graph.layers[0].begin, HIDDEN, own=None)


def cut_layer(source: Path | ov.Model, number: int) -> ov.Model:
    """hidden_states and the layer's other inputs -> hidden_states_out [batch, length, hidden] f32."""
    graph = read_graph(source)
    layer = graph.layers[number]
    entry = _add_entry(graph, layer.begin, layer)
    return _make_part(graph, layer_part(number), entry, layer.end, HIDDEN_OUT, own=layer)


def cut_head(source: Path | ov.Model) -> ov.Model:
    """hidden_states [batch, length, hidden] f32 -> logits [batch, length, vocabulary] f32."""
    graph = read_graph(source)
    entry = _add_entry(graph, graph.layers[-1].end, None)
    return _make_part(graph, HEAD, entry, graph.logits.input(0).get_source_output(), LOGITS, own=None)


def _add_entry(graph: CausalGraph, begin: Any, own: Layer | None) -> Any:
    """Replace `begin` by a Parameter and re-root the shapes that are computed before it."""
    entry = op.parameter([-1, -1, graph.hidden_size], ov.Type.f32, name=HIDDEN)
    entry.output(0).tensor.set_names(_ENTRY_NAMES)
    limit = graph.position(begin.get_node())
    foreign = _counterparts(graph, own)
    early = {i for i in graph.stream if i < limit}
    for node in graph.ops:
        if node.get_type_name() != "ShapeOf":
            continue
        source = node.input(0).get_source_output()
        counterpart = foreign.get(key(source.get_node()))
        if counterpart is not None:
            node.input(0).replace_source_output(counterpart.output(source.get_index()))
        elif graph.position(source.get_node()) in early:
            _reroot(graph, node, source.partial_shape, entry)
    for reader in list(begin.get_target_inputs()):
        reader.replace_source_output(entry.output(0))
    return entry


def _counterparts(graph: CausalGraph, own: Layer | None) -> Mapping[str, Any]:
    """Maps every op of other layers' caches to the same op of the own layer's caches."""
    pairs: dict[str, Any] = {}
    if own is None:
        return pairs
    for layer in graph.layers:
        for theirs, ours in zip(layer.caches, own.caches, strict=True):
            if theirs.variable_id != ours.variable_id:
                # Layers of different kinds may differ after the Concat, but not before it.
                pairs |= {key(a): b for a, b in zip(theirs.ops, ours.ops, strict=False) if _is_same_op(a, b)}
    return pairs


def _is_same_op(a: Any, b: Any) -> bool:
    return bool(a.get_type_name() == b.get_type_name() and a.output(0).partial_shape == b.output(0).partial_shape)


def _reroot(graph: CausalGraph, shape_of: Any, shape: ov.PartialShape, entry: Any) -> None:
    """Compute the output of a ShapeOf, such as [batch, heads, length, 64], from the shape of the entry."""
    symbols = [dimension.get_symbol() for dimension in shape]
    if shape == entry.output(0).partial_shape and symbols[:2] == [graph.batch, graph.length]:
        shape_of.input(0).replace_source_output(entry.output(0))
        return
    kind = shape_of.output(0).element_type
    entry_shape = op.shape_of(entry, output_type=kind.to_string())
    sizes = []
    for dimension, symbol in zip(shape, symbols, strict=True):
        if dimension.is_static:
            sizes.append(op.constant([dimension.get_length()], kind))
        elif symbol in (graph.batch, graph.length):
            axis = 0 if symbol == graph.batch else 1
            sizes.append(op.slice(entry_shape, [axis], [axis + 1], [1], [0]))
        else:
            return  # Not computable from batch and length. If the part reads it, the part is refused.
    dims = op.concat(sizes, 0)
    for reader in list(shape_of.output(0).get_target_inputs()):
        reader.replace_source_output(dims.output(0))


def _make_part(graph: CausalGraph, part: str, entry: Any, output: Any, name: str, *, own: Layer | None) -> ov.Model:
    """End the part in a Result, check that it depends on no other layer, and build its model."""
    caches = sorted(cache.variable_id for cache in own.caches) if own else []
    by_id = {str(sink.get_attributes()["variable_id"]): sink for sink in graph.model.get_sinks()}
    sinks = [by_id[variable] for variable in caches]
    variables = [v for v in graph.model.get_variables() if v.info.variable_id in caches]
    result = op.result(output)
    result.set_friendly_name(name)
    inside = ancestors([result, *sinks])
    read = {key(node) for node in inside}
    others = {n: graph.inputs[n] for n in _LAYER_INPUTS if own and n in graph.inputs and key(graph.inputs[n]) in read}
    _refuse_foreign(part, inside, set(caches), {key(entry), *map(key, others.values())})
    _name_interface(inside, entry, others)
    output.tensor.set_names({name})
    model = ov.Model([result], sinks, [entry, *others.values()], variables, part)
    for info, value in graph.model.get_rt_info().items():
        model.set_rt_info(_to_plain(value), str(info))  # The `runtime_options` set the KV precision.
    name_new_ops(model, part, {node.get_friendly_name() for node in graph.ops})
    return model


def _refuse_foreign(part: str, inside: list[Any], ids: set[str], entries: set[str]) -> None:
    for node in inside:
        kind = node.get_type_name()
        if kind == "Parameter" and key(node) not in entries:
            raise UnsupportedModel(
                f"{part} reads {node.get_friendly_name()} besides its own inputs: it needs more than the hidden "
                "states before it and cannot be cut off"
            )
        if kind == "ReadValue" and node.get_attributes()["variable_id"] not in ids:
            raise UnsupportedModel(
                f"{part} reads the state {node.get_attributes()['variable_id']} of another layer and cannot be "
                "cut off from it"
            )


def _name_interface(inside: list[Any], entry: Any, others: Mapping[str, Any]) -> None:
    """Name the inputs. Inner tensors lose their names, which would clash when layers are joined."""
    inputs = {key(entry), *map(key, others.values())}
    for node in inside:
        if key(node) not in inputs:
            for port in node.outputs():
                port.tensor.set_names(set())
    for name, node in others.items():
        _name_input(node, name)


def _name_input(node: Any, name: str) -> None:
    node.set_friendly_name(name)
    node.output(0).tensor.set_names({name})


def _to_plain(value: Any) -> Any:
    value = getattr(value, "value", value)
    return {k: _to_plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def name_new_ops(model: ov.Model, part: str, known: set[str]) -> None:
    """Rename new ops. OpenVINO names them by a process-wide counter, but files must not depend on earlier calls."""
    existing = known | {TOKENS, HIDDEN, HIDDEN_OUT, LOGITS, *_LAYER_INPUTS}
    for i, node in enumerate(model.get_ordered_ops()):
        if node.get_friendly_name() not in existing:
            node.set_friendly_name(f"{part}/{node.get_type_name()}_{i}")

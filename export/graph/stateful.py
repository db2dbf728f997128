"""Turns KV caches into state of the graph, and adds the `beam_idx` Gather behind each, if a source lacks them.

::

    a graph without state                          the pattern of the plugins' fused attention

    past_key_values.0.key ─ Concat ─ attention     ReadValue ─ Gather(beam_idx) ─ Concat ─ attention
                              └──── present.0.key                                   └───── Assign

`drop_beam_gathers` removes the Gather, to measure its effect.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import openvino as ov
from openvino import opset15 as op
from openvino.op.util import Variable, VariableInfo

from export.graph.layers import TOKENS, producer
from export.sources.source import IR_NAME, last_line
from swarm.errors import DamagedFile, PackageError, UnsupportedModel

_PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")
_BEAM = "beam_idx"


def prepare(ir: Path, scratch: Path) -> Path:
    """Returns `ir` if it has state and Gathers; else an IR with them, written to `scratch`.

    Raises DamagedFile if it cannot be read, UnsupportedModel if its caches cannot become state.
    """
    try:
        model = ov.Core().read_model(ir)
    except RuntimeError as error:
        raise DamagedFile(f"{ir} cannot be read as an OpenVINO model ({last_line(error)}): fetch it again") from error
    changed = None
    if any(_past_name(port) for port in model.inputs):
        changed = make_stateful(model)
    elif _bare_reads(model):
        changed = add_beam_gathers(model)
    if changed is None:
        return ir
    target = scratch / "stateful" / IR_NAME
    target.parent.mkdir(parents=True)
    try:
        ov.save_model(changed, target, compress_to_fp16=False)
    except RuntimeError as error:
        raise PackageError(f"{target} cannot be written: {last_line(error)}") from error
    return target


def make_stateful(model: ov.Model) -> ov.Model:
    """Turn each pair of past_key_values.N.* [batch, heads, past, size] and present.N.* into a state.

    Raises UnsupportedModel if a pair is incomplete, or if heads or size are not fixed.
    """
    past = {name: port for port in model.inputs if (name := _past_name(port))}
    outputs = {name: port for port in model.outputs for name in port.get_names()}
    if TOKENS not in {name for port in model.inputs for name in port.get_names()}:
        raise UnsupportedModel(f"the graph has past_key_values but no {TOKENS}: it is not a causal language model")
    batch = _batch(model)
    beams = _beam_input(model)
    sinks, variables = [*model.get_sinks()], [*model.get_variables()]
    for name, port in past.items():
        present = outputs.get(name.replace("past_key_values", "present"))
        shape = port.partial_shape
        if present is None or shape.rank != ov.Dimension(4) or shape[1].is_dynamic or shape[3].is_dynamic:
            raise UnsupportedModel(
                f"{name} {shape} cannot become a state: it needs a present.* output, fixed heads and fixed size"
            )
        variable = _variable(name, shape, port.element_type)
        sizes = op.concat([batch, op.constant([shape[1].get_length(), 0, shape[3].get_length()], ov.Type.i64)], 0)
        start = op.broadcast(op.constant(0, port.element_type), sizes)
        read = op.gather(op.read_value(start, variable), beams, op.constant(0, ov.Type.i64))
        for reader in list(port.get_target_inputs()):
            reader.replace_source_output(read.output(0))
        sinks.append(op.assign(producer(present.get_node().input(0)), variable))
        variables.append(variable)
    parameters = [
        p for p in model.get_parameters() if not _past_name(p.output(0)) and _BEAM not in p.output(0).get_names()
    ]
    results = [r for r in model.get_results() if not any(n.startswith("present.") for n in r.output(0).get_names())]
    return _model(model, results, sinks, [*parameters, beams], variables)


def add_beam_gathers(model: ov.Model) -> ov.Model:
    """Put a Gather over `beam_idx` behind every ReadValue that lacks one."""
    beams = _beam_input(model)
    for read in _bare_reads(model):
        readers = list(read.output(0).get_target_inputs())
        gather = op.gather(read, beams, op.constant(0, ov.Type.i64))
        for reader in readers:
            reader.replace_source_output(gather.output(0))
    parameters = [p for p in model.get_parameters() if _BEAM not in p.output(0).get_names()]
    return _model(model, model.get_results(), model.get_sinks(), [*parameters, beams], model.get_variables())


def drop_beam_gathers(model: ov.Model) -> ov.Model:
    """Remove the Gathers, and the input that they read."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Gather" and producer(node.input(0)).get_type_name() == "ReadValue":
            node.output(0).replace(node.input(0).get_source_output())
    parameters = [p for p in model.get_parameters() if _BEAM not in p.output(0).get_names()]
    return _model(model, model.get_results(), model.get_sinks(), parameters, model.get_variables())


def _bare_reads(model: ov.Model) -> list[Any]:
    """The ReadValues of KV caches (four-dimensional states) without a Gather."""
    return [
        node
        for node in model.get_ordered_ops()
        if node.get_type_name() == "ReadValue"
        and node.output(0).partial_shape.rank == ov.Dimension(4)
        and not any(reader.get_node().get_type_name() == "Gather" for reader in node.output(0).get_target_inputs())
    ]


def _past_name(port: Any) -> str | None:
    return next((name for name in port.get_names() if _PAST.fullmatch(name)), None)


def _batch(model: ov.Model) -> Any:
    """[1] i64: the batch size of `input_ids`."""
    shape = op.shape_of(model.input(TOKENS))
    return op.gather(shape, op.constant([0], ov.Type.i64), op.constant(0, ov.Type.i64))


def _beam_input(model: ov.Model) -> Any:
    """The model's input `beam_idx`, or a new one."""
    for parameter in model.get_parameters():
        if _BEAM in parameter.output(0).get_names():
            return parameter
    beams = op.parameter([-1], ov.Type.i32, name=_BEAM)
    beams.output(0).tensor.set_names({_BEAM})
    return beams


def _variable(name: str, shape: ov.PartialShape, kind: ov.Type) -> Variable:
    info = VariableInfo()
    info.variable_id = name + name.replace("past_key_values", "present")  # the name that optimum-intel writes
    info.data_shape = ov.PartialShape([-1, shape[1], -1, shape[3]])
    info.data_type = kind
    return Variable(info)


def _model(old: ov.Model, results: Any, sinks: Any, parameters: Any, variables: Any) -> ov.Model:
    model = ov.Model(results, sinks, parameters, variables, old.get_friendly_name())
    for name, value in old.get_rt_info().items():
        model.set_rt_info(value, name)  # The `runtime_options` set the KV precision.
    model.validate_nodes_and_infer_types()
    return model

"""Static graphs for NPUs: each layer of a package again, without state and with fixed shapes.

::

    ReadValue ─ Gather(beam_idx) ─┐                       past_key [1, heads, slots, size] ─┐
                       new keys ──┴► Concat ─┬─ ...  ──►                        new keys ──┬┴► Concat ─ ...
                                             └─ Assign                                      └─► present_key
    attention_mask ─ ... ─► attention        ──►          attention_bias [1, 1, width, slots + width] ─► attention

They are made from the finished files, after compression, so that the checks cover the graphs that will run. Constants
are not folded: all numbers of a static graph are in the layer's own .bin, and its .xml refers to them. No weight is
written twice.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from pathlib import Path
from typing import Any

import openvino as ov
from openvino import opset15 as op

from export.graph.layers import ATTENTION, find_cache, key, producer
from export.sources.source import Progress, last_line, no_progress
from swarm.engine.static.graph import BIAS, CACHES, POSITIONS, check_static
from swarm.errors import ConfigError, DamagedFile, PackageError, UnsupportedModel
from swarm.model.manifest import FileEntry, StaticSpec, describe_file, layer_part, static_file, static_part

_USUAL_CHUNK = 64
_HIDDEN = "hidden_states"
_CONSTANT = re.compile(rb'(<data element_type="[^"]*" shape="[^"]*" offset=")(\d+)(" size=")(\d+)(")')


def static_spec(context: int, chunk: int | None = None) -> StaticSpec:
    """The sizes for `--static CONTEXT --chunk CHUNK`. Raises ConfigError."""
    try:
        fitting = max(2, min(_USUAL_CHUNK, context - StaticSpec.sinks))
        return StaticSpec(context=context, chunk=fitting if chunk is None else chunk)
    except PackageError as error:
        raise ConfigError(f"--static {context} cannot be: {error}") from error


def check_fits(spec: StaticSpec, context_length: int) -> None:
    """Raises ConfigError if static graphs would attend to more tokens than the model's context."""
    if spec.context > context_length:
        raise ConfigError(f"--static {spec.context} is more than the model's context of {context_length}: ask for less")


def write_static(
    package: Path, layers: int, spec: StaticSpec, progress: Progress = no_progress
) -> dict[str, tuple[FileEntry, ...]]:
    """Write the static graphs of all layers into `package`, next to the layers' own. Returns the added parts.

    Raises UnsupportedModel naming a layer that cannot be static and why, PackageError for its files.
    """
    parts = {}
    for layer in range(layers):
        progress("making static graphs", layer, layers)
        files = []
        source = package / f"{layer_part(layer)}.xml"
        constants = _Constants(source)
        for kind, width in spec.widths.items():
            path = package / static_file(layer, kind)
            _save_without_weights(make_static(source, width=width, slots=spec.slots), path, constants)
            files.append(describe_file(path))
        parts[static_part(layer)] = tuple(files)
    progress("making static graphs", layers, layers)
    return parts


def make_static(path: Path, *, width: int, slots: int) -> ov.Model:
    """Build the static graph of the layer at `path`, for steps of `width` tokens over `slots` cached positions.

    Inputs: hidden_states [1, width, hidden] f32, position_ids [1, width] i64 if the layer reads them, attention_bias
    [1, 1, width, slots + width] f32, past_key and past_value [1, heads, slots, size] f32. Outputs:
    hidden_states_out, present_key and present_value of the new tokens.

    Raises UnsupportedModel, DamagedFile.
    """
    try:
        model = ov.Core().read_model(path)
    except RuntimeError as error:
        raise DamagedFile(f"{path} cannot be read ({last_line(error)}): export it again") from error
    attentions = [node for node in model.get_ordered_ops() if node.get_type_name() == ATTENTION]
    if len(attentions) != 1:
        raise UnsupportedModel(f"{path.stem} has {len(attentions)} {ATTENTION} ops; a layer has one")
    inputs = {name: port.get_node() for port in model.inputs for name in port.get_names()}
    pasts, presents = _replace_states(attentions[0], slots)
    bias = _replace_mask(attentions[0], path.stem, width, slots)
    _fix_kv_broadcasts(model)
    hidden = inputs[_HIDDEN]
    hidden.set_partial_shape(ov.PartialShape([1, width, hidden.output(0).partial_shape[2].get_length()]))
    hidden.output(0).tensor.set_names({_HIDDEN})
    if POSITIONS in inputs:
        inputs[POSITIONS].set_partial_shape(ov.PartialShape([1, width]))
    results = [*model.get_results(), *presents]
    parameters = [hidden, *([inputs[POSITIONS]] if POSITIONS in inputs else []), bias, *pasts]
    try:
        static = ov.Model(results, parameters, path.stem)
        static.validate_nodes_and_infer_types()
        check_static(static)
    except (RuntimeError, PackageError) as error:
        raise UnsupportedModel(
            f"{path.stem} cannot be made static ({last_line(error)}): export the model without --static"
        ) from error
    return static


def _replace_states(attention: Any, slots: int) -> tuple[list[Any], list[Any]]:
    """Replace the two states by parameters, and add results with the new keys and values of a step."""
    pasts, presents = [], []
    for name, port in zip(CACHES, (attention.input(1), attention.input(2)), strict=True):
        cache = find_cache(port, 0)
        _, heads, _, size = cache.shape
        shape = [1, heads.get_length(), slots, size.get_length()]
        past = op.parameter(shape, ov.Type.f32, name=f"past_{name}")
        past.output(0).tensor.set_names({f"past_{name}"})
        joined = [port.get_source_output() for port in cache.chain[0].inputs()]
        new = [output for output in joined if key(output.get_node()) != key(cache.gather)]
        if len(new) != 1:
            raise UnsupportedModel(f"the {name}s join {len(new) + 1} tensors; expected are the cached and the new ones")
        # Ops that read the shape of the state read the shape of the parameter instead.
        for node in (cache.gather, cache.read):
            node.output(0).replace(past.output(0))
        new[0].tensor.set_names({f"present_{name}"})
        pasts.append(past)
        presents.append(op.result(new[0], name=f"present_{name}"))
    return pasts, presents


def _replace_mask(attention: Any, part: str, width: int, slots: int) -> Any:
    """Replace the mask, which the graph computes from the number of cached positions, by a parameter."""
    if attention.get_attributes().get("causal") or len(attention.inputs()) < 4:
        raise UnsupportedModel(
            f"{part} masks inside its attention, not by a tensor: it cannot read a ring cache; export the model "
            "without --static"
        )
    bias = op.parameter([1, 1, width, slots + width], ov.Type.f32, name=BIAS)
    bias.output(0).tensor.set_names({BIAS})
    attention.input(3).replace_source_output(bias.output(0))
    return bias


def _fix_kv_broadcasts(model: ov.Model) -> None:
    """Correct the target shape of the bidirectional Broadcasts that repeat KV heads: the length is not repeated.

    openvino_genai's GGUF builder writes 0 for the length into the target shape. With a dynamic length this has no
    effect, because the fused attention absorbs the op; with a static length it must be 1.
    """
    one = op.constant([1], ov.Type.i64, name="one")
    for node in model.get_ops():
        if node.get_type_name() == "Broadcast" and node.get_attributes()["mode"] == "bidirectional":
            target = producer(node.input(1))
            for port in target.inputs() if target.get_type_name() == "Concat" else ():
                size = producer(port)
                if size.get_type_name() == "Constant" and size.get_vector().tolist() == [0]:
                    port.replace_source_output(one.output(0))


def _save_without_weights(model: ov.Model, path: Path, constants: _Constants) -> None:
    """Write `model` to the .xml file `path`, with references to existing `constants`."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".static.") as work:
        whole = Path(work) / "whole.xml"
        try:
            ov.serialize(model, whole)
        except RuntimeError as error:
            raise PackageError(f"{path} cannot be written: {last_line(error)}") from error
        own = whole.with_suffix(".bin").read_bytes()

        def relocate(found: re.Match[bytes]) -> bytes:
            offset, size = int(found[2]), int(found[4])
            existing = constants.find(own[offset : offset + size])
            return found[1] + b"%d" % existing + found[3] + found[4] + found[5]

        path.write_bytes(_CONSTANT.sub(relocate, whole.read_bytes()))


class _Constants:
    """The offset of each constant of the graph at `path` in its .bin file."""

    def __init__(self, path: Path) -> None:
        self._weights = path.with_suffix(".bin")
        raw = self._weights.read_bytes()
        ranges = ((int(found[2]), int(found[4])) for found in _CONSTANT.finditer(path.read_bytes()))
        self._offsets = {_digest(raw[at : at + size]): at for at, size in sorted(ranges, reverse=True)}

    def find(self, content: bytes) -> int:
        """The offset of a constant with these bytes. Raises PackageError if there is none."""
        offset = self._offsets.get(_digest(content))
        if offset is None:
            raise PackageError(
                f"a static graph needs {len(content)} bytes that are not in {self._weights}: export without --static"
            )
        return offset


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()

"""Finding the layers of a graph, and refusing graphs that cannot be cut."""

from __future__ import annotations

from pathlib import Path

import openvino as ov
import pytest

from export.graph.cut import cut_layer, read_graph
from export.graph.layers import CausalGraph
from swarm.errors import DamagedFile, UnsupportedModel
from tests.export.toys import HIDDEN, VOCAB, Toy


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_every_layer_is_found(layers: int) -> None:
    graph = CausalGraph(Toy(layers=layers).model())
    assert [layer.keys.variable_id for layer in graph.layers] == [f"past.{i}.key" for i in range(layers)]
    assert [layer.values.variable_id for layer in graph.layers] == [f"past.{i}.value" for i in range(layers)]
    assert (graph.hidden_size, graph.vocab_size) == (HIDDEN, VOCAB)


def test_each_layer_begins_where_the_one_before_ends() -> None:
    graph = CausalGraph(Toy(layers=4).model())
    for before, after in zip(graph.layers, graph.layers[1:], strict=False):
        assert before.end == after.begin


def test_friendly_names_are_not_used() -> None:
    model = Toy().model()
    for op in model.get_ops():
        if op.get_type_name() != "Parameter":
            op.set_friendly_name("same")
    assert len(CausalGraph(model).layers) == 3


def test_learned_positions_stay_with_layer_0() -> None:
    graph = CausalGraph(Toy(learned_positions=True).model())
    assert graph.layers[0].begin.get_node().get_type_name() == "Gather"
    assert graph.inputs_read_by([graph.layers[0].begin.get_node()]) == {"input_ids"}


@pytest.mark.parametrize(
    ("toy", "reason"),
    [
        (Toy(attention=False), "no ScaledDotProductAttention"),
        (Toy(beam_idx=False), "no Gather over beam_idx behind its ReadValue"),
        (Toy(state=False), "does not read its keys and values from a state"),
        (Toy(extra_input=True), r"inputs pixel_values \[\?,3,8,8\] is not known"),
        (Toy(extra_output=True), "2 outputs"),
        (Toy(extra_state=True), "state conv_state is not the KV cache"),
        (Toy(flat_cache=True), r"KV cache of attention 0 has the shape \[\?,2,1,4\]"),
        (Toy(shared_cache=True), "share the KV cache past.0.key, past.0.value"),
        (Toy(reads_layer_0=True), "from attention 0 to attention 1"),
        (Toy(head=False), "no head to cut off"),
        (Toy(masked_by_token=True), "the embedding cannot be cut off"),
    ],
)
def test_a_graph_that_cannot_be_cut_is_refused_with_the_reason(toy: Toy, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        CausalGraph(toy.model())


def test_a_graph_without_token_ids_is_refused() -> None:
    parameter = ov.opset15.parameter([-1, 8], ov.Type.f32, name="waveform")
    model = ov.Model([ov.opset15.relu(parameter)], [parameter], "other")
    with pytest.raises(UnsupportedModel, match="no input input_ids"):
        CausalGraph(model)


def test_a_file_that_is_no_graph_is_named(tmp_path: Path) -> None:
    path = tmp_path / "openvino_model.xml"
    path.write_text("<net>")
    path.with_suffix(".bin").write_bytes(b"")
    with pytest.raises(DamagedFile, match=r"openvino_model\.xml cannot be read"):
        read_graph(path)


def test_a_layer_has_only_the_inputs_that_it_reads(tmp_path: Path) -> None:
    layer = cut_layer(Toy().write(tmp_path), 1)
    assert [port.get_any_name() for port in layer.inputs[1:]] == ["attention_mask", "beam_idx"]

"""The layers cut from real exporters' graphs: their inputs, states, weights and names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openvino as ov
import pytest

from export.graph.cut import cut_layer
from export.verify.against_graph import verify_package
from swarm.model.manifest import layer_part, load_manifest
from tests.export.make_tiny import FAMILIES, HIDDEN, LAYERS
from tests.export.toys import Toy

families = pytest.mark.parametrize("family", FAMILIES)


def ops(model: ov.Model, kind: str) -> list[Any]:
    return [op for op in model.get_ops() if op.get_type_name() == kind]


def read(package: Path, part: str) -> ov.Model:
    return ov.Core().read_model(package / f"{part}.xml")


@families
def test_chained_layers_equal_the_source_to_the_bit(
    family: str, tiny_irs: Mapping[str, Path], tiny_packages: Mapping[str, Path]
) -> None:
    # 24 tokens and 8 steps: longer than the sliding window of 8 of one family.
    assert verify_package(tiny_packages[family], tiny_irs[family] / "openvino_model.xml") == 0.0


def test_chained_layers_of_the_real_model_equal_the_source_to_the_bit(smollm2_package: Path, smollm2_ir: Path) -> None:
    assert verify_package(smollm2_package, smollm2_ir) == 0.0


@families
def test_nothing_of_the_embedding_stays_in_a_layer(family: str, tiny_packages: Mapping[str, Path]) -> None:
    package = tiny_packages[family]
    vocab = load_manifest(package).vocab_size
    for number in range(LAYERS):
        model = read(package, layer_part(number))
        assert all(vocab not in op.output(0).shape for op in ops(model, "Constant"))
        assert "input_ids" not in {name for port in model.inputs for name in port.get_names()}
        assert len(ops(model, "ScaledDotProductAttention")) == 1
        assert len(ops(model, "ReadValue")) == len(ops(model, "Assign")) == 2


def test_no_layer_of_the_real_model_has_weights_of_another(smollm2_package: Path) -> None:
    sizes = [(smollm2_package / f"{layer_part(n)}.bin").stat().st_size for n in range(30)]
    assert max(sizes) - min(sizes) < 1000
    # 4 bits a weight, a scale and a zero point for each 32 of them: 3.54 million weights a layer
    assert max(sizes) < 3_540_000 * (0.5 + 2.5 / 32) * 1.02
    assert (smollm2_package / "embed.bin").stat().st_size > 10 * max(sizes)


@families
def test_a_layers_input_is_hidden_states(family: str, tiny_packages: Mapping[str, Path]) -> None:
    for number in range(LAYERS):
        model = read(tiny_packages[family], layer_part(number))
        entry = model.inputs[0]
        assert entry.get_names() == {"hidden_states", "inputs_embeds"}
        assert entry.get_node().get_friendly_name() == "hidden_states"
        assert entry.element_type == ov.Type.f32
        assert entry.partial_shape == ov.PartialShape([-1, -1, HIDDEN])
        assert model.outputs[0].get_names() == {"hidden_states_out"}
        others = {port.get_any_name() for port in model.inputs[1:]}
        assert others == {"attention_mask", "position_ids", "beam_idx"}


@families
def test_embed_and_head_have_one_input(family: str, tiny_packages: Mapping[str, Path]) -> None:
    embed, head = (read(tiny_packages[family], part) for part in ("embed", "head"))
    assert [port.get_names() for port in embed.inputs + embed.outputs] == [{"input_ids"}, {"hidden_states"}]
    assert [port.get_names() for port in head.inputs + head.outputs] == [
        {"hidden_states", "inputs_embeds"},
        {"logits"},
    ]


@families
def test_no_two_layers_share_a_state(family: str, tiny_packages: Mapping[str, Path]) -> None:
    models = [read(tiny_packages[family], layer_part(number)) for number in range(LAYERS)]
    ids = [variable.info.variable_id for model in models for variable in model.get_variables()]
    assert len(ids) == len(set(ids)) == 2 * LAYERS


def test_inner_tensors_lose_their_names(tiny_packages: Mapping[str, Path]) -> None:
    model = read(tiny_packages["llama"], layer_part(1))
    ends = {"Parameter", "Result"}
    named = [op for op in model.get_ops() if op.outputs() and op.output(0).get_names()]
    assert {op.get_type_name() for op in named if "hidden_states_out" not in op.output(0).get_names()} <= ends


def test_runtime_options_are_kept(tmp_path: Path) -> None:
    layer = cut_layer(Toy().write(tmp_path), 1)
    assert layer.get_rt_info(["runtime_options", "KV_CACHE_PRECISION"]).value == "f16"


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_all_of_the_sources_rt_info_is_kept(
    family: str, tiny_irs: Mapping[str, Path], tiny_packages: Mapping[str, Path]
) -> None:
    source = ov.Core().read_model(tiny_irs[family] / "openvino_model.xml")
    for part in ("embed", layer_part(2), "head"):
        assert set(source.get_rt_info()) <= set(read(tiny_packages[family], part).get_rt_info())
        for path in (["runtime_options", "KV_CACHE_PRECISION"], ["optimum", "optimum_intel_version"]):
            assert read(tiny_packages[family], part).get_rt_info(path).value == source.get_rt_info(path).value

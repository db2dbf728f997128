"""Adding state and Gather to a graph, and removing the Gather."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino._offline_transformations import stateful_to_stateless_transformation

from export.graph.layers import CausalGraph
from export.graph.stateful import add_beam_gathers, drop_beam_gathers, make_stateful, prepare
from export.verify.runner import Runner, Step
from swarm.errors import DamagedFile, UnsupportedModel
from tests.export.toys import VOCAB, Toy


def logits(model: ov.Model) -> np.ndarray:
    """A prompt and two single tokens."""
    runner = Runner(model)
    tokens = np.arange(8)[None] % VOCAB
    bounds = [(0, 6), (6, 7), (7, 8)]
    return np.concatenate([runner.run(Step(tokens=tokens[:, a:b], past=a), None) for a, b in bounds], axis=1)


def test_a_gather_is_added_behind_every_cache_without_one() -> None:
    model = add_beam_gathers(Toy(beam_idx=False).model())
    assert "beam_idx" in CausalGraph(model).inputs
    assert np.array_equal(logits(model), logits(Toy().model()))


def test_a_gather_can_be_removed() -> None:
    model = drop_beam_gathers(Toy().model())
    assert not any("beam_idx" in port.get_names() for port in model.inputs)
    with pytest.raises(UnsupportedModel, match="has no Gather over beam_idx"):
        CausalGraph(model)


def test_caches_that_are_inputs_and_outputs_become_state() -> None:
    model = _stateless()
    assert len(model.get_variables()) == 0
    made = make_stateful(model)
    assert len(CausalGraph(made).layers) == 2
    assert np.allclose(logits(made), logits(Toy(layers=2).model()), atol=1e-6)


def test_a_cache_without_its_output_is_named() -> None:
    model = _stateless()
    for port in model.outputs:
        if any(name.startswith("present.") for name in port.get_names()):
            port.tensor.set_names({"something"})
    with pytest.raises(UnsupportedModel, match=r"past_key_values\.\d\.(key|value) .* cannot become a state"):
        make_stateful(model)


def test_a_source_with_state_and_gathers_is_used_unchanged(tmp_path: Path) -> None:
    ov.save_model(Toy().model(), tmp_path / "openvino_model.xml")
    assert prepare(tmp_path / "openvino_model.xml", tmp_path) == tmp_path / "openvino_model.xml"


def test_a_source_without_gathers_is_rewritten_to_another_file(tmp_path: Path) -> None:
    ov.save_model(Toy(beam_idx=False).model(), tmp_path / "openvino_model.xml")
    mended = prepare(tmp_path / "openvino_model.xml", tmp_path)
    assert mended != tmp_path / "openvino_model.xml"
    assert len(CausalGraph(ov.Core().read_model(mended)).layers) == 3


def test_a_file_that_is_no_graph_is_named(tmp_path: Path) -> None:
    (tmp_path / "openvino_model.xml").write_text("<net>")
    with pytest.raises(DamagedFile, match=r"openvino_model\.xml"):
        prepare(tmp_path / "openvino_model.xml", tmp_path)


def _stateless() -> ov.Model:
    """A toy of two layers whose caches are inputs and outputs, under optimum-intel's names."""
    model = Toy(layers=2).model()
    stateful_to_stateless_transformation(model)
    for ports, role in ((model.inputs, "past_key_values"), (model.outputs, "present")):
        for port in ports:
            if found := re.search(r"past\.(\d\.(key|value))", " ".join(port.get_names())):
                port.tensor.set_names({f"{role}.{found[1]}"})
    return model

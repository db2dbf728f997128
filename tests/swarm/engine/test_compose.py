"""A composed span compared with the graph that it was cut from: same operations, same bits."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from numpy.typing import NDArray

from swarm.engine.base import Step
from swarm.engine.compose import compose, open_engine
from swarm.engine.device import CompiledSpan, compile_span
from swarm.engine.stateful import StatefulEngine
from swarm.errors import ConfigError, DamagedFile, EngineError, PackageError
from swarm.model.manifest import load_manifest
from swarm.model.spans import LayerRange

F32 = {"EXECUTION_MODE_HINT": "ACCURACY", "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
FAMILIES = ("llama", "qwen3", "phi3", "mistral", "mixtral")


class Unsplit:
    """The source graph, unsplit."""

    def __init__(self, ir: Path) -> None:
        self.compiled = ov.Core().compile_model(ov.Core().read_model(ir), "CPU", F32)
        self._request = self.compiled.create_infer_request()
        self.vocab_size = int(self.compiled.outputs[0].partial_shape[-1].get_length())

    def __call__(self, start: int, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        n = len(tokens)
        inputs = {
            "input_ids": tokens.astype(np.int64)[None],
            "attention_mask": np.ones((1, start + n), np.int64),
            "position_ids": np.arange(start, start + n, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        logits: NDArray[np.float32] = self._request.infer(inputs)[0][0]
        return logits.copy()

    def reset(self) -> None:
        self._request.reset_state()


def chained(engines: Sequence[StatefulEngine], start: int, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """The logits of all `tokens`, by consecutive spans."""
    out: Any = None
    for engine in engines:
        rows = len(tokens) if engine is engines[-1] else 0
        (out,) = engine.forward([Step(session="s", start=start, tokens=tokens, hidden=out, rows=rows)])
        assert isinstance(out, np.ndarray), out
    return np.asarray(out, np.float32)


def spans_of(package: Path, cuts: Sequence[int]) -> list[StatefulEngine]:
    return [open_engine(package, load_manifest(package), LayerRange(a, b)) for a, b in pairwise(cuts)]


def assert_same_bits(unsplit: Unsplit, engines: Sequence[StatefulEngine], *, steps: int, prompt: int) -> None:
    unsplit.reset()
    for engine in engines:
        engine.open("s", prompt + steps)
    tokens = np.random.default_rng(1).integers(3, unsplit.vocab_size, prompt).astype(np.int32)
    start = 0
    for _ in range(steps):
        expected, found = unsplit(start, tokens), chained(engines, start, tokens)
        assert np.array_equal(found, expected), f"{np.abs(found - expected).max()} apart at position {start}"
        start += len(tokens)
        tokens = np.array([expected[-1].argmax()], np.int32)


def compiled_ops(model: ov.Model) -> Counter[str]:
    return ops_of(ov.Core().compile_model(model, "CPU", F32))


def ops_of(compiled: ov.CompiledModel) -> Counter[str]:
    kinds: Counter[str] = Counter()
    for node in compiled.get_runtime_model().get_ops():
        kind = node.get_rt_info()["layerType"]
        kinds[str(getattr(kind, "value", kind))] += 1
    return kinds


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cuts", [(0, 4), (0, 1, 3, 4)], ids=["whole", "three spans"])
def test_spans_in_a_row_equal_the_unsplit_graph_to_the_bit(
    family: str, cuts: tuple[int, ...], tiny_irs: Mapping[str, Path], tiny_packages: Mapping[str, Path]
) -> None:
    unsplit = Unsplit(tiny_irs[family] / "openvino_model.xml")
    assert_same_bits(unsplit, spans_of(tiny_packages[family], cuts), steps=12, prompt=20)


@pytest.fixture(scope="module")
def real(smollm2_ir: Path) -> Unsplit:
    return Unsplit(smollm2_ir)


@pytest.fixture(scope="module")
def whole(smollm2_package: Path) -> CompiledSpan:
    """The real model as one span."""
    manifest = load_manifest(smollm2_package)
    return compile_span(compose(smollm2_package, manifest, manifest.span), attention_layers=30)


def test_a_real_model_equals_its_unsplit_graph_to_the_bit(
    real: Unsplit, whole: CompiledSpan, smollm2_package: Path
) -> None:
    manifest = load_manifest(smollm2_package)
    assert_same_bits(real, [StatefulEngine(whole, manifest, manifest.span)], steps=6, prompt=24)


def test_three_spans_of_a_real_model_equal_it_too(real: Unsplit, smollm2_package: Path) -> None:
    assert_same_bits(real, spans_of(smollm2_package, (0, 11, 19, 30)), steps=6, prompt=24)


def test_mask_and_rotary_values_are_computed_once_for_thirty_layers(real: Unsplit, whole: CompiledSpan) -> None:
    unsplit, found = ops_of(real.compiled), ops_of(whole.model)
    assert found["ScaledDotProductAttention"] == unsplit["ScaledDotProductAttention"] == 30
    for kind in ("ShapeOf", "Range", "Eltwise", "FullyConnected"):
        assert found[kind] == unsplit[kind], kind
    # The selection of rows adds four, reading batch and length from hidden states three.
    assert found.total() - unsplit.total() <= 8


def test_layers_with_different_windows_do_not_share_their_masks(tiny_packages: Mapping[str, Path]) -> None:
    package = tiny_packages["llama"]
    manifest = load_manifest(package)
    one = compiled_ops(compose(package, manifest, manifest.span))
    first, *rest = manifest.layers
    mixed = replace(manifest, layers=(replace(first, window=8), *rest))
    two = compiled_ops(compose(package, mixed, mixed.span))
    assert two.total() > one.total()
    assert two["ScaledDotProductAttention"] == 4


def test_logits_are_computed_only_for_the_requested_rows(tiny_packages: Mapping[str, Path]) -> None:
    package = tiny_packages["llama"]
    manifest = load_manifest(package)
    engine = open_engine(package, manifest, manifest.span)
    tokens = np.arange(10, 20, dtype=np.int32)
    results = {}
    for rows in (0, 1, 4, 10):
        engine.open(f"{rows}", 16)
        (results[rows],) = engine.forward([Step(session=f"{rows}", start=0, tokens=tokens, rows=rows)])
    whole = results[10]
    assert isinstance(whole, np.ndarray)
    for rows, result in results.items():
        assert isinstance(result, np.ndarray)
        assert result.shape == (rows, manifest.vocab_size)
        np.testing.assert_allclose(result, whole[10 - rows :], atol=1e-5)


def test_the_models_own_settings_are_kept(tiny_packages: Mapping[str, Path]) -> None:
    package = tiny_packages["llama"]
    manifest = load_manifest(package)
    layer = ov.Core().read_model(package / "layer_001.xml")
    composed = compose(package, manifest, LayerRange(1, 3))
    assert layer.has_rt_info(["runtime_options", "KV_CACHE_PRECISION"])
    for option in ("KV_CACHE_PRECISION", "ACTIVATIONS_SCALE_FACTOR"):
        path = ["runtime_options", option]
        assert composed.get_rt_info(path).astype(str) == layer.get_rt_info(path).astype(str)


def test_a_middle_span_has_hidden_states_as_input_and_output(tiny_packages: Mapping[str, Path]) -> None:
    package = tiny_packages["llama"]
    manifest = load_manifest(package)
    model = compose(package, manifest, LayerRange(1, 3))
    inputs = {port.get_any_name() for port in model.inputs}
    assert inputs == {"hidden_states", "attention_mask", "position_ids", "beam_idx"}
    assert [port.get_any_name() for port in model.outputs] == ["hidden_states_out"]
    assert len(model.get_sinks()) == 4


def test_without_the_beam_gather_attention_is_not_fused_and_that_is_an_error(
    tiny_packages: Mapping[str, Path],
) -> None:
    package = tiny_packages["llama"]
    manifest = load_manifest(package)
    bare = compose(package, manifest, manifest.span, beam_idx=False)
    assert "beam_idx" not in {port.get_any_name() for port in bare.inputs}
    with pytest.raises(EngineError, match="0 of 4 layers"):
        compile_span(bare, attention_layers=4)
    compiled = compile_span(bare, attention_layers=4, fused=False)
    engines = [StatefulEngine(compiled, manifest, manifest.span), open_engine(package, manifest, manifest.span)]
    tokens = np.arange(10, 20, dtype=np.int32)
    results = []
    for engine in engines:
        engine.open("s", 10)
        results.append(chained([engine], 0, tokens))
    np.testing.assert_allclose(results[0], results[1], atol=1e-5)


def test_a_file_without_a_graph_is_named(tiny_packages: Mapping[str, Path], tmp_path: Path) -> None:
    package = shutil.copytree(tiny_packages["llama"], tmp_path / "damaged")
    manifest = load_manifest(package)
    (package / "layer_002.xml").write_text("<net")
    with pytest.raises(DamagedFile, match=r"layer_002\.xml"):
        compose(package, manifest, manifest.span)
    compose(package, manifest, LayerRange(0, 2))


def test_the_same_layer_twice_is_refused(tiny_packages: Mapping[str, Path], tmp_path: Path) -> None:
    package = shutil.copytree(tiny_packages["llama"], tmp_path / "twice")
    for suffix in ("xml", "bin"):
        shutil.copy(package / f"layer_001.{suffix}", package / f"layer_002.{suffix}")
    with pytest.raises(PackageError, match="two layers"):
        compose(package, load_manifest(package), LayerRange(1, 3))


def test_invalid_settings_are_named(tiny_packages: Mapping[str, Path]) -> None:
    package = tiny_packages["llama"]
    manifest = load_manifest(package)
    model = compose(package, manifest, LayerRange(1, 2))
    for wrong in ({"device": "QPU"}, {"precision": "f64"}, {"threads": -1}):
        with pytest.raises(ConfigError, match=str(*wrong.values())):
            compile_span(model, attention_layers=1, **wrong)


def test_numerics_are_read_from_the_device(tiny_packages: Mapping[str, Path]) -> None:
    package = tiny_packages["llama"]
    manifest = load_manifest(package)
    accurate = open_engine(package, manifest, LayerRange(1, 3), precision="accuracy")
    assert str(accurate.numerics) == "f32/f32"


def test_a_cache_is_used_and_a_damaged_one_replaced(tiny_packages: Mapping[str, Path], tmp_path: Path) -> None:
    package = tiny_packages["llama"]
    manifest = load_manifest(package)

    def result() -> NDArray[np.float32]:
        engine = open_engine(package, manifest, manifest.span, cache_dir=tmp_path)
        engine.open("s", 10)
        return chained([engine], 0, np.arange(10, dtype=np.int32))

    first = result()
    (blob,) = tmp_path.glob("*/*.blob")
    written, content = blob.stat().st_mtime_ns, blob.read_bytes()
    assert np.array_equal(result(), first)
    assert blob.stat().st_mtime_ns == written, "the second start compiled again"

    for damaged in (content[: len(content) // 2], b"", b"\0" * len(content)):
        blob.chmod(0o600)
        blob.write_bytes(damaged)
        assert np.array_equal(result(), first)
        assert blob.stat().st_size == len(content)
        assert blob.read_bytes() != damaged

    (blob.parent / "sealed.json").unlink()  # as after a process that died while writing
    assert np.array_equal(result(), first)
    assert (blob.parent / "sealed.json").exists()


def test_the_first_start_too_runs_from_the_mapped_blob(tiny_packages: Mapping[str, Path], tmp_path: Path) -> None:
    model = compose(tiny_packages["llama"], load_manifest(tiny_packages["llama"]), LayerRange(1, 2))
    for _start in range(2):
        compiled = compile_span(model, attention_layers=1, cache_dir=tmp_path).model
        assert compiled.get_property("LOADED_FROM_CACHE")


def test_half_floats_are_compiled_anew_because_a_cached_graph_holds_them_in_f32(
    tiny_packages: Mapping[str, Path], tmp_path: Path
) -> None:
    package = tiny_packages["llama"]
    for weights, blobs in (("f16", 0), ("int4", 1)):
        manifest = replace(load_manifest(package), weights=weights)
        open_engine(package, manifest, LayerRange(1, 2), cache_dir=tmp_path)
        assert len(list(tmp_path.glob("*/*.blob"))) == blobs


def test_an_unwritable_cache_only_costs_time(tiny_packages: Mapping[str, Path], tmp_path: Path) -> None:
    package = tiny_packages["llama"]
    (tmp_path / "file").write_text("in the way")
    engine = open_engine(package, load_manifest(package), LayerRange(1, 2), cache_dir=tmp_path / "file" / "cache")
    assert engine.span == LayerRange(1, 2)

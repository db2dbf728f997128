"""The static engine compared with the stateful one, and beyond its context with a graph with an explicit mask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from numpy.typing import NDArray
from openvino import opset15 as op

from swarm.engine.base import Engine, Step
from swarm.engine.compose import open_engine
from swarm.engine.static.engine import StaticEngine, open_static_engine
from swarm.engine.static.graph import MAX_ROWS, check_static, compose_static
from swarm.errors import BadStep, ContextExceeded, EngineError, PackageError, SwarmError, UnknownSession
from swarm.model.manifest import DECODE, PREFILL, load_manifest
from swarm.model.spans import LayerRange
from tests.conftest import SMOLLM2_STATIC, TINY_STATIC

CONTEXT, CHUNK = TINY_STATIC
IDS = np.random.default_rng(3).integers(3, 200, 200).astype(np.int32)
F32 = {"EXECUTION_MODE_HINT": "ACCURACY", "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
Ids = NDArray[np.int32]
Floats = NDArray[np.float32]


def static_of(package: Path, layers: str = "0:4") -> StaticEngine:
    return open_static_engine(package, load_manifest(package), LayerRange.parse(layers))


def run(engine: Engine, step: Step) -> Floats:
    (result,) = engine.forward([step])
    if isinstance(result, SwarmError):
        raise result
    return result


def feed(engine: Engine, session: str, start: int, ids: Ids) -> Floats:
    return run(engine, Step(session=session, start=start, tokens=ids, rows=len(ids)))


@pytest.fixture(scope="module")
def llama(tiny_static_packages: Mapping[str, Path]) -> StaticEngine:
    return static_of(tiny_static_packages["llama"])


@pytest.fixture
def session(llama: StaticEngine) -> Iterator[str]:
    llama.open("s", 200)
    yield "s"
    llama.close("s")


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "mixtral", "mistral", "gpt_oss"])
def test_within_its_context_it_equals_the_stateful_engine(
    family: str, tiny_static_packages: Mapping[str, Path]
) -> None:
    """Mistral has a window of 8 tokens, gpt-oss in every other layer: the order of slots in a ring must not matter."""
    package = tiny_static_packages[family]
    one, other = static_of(package), open_engine(package, load_manifest(package), LayerRange(0, 4))
    random = np.random.default_rng(5)
    for engine in (one, other):
        engine.open("s", CONTEXT)
    known = IDS[:0]
    for n in (3, 1, CHUNK, 1, 2 * CHUNK + 5, CONTEXT):
        start = max(0, len(known) - int(random.integers(0, 3)))
        known = np.concatenate([known[:start], random.integers(3, 200, min(n, CONTEXT - start)).astype(np.int32)])
        found, expected = (feed(engine, "s", start, known[start:]) for engine in (one, other))
        np.testing.assert_allclose(found, expected, atol=2e-5)
        assert one.length("s") == other.length("s") == len(known)


def test_a_span_in_the_middle_takes_and_gives_hidden_states(tiny_static_packages: Mapping[str, Path]) -> None:
    package = tiny_static_packages["llama"]
    hidden = np.random.default_rng(0).normal(size=(30, 64)).astype(np.float32)
    results = []
    for engine in (static_of(package, "1:3"), open_engine(package, load_manifest(package), LayerRange(1, 3))):
        engine.open("s", 30)
        steps = [Step(session="s", start=a, tokens=IDS[a:b], hidden=hidden[a:b]) for a, b in ((0, 29), (29, 30))]
        results.append(np.concatenate([run(engine, step) for step in steps]))
    np.testing.assert_allclose(results[0], results[1], atol=2e-5)


def masked_logits(ir: Path, ids: Ids, windows: Sequence[int | None]) -> Floats:
    """The unsplit graph over all of `ids` at once, with explicit masks: sinks and the last positions, no ring."""
    model = ov.Core().read_model(ir)
    n, reach = len(ids), CONTEXT - 4
    attentions = [node for node in model.get_ordered_ops() if node.get_type_name() == "ScaledDotProductAttention"]
    for attention, window in zip(attentions, windows, strict=True):
        mask = np.full((1, 1, n, n), -65504, np.float32)
        for query in range(n):
            for position in range(query + 1):
                near = query - position < reach or position < 4
                if near and (window is None or query - position < window):
                    mask[0, 0, query, position] = 0
        attention.input(3).replace_source_output(op.constant(mask).output(0))
    inputs = {
        "input_ids": ids.astype(np.int64)[None],
        "attention_mask": np.ones((1, n), np.int64),
        "position_ids": np.arange(n, dtype=np.int64)[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    request = ov.Core().compile_model(model, "CPU", F32).create_infer_request()
    request.infer({name: inputs[name] for port in model.inputs for name in port.get_names() & inputs.keys()})
    logits: Floats = request.get_output_tensor(0).data[0].copy()
    return logits


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_beyond_its_context_it_attends_to_the_sinks_and_the_last_tokens(
    family: str, tiny_irs: Mapping[str, Path], tiny_static_packages: Mapping[str, Path]
) -> None:
    """With the original positions, for any number of tokens per step."""
    package = tiny_static_packages[family]
    windows = [layer.window for layer in load_manifest(package).layers]
    expected = masked_logits(tiny_irs[family] / "openvino_model.xml", IDS[:150], windows)
    engine = static_of(package)
    for stride in (1, 5, 3 * CHUNK):
        engine.open("s", 150)
        found = [feed(engine, "s", start, IDS[start : min(start + stride, 150)]) for start in range(0, 150, stride)]
        np.testing.assert_allclose(np.concatenate(found), expected, atol=2e-5)
        engine.close("s")


def test_a_text_beyond_the_context_can_rewind_a_few_tokens_and_else_is_refused(
    llama: StaticEngine, session: str, tiny_irs: Mapping[str, Path]
) -> None:
    other = np.concatenate([IDS[:95], IDS[150:160]])
    expected = masked_logits(tiny_irs["llama"] / "openvino_model.xml", other, [None] * 4)
    feed(llama, session, 0, IDS[:40])
    feed(llama, session, 40, IDS[40:80])
    feed(llama, session, 80, IDS[80:110])
    np.testing.assert_allclose(feed(llama, session, 95, other[95:]), expected[95:], atol=2e-5)
    with pytest.raises(UnknownSession, match=r"position 60 .* open the session again"):
        feed(llama, session, 60, IDS[60:70])
    assert llama.length(session) == 105
    first = feed(llama, session, 0, IDS[:20])
    assert np.array_equal(first, feed(llama, session, 0, IDS[:20]))


def test_a_prompt_that_does_not_fit_is_refused_before_it_runs(llama: StaticEngine, session: str) -> None:
    expected = feed(llama, session, 0, IDS[: CHUNK + 3])[CHUNK:]
    feed(llama, session, 0, IDS[:CHUNK])
    with pytest.raises(ContextExceeded, match=f"{CONTEXT + 1} tokens at once are more than the {CONTEXT}"):
        feed(llama, session, CHUNK, IDS[: CONTEXT + 1])
    assert llama.length(session) == CHUNK
    np.testing.assert_allclose(feed(llama, session, CHUNK, IDS[CHUNK : CHUNK + 3]), expected, atol=2e-5)


def test_sessions_in_one_call_do_not_affect_each_other(llama: StaticEngine) -> None:
    firsts = {"a": 0, "b": 50, "c": 90}
    alone = {}
    for name, first in firsts.items():
        llama.open("alone", 20)
        alone[name] = feed(llama, "alone", 0, IDS[first : first + 20])
        llama.close("alone")
        llama.open(name, 20)
    for at in range(0, 20, 5):
        steps = [
            Step(session=name, start=at, tokens=IDS[first + at : first + at + 5], rows=5)
            for name, first in firsts.items()
        ]
        for name, result in zip(firsts, llama.forward(steps), strict=True):
            np.testing.assert_allclose(np.asarray(result), alone[name][at : at + 5], atol=2e-5)
    for name in firsts:
        llama.close(name)


def test_results_are_copies_and_have_the_requested_rows(llama: StaticEngine, session: str) -> None:
    whole = feed(llama, session, 0, IDS[:30])
    kept = whole.copy()
    for rows in (0, 1, MAX_ROWS, MAX_ROWS + 3, 30):
        found = run(llama, Step(session=session, start=0, tokens=IDS[:30], rows=rows))
        assert found.shape == (rows, whole.shape[1])
        np.testing.assert_allclose(found, whole[30 - rows :], atol=2e-5)
    assert np.array_equal(whole, kept)


def test_invalid_steps_are_refused_and_do_not_affect_the_others(llama: StaticEngine, session: str) -> None:
    good = Step(session=session, start=0, tokens=IDS[:5], rows=5)
    expected = run(llama, good)
    results = llama.forward(
        [
            Step(session="unknown", start=0, tokens=IDS[:5]),
            Step(session=session, start=0, tokens=IDS[:5], rows=5),
            good,
        ]
    )
    assert [type(results[0]), type(results[2])] == [UnknownSession, BadStep]
    np.testing.assert_allclose(np.asarray(results[1]), expected, atol=2e-5)
    with pytest.raises(BadStep, match="100000"):
        feed(llama, session, 5, np.array([100_000], np.int32))
    with pytest.raises(BadStep, match="start 9"):
        feed(llama, session, 9, IDS[:1])
    with pytest.raises(EngineError, match="'s' is open already"):
        llama.open(session, 5)
    with pytest.raises(ContextExceeded, match="256"):
        llama.open("longer", 257)
    with pytest.raises(UnknownSession, match="longer"):
        llama.length("longer")


class BrokenRequest:
    """An InferRequest whose device is lost."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def infer(self) -> None:
        raise RuntimeError("device lost")


def test_a_failed_inference_closes_its_session_and_reports_it(
    llama: StaticEngine, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama._prefill, "_request", BrokenRequest(llama._prefill._request))
    with pytest.raises(EngineError, match=r"'s' failed at position 0 and was closed \(device lost\)"):
        feed(llama, session, 0, IDS[:5])
    with pytest.raises(UnknownSession):
        llama.length(session)
    llama.open("next", 5)
    assert np.isfinite(feed(llama, "next", 0, IDS[:1])).all()
    llama.close("next")


@pytest.mark.parametrize("kind", [DECODE, PREFILL])
def test_no_operation_of_a_whole_model_has_a_shape_that_is_not_fixed(
    kind: str, tiny_static_packages: Mapping[str, Path]
) -> None:
    package = tiny_static_packages["gpt_oss"]
    manifest = load_manifest(package)
    model = compose_static(package, manifest, manifest.span, kind)
    assert not model.is_dynamic()
    assert not [node for node in model.get_ops() if any(port.partial_shape.is_dynamic for port in node.outputs())]
    model.reshape({"position_ids": [1, -1]} if kind == PREFILL else {"position_ids": [-1, 1]})
    with pytest.raises(PackageError, match="is not static: Parameter position_ids has the shape"):
        check_static(model)


def test_graphs_of_another_size_than_the_manifest_says_are_refused(
    tiny_static_packages: Mapping[str, Path], tmp_path: Path
) -> None:
    given = tiny_static_packages["llama"]
    for path in given.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "layer_002.decode.xml").unlink()
    (tmp_path / "layer_002.decode.xml").symlink_to(given / "layer_002.prefill.xml")
    with pytest.raises(PackageError, match=r"layer_002 reads .*\[1,8,64\], but it is \[1,1,64\]"):
        compose_static(tmp_path, load_manifest(given), LayerRange(1, 4), DECODE)


def test_a_package_without_static_graphs_is_refused(tiny_packages: Mapping[str, Path]) -> None:
    with pytest.raises(PackageError, match=r"llama .* has no static graphs: export it with --static CONTEXT"):
        static_of(tiny_packages["llama"])


def test_a_real_model_predicts_a_text_beyond_its_context(smollm2_static_package: Path, smollm2_tokenizer: Any) -> None:
    """Without the first tokens as sinks, a model predicts no word of the text any more."""
    context = SMOLLM2_STATIC[0]
    text = " ".join(
        line.strip("#|`- ") for line in (Path(__file__).parents[4] / "CONTRIBUTING.md").read_text().splitlines()
    )
    ids = smollm2_tokenizer.encode(text).input_ids.data[0][: 2 * context + 1].astype(np.int32)
    surprise = []
    package = smollm2_static_package
    for engine in (static_of(package, "0:30"), open_engine(package, load_manifest(package), LayerRange(0, 30))):
        engine.open("text", len(ids))
        run(engine, Step(session="text", start=0, tokens=ids[:context]))
        logits = run(engine, Step(session="text", start=context, tokens=ids[context:-1], rows=context))
        logits -= logits.max(axis=1, keepdims=True)
        losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(context), ids[context + 1 :]]
        surprise.append(float(losses.mean()))
        engine.close("text")
    slid, whole = surprise
    assert slid < whole + 0.5, surprise

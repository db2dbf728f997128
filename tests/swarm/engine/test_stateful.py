"""Sessions of one engine: isolation, rewinds, refused steps, failures. Tiny models throughout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from swarm.engine import ledger as ledger_module
from swarm.engine.base import Step
from swarm.engine.compose import open_engine
from swarm.engine.stateful import StatefulEngine
from swarm.errors import BadStep, ContextExceeded, EngineError, SwarmError, UnknownSession
from swarm.model.manifest import load_manifest
from swarm.model.spans import LayerRange

IDS = np.random.default_rng(3).integers(3, 200, 200).astype(np.int32)
Ids = NDArray[np.int32]


def engine_of(package: Path, layers: str = "0:4") -> StatefulEngine:
    return open_engine(package, load_manifest(package), LayerRange.parse(layers))


def run(engine: StatefulEngine, step: Step) -> NDArray[np.float32]:
    (result,) = engine.forward([step])
    if isinstance(result, SwarmError):
        raise result
    return result


def feed(engine: StatefulEngine, session: str, start: int, ids: Ids) -> NDArray[np.float32]:
    return run(engine, Step(session=session, start=start, tokens=ids, rows=len(ids)))


def fresh(engine: StatefulEngine, ids: Ids) -> NDArray[np.float32]:
    engine.open("fresh", len(ids))
    try:
        return feed(engine, "fresh", 0, ids)
    finally:
        engine.close("fresh")


@pytest.fixture(scope="module")
def llama(tiny_packages: Mapping[str, Path]) -> StatefulEngine:
    return engine_of(tiny_packages["llama"])


@pytest.fixture(scope="module")
def middle(tiny_packages: Mapping[str, Path]) -> StatefulEngine:
    return engine_of(tiny_packages["llama"], "1:3")


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral"])
def test_rewinds_equal_a_fresh_prefill(family: str, tiny_packages: Mapping[str, Path]) -> None:
    engine, random = engine_of(tiny_packages[family]), np.random.default_rng(5)
    engine.open("s", 200)
    known = IDS[:12]
    feed(engine, "s", 0, known)
    for _ in range(25):
        start = len(known) - int(random.integers(0, min(len(known), 15)))
        known = np.concatenate([known[:start], random.integers(3, 200, int(random.integers(1, 9))).astype(np.int32)])
        found = feed(engine, "s", start, known[start:])
        np.testing.assert_allclose(found, fresh(engine, known)[start:], atol=2e-5)
        assert engine.length("s") == len(known)


def test_a_rewind_far_beyond_the_window_equals_a_fresh_prefill(tiny_packages: Mapping[str, Path]) -> None:
    engine = engine_of(tiny_packages["mistral"])
    assert load_manifest(tiny_packages["mistral"]).layers[0].window == 8
    engine.open("s", 100)
    feed(engine, "s", 0, IDS[:60])
    feed(engine, "s", 60, IDS[100:130])
    found = feed(engine, "s", 40, IDS[40:50])
    np.testing.assert_allclose(found, fresh(engine, IDS[:50])[40:], atol=2e-5)


def test_compaction_changes_no_result(llama: StatefulEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_MIN_DEAD", 4)
    llama.open("s", 200)
    feed(llama, "s", 0, IDS[:10])
    for start in range(10, 40, 2):
        feed(llama, "s", start, IDS[100:106])  # rejected drafts
        found = feed(llama, "s", start, IDS[start : start + 2])
    np.testing.assert_allclose(found, fresh(llama, IDS[:40])[38:], atol=2e-5)
    llama.close("s")


def test_sessions_in_one_call_do_not_affect_each_other(llama: StatefulEngine) -> None:
    alone = {name: fresh(llama, IDS[first : first + 20]) for name, first in (("a", 0), ("b", 50), ("c", 90))}
    for name in alone:
        llama.open(name, 20)
    for at in range(0, 20, 5):
        steps = [
            Step(session=name, start=at, tokens=IDS[first + at : first + at + 5], rows=5)
            for name, first in (("a", 0), ("b", 50), ("c", 90))
        ]
        for name, result in zip(alone, llama.forward(steps), strict=True):
            assert isinstance(result, np.ndarray)
            np.testing.assert_allclose(result, alone[name][at : at + 5], atol=2e-5)
    for name in alone:
        llama.close(name)


def test_a_reused_request_has_no_state_of_the_closed_session(llama: StatefulEngine) -> None:
    expected = fresh(llama, IDS[:10])
    llama.open("old", 100)
    feed(llama, "old", 0, IDS[100:180])
    llama.close("old")
    llama.close("old")
    assert np.array_equal(fresh(llama, IDS[:10]), expected)


def test_results_are_copies(llama: StatefulEngine) -> None:
    llama.open("s", 20)
    first = feed(llama, "s", 0, IDS[:5])
    kept = first.copy()
    feed(llama, "s", 5, IDS[5:10])
    assert np.array_equal(first, kept)
    llama.close("s")


def test_received_views_and_reused_buffers_are_safe(middle: StatefulEngine) -> None:
    middle.open("s", 8)
    hidden = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    view = np.frombuffer(hidden.tobytes(), np.float32).reshape(4, 64)  # read-only, as from a socket
    expected = run(middle, Step(session="s", start=0, tokens=IDS[:4], hidden=view))
    buffer = hidden.copy()
    assert np.array_equal(run(middle, Step(session="s", start=0, tokens=IDS[:4], hidden=buffer)), expected)
    buffer[:] = 0
    assert np.array_equal(run(middle, Step(session="s", start=0, tokens=IDS[:4], hidden=view)), expected)
    middle.close("s")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no token": ({"tokens": IDS[:0]}, "0 tokens"),
    "a gap": ({"start": 6}, "start 6"),
    "a negative start": ({"start": -1}, "start -1"),
    "an id beyond the vocabulary": ({"tokens": np.array([5, 100_000], np.int32)}, "100000"),
    "a negative id": ({"tokens": np.array([5, -7], np.int32)}, "-7"),
    "ids of 64 bits": ({"tokens": np.array([5], np.int64)}, "int64"),
    "ids in rows": ({"tokens": IDS[:4].reshape(2, 2)}, r"\[2, 2\]"),
    "more rows than tokens": ({"rows": 3}, "3 rows"),
    "negative rows": ({"rows": -1}, "-1 rows"),
    "hidden states for the first span": ({"hidden": np.zeros((2, 64), np.float32)}, "take token ids"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_step_is_refused_and_its_session_stays(name: str, llama: StatefulEngine) -> None:
    change, words = BAD[name]
    llama.open("s", 20)
    expected = feed(llama, "s", 0, IDS[:7])[5:]
    feed(llama, "s", 0, IDS[:5])
    good = Step(session="s", start=5, tokens=IDS[5:7], rows=2)
    bad = replace(good, **change)
    with pytest.raises(BadStep, match=words):
        run(llama, bad)
    assert llama.length("s") == 5
    np.testing.assert_allclose(run(llama, good), expected, atol=2e-5)
    llama.close("s")


BAD_HIDDEN: dict[str, tuple[Any, str]] = {
    "none": (None, "has none"),
    "another width": (np.zeros((2, 63), np.float32), r"\[2, 63\]"),
    "another length": (np.zeros((3, 64), np.float32), r"\[3, 64\]"),
    "another type": (np.zeros((2, 64), np.float64), "float64"),
    "infinity": (np.full((2, 64), -np.inf, np.float32), "not finite"),
    "one NaN": (np.where(np.arange(128).reshape(2, 64) == 77, np.nan, 0).astype(np.float32), "not finite"),
}


@pytest.mark.parametrize("name", BAD_HIDDEN)
def test_wrong_hidden_states_are_refused(name: str, middle: StatefulEngine) -> None:
    hidden, words = BAD_HIDDEN[name]
    middle.open("s", 20)
    with pytest.raises(BadStep, match=words):
        run(middle, Step(session="s", start=0, tokens=IDS[:2], hidden=hidden))
    assert middle.length("s") == 0
    middle.close("s")


def test_rows_of_logits_are_refused_where_there_is_no_head(middle: StatefulEngine) -> None:
    middle.open("s", 20)
    step = Step(session="s", start=0, tokens=IDS[:1], hidden=np.zeros((1, 64), np.float32), rows=1)
    with pytest.raises(BadStep, match="no head"):
        run(middle, step)
    middle.close("s")


def test_a_text_that_is_too_long_is_refused_and_its_session_stays(llama: StatefulEngine) -> None:
    llama.open("s", 10)
    feed(llama, "s", 0, IDS[:8])
    with pytest.raises(ContextExceeded, match="10"):
        feed(llama, "s", 8, IDS[8:11])
    assert feed(llama, "s", 8, IDS[8:10]).shape[0] == 2
    llama.close("s")
    with pytest.raises(ContextExceeded, match="256"):
        llama.open("longer", 257)


def test_an_invalid_step_does_not_affect_the_others_in_its_call(llama: StatefulEngine) -> None:
    expected = fresh(llama, IDS[:5])
    llama.open("good", 20)
    good = Step(session="good", start=0, tokens=IDS[:5], rows=5)
    results = llama.forward([Step(session="unknown", start=0, tokens=IDS[:5]), good, good])
    assert isinstance(results[0], UnknownSession)
    assert np.array_equal(np.asarray(results[1]), expected)
    assert isinstance(results[2], BadStep)
    llama.close("good")


def test_unknown_and_double_sessions_are_errors(llama: StatefulEngine) -> None:
    with pytest.raises(UnknownSession, match="unknown"):
        llama.length("unknown")
    llama.open("twice", 5)
    with pytest.raises(EngineError, match="twice"):
        llama.open("twice", 5)
    llama.close("twice")


class BrokenRequest:
    """An InferRequest whose device is lost."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def infer(self, **_: object) -> None:
        raise RuntimeError("device lost")


def test_a_failed_inference_closes_its_session_and_reports_it(llama: StatefulEngine) -> None:
    for name in ("good", "bad"):
        llama.open(name, 20)
    llama._sessions["bad"].request = BrokenRequest(llama._sessions["bad"].request)
    steps = [Step(session=name, start=0, tokens=IDS[:5], rows=1) for name in ("bad", "good")]
    bad, good = llama.forward(steps)
    assert isinstance(bad, EngineError)
    assert "'bad' failed at position 0 and was closed (device lost)" in str(bad)
    assert isinstance(good, np.ndarray)
    with pytest.raises(UnknownSession):
        llama.length("bad")
    llama._sessions["good"].request = BrokenRequest(llama._sessions["good"].request)
    with pytest.raises(EngineError, match="device lost"):
        llama.forward([Step(session="good", start=5, tokens=IDS[:5], rows=1)])

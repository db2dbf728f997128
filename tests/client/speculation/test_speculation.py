"""The text with guesses is the text without them, for any draft, window size and depth."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from client.speculation.draft import Draft, NgramDraft
from reproduction.harness.scripted_draft import ScriptedDraft
from swarm.engine.base import Engine, Step, StepResult
from swarm.engine.compose import open_engine
from swarm.engine.static.engine import open_static_engine
from swarm.errors import EngineError, PeerFailed
from swarm.model.manifest import StaticSpec, load_manifest
from swarm.model.spans import LayerRange
from swarm.sampling import Sampling, probabilities
from tests.client.pipeline.test_pipeline import FAULTS, at_step
from tests.client.scripted_peer import toy_text
from tests.client.speculation.engine_pipeline import EnginePipeline, write
from tests.client.speculation.test_verify import CHI_SQUARE_P001
from tests.client.toy_world import World, run
from tests.peer.toy_engine import ToyEngine

COUNT = 40
TOY = LayerRange(0, 6)
SAMPLED = Sampling(temperature=0.9, top_k=20, repetition_penalty=1.2, seed=4)


def plain_text(engine: Engine, prompt: list[int], count: int, sampling: Sampling | None = None) -> list[int]:
    """Without guesses."""
    pipeline = EnginePipeline(engine, len(prompt) + count)
    return asyncio.run(write(pipeline, prompt, count, None, sampling=sampling))[0]


# -- without peers


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    errors=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    k=st.none() | st.integers(1, 7),
    depth=st.none() | st.integers(1, 5),
    instant=st.booleans(),
    sampling=st.sampled_from([Sampling(), SAMPLED]),
)
def test_neither_draft_nor_size_nor_depth_changes_a_token(
    prompt: list[int], errors: float, k: int | None, depth: int | None, instant: bool, sampling: Sampling
) -> None:
    text = plain_text(ToyEngine(TOY), prompt, COUNT, sampling)
    draft = ScriptedDraft([*prompt, *text, 1, 2, 3], errors=errors, instant=instant)
    pipeline = EnginePipeline(ToyEngine(TOY), len(prompt) + COUNT)  # no room for an extra guess
    written, speculation = asyncio.run(write(pipeline, prompt, COUNT, draft, sampling=sampling, k=k, depth=depth))
    assert written == text
    report = speculation.report()
    assert report is not None
    assert 0 <= report.accepted <= report.proposed
    assert depth is None or pipeline.max_windows <= depth
    if errors == 1.0:
        assert report.accepted == 0


@settings(max_examples=30, deadline=None)
@given(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=30), k=st.none() | st.integers(1, 7))
def test_look_up_changes_no_token(prompt: list[int], k: int | None) -> None:
    pipeline = EnginePipeline(ToyEngine(TOY), len(prompt) + COUNT)
    written, _ = asyncio.run(write(pipeline, prompt, COUNT, NgramDraft(2), k=k))
    assert written == plain_text(ToyEngine(TOY), prompt, COUNT)


def test_right_guesses_make_fewer_trips_and_the_report_says_so() -> None:
    text = plain_text(ToyEngine(TOY), [5], COUNT)
    pipeline = EnginePipeline(ToyEngine(TOY), COUNT + 1)
    _, speculation = asyncio.run(write(pipeline, [5], COUNT, ScriptedDraft([5, *text], errors=0.0), k=3, depth=1))
    report = speculation.report()
    assert report is not None
    assert report.trips == 11  # the prompt's, and one for every four tokens after its own
    assert report.accepted == report.proposed == 29  # the last window has room for two
    assert report.tokens_a_trip == pytest.approx(COUNT / 11)
    assert report.windows == ((1, 3, 1),)


def test_windows_are_sent_before_the_first_is_answered() -> None:
    text = plain_text(ToyEngine(TOY), [5], COUNT)
    for instant in (True, False):
        pipeline = EnginePipeline(ToyEngine(TOY), COUNT + 1, turns=100)
        draft = ScriptedDraft([5, *text], errors=0.1, instant=instant)
        written, _ = asyncio.run(write(pipeline, [5], COUNT, draft, k=2, depth=4))
        assert written == text
        assert pipeline.max_windows == 4


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_real_graph_writes_the_same_text_past_its_sliding_window(
    tiny_packages: Mapping[str, Path], family: str, depth: int
) -> None:
    package = tiny_packages[family]
    manifest = load_manifest(package)
    engine = open_engine(package, manifest, manifest.span)
    count, prompt = 60, list(range(3, 20))
    windows = [layer.window for layer in manifest.layers if layer.window]
    assert all(window < len(prompt) + count for window in windows)
    text = plain_text(engine, prompt, count)
    draft = ScriptedDraft([*prompt, *text], errors=0.3)
    pipeline = EnginePipeline(engine, len(prompt) + count)
    written, speculation = asyncio.run(write(pipeline, prompt, count, draft, k=3, depth=depth))
    assert written == text
    report = speculation.report()
    assert report is not None
    assert 0 < report.accepted < report.proposed


def test_guesses_go_no_further_than_a_static_graph_can_rewind(tiny_static_packages: Mapping[str, Path]) -> None:
    package = tiny_static_packages["llama"]
    manifest = load_manifest(package)
    engine = open_static_engine(package, manifest, manifest.span)
    count, prompt = 70, list(range(3, 20))
    assert manifest.static is not None
    assert len(prompt) + count > manifest.static.slots
    text = plain_text(engine, prompt, count)

    def written(static: StaticSpec | None) -> list[int]:
        pipeline = EnginePipeline(engine, len(prompt) + count, static=static)
        draft = ScriptedDraft([*prompt, *text], errors=0.3)
        return asyncio.run(write(pipeline, prompt, count, draft, k=28, depth=1))[0]

    assert written(manifest.static) == text
    with pytest.raises(AssertionError, match="no longer cached"):
        written(None)


def test_sampled_texts_keep_their_distribution(tiny_packages: Mapping[str, Path]) -> None:
    """Chi-square over pairs of tokens after a prompt, 1,500 seeds, with a draft and without: p > 0.001 each."""
    package = tiny_packages["llama"]
    manifest = load_manifest(package)
    engine = MemoizingEngine(open_engine(package, manifest, manifest.span))
    prompt, how = [5, 9, 7, 5, 9], {"temperature": 0.7, "top_k": 3}
    first = shares_after(engine, prompt, Sampling(**how))  # type: ignore[arg-type]
    expected = {
        (a, b): p * q
        for a, p in first.items()
        for b, q in shares_after(engine, [*prompt, a], Sampling(**how)).items()  # type: ignore[arg-type]
    }
    likely = max(expected, key=lambda pair: expected[pair])

    async def pairs(draft: Draft | None, seeds: range) -> dict[tuple[int, int], int]:
        seen = dict.fromkeys(expected, 0)
        for seed in seeds:
            pipeline = EnginePipeline(engine, 8)
            sampling = Sampling(seed=seed, **how)  # type: ignore[arg-type]
            one, two = (await write(pipeline, prompt, 2, draft, sampling=sampling, k=2, limit=8))[0]
            seen[one, two] += 1
        return seen

    count = 1500
    assert len(expected) == 9
    for draft in (None, ScriptedDraft([*prompt, *likely, 3], errors=0.0)):
        seen = asyncio.run(pairs(draft, range(count)))
        chi_square = sum((seen[pair] - count * p) ** 2 / (count * p) for pair, p in expected.items())
        assert chi_square < CHI_SQUARE_P001[8]


class MemoizingEngine:
    """Computes the logits after each text only once: thousands of short texts have equal beginnings."""

    def __init__(self, engine: Engine) -> None:
        self.span = engine.span
        self.numerics = engine.numerics
        self._engine = engine
        self._line: list[int] = []
        self._known: dict[tuple[int, ...], NDArray[np.float32]] = {}

    def open(self, session: str, max_tokens: int) -> None:
        self._line = []

    def close(self, session: str) -> None:
        self._line = []

    def length(self, session: str) -> int:
        return len(self._line)

    def forward(self, steps: Sequence[Step]) -> list[StepResult]:
        (step,) = steps
        line = self._line = [*self._line[: step.start], *step.tokens.tolist()]
        texts = [tuple(line[:end]) for end in range(step.end - step.rows + 1, step.end + 1)]
        return [np.stack([self._after(text) for text in texts])]

    def _after(self, text: tuple[int, ...]) -> NDArray[np.float32]:
        if text not in self._known:
            self._engine.close("all")
            self._engine.open("all", len(text))
            (logits,) = self._engine.forward([Step(session="all", start=0, tokens=np.array(text, np.int32), rows=1)])
            assert isinstance(logits, np.ndarray)
            self._known[text] = logits[0]
        return self._known[text]


def shares_after(engine: Engine, ids: list[int], sampling: Sampling) -> dict[int, float]:
    """The probability of each token that may follow `ids`."""
    engine.close("exact")
    engine.open("exact", len(ids))
    (logits,) = engine.forward([Step(session="exact", start=0, tokens=np.array(ids, np.int32), rows=1)])
    assert isinstance(logits, np.ndarray)
    order, shares = probabilities(logits[0], sampling)
    return dict(zip(order.tolist(), shares.tolist(), strict=True))


# -- over peers that fail


def scripted(prompt: list[int], *, errors: float = 0.25, instant: bool = True) -> ScriptedDraft:
    return ScriptedDraft([*prompt, *toy_text(prompt, 60)], errors=errors, instant=instant)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("instant", [True, False])
def test_peers_that_rewind_and_drop_void_windows_write_the_models_text(
    prompt: list[int], depth: int, instant: bool
) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        world.swarm.peers["b"].delay_s = 0.02  # so long that a correction makes the windows void that wait there
        pipeline = world.pipeline()
        written, speculation = await write(pipeline, prompt, COUNT, scripted(prompt, instant=instant), k=2, depth=depth)
        assert written == toy_text(prompt, COUNT)
        report = speculation.report()
        assert report is not None
        assert report.accepted > 5
        assert pipeline.repairs == 0
        voided = sum(peer.void_steps for peer in world.swarm.peers.values())
        assert (voided > 0) == (depth > 1 and instant) or not instant
        await pipeline.close()
        assert world.swarm.open_sessions == 0

    run(test)


@pytest.mark.parametrize("fault", [name for name in FAULTS if "leaves" not in name])
@pytest.mark.parametrize("place", ["a", "c"])
def test_a_hop_that_fails_in_the_middle_of_a_verify_changes_nothing(prompt: list[int], place: str, fault: str) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        spans = {"a": "0:2", "c": "4:6"}
        await world.swarm.add("other", spans[place], layer_time_s=0.01)
        peer = world.swarm.peers[place]
        peer.on_step = at_step(9, FAULTS[fault](peer))
        pipeline = world.pipeline()
        written, _ = await write(pipeline, prompt, COUNT, scripted(prompt), k=3, depth=3)
        assert written == toy_text(prompt, COUNT)
        assert pipeline.repairs >= 1
        await pipeline.close()
        peer.dead = peer.dead or "stopped" in fault  # it does not learn that its sessions are closed
        assert world.swarm.open_sessions == 0

    run(test)


def test_windows_are_relayed_between_peers_that_cannot_reach_each_other(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        a, b = world.swarm.peers["a"], world.swarm.peers["b"]
        a.unreachable.add(b.peer_id)
        pipeline = world.pipeline()
        written, _ = await write(pipeline, prompt, COUNT, scripted(prompt), k=2, depth=4)
        assert written == toy_text(prompt, COUNT)
        assert a.relayed > 0
        assert pipeline.repairs == 0
        await pipeline.close()

    run(test)


def test_a_failure_in_a_void_window_is_repaired_too(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        wrong = [False]

        def on_step(count: int, forward: object) -> None:
            if count > 8 and not wrong[0]:
                wrong[0] = True
                raise PeerFailed("the device is gone")

        world.swarm.peers["b"].on_step = on_step
        pipeline = world.pipeline()
        written, _ = await write(pipeline, prompt, COUNT, scripted(prompt, errors=0.6), k=2, depth=4)
        assert written == toy_text(prompt, COUNT)
        await pipeline.close()

    run(test)


@pytest.mark.parametrize("turns", range(0, 160, 20))
def test_a_cancellation_at_any_moment_leaves_the_session_usable(prompt: list[int], turns: int) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        pipeline = world.pipeline()
        draft = scripted(prompt, instant=False)
        task = asyncio.create_task(write(pipeline, prompt, COUNT, draft, k=2, depth=3))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        written, _ = await write(pipeline, prompt, 8, scripted(prompt), k=2, depth=2)
        assert written == toy_text(prompt, 8)
        await pipeline.close()
        assert world.swarm.open_sessions == 0

    run(test)


def test_a_draft_whose_device_fails_is_switched_off_and_the_report_says_why(prompt: list[int]) -> None:
    class Broken(ScriptedDraft):
        async def propose(self, k: int) -> list[int]:
            raise EngineError("the draft's device is gone")

    async def test(world: World) -> None:
        await world.add_three_peers()
        pipeline = world.pipeline()
        draft = Broken(prompt, errors=0.0, instant=False)
        written, speculation = await write(pipeline, prompt, 12, draft, k=2)
        assert written == toy_text(prompt, 12)
        report = speculation.report()
        assert report is not None
        assert "device is gone" in report.off
        await pipeline.close()

    run(test)

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from client.config import ClientConfig, GenerationConfig
from client.events import Event
from client.speculation.draft_model import DraftModel, ModelDraft, check_same_vocabulary
from client.speculation.draft_pool import Drafts, SessionDrafts
from swarm.engine.base import Step, StepResult
from swarm.errors import ConfigError, EngineError, PackageError
from swarm.model.manifest import EMBED, TOKENIZER, load_manifest
from swarm.model.spans import LayerRange
from swarm.sampling import Sampling
from tests.client.speculation.engine_pipeline import EnginePipeline, write
from tests.client.speculation.test_speculation import plain_text
from tests.client.test_metrics import answer
from tests.peer.toy_engine import CONTEXT, VOCAB, ToyEngine, toy_manifest
from tests.swarm.event_loops import in_loop, until

TOY = LayerRange(0, 6)
PROMPT = [5, 9, 7, 1]


class RecordingEngine(ToyEngine):
    """Records the steps that it ran."""

    def __init__(self) -> None:
        super().__init__(TOY)
        self.steps: list[Step] = []

    def forward(self, steps: list[Step]) -> list[StepResult]:  # type: ignore[override]
        self.steps += steps
        return super().forward(steps)


@pytest.fixture
def engine() -> RecordingEngine:
    return RecordingEngine()


@pytest.fixture
def model(engine: RecordingEngine) -> Iterator[DraftModel]:
    model = DraftModel(engine, toy_manifest(), ThreadPoolExecutor(1))
    yield model
    model.close()
    model.close()


def begin_draft(model: DraftModel, prompt: list[int], sampling: Sampling | None = None) -> ModelDraft:
    draft = model.draft(CONTEXT)
    draft.begin(prompt, sampling or Sampling())
    return draft


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3, repetition_penalty=1.3)])
def test_it_guesses_the_tokens_of_the_model(model: DraftModel, sampling: Sampling) -> None:
    expected = plain_text(ToyEngine(TOY), PROMPT, 7, sampling)

    async def test() -> None:
        draft = begin_draft(model, PROMPT, sampling)
        written = await draft.propose(3)
        draft.accept(3, None)
        assert [*written, *await draft.propose(4)] == expected

    in_loop(test)()


def test_its_cache_is_rewound_and_not_recomputed(model: DraftModel, engine: RecordingEngine) -> None:
    expected = plain_text(ToyEngine(TOY), [*PROMPT, 1, 2, 3], 1)

    async def test() -> None:
        draft = begin_draft(model, PROMPT)
        await draft.propose(4)
        draft.accept(2, 60)
        await draft.propose(2)
        assert [(step.start, len(step.tokens)) for step in engine.steps] == [
            (0, 4),
            (4, 1),
            (5, 1),
            (6, 1),
            (6, 1),
            (7, 1),
        ]
        draft.accept(2, 61)
        draft.begin([*PROMPT, 1, 2, 3], Sampling())
        before = len(engine.steps)
        guesses = await draft.propose(1)
        assert engine.steps[before].start == len(PROMPT)
        assert guesses == expected

    in_loop(test)()


def test_the_event_loop_never_computes(model: DraftModel, engine: RecordingEngine) -> None:
    asyncio.run(begin_draft(model, PROMPT).propose(2))
    assert threading.get_ident() not in engine.threads
    assert len(engine.threads) == 1


def test_a_cancelled_guess_is_rewound(model: DraftModel, engine: RecordingEngine) -> None:
    expected = plain_text(ToyEngine(TOY), [*PROMPT, 33], 2)

    async def test() -> None:
        engine._gate = threading.Event()
        draft = begin_draft(model, PROMPT)
        task = asyncio.create_task(draft.propose(5))
        await until(lambda: bool(engine.steps))
        task.cancel()
        draft.accept(0, 33)
        engine._gate.set()
        await asyncio.wait({task})
        assert await draft.propose(2) == expected

    in_loop(test)()


def test_a_long_prompt_is_read_in_chunks(model: DraftModel, engine: RecordingEngine) -> None:
    prompt = [int(i) for i in np.random.default_rng(1).integers(0, VOCAB, CONTEXT)]
    model._manifest.__dict__["context_length"] = 1000
    draft = model.draft(600)
    draft.begin([*prompt, *prompt], Sampling())
    asyncio.run(draft.propose(1))
    assert [len(step.tokens) for step in engine.steps] == [256, 256]


def test_tokens_that_were_read_are_not_read_again(model: DraftModel, engine: RecordingEngine) -> None:
    async def test() -> None:
        draft = begin_draft(model, PROMPT)
        assert draft.unread_tokens == len(PROMPT) - 1
        await draft.read()
        assert draft.unread_tokens == 0
        await draft.propose(1)
        assert [(step.start, len(step.tokens)) for step in engine.steps] == [
            (0, len(PROMPT) - 1),
            (len(PROMPT) - 1, 1),
        ]

    in_loop(test)()


def test_beyond_its_context_it_makes_no_guesses(model: DraftModel) -> None:
    async def test() -> None:
        draft = model.draft(6)
        draft.begin(PROMPT, Sampling())
        assert len(await draft.propose(9)) == 3  # two more positions, and a token that needs none
        assert await draft.propose(1) == []
        assert draft.off_reason == "the text has 7 tokens, and the draft's context is 6"
        draft.begin(PROMPT, Sampling())
        assert draft.off_reason == ""
        long, pipeline = model.draft(20), EnginePipeline(ToyEngine(TOY), 60)
        _, speculation = await write(pipeline, PROMPT, 30, long, k=2)
        report = speculation.report()
        assert report is not None
        assert report.off == "the text has 34 tokens, and the draft's context is 20"

    in_loop(test)()


def test_a_failed_device_raises_and_a_closed_draft_opens_no_cache_again(
    model: DraftModel, engine: RecordingEngine
) -> None:
    async def test() -> None:
        draft = begin_draft(model, PROMPT)
        engine.broken = EngineError("no device")
        with pytest.raises(EngineError, match="no device"):
            await draft.propose(1)
        engine.broken = None
        assert len(engine.sessions) == 1
        draft.close()
        draft.close()
        await until(lambda: not engine.sessions)
        draft.begin([*PROMPT, 1, 2], Sampling())
        for late in (draft.propose(1), draft.read()):  # an answer goes on after its session was closed
            with pytest.raises(EngineError, match="closed"):
                await late
        assert engine.sessions == {}

    in_loop(test)()


def test_a_failed_draft_frees_its_cache_before_the_next_one_opens(
    model: DraftModel, engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        drafts = Drafts(toy_manifest(), config=ClientConfig(), on_event=print, clock=lambda: 0.0)
        monkeypatch.setattr(drafts, "package_of", lambda draft: Path("small"))
        drafts._models[Path("small")] = asyncio.create_task(asyncio.sleep(0, model))
        session = SessionDrafts(drafts, max_tokens=32, clock=lambda: 0.0)
        for failing in (True, False):
            guesser = await session.guesser(GenerationConfig())
            assert guesser is not None
            guesser.draft.begin(PROMPT, Sampling())
            engine.broken = EngineError("all blocks of the KV cache are held") if failing else None
            assert len(await guesser.propose(1)) == (not failing)
        assert len(engine.sessions) == 1
        session.close()
        await drafts.close()

    in_loop(test)()


@pytest.mark.parametrize("k", [1, 4, None])
def test_an_equal_target_accepts_every_guess(model: DraftModel, k: int | None) -> None:
    """Both use the same random number at each position: no guess of an equal model is ever wrong."""
    sampling = Sampling(temperature=1.3, top_p=0.9, seed=8)
    pipeline = EnginePipeline(ToyEngine(TOY), 60)
    draft = model.draft(CONTEXT)
    written, speculation = asyncio.run(write(pipeline, PROMPT, 30, draft, sampling=sampling, k=k))
    assert written == plain_text(ToyEngine(TOY), PROMPT, 30, sampling)
    report = speculation.report()
    assert report is not None
    assert report.accepted == report.proposed or report.proposed - report.accepted <= 4  # at the end of the text
    draft.close()


# -- choosing the draft


def test_another_vocabulary_is_refused() -> None:
    target, small = toy_manifest(), toy_manifest(2, name="small")
    check_same_vocabulary(small, target)
    other = {**small.parts, TOKENIZER: small.parts[EMBED]}
    with pytest.raises(ConfigError, match="small cannot draft for toy: its tokenizer is another"):
        check_same_vocabulary(replace(small, parts=other), target)
    with pytest.raises(ConfigError, match=f"it has 5 tokens, not {VOCAB}"):
        check_same_vocabulary(replace(small, vocab_size=5), target)


def test_look_up_replaces_a_configured_draft_with_another_vocabulary(
    tiny_packages: Mapping[str, Path], tmp_path: Path
) -> None:
    target = replace(load_manifest(tiny_packages["llama"]), vocab_size=5)
    events: list[Event] = []
    config = ClientConfig(draft_package=tiny_packages["qwen3"], cache_dir=tmp_path)

    async def test() -> None:
        drafts = Drafts(target, config=config, on_event=events.append, clock=lambda: 0.0)
        session = SessionDrafts(drafts, max_tokens=32, clock=lambda: 0.0)
        for _ in range(2):
            guesser = await session.guesser(GenerationConfig())
            assert guesser is not None
            assert guesser.draft.name == "ngram"
        assert len(events) == 1
        assert "it has 259 tokens, not 5" in events[0].text
        with pytest.raises(ConfigError, match="not 5"):
            await session.guesser(GenerationConfig(draft=tiny_packages["qwen3"]))
        await drafts.close()

    in_loop(test)()


def test_a_session_starts_from_the_measurements_of_the_one_before(
    tiny_packages: Mapping[str, Path], tmp_path: Path
) -> None:
    target = load_manifest(tiny_packages["llama"])

    async def test() -> None:
        drafts = Drafts(target, config=ClientConfig(cache_dir=tmp_path), on_event=print, clock=lambda: 0.0)
        for known in (False, True):
            session = SessionDrafts(drafts, max_tokens=32, clock=lambda: 0.0)
            guesser = await session.guesser(GenerationConfig(draft="ngram"))
            assert guesser is not None
            assert (guesser.tuner.costs is not None) is known
            guesser.tuner.record_answer(answer(1.0))
            session.close()
        other = SessionDrafts(drafts, max_tokens=32, clock=lambda: 0.0)
        guesser = await other.guesser(GenerationConfig(draft="ngram", max_ngram_size=5))
        assert guesser is not None
        assert guesser.tuner.costs is None  # another draft
        await drafts.close()

    in_loop(test)()


def test_a_package_is_loaded_once_and_drafts_for_its_family(tiny_packages: Mapping[str, Path], tmp_path: Path) -> None:
    target = load_manifest(tiny_packages["llama"])
    events: list[Event] = []
    config = ClientConfig(draft_package=tiny_packages["qwen3"], cache_dir=tmp_path)

    async def test() -> None:
        drafts = Drafts(target, config=config, on_event=events.append, clock=lambda: 0.0)
        session = SessionDrafts(drafts, max_tokens=32, clock=lambda: 0.0)
        await drafts.load("auto")
        with pytest.raises(ConfigError, match="'nowhere'"):
            await drafts.load("nowhere")
        auto = await session.guesser(GenerationConfig())
        named = await session.guesser(GenerationConfig(draft=str(tiny_packages["qwen3"]), num_assistant_tokens=2))
        assert auto is not None
        assert named is not None
        assert auto.draft is named.draft  # one cache
        assert auto.tuner is not named.tuner
        assert await session.guesser(GenerationConfig()) is auto
        assert [event.text for event in events] == ["loading the draft qwen3"]
        auto.draft.begin([5, 6, 7], Sampling())
        assert len(await auto.draft.propose(3)) == 3
        look_up = await session.guesser(GenerationConfig(draft="ngram"))
        assert look_up is not None
        assert look_up.draft.name == "ngram"
        assert await session.guesser(GenerationConfig(draft="off")) is None
        assert await session.guesser(GenerationConfig(num_assistant_tokens=0)) is None
        with pytest.raises(ConfigError, match="no model package is there"):
            await session.guesser(GenerationConfig(draft="nowhere"))
        with pytest.raises(PackageError):
            await session.guesser(GenerationConfig(draft=tmp_path / "none"))
        session.close()
        await drafts.close()
        await drafts.close()

    in_loop(test)()

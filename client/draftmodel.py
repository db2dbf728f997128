"""A whole model package as a draft: one span over all its layers, run in this process by a thread of its own.

It guesses with the very function, and the very random numbers of each position, that the last hop chooses with. Where
draft and target agree on the probabilities they draw the same token, nearly as often as any rule could accept
(Daliri et al. 2024), no distribution has to travel to the last hop, and a seed gives one text with any draft or none.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from client.draft import Line, common_prefix
from swarm.engine.base import Engine, Step
from swarm.errors import ConfigError, EngineError, SwarmError
from swarm.manifest import TOKENIZER, Manifest, check_files, load_manifest
from swarm.sampling import Sampling, choose

T = TypeVar("T")
_CHUNK = 256  # a prompt is read in steps of so many tokens: the head's and the layers' activations stay small


class DraftModel:
    """A loaded model and the thread that owns its device; any number of texts at once. Made by `open`."""

    def __init__(self, engine: Engine, manifest: Manifest, executor: ThreadPoolExecutor) -> None:
        self._engine = engine
        self._manifest = manifest
        self._executor = executor
        self._keys = itertools.count()
        self._closed = False

    @classmethod
    async def open(
        cls, package: Path, target: Manifest, *, device: str = "CPU", threads: int = 0, cache_dir: Path | None = None
    ) -> DraftModel:
        """Load it, for seconds. Raises PackageError, ConfigError where its vocabulary is another, EngineError."""
        # one thread: an executor of one worker is that, with futures that asyncio understands
        executor = ThreadPoolExecutor(1, thread_name_prefix="draft")

        def load() -> tuple[Engine, Manifest]:
            # loaded here, not above: `import client` stays light
            from swarm.engine.compose import open_engine

            manifest = load_manifest(package)
            check_same_vocabulary(manifest, target)
            check_files(package, manifest.files(manifest.parts))
            engine = open_engine(package, manifest, manifest.span, device=device, threads=threads, cache_dir=cache_dir)
            return engine, manifest

        try:
            engine, manifest = await asyncio.get_running_loop().run_in_executor(executor, load)
        except BaseException:
            executor.shutdown(wait=False)
            raise
        return cls(engine, manifest, executor)

    @property
    def name(self) -> str:
        return f"{self._manifest.name} {self._manifest.weights}"

    def draft(self, max_tokens: int) -> ModelDraft:
        """A draft of its own for one session, of at most `max_tokens` positions; beyond its context it is silent."""
        return ModelDraft(self, f"text {next(self._keys)}", min(max_tokens, self._manifest.context_length))

    def run(self, work: Callable[[Engine], T]) -> asyncio.Future[T]:
        """`work` in the thread that owns the engine, after all that was asked for before."""
        return asyncio.get_running_loop().run_in_executor(self._executor, work, self._engine)

    def post(self, work: Callable[[Engine], object]) -> None:
        """As `run`, for what nobody waits for and what cannot fail."""
        if not self._closed:
            self._executor.submit(work, self._engine)

    def close(self) -> None:
        """What runs ends first; nothing waits for it. Idempotent."""
        self._closed = True
        self._executor.shutdown(wait=False)


class ModelDraft:
    """One text's `Draft`.

    `_fed` ids of the line are in the engine's cache, or will be once its thread gets there: steps run in the order in
    which they were asked for, also those whose asker was cancelled, and a step that starts lower rewinds.
    """

    instant = False

    def __init__(self, model: DraftModel, key: str, max_tokens: int) -> None:
        self.name = model.name
        self._model = model
        self._key = key
        self._max_tokens = max_tokens
        self._line = Line()
        self._sampling = Sampling()
        self._fed = 0
        self._is_open = False

    def begin(self, known: Sequence[int], sampling: Sampling) -> None:
        self._sampling = sampling
        same = common_prefix(self._line.ids, known)
        self._line.begin(known)
        self._fed = min(self._fed, same)

    def accept(self, n: int, correction: int | None) -> None:
        self._line.accept(n, correction)
        if correction is not None:
            self._fed = min(self._fed, self._line.sure - 1)

    @property
    def unread(self) -> int:
        length = len(self._line.ids)
        return max(length - self._fed - 1, 0) if length <= self._max_tokens else 0

    async def read(self) -> None:
        """As `Draft` says. Raises EngineError where the device fails."""
        while self.unread:
            await self._feed(self._fed + min(self.unread, _CHUNK), answers=False)

    async def propose(self, k: int) -> list[int]:
        """As `Draft` says. Raises EngineError where the device fails."""
        ids = self._line.ids
        guesses: list[int] = []
        while len(guesses) < k and len(ids) <= self._max_tokens:
            while self.unread >= _CHUNK:
                await self._feed(self._fed + _CHUNK, answers=False)
            guesses.append(await self._feed(len(ids), answers=True))
            ids.append(guesses[-1])
        return guesses

    def close(self) -> None:
        """Give its cache back. Idempotent; the thread does it when it gets there."""
        if self._is_open:
            self._is_open = False
            self._fed = 0
            self._model.post(lambda engine: engine.close(self._key))

    async def _feed(self, end: int, *, answers: bool) -> int:
        """Have the line computed up to `end`; the token that follows if it `answers`."""
        if self._fed >= end:
            self._fed = end - 1  # all is cached: one position again, for its answer
        opens, self._is_open = not self._is_open, True
        tokens = np.array(self._line.ids[self._fed : end], np.int32)
        step = Step(session=self._key, start=self._fed, tokens=tokens, rows=int(answers))
        sampling = self._sampling
        history = np.array(self._line.ids[:end], np.int32) if sampling.looks_back else None
        self._fed = end

        def run(engine: Engine) -> int:
            if opens:
                engine.open(self._key, self._max_tokens)
            (result,) = engine.forward([step])
            if isinstance(result, SwarmError):
                raise EngineError(f"the draft failed: {result}") from result
            return choose(result[0], sampling, position=end, history=history).token if answers else 0

        return await asyncio.shield(self._model.run(run))


def check_same_vocabulary(draft: Manifest, target: Manifest) -> None:
    """Raises ConfigError unless ids mean the same in both models: the tokenizer's graphs and tables are equal."""
    hashes = [{entry.sha256 for entry in m.files([TOKENIZER]) if _is_graph(entry.path)} for m in (draft, target)]
    if hashes[0] != hashes[1] or draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{draft.name} cannot draft for {target.name}: its tokenizer is another. Take a smaller model of the same "
            "family, or --draft ngram"
        )


def _is_graph(path: str) -> bool:
    """Not the model's own configuration, which lies beside them."""
    return path.endswith((".xml", ".bin"))

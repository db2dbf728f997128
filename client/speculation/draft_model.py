"""A whole model package as a draft: one span over all its layers, run in this process by a thread of its own.

It chooses guesses with the same function, and the same random numbers of each position, as the last hop. Where draft
and target agree on the probabilities they draw the same token, nearly as often as any rule could accept (Daliri et al.
2024). No distribution has to be sent to the last hop, and a seed gives one text with any draft or none.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil

from client.pipeline.prefix import common_prefix
from client.speculation.draft import Line
from client.speculation.draft_thread import DraftThread, Feed
from swarm.engine.base import Engine, Step
from swarm.errors import ConfigError, EngineError, UnsupportedModel
from swarm.model.manifest import TOKENIZER, Manifest, check_files, load_manifest
from swarm.model.memory_footprint import kv_token_bytes
from swarm.process.priority import lower_priority
from swarm.sampling import Sampling

_MAX_KV_TOKENS = 1 << 17
_CHUNK = 256  # tokens a step while reading a prompt: keeps the activations small


class DraftModel:
    """A loaded model and the thread that owns its device; any number of texts at once. Made by `open`."""

    def __init__(self, engine: Engine, manifest: Manifest, executor: ThreadPoolExecutor) -> None:
        self.thread = DraftThread(engine, executor)
        self._manifest = manifest
        self._keys = itertools.count()

    @classmethod
    async def open(
        cls,
        package: Path,
        target: Manifest,
        *,
        device: str = "CPU",
        threads: int = 0,
        engine: str = "stateful",
        cache_dir: Path | None = None,
    ) -> DraftModel:
        """Load it, which takes seconds; `engine` as `ClientConfig.draft_engine`.

        Raises PackageError, ConfigError if its vocabulary differs, EngineError, UnsupportedModel.
        """
        # a thread as an executor of one worker: asyncio can wait for its futures
        executor = ThreadPoolExecutor(1, thread_name_prefix="draft", initializer=lower_priority)

        def load() -> tuple[Engine, Manifest]:
            manifest = load_manifest(package)
            check_same_vocabulary(manifest, target)
            check_files(package, manifest.files(manifest.parts))
            return _open_engine(package, manifest, engine, device, threads, cache_dir), manifest

        try:
            loaded, manifest = await asyncio.get_running_loop().run_in_executor(executor, load)
        except BaseException:
            executor.shutdown(wait=False)
            raise
        return cls(loaded, manifest, executor)

    @property
    def name(self) -> str:
        return f"{self._manifest.name} {self._manifest.weights}"

    def draft(self, max_tokens: int) -> ModelDraft:
        """A draft for one session of at most `max_tokens` positions. Beyond the model's context it makes no guesses."""
        return ModelDraft(self, f"text {next(self._keys)}", min(max_tokens, self._manifest.context_length))

    def close(self) -> None:
        """Close the thread after the step that it runs, without waiting. Idempotent."""
        self.thread.close()


class ModelDraft:
    """One text's `Draft`.

    `_fed` ids of the line are in the engine's cache, or will be when the thread has run the steps that were queued. It
    runs them in order, also those whose caller was cancelled; a step that starts lower rewinds.
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
        self._closed = False

    def begin(self, known: Sequence[int], sampling: Sampling) -> None:
        self._sampling = sampling
        same = common_prefix(self._line.ids, known)
        self._line.begin(known)
        self._fed = min(self._fed, same)

    def accept(self, n: int, correction: int | None) -> None:
        self._line.accept(n, correction)
        if correction is not None:
            self._fed = min(self._fed, self._line.known - 1)

    @property
    def unread_tokens(self) -> int:
        length = len(self._line.ids)
        return max(length - self._fed - 1, 0) if length <= self._max_tokens else 0

    @property
    def off_reason(self) -> str:
        length = len(self._line.ids)
        reason = f"the text has {length} tokens, and the draft's context is {self._max_tokens}"
        return reason if length > self._max_tokens else ""

    async def read(self) -> None:
        """See `Draft`. Raises EngineError if the device fails or the draft is closed."""
        while self.unread_tokens:
            await self._feed(self._fed + min(self.unread_tokens, _CHUNK), answers=False)

    async def propose(self, k: int) -> list[int]:
        """See `Draft`. Raises EngineError if the device fails or the draft is closed."""
        ids = self._line.ids
        guesses: list[int] = []
        while len(guesses) < k and len(ids) <= self._max_tokens:
            while self.unread_tokens >= _CHUNK:
                await self._feed(self._fed + _CHUNK, answers=False)
            guesses.append(await self._feed(len(ids), answers=True))
            ids.append(guesses[-1])
        return guesses

    def close(self) -> None:
        """Free its cache, after the steps that were queued before. It makes no more guesses. Idempotent."""
        self._closed = True
        if self._is_open:
            self._is_open = False
            self._model.thread.post(lambda engine: engine.close(self._key))

    async def _feed(self, end: int, *, answers: bool) -> int:
        """Have the line computed up to `end`. Returns the token that follows if `answers`, else 0."""
        if self._closed:
            raise EngineError("the session that this draft guessed for is closed")
        if self._fed >= end:
            self._fed = end - 1  # all is cached: compute the last position again, for its answer
        tokens = np.array(self._line.ids[self._fed : end], np.int32)
        feed = Feed(
            step=Step(session=self._key, start=self._fed, tokens=tokens, rows=int(answers)),
            open_tokens=0 if self._is_open else self._max_tokens,
            sampling=self._sampling if answers else None,
            history=np.array(self._line.ids[:end], np.int32) if self._sampling.uses_history else None,
        )
        self._is_open, self._fed = True, end
        token: int = await asyncio.shield(self._model.thread.feed(feed))
        return token


def _open_engine(
    package: Path, manifest: Manifest, choice: str, device: str, threads: int, cache_dir: Path | None
) -> Engine:
    """The first engine that works of those that `choice` allows."""
    # imported here, so that `import client` stays light
    from swarm.engine.choice import EngineKind, engines_to_try, open_chosen_engine

    def open_as(kind: EngineKind) -> Engine:
        return open_chosen_engine(
            kind,
            package,
            manifest,
            manifest.span,
            device=device,
            threads=threads,
            cache_dir=cache_dir,
            kv_tokens=_kv_tokens(manifest),
        )

    *others, last = engines_to_try(choice, device)
    for kind in others:
        with contextlib.suppress(UnsupportedModel):
            return open_as(kind)
    return open_as(last)


def _kv_tokens(manifest: Manifest) -> int:
    """Positions over all texts. Their memory is allocated when they are written."""
    budget: int = psutil.virtual_memory().available // 4
    return min(max(budget // kv_token_bytes(manifest, manifest.span, "f32"), manifest.context_length), _MAX_KV_TOKENS)


def check_same_vocabulary(draft: Manifest, target: Manifest) -> None:
    """Raise ConfigError unless ids mean the same in both models: the tokenizers' graphs and tables are equal."""
    hashes = [{entry.sha256 for entry in m.files([TOKENIZER]) if _is_graph(entry.path)} for m in (draft, target)]
    same = hashes[0] == hashes[1]
    if not same or draft.vocab_size != target.vocab_size:
        sizes = f"it has {draft.vocab_size} tokens, not {target.vocab_size}"
        raise ConfigError(
            f"{draft.name} cannot draft for {target.name}: {sizes if same else 'its tokenizer is another'}. Take a "
            "smaller model of the same family, or --draft ngram"
        )


def _is_graph(path: str) -> bool:
    """Whether the file belongs to the tokenizer itself, not to the configuration next to it."""
    return path.endswith((".xml", ".bin"))

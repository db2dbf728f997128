"""The drafts of one client: which one a generation gets, models loaded once, and what is known of each session's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from client.config import AUTO, MAX_GUESSES, NGRAM, OFF, ClientConfig, GenerationConfig
from client.events import Event, OnEvent, Stage
from client.speculation.draft import Draft, NgramDraft
from client.speculation.draft_model import DraftModel, ModelDraft, check_same_vocabulary
from client.speculation.speculation import Guesser
from client.speculation.tuner import Learned, Prior, Tuner
from swarm.errors import ConfigError
from swarm.model.manifest import Manifest, load_manifest, package_folder

_LOOK_UP = Prior(chance=0.5, draft_s=1e-5)
_MODEL = Prior(chance=0.7, draft_s=0.01)


class Drafts:
    """Made by `SwarmClient`; belongs to one event loop. `close` it in the end."""

    def __init__(
        self, target: Manifest, *, config: ClientConfig, on_event: OnEvent, clock: Callable[[], float]
    ) -> None:
        self._target = target
        self._config = config
        self._on_event = on_event
        self._clock = clock
        self._models: dict[Path, asyncio.Task[DraftModel]] = {}
        self._fits: dict[Path, bool] = {}
        self.learned: dict[str, Learned] = {}
        """By each draft's name, in the session that ended last."""

    async def model(self, package: Path) -> DraftModel:
        """Loaded at the first call, for seconds. Raises PackageError, ConfigError, EngineError."""
        task = self._models.get(package)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            self._on_event(Event(stage=Stage.DRAFT, text=f"loading the draft {package.name}"))
            opening = DraftModel.open(
                package,
                self._target,
                device=self._config.draft_device,
                threads=self._config.draft_threads,
                engine=self._config.draft_engine,
                cache_dir=self._config.cache_dir / "graphs",
            )
            task = self._models[package] = asyncio.create_task(opening)
        # whoever is cancelled does not take it away from others who wait for it
        return await asyncio.shield(task)

    def package_of(self, draft: str | Path) -> Path | None:
        """The model that `GenerationConfig.draft` names here; None for look-up, or no draft.

        Raises ConfigError, and PackageError where what is configured is damaged.
        """
        if draft == AUTO:
            configured = self._config.draft_package
            return configured if configured is not None and self._fits_target(configured) else None
        if draft in (NGRAM, OFF):
            return None
        package = package_folder(draft)
        if package is None:
            raise ConfigError(
                f"draft is {str(draft)!r}: no model package is there; take a package's directory, or ngram, auto or off"
            )
        return package

    async def load(self, draft: str | Path) -> None:
        """The model that it names, if it names one, now. Raises as `model` and `package_of` do."""
        package = self.package_of(draft)
        if package is not None:
            await self.model(package)

    def _fits_target(self, package: Path) -> bool:
        """Whether it has the target's vocabulary; where it has not, that is said once. Raises PackageError."""
        if package not in self._fits:
            try:
                check_same_vocabulary(load_manifest(package), self._target)
                self._fits[package] = True
            except ConfigError as error:
                self._fits[package] = False
                self._on_event(Event(stage=Stage.DRAFT, text=f"{error}, which is used now"))
        return self._fits[package]

    async def close(self) -> None:
        """Idempotent."""
        models, self._models = list(self._models.values()), {}
        for task in models:
            task.cancel()
        for model in await asyncio.gather(*models, return_exceptions=True):
            if isinstance(model, DraftModel):
                model.close()


class SessionDrafts:
    """One session's drafts, kept from answer to answer: their caches and what was measured."""

    def __init__(self, drafts: Drafts, *, max_tokens: int, clock: Callable[[], float]) -> None:
        self._drafts = drafts
        self._max_tokens = max_tokens
        self._clock = clock
        self._drafts_by_name: dict[str, Draft] = {}
        self._guessers: dict[tuple[str, int | None, int | None], Guesser] = {}

    async def guesser(self, config: GenerationConfig) -> Guesser | None:
        """What `config.draft` means here; None for no draft. Raises ConfigError, PackageError, EngineError."""
        if config.draft == OFF or config.num_assistant_tokens == 0:
            return None
        package = self._drafts.package_of(config.draft)
        name = f"{NGRAM} {config.max_ngram_size}" if package is None else str(package)
        key = (name, config.num_assistant_tokens, config.draft_windows)
        draft, guesser = self._drafts_by_name.get(name), self._guessers.get(key)
        is_its = guesser is not None and guesser.draft is draft  # else another one's failed, and was replaced
        if guesser is not None and is_its and not guesser.failure:
            return guesser
        if draft is None or is_its:
            _close(draft)  # it may hold memory that another needs
            draft = self._drafts_by_name[name] = await self._draft(package, config.max_ngram_size)
        tuner = Tuner(
            _LOOK_UP if draft.instant else _MODEL,
            free_guesses=draft.instant,
            k=config.num_assistant_tokens,
            depth=config.draft_windows,
            learned=self._drafts.learned.get(name),
        )
        guesser = self._guessers[key] = Guesser(draft, tuner, self._clock)
        return guesser

    def close(self) -> None:
        """Give the caches back; what was found out stays with the client's drafts. Idempotent."""
        for (name, _, _), guesser in self._guessers.items():
            if (learned := guesser.tuner.learned) is not None:
                self._drafts.learned[name] = learned
        for draft in self._drafts_by_name.values():
            _close(draft)

    async def _draft(self, package: Path | None, max_ngram_size: int) -> Draft:
        if package is None:
            return NgramDraft(max_ngram_size)
        model = await self._drafts.model(package)
        return model.draft(self._max_tokens + MAX_GUESSES)


def _close(draft: Draft | None) -> None:
    if isinstance(draft, ModelDraft):
        draft.close()

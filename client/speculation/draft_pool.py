"""The drafts of one client: which draft a generation gets, models loaded once, and what sessions measured."""

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
        """By each draft's name: what the session that ended last measured."""

    async def model(self, package: Path) -> DraftModel:
        """The model, which the first call loads, in seconds. Raises PackageError, ConfigError, EngineError."""
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
        # Shielded: cancelling one waiter must not cancel the loading that others wait for.
        return await asyncio.shield(task)

    def package_of(self, draft: str | Path) -> Path | None:
        """The model package that `GenerationConfig.draft` names; None for look-up or no draft.

        Raises ConfigError, and PackageError if the configured package is damaged.
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
        """Load the model that `draft` names, if it names one. Raises what `model` and `package_of` raise."""
        package = self.package_of(draft)
        if package is not None:
            await self.model(package)

    def _fits_target(self, package: Path) -> bool:
        """Whether it has the target's vocabulary; if not, an event reports that once. Raises PackageError."""
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
    """One session's drafts with their caches and measurements, kept from answer to answer."""

    def __init__(self, drafts: Drafts, *, max_tokens: int, clock: Callable[[], float]) -> None:
        self._drafts = drafts
        self._max_tokens = max_tokens
        self._clock = clock
        self._drafts_by_name: dict[str, Draft] = {}
        self._guessers: dict[tuple[str, int | None, int | None], Guesser] = {}

    async def guesser(self, config: GenerationConfig) -> Guesser | None:
        """The guesser for `config.draft`; None for no draft. Raises ConfigError, PackageError, EngineError."""
        if config.draft == OFF or config.num_assistant_tokens == 0:
            return None
        package = self._drafts.package_of(config.draft)
        name = f"{NGRAM} {config.max_ngram_size}" if package is None else str(package)
        key = (name, config.num_assistant_tokens, config.draft_windows)
        draft, guesser = self._drafts_by_name.get(name), self._guessers.get(key)
        # a guesser's draft is not the current one if it failed and another guesser has replaced it
        is_current = guesser is not None and guesser.draft is draft
        if guesser is not None and is_current and not guesser.failure:
            return guesser
        if draft is None or is_current:
            _close(draft)  # first: it may have memory that the new one needs
            draft = self._drafts_by_name[name] = await self._open_draft(package, config.max_ngram_size)
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
        """Free the caches; the client's `Drafts` keep the measurements. Idempotent."""
        for (name, _, _), guesser in self._guessers.items():
            if (learned := guesser.tuner.learned) is not None:
                self._drafts.learned[name] = learned
        for draft in self._drafts_by_name.values():
            _close(draft)

    async def _open_draft(self, package: Path | None, max_ngram_size: int) -> Draft:
        if package is None:
            return NgramDraft(max_ngram_size)
        model = await self._drafts.model(package)
        return model.draft(self._max_tokens + MAX_GUESSES)


def _close(draft: Draft | None) -> None:
    if isinstance(draft, ModelDraft):
        draft.close()

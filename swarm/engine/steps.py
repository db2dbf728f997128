"""Code shared by all engines: checks of steps and sessions, and running steps one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from swarm.engine.base import Engine, Step, StepResult
from swarm.errors import BadStep, ContextExceeded, EngineError, SwarmError, UnknownSession
from swarm.model.manifest import Manifest
from swarm.model.spans import LayerRange

WARM_UP_TOKENS = 32
S = TypeVar("S")


class Sessions(dict[str, S]):
    """An engine's data of each open session, by session name."""

    def check_unused(self, session: str) -> None:
        """Raises EngineError if the session exists."""
        if session in self:
            raise EngineError(f"session {session!r} is open already: close it first")

    def find(self, session: str) -> S:
        """Raises UnknownSession."""
        try:
            return self[session]
        except KeyError:
            raise UnknownSession(f"session {session!r} is not open here: open it and feed its known tokens") from None


class StepRules:
    """Checks the shapes of steps over `span`. Pure. The caches check positions: see `check_position`."""

    def __init__(self, manifest: Manifest, span: LayerRange) -> None:
        self.span = span
        self.context = manifest.context_length
        self.hidden_size = manifest.hidden_size
        self.vocab_size = manifest.vocab_size
        self.takes_tokens = span.first == 0
        self.gives_logits = span.last == len(manifest.layers)

    def check_length(self, max_tokens: int) -> None:
        """Raises ContextExceeded for a session longer than the model's context."""
        if max_tokens > self.context:
            raise ContextExceeded(
                f"{max_tokens} positions requested, the model's context is {self.context}: request fewer"
            )

    def check(self, step: Step) -> None:
        """Raises BadStep naming the invalid value."""
        tokens, hidden = step.tokens, step.hidden
        if tokens.ndim != 1 or tokens.dtype != np.int32:
            raise BadStep(f"tokens are {tokens.dtype} {list(tokens.shape)}, not int32 [n]")
        n = len(tokens)
        if n < 1:
            raise BadStep("a step of 0 tokens: send at least one")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise BadStep(f"token id {wrong} is outside the vocabulary of {self.vocab_size}")
        if not 0 <= step.rows <= (n if self.gives_logits else 0):
            has = f"0 to {n} are possible" if self.gives_logits else f"layers {self.span} have no head"
            raise BadStep(f"{step.rows} rows of logits asked for: {has}")
        if self.takes_tokens:
            if hidden is not None:
                raise BadStep(f"layers {self.span} take token ids, not hidden states")
        elif hidden is None:
            raise BadStep(f"layers {self.span} take hidden states, and the step has none")
        elif hidden.dtype != np.float32 or hidden.shape != (n, self.hidden_size):
            raise BadStep(
                f"hidden states are {hidden.dtype} {list(hidden.shape)}, not float32 [{n}, {self.hidden_size}]"
            )
        elif not all_finite(hidden):
            raise BadStep("hidden states hold numbers that are not finite")


def check_position(start: int, n: int, *, length: int, max_tokens: int) -> None:
    """Check that `n` tokens can be computed from position `start` in a session with `length` cached positions.

    Raises BadStep for a step that leaves a gap or is empty, ContextExceeded for a step that ends beyond the session.
    """
    if n < 1:
        raise BadStep(f"a step of {n} tokens: send at least one")
    if not 0 <= start <= length:
        raise BadStep(f"start {start} is outside 0 to {length}, the length of what is cached")
    if start + n > max_tokens:
        raise ContextExceeded(
            f"{n} tokens from position {start} end at {start + n}, beyond the session's "
            f"{max_tokens}: shorten the text or open a longer session"
        )


def check_unique(step: Step, seen: set[str]) -> None:
    """Add the step's session to those `seen` in this call. Raises BadStep if it is there already."""
    if step.session in seen:
        raise BadStep(f"two steps of session {step.session!r} in one call: send them in turn")
    seen.add(step.session)


def run_one_by_one(steps: Sequence[Step], run: Callable[[Step], StepResult]) -> list[StepResult]:
    """`Engine.forward` for an engine that runs one step after another. `run` runs a step or raises SwarmError.

    Raises EngineError only if every step of the call failed on the device; otherwise a failed step's result is
    its error, and the other results are valid.
    """
    results: list[StepResult] = []
    seen: set[str] = set()
    for step in steps:
        try:
            check_unique(step, seen)
            results.append(run(step))
        except SwarmError as error:
            results.append(error)
    failures = [result for result in results if isinstance(result, EngineError)]
    if failures and len(failures) == len(results):
        raise failures[0]
    return results


def run_warm_up(engine: Engine, rules: StepRules, tokens: int) -> None:
    """Run a prompt of up to `tokens` and one more token, in a session of its own.

    A plugin packs its weights at the first inference of several tokens and at the first of one (on SmolLM2 in two
    layouts). After the warm-up no user waits for it, the file's pages can be dropped, and a graph that does not run
    has failed. Raises the error of a step that fails.
    """
    session = "\0warm-up"
    count = min(tokens, rules.context - 1)
    engine.open(session, count + 1)
    try:
        for start, n in ((0, count), (count, 1)):
            hidden = None if rules.takes_tokens else np.zeros((n, rules.hidden_size), np.float32)
            step = Step(session=session, start=start, tokens=np.zeros(n, np.int32), hidden=hidden)
            (result,) = engine.forward([step])
            if isinstance(result, SwarmError):
                raise result
    finally:
        engine.close(session)


def all_finite(array: NDArray[np.float32]) -> bool:
    """Whether all numbers are finite, without a temporary array: they are if their sum is. Otherwise, as the sum may
    have overflowed, maximum and minimum decide, which are NaN if any number is."""
    with np.errstate(over="ignore", invalid="ignore"):
        if math.isfinite(np.add.reduce(array, axis=None)):
            return True
    high, low = np.maximum.reduce(array, axis=None), np.minimum.reduce(array, axis=None)
    return math.isfinite(high) and math.isfinite(low)

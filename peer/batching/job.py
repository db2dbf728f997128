"""A step on its way through the device: from the event loop to the worker's thread, portion by portion, and back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peer.batching.scheduler import PendingStep
from swarm.engine.base import Step, StepResult
from swarm.errors import BadStep, EngineError, PeerFailed, SwarmError
from swarm.sampling import Choice, Sampling, choose


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What a step gave: `hidden` [n, hidden_size] float32, or (from the span with the head) one choice
    for each row. Seconds it waited for the device, and kept it; `batch` steps ran in the same call."""

    hidden: NDArray[np.float32] | None
    choices: tuple[Choice, ...]
    queue_s: float
    compute_s: float
    batch: int = 1


@dataclass(eq=False, kw_only=True)
class StepJob(PendingStep):
    """A step on its way; `future` belongs to the event loop, `dropped` is set from there."""

    future: asyncio.Future[Any]
    step: Step
    sampling: Sampling | None
    history: NDArray[np.int32]
    dropped: bool = False
    started_at: float = 0.0
    compute_s: float = 0.0
    batch: int = 1  # steps in the last round

    def __post_init__(self) -> None:
        self.hidden: list[NDArray[np.float32]] = []
        self.choices: list[Choice] = []

    def drop(self) -> None:
        """Nobody waits for it any more. To be called in the event loop."""
        self.dropped = True
        self.future.cancel()

    def portion(self, count: int) -> Step:
        """The next `count` tokens as a step of their own; of the rows that are wanted, those among them."""
        step, first, last = self.step, self.done, self.done + count
        if count == self.tokens:
            return step
        return Step(
            session=step.session,
            start=step.start + first,
            tokens=step.tokens[first:last],
            hidden=None if step.hidden is None else step.hidden[first:last],
            rows=max(0, last - max(first, self.tokens - step.rows)),
        )

    def outcome(self) -> StepOutcome:
        hidden = None
        if self.sampling is None:
            hidden = self.hidden[0] if len(self.hidden) == 1 else np.concatenate(self.hidden)
        queue_s = self.started_at - self.put_at
        return StepOutcome(
            hidden=hidden,
            choices=tuple(self.choices),
            queue_s=queue_s,
            compute_s=self.compute_s,
            batch=self.batch,
        )

    def keep(self, step: Step, answer: StepResult) -> SwarmError | None:
        """Put the answer to the portion `step` with the others: as it is, or a token for each row of logits."""
        if isinstance(answer, EngineError):
            return device_failed(answer)
        if isinstance(answer, SwarmError):
            return answer
        if self.sampling is None:
            self.hidden.append(answer)
            return None
        first = step.end - step.rows + 1  # the position that the first of the rows is the choice for
        try:
            for position, row in enumerate(answer, first):
                self.choices.append(choose(row, self.sampling, position=position, history=self.history[:position]))
        except BadStep as error:  # a token id that the model does not have
            return error
        return None


def device_failed(error: SwarmError) -> PeerFailed:
    failed = PeerFailed(f"this peer's device failed: {error}")
    failed.__cause__ = error
    return failed

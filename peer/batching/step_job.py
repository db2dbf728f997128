"""A step on its way through the worker: from the event loop to the thread, portion by portion, and back."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peer.batching.scheduler import PendingStep
from swarm.engine.base import Step, StepResult
from swarm.errors import BadStep, EngineError, PeerFailed, SwarmError
from swarm.sampling import Choice, Sampling, choose

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """The result of a step: `hidden` [n, hidden_size] float32, or (on the span with the head) a choice for each row.

    The step waited `queue_s` seconds for the device and ran for `compute_s`; `batch` steps shared its last round.
    """

    hidden: NDArray[np.float32] | None
    choices: tuple[Choice, ...]
    queue_s: float
    compute_s: float
    batch: int = 1


@dataclass(eq=False, kw_only=True)
class StepJob(PendingStep):
    """A step on its way. `future` belongs to the event loop, which also sets `dropped`; the rest to the thread."""

    future: asyncio.Future[Any]
    step: Step
    sampling: Sampling | None
    history: NDArray[np.int32]
    dropped: bool = False
    started_at: float = 0.0
    compute_s: float = 0.0
    batch: int = 1
    hidden: list[NDArray[np.float32]] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)

    def drop(self) -> None:
        """Give up the step. To be called in the event loop."""
        self.dropped = True
        self.future.cancel()

    def portion(self, count: int) -> Step:
        """The next `count` tokens as a step of their own, with those of the requested rows that are among them."""
        step, first, last = self.step, self.computed, self.computed + count
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
        return StepOutcome(
            hidden=hidden,
            choices=tuple(self.choices),
            queue_s=self.started_at - self.queued_at,
            compute_s=self.compute_s,
            batch=self.batch,
        )

    def add_result(self, step: Step, result: StepResult) -> SwarmError | None:
        """Store the result of the portion `step`: hidden states, or a choice for each row. Returns its error."""
        if isinstance(result, EngineError):
            return device_failed(result)
        if isinstance(result, SwarmError):
            return result
        if self.sampling is None:
            self.hidden.append(result)
            return None
        first = step.end - step.rows + 1  # the position that the first row of logits chooses a token for
        try:
            for position, row in enumerate(result, first):
                self.choices.append(choose(row, self.sampling, position=position, history=self.history[:position]))
        except BadStep as error:  # a token id outside the vocabulary
            return error
        except Exception as error:
            # The cause is this step's content: it ends its own session, and counts against neither peer nor others.
            _log.exception("no token can be chosen for session %s", step.session)
            return BadStep(f"no token can be chosen from what this step asks for: {type(error).__name__}: {error}")
        return None


def device_failed(error: SwarmError) -> PeerFailed:
    failed = PeerFailed(f"this peer's device failed: {error}")
    failed.__cause__ = error
    return failed

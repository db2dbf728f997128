"""A draft that knows the text and errs on purpose, for a given acceptance.

It sleeps for the time that a model would take. Its guesses are wrong at a fixed share of the positions, drawn from
(seed, position): the same text always gets the same errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from client.speculation.draft import Line
from swarm.sampling import Sampling

GUESSES = 3
COST_SHARE = 0.2  # time of a guess as a share of the target's time for a token


class ScriptedDraft:
    """A `client.speculation.draft.Draft` over `text`, the token ids of prompt and answer. No guesses after its end."""

    off_reason = ""

    def __init__(
        self,
        text: Sequence[int],
        *,
        errors: float,
        seconds: float = 0.0,
        seed: int = 0,
        instant: bool | None = None,
        reading_s: float = 0.0,
    ) -> None:
        """`errors` is the share of wrong guesses, `seconds` the time of a guess, `reading_s` that of the prompt."""
        self.name = f"scripted, {1 - errors:.0%} right"
        self.instant = seconds == 0.0 if instant is None else instant
        self._text = list(text)
        self._errors = errors
        self._seconds = seconds
        self._seed = seed
        self._line = Line()
        self._reading_s = reading_s

    @property
    def unread_tokens(self) -> int:
        return len(self._line.ids) if self._reading_s else 0

    def begin(self, known: Sequence[int], sampling: Sampling) -> None:
        self._line.begin(known)

    async def read(self) -> None:
        await asyncio.sleep(self._reading_s)
        self._reading_s = 0.0

    async def propose(self, k: int) -> list[int]:
        if self._reading_s:
            await self.read()
        guesses: list[int] = []
        while len(guesses) < k and len(self._line.ids) < len(self._text):
            if not self.instant:
                await asyncio.sleep(self._seconds)
            guesses.append(self._at(len(self._line.ids)))
            self._line.ids.append(guesses[-1])
        return guesses

    def accept(self, n: int, correction: int | None) -> None:
        self._line.accept(n, correction)

    def _at(self, position: int) -> int:
        wrong = np.random.Generator(np.random.Philox(key=[self._seed, position])).random() < self._errors
        return self._text[position] ^ int(wrong)


def chance_of(acceptance: float) -> float:
    """The chance that a guess after right ones is right, from the share of `GUESSES` per trip that is accepted."""
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, GUESSES + 1)) / GUESSES < acceptance:
            low = middle
        else:
            high = middle
    return low

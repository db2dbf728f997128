"""Guessing what comes next: the interface of all drafts, and look-up in the text itself. Pure.

A draft holds a *line*: the text that is sure, and after it what it has guessed. `propose` makes the line longer,
`accept` moves the border and cuts off what was wrong. A wrong guess costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from swarm.sampling import Sampling
from swarm.wire.messages import GREEDY

_SHORTEST = 2  # what followed a single token before says little about what follows it now


class Draft(Protocol):
    """One text's draft. Not for two callers at once."""

    @property
    def name(self) -> str:
        """For a person."""

    @property
    def instant(self) -> bool:
        """`propose` takes no time worth speaking of, and never waits."""

    @property
    def unread(self) -> int:
        """How many tokens of the line it has to read before it can guess; that takes longer than a guess."""

    @property
    def silence(self) -> str:
        """Why it guesses no more in this text, whatever follows; empty where it may."""

    def begin(self, known: Sequence[int], sampling: Sampling) -> None:
        """The text is this now, its tokens will be chosen so, and nothing is guessed. What is cached stays cached."""

    async def read(self) -> None:
        """Read what is unread, but for what belongs to the next guess. It may be cancelled, and asked for again."""

    async def propose(self, k: int) -> list[int]:
        """Up to `k` more guesses at the end of the line. Cancelled, a correction or `begin` has to follow."""

    def accept(self, n: int, correction: int | None) -> None:
        """The oldest `n` guesses are sure. A `correction` follows them, and the guesses after them were wrong."""


class Line:
    """The ids of a text: `sure` of them certain, guesses after that."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.sure = 0

    def begin(self, known: Sequence[int]) -> None:
        self.ids = list(known)
        self.sure = len(self.ids)

    def accept(self, n: int, correction: int | None) -> None:
        self.sure += n
        assert self.sure <= len(self.ids), "more was accepted than guessed"
        if correction is not None:
            del self.ids[self.sure :]
            self.ids.append(correction)
            self.sure += 1


class NgramDraft:
    """Guesses that the text goes on as it did after the last time its latest tokens were there.

    As openvino_genai's prompt look-up (after Saxena 2023): the longest of the latest `max_ngram_size` ... 2 tokens
    that occurred before is looked for, here by an index that grows with the text, and its most recent occurrence wins.
    Copying goes on from there, into the copy itself where the text repeats, until a correction.

    >>> import asyncio
    >>> draft = NgramDraft(3)
    >>> draft.begin([1, 2, 3, 4, 9, 2, 3])
    >>> asyncio.run(draft.propose(5))
    [4, 9, 2, 3, 4]
    """

    name = "ngram"
    instant = True
    unread = 0
    silence = ""

    def __init__(self, max_ngram_size: int = 3) -> None:
        self._sizes = range(max_ngram_size, min(_SHORTEST, max_ngram_size) - 1, -1)
        self._line = Line()
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> the place after it, the latest but the end itself
        self._indexed = 0
        self._from: int | None = None  # where in the line the next guess is copied from

    def begin(self, known: Sequence[int], sampling: Sampling = GREEDY) -> None:
        self._line.begin(known)
        self._after.clear()
        self._indexed = 0
        self._from = None

    async def read(self) -> None:
        """There is nothing to be read: an index grows with each look."""

    async def propose(self, k: int) -> list[int]:
        ids = self._line.ids
        if self._from is None:
            self._from = self._look_up()
        if self._from is None:
            return []
        guesses = []
        for _ in range(k):
            guesses.append(ids[self._from])
            ids.append(ids[self._from])
            self._from += 1
        return guesses

    def accept(self, n: int, correction: int | None) -> None:
        self._line.accept(n, correction)
        if correction is not None:
            self._from = None

    def _look_up(self) -> int | None:
        """Where what followed the latest tokens before begins. The line has no guesses then."""
        ids = self._line.ids
        # n-grams that end before the last token: the end of the text is no earlier occurrence of itself
        for end in range(self._indexed + 1, len(ids)):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(ids[end - size : end])] = end
        self._indexed = max(self._indexed, len(ids) - 1)
        for size in self._sizes:
            if (found := self._after.get(tuple(ids[len(ids) - size :]))) is not None and size <= len(ids):
                return found
        return None

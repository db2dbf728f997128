"""Guessing the next tokens: the interface of all drafts, and look-up in the text itself. Pure.

A draft holds a *line*: the known text and its own guesses after it. `propose` appends guesses; `accept` turns the right
ones into known text and cuts off the wrong ones. A wrong guess costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from swarm.sampling import Sampling
from swarm.wire.messages import GREEDY

_MIN_NGRAM_SIZE = 2  # a single token says little about the next one


class Draft(Protocol):
    """One text's draft. Not for two callers at once."""

    @property
    def name(self) -> str:
        """For a person."""

    @property
    def instant(self) -> bool:
        """Whether `propose` takes no noticeable time and never waits."""

    @property
    def unread_tokens(self) -> int:
        """How many tokens of the line it must read (prefill) before it can guess, beyond what a guess reads anyway."""

    @property
    def off_reason(self) -> str:
        """Why it can make no more guesses in this text; empty if it can."""

    def begin(self, known: Sequence[int], sampling: Sampling) -> None:
        """Start over with the text `known`, without guesses. The next tokens are chosen by `sampling`. Caches stay."""

    async def read(self) -> None:
        """Read the unread tokens. May be cancelled and called again."""

    async def propose(self, k: int) -> list[int]:
        """Append up to `k` guesses to the line and return them. After a cancellation, call `begin`, or `accept` with a
        correction."""

    def accept(self, n: int, correction: int | None) -> None:
        """The oldest `n` guesses are right. If there is a `correction`, it follows them and the other guesses are
        wrong."""


class Line:
    """The ids of a text: the first `known` are certain, the others are guesses."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.known = 0

    def begin(self, known: Sequence[int]) -> None:
        self.ids = list(known)
        self.known = len(self.ids)

    def accept(self, n: int, correction: int | None) -> None:
        self.known += n
        assert self.known <= len(self.ids), "more was accepted than guessed"
        if correction is not None:
            del self.ids[self.known :]
            self.ids.append(correction)
            self.known += 1


class NgramDraft:
    """Guesses that the text continues as it did after the last occurrence of its latest tokens.

    As openvino_genai's prompt look-up (after Saxena 2023): it looks up the longest of the latest `max_ngram_size` ... 2
    tokens that occurred before, in an index that grows with the text; the most recent occurrence wins. It copies the
    tokens from there on, and then its own copy (the text repeats), until a correction.

    >>> import asyncio
    >>> draft = NgramDraft(3)
    >>> draft.begin([1, 2, 3, 4, 9, 2, 3])
    >>> asyncio.run(draft.propose(5))
    [4, 9, 2, 3, 4]
    """

    name = "ngram"
    instant = True
    unread_tokens = 0
    off_reason = ""

    def __init__(self, max_ngram_size: int = 3) -> None:
        self._sizes = range(max_ngram_size, min(_MIN_NGRAM_SIZE, max_ngram_size) - 1, -1)
        self._line = Line()
        self._after: dict[
            tuple[int, ...], int
        ] = {}  # n-gram -> the place after its latest occurrence, the text's end aside
        self._indexed = 0
        self._copy_from: int | None = None  # the place in the line from which the next guess is copied

    def begin(self, known: Sequence[int], sampling: Sampling = GREEDY) -> None:
        self._line.begin(known)
        self._after.clear()
        self._indexed = 0
        self._copy_from = None

    async def read(self) -> None:
        """Nothing to read: `propose` extends the index."""

    async def propose(self, k: int) -> list[int]:
        ids = self._line.ids
        if self._copy_from is None:
            self._copy_from = self._look_up()
        if self._copy_from is None:
            return []
        guesses = []
        for _ in range(k):
            guesses.append(ids[self._copy_from])
            ids.append(ids[self._copy_from])
            self._copy_from += 1
        return guesses

    def accept(self, n: int, correction: int | None) -> None:
        self._line.accept(n, correction)
        if correction is not None:
            self._copy_from = None

    def _look_up(self) -> int | None:
        """The place after the latest earlier occurrence of the latest tokens. Called while the line has no guesses."""
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

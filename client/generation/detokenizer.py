"""From tokens to pieces of text that can be shown at once. Pure.

Three things may take back the end of a text: a UTF-8 sequence that is not complete, a decoder that tidies up,
and a stop string of which only the beginning is there. Such an end is held until it is certain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_INCOMPLETE = re.compile("\N{REPLACEMENT CHARACTER}+\\Z")
# "it 's" becomes "it's" once the s is there: nothing short after a space is certain
_UNTIDY = re.compile("\N{REPLACEMENT CHARACTER}+\\Z|\\s+\\S{0,3}\\Z")


class Detokenizer:
    """Tokens one by one; the pieces joined equal the decoding of all tokens at once.

    Each token decodes all so far: 0.1 ms for a hundred tokens, 0.6 ms for eight thousand, and right for every
    decoder that looks at neighbours.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, tidies: bool = False) -> None:
        self._decode = decode
        self._uncertain = _UNTIDY if tidies else _INCOMPLETE
        self._ids: list[int] = []
        self._given = ""

    def add(self, token: int) -> str:
        """What is certain now and was not before; often one token's text, sometimes nothing."""
        self._ids.append(token)
        return self._give(self._uncertain.sub("", self._decode(self._ids)))

    def finish(self) -> str:
        """The rest, a broken sequence at the very end included (as U+FFFD)."""
        return self._give(self._decode(self._ids))

    def _give(self, text: str) -> str:
        if not text.startswith(self._given):
            return ""  # wait for what makes sense of it
        piece = text[len(self._given) :]
        self._given = text
        return piece


class Stops:
    """Finds the first stop string to be complete, wherever the pieces are cut."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.found: str | None = None
        self._stops = tuple(stops)
        self._held = ""

    def add(self, piece: str) -> str:
        """What can be shown: no part of a stop string. Nothing after one was found."""
        if self.found is not None:
            return ""
        self._held += piece
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            # the one that is complete first; of those, the one that began first
            _, at, self.found = min(hits)
            shown, self._held = self._held[:at], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """The rest, where the text ended before any stop string was complete."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class Writer:
    """Tokens in, showable text out, until a stop string."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], *, stops: Sequence[str] = (), tidies: bool = False
    ) -> None:
        self._detokenizer = Detokenizer(decode, tidies=tidies)
        self._stops = Stops(stops)

    @property
    def stopped(self) -> bool:
        return self._stops.found is not None

    def add(self, token: int) -> str:
        return self._stops.add(self._detokenizer.add(token))

    def finish(self) -> str:
        """What was held back, unless a stop string ends in it."""
        return self._stops.add(self._detokenizer.finish()) + self._stops.finish()

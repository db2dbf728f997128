"""Which guesses are right. Pure.

The last hop chooses a token for each position of a window as if no guess had been made: its random numbers are a
function of (seed, position) alone. A guess is accepted if the choice is the same token.

Why that keeps the distribution: let the target give a token the probability p(x), and let the guess g be independent of
the random numbers that choose x. P(x = g) = p(g), so g is accepted with the target's probability of it; and given that
it was not, x is drawn from p without g. That is the acceptance rule for a deterministic proposal (Leviathan et al.
2023, algorithm 1 with q a point mass; Chen et al. 2023). A draft that uses the same random numbers (`draft_model.py`)
is accepted more often, and x is still the target's own choice: for a seed, the text with any draft is the text without
one, token for token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """The first `accepted` guesses are right; `correction` is the target's own token after them, None if every choice
    was guessed."""

    accepted: int
    correction: int | None

    def tokens(self, guesses: Sequence[int]) -> tuple[int, ...]:
        """The tokens that follow the known text now; `guesses` as given to `verify`."""
        right = tuple(guesses[: self.accepted])
        return right if self.correction is None else (*right, self.correction)


def verify(guesses: Sequence[int], chosen: Sequence[int]) -> Verdict:
    """Compare the `guesses` that follow the known text with the tokens `chosen` for the same positions.

    `chosen` has at least one token. There may be more guesses than choices (the rest is not verified yet) or one fewer
    (the last choice is new).

    >>> verify([5, 6, 7], [5, 6, 9, 4])
    Verdict(accepted=2, correction=9)
    >>> verify([5, 6], [5, 6, 8])
    Verdict(accepted=2, correction=8)
    >>> verify([5, 6, 7], [5, 6])
    Verdict(accepted=2, correction=None)
    """
    for place, token in enumerate(chosen):
        if place >= len(guesses) or guesses[place] != token:
            return Verdict(place, token)
    return Verdict(len(chosen), None)

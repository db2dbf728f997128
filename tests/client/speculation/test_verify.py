from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from client.speculation.verify import Verdict, verify
from swarm.sampling import Sampling, choose, probabilities

ids = st.lists(st.integers(0, 2), max_size=8)


def test_the_longest_right_prefix_and_the_targets_own_token_after_it_are_accepted() -> None:
    assert verify([1, 2, 3], [1, 2, 9, 9]) == Verdict(2, 9)
    assert verify([1, 2, 3], [1, 2, 3, 4]) == Verdict(3, 4)
    assert verify([], [4]) == Verdict(0, 4)
    assert verify([1, 2], [3, 2, 1]).tokens([1, 2]) == (3,)


def test_guesses_beyond_the_choices_are_not_verified_yet() -> None:
    assert verify([1, 2, 3], [1, 2]) == Verdict(2, None)
    assert verify([1, 2, 3], [1, 2]).tokens([1, 2, 3]) == (1, 2)


@given(ids, ids.filter(len))
def test_the_tokens_are_always_the_chosen_ones(guesses: list[int], chosen: list[int]) -> None:
    verdict = verify(guesses, chosen)
    tokens = verdict.tokens(guesses)
    assert 1 <= len(tokens) <= len(chosen)
    assert list(tokens) == chosen[: len(tokens)]


def test_a_deterministic_guess_is_accepted_with_the_targets_probability_of_it() -> None:
    """The correction is drawn from the other tokens. Chi-square over the guess and each other token; 20,000 seeds."""
    logits = np.random.default_rng(5).normal(0, 1.5, 12).astype(np.float32)
    how = {"temperature": 0.8, "top_k": 8, "top_p": 0.97}
    order, shares = probabilities(logits, Sampling(**how))  # type: ignore[arg-type]
    guess = int(order[1])
    count, seen = 20_000, np.zeros(12)
    for seed in range(count):
        verdict = verify([guess], [choose(logits, Sampling(seed=seed, **how), position=7).token])  # type: ignore[arg-type]
        seen[guess if verdict.correction is None else verdict.correction] += 1
        assert verdict.correction != guess
    expected = shares * count
    chi_square = ((seen[order] - expected) ** 2 / expected).sum()
    assert seen.sum() == seen[order].sum() == count
    assert chi_square < CHI_SQUARE_P001[len(order) - 1]


# the value that chi-square exceeds with a chance of 0.001, by degrees of freedom
CHI_SQUARE_P001 = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32, 8: 26.12}

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swarm.errors import BadStep, ConfigError
from swarm.sampling import MAX_LOGPROBS, Choice, Sampling, choose, probabilities

VOCAB = 12
logits_of = hnp.arrays(np.float32, VOCAB, elements=st.floats(-50, 50, width=32))
samplings = st.builds(
    Sampling,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.5, 2),
    seed=st.integers(0, (1 << 63) - 1),
)
histories = hnp.arrays(np.int32, st.integers(0, 20), elements=st.integers(0, VOCAB - 1))


_ANY_FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
_EXTREMES = st.sampled_from([3.4028235e38, -3.4028235e38, 1e-45, -1e-45, 0.0, -0.0])
extreme_logits = hnp.arrays(np.float32, VOCAB, elements=_EXTREMES | _ANY_FINITE)
extreme_samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 5e-324, 1e-300, 100.0]) | st.floats(0, 100),
    top_k=st.sampled_from([0, 1, 1 << 31]) | st.integers(0, VOCAB + 1),
    top_p=st.sampled_from([5e-324, 1.0]) | st.floats(0, 1, exclude_min=True),
    min_p=st.sampled_from([0.0, 5e-324, 1.0]) | st.floats(0, 1),
    repetition_penalty=st.sampled_from([0.01, 100.0]) | st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.lists(st.tuples(st.integers(0, VOCAB - 1), st.floats(-100, 100)), max_size=4).map(tuple),
    seed=st.integers(0, (1 << 63) - 1),
    logprobs=st.none() | st.integers(0, VOCAB),
)


def plain_probabilities(logits: Any, sampling: Sampling) -> dict[int, float]:
    """A reference for `probabilities`: the definitions, token by token."""
    # relative to the largest, as scores are: scores that differ by less than its rounding are equal
    scaled = [(float(x) - float(max(logits))) / sampling.temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = {i: math.exp(scaled[i] - scaled[order[0]]) for i in order}
    total = math.fsum(weights.values())
    shares = {i: weight / total for i, weight in weights.items()}
    if sampling.top_p < 1:
        kept, mass = {}, 0.0
        for i in order:
            kept[i] = shares[i]
            mass += shares[i]
            if mass >= sampling.top_p:
                break
        shares = kept
    largest = max(shares.values())
    shares = {i: share for i, share in shares.items() if share >= sampling.min_p * largest}
    total = math.fsum(shares.values())
    return {i: share / total for i, share in shares.items()}


@given(logits_of, samplings)
def test_the_distribution_agrees_with_its_definition(logits: Any, sampling: Sampling) -> None:
    ids, shares = probabilities(logits, sampling)
    expected = plain_probabilities(logits, sampling)
    found = dict(zip(ids.tolist(), shares.tolist(), strict=True))
    # If a sum or a product is at a filter's limit, rounding decides whether a token passes.
    for token in found.keys() ^ expected.keys():
        assert on_an_edge(logits, sampling, token)
    if found.keys() == expected.keys():
        assert all(found[token] == pytest.approx(expected[token], rel=1e-9, abs=1e-12) for token in found)


def on_an_edge(logits: Any, sampling: Sampling, token: int) -> bool:
    wider = Sampling(temperature=sampling.temperature, top_k=sampling.top_k)
    shares = plain_probabilities(logits, wider)
    order = list(shares)
    before = math.fsum(shares[i] for i in order[: order.index(token)])
    at_top_p = abs(before - sampling.top_p) < 1e-9
    at_min_p = abs(shares[token] - sampling.min_p * max(shares.values())) < 1e-9
    return at_top_p or at_min_p


@given(logits_of, samplings)
def test_probabilities_form_a_sorted_distribution(logits: Any, sampling: Sampling) -> None:
    ids, shares = probabilities(logits, sampling)
    assert 0 < len(ids) == len(set(ids.tolist())) <= VOCAB
    assert shares.sum() == pytest.approx(1)
    assert (shares >= 0).all()
    assert (np.diff(shares) <= 1e-15).all()
    assert logits[ids[0]] == logits.max()
    if sampling.top_k:
        assert len(ids) <= sampling.top_k


def sorted_choice(logits: Any, sampling: Sampling, position: int) -> Choice:
    """A reference for `choose` that sorts the whole vocabulary."""
    scaled = logits.astype(np.float64)
    scaled = (scaled - scaled.max()) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")[: sampling.top_k or None]
    shares = np.exp(scaled[order])
    shares /= shares.sum()
    order = order[: int(np.searchsorted(np.cumsum(shares), sampling.top_p)) + 1] if sampling.top_p < 1 else order
    shares = shares[: len(order)] / shares[: len(order)].sum()
    numbers = np.random.Generator(np.random.Philox(key=[sampling.seed, position])).standard_exponential(len(logits))
    with np.errstate(divide="ignore", over="ignore"):
        token = int(order[(numbers[order] / shares).argmin()])
    logprobs = logits.astype(np.float64) - logits.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    best = np.argsort(-logprobs, kind="stable")[: sampling.logprobs]
    return Choice(token=token, logprob=float(logprobs[token]), top=tuple((int(i), float(logprobs[i])) for i in best))


@given(
    seed=st.integers(0, 1 << 32),
    spread=st.sampled_from([0.0, 0.5, 3.0, 20.0]),
    distinct=st.sampled_from([3, 1 << 20]),
    top_k=st.sampled_from([0, 1, 50, 4999, 5000, 6000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999999, 1.0]),
    temperature=st.sampled_from([0.1, 1.0, 30.0]),
)
@settings(max_examples=200, deadline=None)
def test_a_choice_is_the_same_as_by_sorting_the_whole_vocabulary(
    seed: int, spread: float, distinct: int, top_k: int, top_p: float, temperature: float
) -> None:
    random = np.random.default_rng(seed)
    # Few distinct values give many equal logits.
    logits = (np.round(random.normal(size=5000) * distinct) / distinct * spread).astype(np.float32)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, logprobs=20)
    assert choose(logits, sampling, position=7) == sorted_choice(logits, sampling, 7)


@given(logits_of, st.integers(0, (1 << 63) - 1), st.integers(0, 1 << 31))
def test_a_token_depends_only_on_seed_and_position(logits: Any, seed: int, position: int) -> None:
    sampling = Sampling(temperature=1.0, seed=seed)
    first = choose(logits, sampling, position=position)
    choose(logits, sampling, position=position + 1)
    assert choose(logits.copy(), Sampling(temperature=1.0, seed=seed), position=position) == first


def test_other_seeds_and_other_positions_give_other_tokens() -> None:
    logits = np.zeros(1000, np.float32)
    by_position = {choose(logits, Sampling(temperature=1.0, seed=1), position=i).token for i in range(50)}
    by_seed = {choose(logits, Sampling(temperature=1.0, seed=i), position=1).token for i in range(50)}
    assert len(by_position) > 40
    assert len(by_seed) > 40


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 40, "min_p": 0.01}])
def test_models_with_similar_distributions_nearly_always_choose_the_same_token(filters: dict[str, float]) -> None:
    random = np.random.default_rng(2)
    logits = random.normal(0, 1.5, 5000).astype(np.float32)
    other = logits + random.normal(0, 0.02, 5000).astype(np.float32)
    same = 0
    for seed in range(400):
        sampling = Sampling(temperature=1.0, seed=seed, **filters)  # type: ignore[arg-type]
        same += choose(logits, sampling, position=3) == choose(other, sampling, position=3)
    assert same > 0.95 * 400


def test_token_frequencies_match_their_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
    draws = 4000
    sampling = Sampling(temperature=1.0, seed=11)
    counts = np.bincount([choose(logits, sampling, position=i).token for i in range(draws)], minlength=4)
    expected = draws * np.array([0.5, 0.25, 0.15, 0.1])
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 16.3  # 3 degrees of freedom: exceeded by one seed in a thousand.


@given(logits_of)
def test_temperature_0_chooses_the_first_of_the_most_likely_tokens(logits: Any) -> None:
    token = choose(logits, Sampling(), position=0).token
    assert token == logits.tolist().index(max(logits.tolist()))


@given(logits_of, st.floats(5e-324, 1e-300) | st.just(100.0))
def test_extreme_temperatures_work(logits: Any, temperature: float) -> None:
    choice = choose(logits, Sampling(temperature=temperature, seed=3), position=1)
    assert 0 <= choice.token < VOCAB
    if temperature < 1:
        assert logits[choice.token] == logits.max()


@given(logits_of, histories, st.floats(0.5, 2))
def test_the_repetition_penalty_is_huggingfaces(logits: Any, history: Any, penalty: float) -> None:
    expected = logits.copy()
    for token in set(history.tolist()):
        expected[token] = expected[token] / penalty if expected[token] > 0 else expected[token] * penalty
    before = logits.copy()
    found = choose(logits, Sampling(repetition_penalty=penalty), position=0, history=history)
    assert found.token == int(expected.argmax())
    assert np.array_equal(logits, before)


@given(logits_of, histories, st.integers(0, 20), st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_penalties_count_only_the_answer(
    logits: Any, history: Any, start: int, presence: float, frequency: float
) -> None:
    sampling = Sampling(presence_penalty=presence, frequency_penalty=frequency, answer_start=start)
    expected = logits.astype(np.float64)
    for token in set(history[start:].tolist()):
        expected[token] -= presence + frequency * history[start:].tolist().count(token)
    found = choose(logits, sampling, position=0, history=history)
    assert expected[found.token] == pytest.approx(expected.max(), abs=1e-4)
    assert sampling.uses_history is (presence != 0 or frequency != 0)


@given(logits_of, st.integers(0, VOCAB - 1), samplings)
def test_a_bias_forces_or_forbids_a_token_and_changes_no_log_probability(
    logits: Any, token: int, sampling: Sampling
) -> None:
    def biased(value: float) -> Choice:
        return choose(logits, Sampling(logit_bias=((token, value),), logprobs=0, temperature=0.05), position=3)

    before = logits.copy()
    assert biased(100.0).token == token or np.sum(logits >= logits.max() - 1e-3) > 1
    assert biased(-100.0).token != token or logits[token] > np.delete(logits, token).max() + 90
    assert (logits == before).all()
    plain = choose(logits, Sampling(logprobs=VOCAB), position=3)
    assert biased(100.0).logprob == pytest.approx(dict(plain.top)[biased(100.0).token])


@pytest.mark.parametrize("bias", [((1, 101.0),), ((True, 1.0),), ((1,),), [(1, 1.0)], ((1, 1.0),) * 301])
def test_an_invalid_bias_is_named(bias: Any) -> None:
    with pytest.raises(ConfigError, match="logit_bias"):
        Sampling(logit_bias=bias)


def test_a_bias_of_an_unknown_token_is_refused() -> None:
    with pytest.raises(BadStep, match="token 12"):
        choose(np.zeros(VOCAB, np.float32), Sampling(logit_bias=((VOCAB, 1.0),)), position=0)


def test_a_strong_penalty_prevents_a_repetition() -> None:
    logits = np.array([3.0, 2.9, -1.0], np.float32)
    sampling = Sampling(repetition_penalty=2.0)
    assert choose(logits, sampling, position=0).token == 0
    assert choose(logits, sampling, position=1, history=np.array([0], np.int32)).token == 1


@given(logits_of, st.integers(0, MAX_LOGPROBS), histories)
def test_log_probabilities_are_the_models_own(logits: Any, count: int, history: Any) -> None:
    sampling = Sampling(temperature=2.0, top_k=2, repetition_penalty=1.5, logprobs=count)
    choice = choose(logits, sampling, position=0, history=history)
    total = math.log(math.fsum(math.exp(float(x)) for x in logits))
    assert choice.logprob == pytest.approx(float(logits[choice.token]) - total, abs=1e-6)
    assert len(choice.top) == min(count, VOCAB)
    assert [logprob for _, logprob in choice.top] == sorted((logprob for _, logprob in choice.top), reverse=True)
    for token, logprob in choice.top:
        assert logprob == pytest.approx(float(logits[token]) - total, abs=1e-6)


def test_a_choice_has_only_the_requested_values() -> None:
    assert choose(np.zeros(3, np.float32), Sampling(), position=0) == Choice(token=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-38),
        ("repetition_penalty", 101.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("nan")),
        ("answer_start", -1),
        ("seed", -1),
        ("seed", 1 << 63),
        ("logprobs", 65),
        ("logprobs", -1),
    ],
)
def test_an_invalid_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value!r}; it must be"):
        Sampling(**{name: value})


@given(extreme_logits, extreme_samplings, histories, st.integers(0, (1 << 31) - 1))
@settings(max_examples=500)
def test_any_finite_logits_and_admitted_parameters_give_a_token_and_no_nan(
    logits: Any, sampling: Sampling, history: Any, position: int
) -> None:
    choice = choose(logits, sampling, position=position, history=history)
    assert 0 <= choice.token < VOCAB
    numbers = [number for _, number in choice.top]
    assert not any(math.isnan(number) for number in [choice.logprob or 0.0, *numbers])

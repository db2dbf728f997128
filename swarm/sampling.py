"""Sampling: from logits to a token, with the same result on every peer.

Sampling runs at the last hop, not at the client: an answer is a few bytes a position instead of 4 x vocabulary
(197 KB for SmolLM2), which decides the speed over a slow link. The random numbers of a position depend only on
(seed, position): the same seed gives the same text for any route, after a repair, and with or without drafts.

Each position has a random number for each token, and the token with the smallest number divided by its probability
is chosen (the Gumbel-max trick in its exponential form). Two models with nearly the same distribution then nearly
always choose the same token (Daliri et al. 2024: with a probability of at least (1 - TV) / (1 + TV)), which makes
drafts effective. Inverting the cumulative distribution loses that when many small probabilities add up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from swarm.errors import BadStep, ConfigError

MAX_LOGPROBS = 64
MAX_LOGIT_BIAS = 300
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
LOGITS_DTYPES = ("", "f16", "f32")
# Sorting a whole vocabulary takes milliseconds, and top-p mostly needs only the most likely hundreds.
_FIRST_CANDIDATES = 256
_GROWTH = 8
_ROUNDING = 1e-9
_LARGEST = np.finfo(np.float32).max
_NO_IDS = np.empty(0, np.int32)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are sampled. Names and meaning as in Hugging Face's GenerationConfig.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 have no effect. `logprobs`
    requests the log-probabilities of the chosen and of that many most likely tokens. `logits` (`f16` or `f32`)
    requests all logits of a position, in 2 or 4 bytes each.

    As in OpenAI's API: `presence_penalty` is subtracted from the score of each token that is in the answer,
    `frequency_penalty` once for each occurrence; the answer starts at position `answer_start`. `logit_bias` holds
    pairs (token id, number added to its score).

    >>> Sampling(temperature=0.7, top_p=0.9, seed=7).greedy
    False
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    answer_start: int = 0
    logits: str = ""

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_bias(self.logit_bias)
        _check_integer("answer_start", self.answer_start, 0, (1 << 31) - 1)
        _check_integer("top_k", self.top_k, 0, 1 << 31)
        _check_integer("seed", self.seed, 0, (1 << 63) - 1)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.logits not in LOGITS_DTYPES:
            raise ConfigError(f"logits is {self.logits!r}; it must be f16 or f32, or empty for none")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def uses_history(self) -> bool:
        """Whether the previous tokens affect the scores."""
        return self.repetition_penalty != 1.0 or self._penalises_answer

    @property
    def _penalises_answer(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def filters(self) -> bool:
        """Whether top-k, top-p or min-p may exclude tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A sampled token. `logprob`, `top` (id, logprob; most likely first), `logits` [vocab] float32: only if requested.

    Log-probabilities are the model's own: before temperature, penalties, bias and filters.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    logits: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)


def choose(
    logits: NDArray[np.float32], sampling: Sampling, *, position: int, history: NDArray[np.int32] | None = None
) -> Choice:
    """Sample the token for `position` from logits [vocab] float32. `history`: all previous ids, for the penalties.

    Raises BadStep if `logit_bias` names a token that the model does not have.
    """
    scores = _adjust_scores(logits, sampling, _NO_IDS if history is None else history)
    token = int(scores.argmax()) if sampling.greedy else _draw(scores, sampling, position)
    requested = logits if sampling.logits else None
    if sampling.logprobs is None:
        return Choice(token=token, logits=requested)
    logprobs = _log_softmax(logits)
    best = _likeliest(logprobs, sampling.logprobs) if sampling.logprobs else ()
    top = tuple((int(i), float(logprobs[i])) for i in best)
    return Choice(token=token, logprob=float(logprobs[token]), top=top, logits=requested)


def probabilities(scores: NDArray[np.float32], sampling: Sampling) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """The distribution after temperature, top-k, top-p and min-p: ids, most likely first, and their probabilities.

    Without filters it sorts the whole vocabulary, which takes longer than a small model's decode step. `_draw` avoids
    it in that case.
    """
    scaled = _scaled(scores, sampling)
    weights = np.exp(scaled)
    order = _candidates(scaled, weights, sampling)
    shares = weights[order] / (weights[order] if sampling.top_k else weights).sum()
    if not sampling.filters:
        return order, shares
    if sampling.top_p < 1.0:
        # The smallest set whose sum reaches top_p. The most likely token always stays.
        count = int(np.searchsorted(np.cumsum(shares), sampling.top_p)) + 1
        order, shares = order[:count], shares[:count]
    if sampling.min_p > 0.0:
        above_min_p = shares >= sampling.min_p * shares[0]
        order, shares = order[above_min_p], shares[above_min_p]
    return order, shares / shares.sum()


def _scaled(scores: NDArray[np.float32], sampling: Sampling) -> NDArray[np.float64]:
    """Scores minus the largest, over the temperature: with a temperature near 0 the others become -inf, never NaN."""
    wide = scores.astype(np.float64)
    with np.errstate(over="ignore"):
        scaled: NDArray[np.float64] = (wide - wide.max()) / sampling.temperature
    return scaled


def _candidates(scaled: NDArray[np.float64], weights: NDArray[np.float64], sampling: Sampling) -> NDArray[np.intp]:
    """Ids, most likely first, of all tokens that may pass the filters. Arrays [vocab]; `weights` not normalised."""
    if sampling.top_k:
        return _likeliest(scaled, sampling.top_k)
    if sampling.min_p > 0.0 and sampling.top_p == 1.0:
        # The largest weight is 1. `_ROUNDING`: a probability may be rounded in the other direction than its weight.
        return _likeliest(scaled, int((weights >= sampling.min_p * (1 - _ROUNDING)).sum()))
    count = _FIRST_CANDIDATES if sampling.top_p < 1.0 else len(scaled)
    wanted = sampling.top_p * weights.sum() * (1 + _ROUNDING)
    while (order := _likeliest(scaled, count)).size < len(scaled) and weights[order].sum() < wanted:
        count *= _GROWTH
    return order


def _likeliest(scores: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Ids of the `count` highest of `scores` [vocab], highest first, equal ones by id."""
    rank = len(scores) - count
    # All ids with at least the lowest of these scores are candidates; the stable sort then decides between equals.
    candidates = np.flatnonzero(scores >= np.partition(scores, rank)[rank]) if rank > 0 else np.arange(len(scores))
    return candidates[np.argsort(-scores[candidates], kind="stable")][:count]


def _draw(scores: NDArray[np.float32], sampling: Sampling, position: int) -> int:
    numbers = np.random.Generator(np.random.Philox(key=[sampling.seed, position])).standard_exponential(len(scores))
    with np.errstate(divide="ignore", over="ignore"):  # A token of probability 0 gets infinity and is never chosen.
        if not sampling.filters:
            return int((numbers / np.exp(_scaled(scores, sampling))).argmin())
        ids, shares = probabilities(scores, sampling)
        return int(ids[(numbers[ids] / shares).argmin()])


def _adjust_scores(logits: NDArray[np.float32], sampling: Sampling, history: NDArray[np.int32]) -> NDArray[np.float32]:
    """The scores [vocab] after penalties and bias; the array `logits` itself if there are none. All are finite."""
    with np.errstate(over="ignore"):
        scores = _penalised(logits, sampling, history)
    return scores if scores is logits else np.clip(scores, -_LARGEST, _LARGEST)


def _penalised(logits: NDArray[np.float32], sampling: Sampling, history: NDArray[np.int32]) -> NDArray[np.float32]:
    """As `_adjust_scores`, but scores may overflow to infinity."""
    scores = logits
    if sampling.repetition_penalty != 1.0 and len(history):
        scores = _penalise(logits, history, sampling.repetition_penalty)
    answer = history[sampling.answer_start :]
    if sampling._penalises_answer and len(answer):
        seen, counts = np.unique(answer, return_counts=True)
        scores = logits.copy() if scores is logits else scores
        scores[seen] -= sampling.presence_penalty + sampling.frequency_penalty * counts.astype(np.float32)
    if sampling.logit_bias:
        scores = logits.copy() if scores is logits else scores
        for token, bias in sampling.logit_bias:
            if token >= len(scores):
                raise BadStep(f"logit_bias names token {token}; the model has {len(scores)} tokens, from 0")
            scores[token] += bias
    return scores


def _penalise(logits: NDArray[np.float32], history: NDArray[np.int32], penalty: float) -> NDArray[np.float32]:
    """The repetition penalty of Keskar et al. 2019, section 4.1, with Hugging Face's rule for negative scores."""
    scores = logits.copy()
    seen = np.unique(history)
    scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    return scores


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max()
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum())
    return result


def _check(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or not low <= value <= high
        or (open_low and value == low)
    ):
        raise ConfigError(f"{name} is {value!r}; it must be {'over' if open_low else 'from'} {low:g} to {high:g}")


def _check_bias(pairs: object) -> None:
    if not isinstance(pairs, tuple) or len(pairs) > MAX_LOGIT_BIAS:
        raise ConfigError(f"logit_bias must be up to {MAX_LOGIT_BIAS} pairs of a token id and a number")
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ConfigError(f"logit_bias has {pair!r}; it must have pairs of a token id and a number")
        _check_integer("logit_bias: a token id", pair[0], 0, (1 << 31) - 1)
        _check(f"logit_bias of token {pair[0]}", pair[1], -100.0, 100.0)


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number from {low} to {high}")

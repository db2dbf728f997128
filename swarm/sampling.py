"""From logits to a token, the same at every peer.

Sampling runs at the last hop, not at the client: an answer is then a few bytes a position instead of
4 x vocabulary (197 KB for SmolLM2), which decides the speed over a slow link. The random number of a
position is a function of (seed, position) alone, so the same seed gives the same text whatever the
layout of peers, after a repair, and with or without drafts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarm.errors import BadStep, ConfigError

MAX_LOGPROBS = 64
MAX_LOGIT_BIAS = 300
# sorting a whole vocabulary takes milliseconds, and top-p mostly ends within its first hundreds
_FIRST = 256
_GROWTH = 8
_ROUNDING = 1e-9
_NO_IDS = np.empty(0, np.int32)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen; names and meaning as in Hugging Face's GenerationConfig.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0, `repetition_penalty` 1 switch the filter
    off. `logprobs` asks for that many of the likeliest tokens beside the chosen one.

    As in OpenAI's API: `presence_penalty` is subtracted from the score of each token that the answer has already,
    `frequency_penalty` for each time that it has it; the answer begins at position `answer_start`. `logit_bias`
    holds (token id, what is added to its score).

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

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_bias(self.logit_bias)
        _check_integer("answer_start", self.answer_start, 0, (1 << 31) - 1)
        _check_integer("top_k", self.top_k, 0, 1 << 31)
        _check_integer("seed", self.seed, 0, (1 << 63) - 1)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def looks_back(self) -> bool:
        """Whether the tokens before weigh on the next."""
        return self.repetition_penalty != 1.0 or self._counts

    @property
    def _counts(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def filters(self) -> bool:
        """Whether any token is left out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A chosen token. `logprob` and `top` (id, logprob; likeliest first) only where they were asked for.

    Log-probabilities are the model's own: before temperature, penalty and filters.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def choose(
    logits: NDArray[np.float32], sampling: Sampling, *, position: int, history: NDArray[np.int32] | None = None
) -> Choice:
    """The token for `position`, from logits [vocab] float32 and the ids before it (for the penalties).

    Raises BadStep where `logit_bias` names a token that the model does not have.
    """
    scores = _weigh(logits, sampling, _NO_IDS if history is None else history)
    token = int(scores.argmax()) if sampling.greedy else _draw(scores, sampling, position)
    if sampling.logprobs is None:
        return Choice(token=token)
    logprobs = _log_softmax(logits)
    best = _likeliest(logprobs, sampling.logprobs) if sampling.logprobs else ()
    return Choice(token=token, logprob=float(logprobs[token]), top=tuple((int(i), float(logprobs[i])) for i in best))


def probabilities(
    scores: NDArray[np.float32], sampling: Sampling, *, enough: float = 1.0
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """The distribution after temperature, top-k, top-p and min-p: ids, likeliest first, and their shares.

    Where no filter cuts the tail off, it ends once the shares sum up to `enough`: sorting a whole vocabulary takes
    longer than a small model's decode step.
    """
    wide = scores.astype(np.float64)
    with np.errstate(over="ignore"):
        # from the largest down: a temperature near 0 makes the others -inf, and nothing NaN
        scaled = (wide - wide.max()) / sampling.temperature
    weights = np.exp(scaled)
    order = _candidates(scaled, weights, sampling, enough)
    shares = weights[order] / (weights[order] if sampling.top_k else weights).sum()
    if not sampling.filters:
        return order, shares
    if sampling.top_p < 1.0:
        # the smallest set whose sum reaches top_p; the likeliest always stays
        count = int(np.searchsorted(np.cumsum(shares), sampling.top_p)) + 1
        order, shares = order[:count], shares[:count]
    if sampling.min_p > 0.0:
        kept = shares >= sampling.min_p * shares[0]
        order, shares = order[kept], shares[kept]
    return order, shares / shares.sum()


def _candidates(
    scaled: NDArray[np.float64], weights: NDArray[np.float64], sampling: Sampling, enough: float
) -> NDArray[np.intp]:
    """Ids, likeliest first, of all that the filters can leave. Both arrays [vocab]; `weights` not normalised."""
    if sampling.top_k:
        return _likeliest(scaled, sampling.top_k)
    if sampling.min_p > 0.0 and sampling.top_p == 1.0:
        # the likeliest weighs 1; a share may be rounded the other way than its weight
        return _likeliest(scaled, int((weights >= sampling.min_p * (1 - _ROUNDING)).sum()))
    share = sampling.top_p if sampling.filters else enough
    count = _FIRST if share < 1.0 else len(scaled)
    wanted = share * weights.sum() * (1 + _ROUNDING)
    while (order := _likeliest(scaled, count)).size < len(scaled) and weights[order].sum() < wanted:
        count *= _GROWTH
    return order


def _likeliest(scores: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Ids of the `count` highest of `scores` [vocab], highest first and equals in their order."""
    place = len(scores) - count
    # everything as high as the last of them is a candidate, then a stable order decides
    candidates = np.flatnonzero(scores >= np.partition(scores, place)[place]) if place > 0 else np.arange(len(scores))
    return candidates[np.argsort(-scores[candidates], kind="stable")][:count]


def _draw(scores: NDArray[np.float32], sampling: Sampling, position: int) -> int:
    uniform = np.random.Generator(np.random.Philox(key=[sampling.seed, position])).random()
    ids, shares = probabilities(scores, sampling, enough=uniform)
    index = int(np.searchsorted(np.cumsum(shares), uniform, side="right"))
    return int(ids[min(index, len(ids) - 1)])


def _weigh(logits: NDArray[np.float32], sampling: Sampling, history: NDArray[np.int32]) -> NDArray[np.float32]:
    """The scores [vocab] after penalties and bias; `logits` themselves where there is none of them."""
    scores = logits
    if sampling.repetition_penalty != 1.0 and len(history):
        scores = _penalise(logits, history, sampling.repetition_penalty)
    answer = history[sampling.answer_start :]
    if sampling._counts and len(answer):
        seen, counts = np.unique(answer, return_counts=True)
        scores = logits.copy() if scores is logits else scores
        scores[seen] -= sampling.presence_penalty + sampling.frequency_penalty * counts.astype(np.float32)
    if sampling.logit_bias:
        scores = logits.copy() if scores is logits else scores
        for token, bias in sampling.logit_bias:
            if token >= len(scores):
                raise BadStep(f"logit_bias names token {token}, and the model has {len(scores)}")
            scores[token] += bias
    return scores


def _penalise(logits: NDArray[np.float32], history: NDArray[np.int32], penalty: float) -> NDArray[np.float32]:
    """Keskar et al. 2019, section 4.1, as Hugging Face does it: toward zero above, away from it below."""
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

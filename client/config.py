"""The options of a generation and of a client. A wrong value raises ConfigError, which names the field."""

from __future__ import annotations

import difflib
import math
import random
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from swarm.engine.choice import ENGINE_CHOICES, EngineChoice
from swarm.errors import ConfigError
from swarm.model.numerics import Numerics
from swarm.process.folders import cache_folder
from swarm.sampling import Sampling
from swarm.wire.messages import MAX_STEP_TOKENS
from swarm.wire.tensors import HIDDEN_DTYPES

_MAX_STOPS = 64
MAX_GUESSES = 32
MAX_WINDOWS = 8
AUTO, NGRAM, OFF = "auto", "ngram", "off"
"""The values of `GenerationConfig.draft` besides a model package's directory."""


class _ChecksNames:
    """Refuses a field that does not exist with a ConfigError that suggests the nearest name."""

    def __new__(cls, **values: Any) -> Self:
        known = [entry.name for entry in fields(cls)]  # type: ignore[arg-type]  # every subclass is a dataclass
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                raise ConfigError(f"{cls.__name__} has no field {name}: {hint}")
        return super().__new__(cls)


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(_ChecksNames):
    """The options of one answer; names and meaning as in Hugging Face's and openvino_genai's.

    Greedy is the default. `do_sample=True` samples. With `do_sample=None`, a `temperature` over 0, or a `top_k`,
    `top_p` or `min_p`, samples (at temperature 1 by default). `do_sample=False` is greedy in any case, and so is
    `temperature=0`. `top_k` 0, `top_p` 1 and `min_p` 0 keep every token. Without a `seed` each generation draws one.

    The answer ends with one of the model's end-of-text ids (unless `ignore_eos`), one of
    `stop_token_ids`, the first of `stop_strings` in the text (none of these appears in the text), after
    `max_new_tokens`, or at the end of the model's context. `repetition_penalty` weighs prompt and answer;
    `presence_penalty`, `frequency_penalty` and `logit_bias` (token id to what is added to its score) are OpenAI's.
    `logprobs` asks for the log-probability of each chosen token and of so many of the likeliest; `logits`, `f16` or
    `f32`, for all logits of each token, which are many bytes. Both come in `Piece.logprobs`.

    `draft` guesses tokens that the peers then verify, several a trip: `ngram` looks them up in prompt and answer (by
    the latest `max_ngram_size` tokens or fewer), a model package's directory names a small model with the same
    tokenizer, `auto` takes `ClientConfig.draft_package` if it is set, else `ngram`, `off` guesses nothing. A draft
    changes the speed and never the text. The guesses a window and the windows under way follow from measured times, and
    are none if guessing does not pay; `num_assistant_tokens` and `draft_windows` fix them.

    >>> GenerationConfig(temperature=0.7, seed=1, stop_strings="END").stop_strings
    ('END',)
    """

    max_new_tokens: int = 512
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    do_sample: bool | None = None
    seed: int | None = None
    stop_strings: tuple[str, ...] | str = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logits: str = ""
    draft: str | Path = AUTO
    num_assistant_tokens: int | None = None
    max_ngram_size: int = 3
    draft_windows: int | None = None

    def __post_init__(self) -> None:
        check_whole_number("max_new_tokens", self.max_new_tokens, 1, 1 << 31)
        check_whole_number("max_ngram_size", self.max_ngram_size, 1, 16)
        if self.num_assistant_tokens is not None:
            check_whole_number("num_assistant_tokens", self.num_assistant_tokens, 0, MAX_GUESSES)
        if self.draft_windows is not None:
            check_whole_number("draft_windows", self.draft_windows, 1, MAX_WINDOWS)
        if not isinstance(self.draft, (str, Path)) or not str(self.draft):
            raise ConfigError(f"draft is {self.draft!r}; it must be auto, ngram, off or a model package's directory")
        for name in ("do_sample", "ignore_eos"):
            if not isinstance(getattr(self, name), bool) and (name == "ignore_eos" or self.do_sample is not None):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if self.do_sample and self.temperature == 0:
            raise ConfigError("temperature is 0 while do_sample is True; raise it, or leave do_sample out for greedy")
        object.__setattr__(self, "stop_strings", _stop_strings(self.stop_strings))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        self.sampling(random.Random(0))  # Sampling checks the parameters for the last hop

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled, not chosen greedily."""
        if self.do_sample is not None:
            return self.do_sample
        if self.temperature is not None:
            return self.temperature != 0
        return not (self.top_k is None and self.top_p is None and self.min_p is None)

    @property
    def stops(self) -> tuple[str, ...]:
        """`stop_strings`, typed as the tuple that it is after construction."""
        assert isinstance(self.stop_strings, tuple)
        return self.stop_strings

    def sampling(self, rng: random.Random, *, answer_start: int = 0) -> Sampling:
        """The parameters for the last hop. `rng` draws the seed if none was given; the answer begins at position
        `answer_start`.

        Raises ConfigError that names the field.
        """
        sampling = Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=0 if self.top_k is None else self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=0.0 if self.min_p is None else self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_pairs(self.logit_bias),
            answer_start=answer_start if self.presence_penalty or self.frequency_penalty else 0,
            seed=rng.getrandbits(62) if self.seed is None else self.seed,
            logprobs=self.logprobs,
            logits=self.logits,
        )
        if self.samples:
            return sampling
        # all greedy configurations are equal: parameters of sampling mean nothing to them
        return replace(sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@dataclass(frozen=True, kw_only=True)
class ClientConfig(_ChecksNames):
    """How a client works with its peers; times in seconds.

    Steps: a prompt is sent in chunks of `chunk_tokens`, with at most `chunks_in_flight` unanswered. Hidden states are
    sent as `dtype`; only f32 is exact. All hops of a route have the same numerics, `numerics` if that is given, unless
    `mixed_numerics` allows others. `chat_tokens` is what a chat reserves on each hop, at most the model's context.

    Failures: a step is overdue after `step_floor_s` plus `step_factor` times its expected time. Then a hop that does
    not answer a ping within `ping_timeout_s` is at fault at once, and one that answers but computes nothing after
    another `stall_s`. A hop whose device computes, but for other sessions, gets `slow_s`, and no failure counts against
    it. A peer at fault is left out for `ban_s`, doubled with each failure up to `ban_limit_s`. If no other peer serves
    its layers, an answer to a ping ends that earlier. `repair_timeout_s` and `max_repairs` bound the repairs of one
    step. If no peer serves a layer, the client waits `wait_for_peers_s` and looks every `look_again_s`.

    Routes: records are looked up before each route; after `look_up_timeout_s` those of the last look-up are used. A
    measured link counts for `links_age_s`.

    Prefix cache: peers keep the KV cache of a text for a while, under names made with `prefix_key`. Clients with the
    same key reuse each other's prefixes, and can tell from the timing which ones there are. None: peers keep nothing.

    Drafts: `draft_package` is the small model that drafts for `draft="auto"`, on this machine's `draft_device` with
    `draft_threads` (0: OpenVINO's choice). `draft_engine` as `swarm join --engine`: `auto` guesses for many texts at
    once and is compiled at each start; `stateful` takes them one after another.

    >>> ClientConfig(chunk_tokens=64).chunks_in_flight
    4
    """

    chunk_tokens: int = 128
    chunks_in_flight: int = 4
    dtype: str = "f32"
    numerics: Numerics | None = None
    mixed_numerics: bool = False
    chat_tokens: int = 4096
    prefix_key: str | None = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    connect_timeout_s: float = 5.0
    measure_timeout_s: float = 2.0
    open_timeout_s: float = 10.0
    close_timeout_s: float = 2.0
    ping_timeout_s: float = 3.0
    step_floor_s: float = 4.0
    step_factor: float = 8.0
    stall_s: float = 15.0
    slow_s: float = 60.0
    wait_for_peers_s: float = 10.0
    repair_timeout_s: float = 60.0
    max_repairs: int = 12
    ban_s: float = 5.0
    ban_limit_s: float = 300.0
    look_up_timeout_s: float = 2.0
    look_again_s: float = 1.0
    links_age_s: float = 30.0
    draft_package: Path | None = None
    draft_device: str = "CPU"
    draft_threads: int = 0
    draft_engine: EngineChoice = "stateful"
    cache_dir: Path = field(default_factory=cache_folder)

    def __post_init__(self) -> None:
        check_whole_number("chunk_tokens", self.chunk_tokens, 1, MAX_STEP_TOKENS)
        check_whole_number("chunks_in_flight", self.chunks_in_flight, 1, 16)
        check_whole_number("chat_tokens", self.chat_tokens, 2, 1 << 31)
        check_whole_number("max_repairs", self.max_repairs, 0, 1 << 20)
        check_whole_number("draft_threads", self.draft_threads, 0, 4096)
        if self.draft_engine not in ENGINE_CHOICES:
            raise ConfigError(f"draft_engine is {self.draft_engine!r}; it must be {', '.join(ENGINE_CHOICES)}")
        if self.dtype not in HIDDEN_DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; it must be {', '.join(HIDDEN_DTYPES)}")
        if self.prefix_key is not None and not (isinstance(self.prefix_key, str) and 0 < len(self.prefix_key) <= 256):
            raise ConfigError("prefix_key must be a text of 1 to 256 characters, or None so that peers keep nothing")
        if self.numerics is not None and not isinstance(self.numerics, Numerics):
            raise ConfigError(f"numerics is {self.numerics!r}; it must be Numerics(inference=..., kv=...)")
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name.endswith("_s") and not (_is_number(value) and value > 0):
                raise ConfigError(f"{entry.name} is {value!r}; it must be over 0 seconds")
        if not (_is_number(self.step_factor) and self.step_factor >= 1):
            raise ConfigError(f"step_factor is {self.step_factor!r}; it must be at least 1")


def _stop_strings(value: Iterable[str] | str) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else _tuple("stop_strings", value)
    if len(texts) > _MAX_STOPS or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"stop_strings is {value!r}; it must be up to {_MAX_STOPS} texts, none of them empty")
    return texts


def _stop_token_ids(value: Iterable[int]) -> tuple[int, ...]:
    ids = _tuple("stop_token_ids", value)
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 31 for i in ids):
        raise ConfigError(f"stop_token_ids is {value!r}; it must be token ids from 0 up")
    return ids


def _pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    if bias is not None and not isinstance(bias, Mapping):
        raise ConfigError(f"logit_bias is {bias!r}; it must map token ids to numbers")
    return tuple((bias or {}).items())


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    try:
        return tuple(value)
    except TypeError as error:
        raise ConfigError(f"{name} is {value!r}; it must be a list") from error


def check_whole_number(name: str, value: object, low: int, high: int) -> None:
    """Raise a ConfigError that names the field, unless `value` is a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number from {low} to {high}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

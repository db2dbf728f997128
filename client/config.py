"""What a generation and a client can be told. Every wrong value is a ConfigError that names its field."""

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
"""What `draft` can be beside a model package's directory."""


class _Named:
    """Refuses a field that does not exist with a ConfigError, and says which one was meant."""

    def __new__(cls, **given: Any) -> Self:
        known = [entry.name for entry in fields(cls)]  # type: ignore[arg-type]  # every subclass is a dataclass
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                raise ConfigError(f"{cls.__name__} has no field {name}: {hint}")
        return super().__new__(cls)


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(_Named):
    """How one answer is made; names and meaning as in Hugging Face's and openvino_genai's.

    Greedy is the default. `do_sample=True` samples; left at None it follows from the rest: a
    `temperature` over 0, or a `top_k`, `top_p` or `min_p`, samples (at temperature 1 unless another is
    given). `do_sample=False` is greedy whatever the others say, and so is `temperature=0`. `top_k` 0,
    `top_p` 1 and `min_p` 0 keep every token. Without a `seed` each generation draws its own.

    The answer ends with one of the model's end-of-text ids (unless `ignore_eos`), one of
    `stop_token_ids`, the first of `stop_strings` in the text (none of these appears in the text), after
    `max_new_tokens`, or at the end of the model's context. `repetition_penalty` weighs prompt and answer;
    `presence_penalty`, `frequency_penalty` and `logit_bias` (token id to what is added to its score) are OpenAI's.
    `logprobs` asks for the chosen token's log-probability and that many of the likeliest; `logits`, `f16` or `f32`, for
    all that the model gave for each token: they come in `Piece.logprobs`, and many bytes with them.

    `draft` guesses tokens that the peers then check, several a trip: `ngram` looks them up in prompt and answer (the
    latest `max_ngram_size` tokens or fewer), a model package's directory names a small model with the same tokenizer,
    `auto` takes `ClientConfig.draft_package` if there is one, else `ngram`, `off` guesses nothing. It changes the
    speed and never the text. How many at a time, and how many windows of them are under way, follows from what is
    measured, none where it does not pay; `num_assistant_tokens` and `draft_windows` fix the one and the other.

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
        whole("max_new_tokens", self.max_new_tokens, 1, 1 << 31)
        whole("max_ngram_size", self.max_ngram_size, 1, 16)
        if self.num_assistant_tokens is not None:
            whole("num_assistant_tokens", self.num_assistant_tokens, 0, MAX_GUESSES)
        if self.draft_windows is not None:
            whole("draft_windows", self.draft_windows, 1, MAX_WINDOWS)
        if not isinstance(self.draft, (str, Path)) or not str(self.draft):
            raise ConfigError(f"draft is {self.draft!r}; it must be auto, ngram, off or a model package's directory")
        for name in ("do_sample", "ignore_eos"):
            if not isinstance(getattr(self, name), bool) and (name == "ignore_eos" or self.do_sample is not None):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if self.do_sample and self.temperature == 0:
            raise ConfigError("temperature is 0 while do_sample is True; raise it, or leave do_sample out for greedy")
        object.__setattr__(self, "stop_strings", _stop_strings(self.stop_strings))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        self.sampling(random.Random(0))  # Sampling checks what goes to the last hop

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn, rather than the likeliest taken."""
        if self.do_sample is not None:
            return self.do_sample
        if self.temperature is not None:
            return self.temperature != 0
        return not (self.top_k is None and self.top_p is None and self.min_p is None)

    @property
    def stops(self) -> tuple[str, ...]:
        """`stop_strings` as a tuple, which they are after construction."""
        assert isinstance(self.stop_strings, tuple)
        return self.stop_strings

    def sampling(self, rng: random.Random, *, answer_start: int = 0) -> Sampling:
        """What travels to the last hop. `rng` gives the seed where none was asked for; the answer begins at position
        `answer_start`.

        Raises ConfigError that names the field.
        """
        given = Sampling(
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
            return given
        # one and the same for all that is greedy: what draws says nothing there
        return replace(given, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@dataclass(frozen=True, kw_only=True)
class ClientConfig(_Named):
    """How a client deals with its peers; times in seconds.

    A prompt goes out in chunks of `chunk_tokens`, at most `chunks_in_flight` not yet answered. Hidden states
    travel as `dtype`; anything but f32 costs exactness. A route's hops all compute alike, in `numerics` where
    that is given; `mixed_numerics` lets it join peers that do not.

    Peers are asked again who serves what before each route; after `look_up_timeout_s` what is known has to do.
    A step is looked into after `step_floor_s` plus `step_factor` times what it should take: a hop whose
    connection does not answer within `ping_timeout_s` is given up at once, one that answers and computes
    nothing for `stall_s` more after that. Without cover for a layer, `wait_for_peers_s` is how long somebody
    may still join; `repair_timeout_s` and `max_repairs` bound the attempts at one step.
    Peers keep what they computed of a text for a while, under names that only `prefix_key` makes: clients with the
    same key start from what any of them has left there, and can tell from the time it takes what that was. None: keep
    nothing for me.
    `chat_tokens` is what a chat reserves on each hop, at most the model's context. `draft_package` is the small model
    that drafts where a generation does not say otherwise, on this machine's `draft_device` with `draft_threads` (0:
    as OpenVINO thinks best). `draft_engine` as `swarm join --engine`: `auto` guesses for many texts at once, and is
    compiled at each start; `stateful` takes them one after another.

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
        whole("chunk_tokens", self.chunk_tokens, 1, MAX_STEP_TOKENS)
        whole("chunks_in_flight", self.chunks_in_flight, 1, 16)
        whole("chat_tokens", self.chat_tokens, 2, 1 << 31)
        whole("max_repairs", self.max_repairs, 0, 1 << 20)
        whole("draft_threads", self.draft_threads, 0, 4096)
        if self.draft_engine not in ENGINE_CHOICES:
            raise ConfigError(f"draft_engine is {self.draft_engine!r}; it must be {', '.join(ENGINE_CHOICES)}")
        if self.dtype not in HIDDEN_DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; it must be {', '.join(HIDDEN_DTYPES)}")
        if self.prefix_key is not None and not (isinstance(self.prefix_key, str) and 0 < len(self.prefix_key) <= 256):
            raise ConfigError("prefix_key must be a text of 1 to 256 characters, or None to have nothing kept")
        if self.numerics is not None and not isinstance(self.numerics, Numerics):
            raise ConfigError(f"numerics is {self.numerics!r}; it must be Numerics(inference=..., kv=...)")
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name.endswith("_s") and not (_is_number(value) and value > 0):
                raise ConfigError(f"{entry.name} is {value!r}; it must be over 0 seconds")
        if not (_is_number(self.step_factor) and self.step_factor >= 1):
            raise ConfigError(f"step_factor is {self.step_factor!r}; it must be at least 1")


def _stop_strings(given: Iterable[str] | str) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else _tuple("stop_strings", given)
    if len(texts) > _MAX_STOPS or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"stop_strings is {given!r}; it must be up to {_MAX_STOPS} texts, none of them empty")
    return texts


def _stop_token_ids(given: Iterable[int]) -> tuple[int, ...]:
    ids = _tuple("stop_token_ids", given)
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 31 for i in ids):
        raise ConfigError(f"stop_token_ids is {given!r}; it must be token ids, from 0 on")
    return ids


def _pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    if bias is not None and not isinstance(bias, Mapping):
        raise ConfigError(f"logit_bias is {bias!r}; it must map token ids to numbers")
    return tuple((bias or {}).items())


def _tuple(name: str, given: Any) -> tuple[Any, ...]:
    try:
        return tuple(given)
    except TypeError as error:
        raise ConfigError(f"{name} is {given!r}; it must be a list") from error


def whole(name: str, value: object, low: int, high: int) -> None:
    """Raises ConfigError that names the field, unless `value` is a whole number in the bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number from {low} to {high}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

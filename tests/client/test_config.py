from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest

from client.config import ClientConfig, GenerationConfig
from swarm.errors import ConfigError
from swarm.sampling import Sampling

RNG = random.Random(0)


def test_greedy_is_the_default() -> None:
    assert GenerationConfig().sampling(RNG) == Sampling()


@pytest.mark.parametrize(
    ("given", "samples"),
    [
        ({"temperature": 0.7}, True),
        ({"temperature": 0.0}, False),
        ({"temperature": 0}, False),
        ({"top_k": 40}, True),
        ({"top_p": 0.9}, True),
        ({"min_p": 0.1}, True),
        ({"top_p": 0.9, "temperature": 0.0}, False),
        ({"seed": 3}, False),
        ({"do_sample": True}, True),
        ({"do_sample": False, "temperature": 0.7}, False),
        ({"do_sample": False, "top_p": 0.7}, False),
        ({"repetition_penalty": 1.2}, False),
    ],
)
def test_sampling_follows_from_the_given_fields(given: dict[str, Any], samples: bool) -> None:
    config = GenerationConfig(**given)
    assert config.samples is samples
    assert config.sampling(RNG).greedy is not samples


def test_only_penalties_of_the_answer_need_its_start() -> None:
    config = GenerationConfig(presence_penalty=0.5, logit_bias={7: -1.0})
    assert config.sampling(RNG, answer_start=9) == Sampling(
        presence_penalty=0.5, logit_bias=((7, -1.0),), answer_start=9
    )
    assert GenerationConfig().sampling(RNG, answer_start=9) == Sampling()
    with pytest.raises(ConfigError, match="logit_bias"):
        GenerationConfig(logit_bias=[(7, 1.0)])  # type: ignore[arg-type]


def test_every_parameter_reaches_the_last_hop() -> None:
    config = GenerationConfig(
        temperature=0.5, top_k=3, top_p=0.8, min_p=0.05, repetition_penalty=1.3, seed=9, logprobs=2
    )
    assert config.sampling(RNG) == Sampling(
        temperature=0.5, top_k=3, top_p=0.8, min_p=0.05, repetition_penalty=1.3, seed=9, logprobs=2
    )


def test_without_temperature_sampling_is_at_one() -> None:
    assert GenerationConfig(do_sample=True).sampling(RNG).temperature == 1.0


def test_greedy_keeps_the_penalty_and_the_log_probabilities() -> None:
    config = GenerationConfig(do_sample=False, temperature=2.0, repetition_penalty=1.3, logprobs=0)
    assert config.sampling(RNG) == Sampling(repetition_penalty=1.3, logprobs=0)


def test_without_a_seed_each_generation_draws_its_own() -> None:
    config = GenerationConfig(temperature=1.0)
    rng = random.Random(4)
    assert config.sampling(rng).seed != config.sampling(rng).seed
    fixed = GenerationConfig(temperature=1.0, seed=7)
    assert fixed.sampling(rng) == fixed.sampling(rng)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", True),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 1.0),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("do_sample", "yes"),
        ("seed", -1),
        ("seed", 1.0),
        ("stop_strings", ("",)),
        ("stop_strings", (1,)),
        ("stop_strings", 5),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("a",)),
        ("stop_token_ids", 5),
        ("ignore_eos", None),
        ("logprobs", -1),
        ("logprobs", 65),
    ],
)
def test_the_error_names_a_wrong_field(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        GenerationConfig(**{name: value})  # type: ignore[arg-type]


def test_the_error_names_a_wrong_pair() -> None:
    with pytest.raises(ConfigError, match="temperature is 0 while do_sample is True"):
        GenerationConfig(do_sample=True, temperature=0.0)


def test_the_error_names_an_unknown_field_and_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="max_new_tokns: did you mean max_new_tokens"):
        GenerationConfig(max_new_tokns=5)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="no field frobnicate: there are max_new_tokens"):
        GenerationConfig(frobnicate=5)  # type: ignore[call-arg]


def test_one_stop_string_need_not_be_a_list() -> None:
    assert GenerationConfig(stop_strings="END").stops == ("END",)
    assert GenerationConfig(stop_strings=["a", "b"]).stops == ("a", "b")  # type: ignore[arg-type]
    assert GenerationConfig(stop_token_ids={4}).stop_token_ids == (4,)  # type: ignore[arg-type]


def test_a_config_can_be_copied_and_changed() -> None:
    config = GenerationConfig(temperature=0.5, stop_strings="x")
    assert copy.deepcopy(config) == config
    assert replace(config, seed=3).stops == ("x",)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chunk_tokens", 0),
        ("chunk_tokens", 5000),
        ("chunks_in_flight", 0),
        ("dtype", "f64"),
        ("numerics", "f32"),
        ("step_factor", 0.5),
        ("connect_timeout_s", 0),
        ("ban_s", float("inf")),
        ("stall_s", "long"),
    ],
)
def test_the_error_names_a_wrong_field_of_a_client(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        ClientConfig(**{name: value})  # type: ignore[arg-type]


def test_the_error_names_an_unknown_field_of_a_client() -> None:
    with pytest.raises(ConfigError, match="ClientConfig has no field timeout"):
        ClientConfig(timeout=3)  # type: ignore[call-arg]

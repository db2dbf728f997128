"""Parsing of request bodies: hostile values, and the API's description as the only definition of valid ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.gateway.api.openapi import openapi_document
from client.gateway.api.parameters import CHAT, COMPLETION
from client.gateway.api.requests import CompletionRequest, parse_chat, parse_completion, parse_json
from client.gateway.api.schema import check
from swarm.errors import RequestError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
Parse = Callable[..., CompletionRequest]
MESSAGES = [{"role": "user", "content": "Hello"}]


def values_of(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """A strategy for the values that a schema of this API allows."""
    if "anyOf" in schema:
        return st.one_of(*(values_of(each) for each in schema["anyOf"]))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    named = schema.get("type", "object")
    names = [named] if isinstance(named, str) else named
    return st.one_of(*(_of_type(name, schema) for name in names))


def _of_type(name: str, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    match name:
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(schema.get("minimum", 0), min(schema.get("maximum", 1 << 40), 1 << 62))
        case "number":
            low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
            return st.floats(low, schema["maximum"], exclude_min="exclusiveMinimum" in schema)
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=min(schema.get("maxLength", 20), 20))
        case "array":
            max_size = min(schema.get("maxItems", 3), 3)
            return st.lists(values_of(schema.get("items", {})), min_size=schema.get("minItems", 0), max_size=max_size)
    if "propertyNames" in schema:
        names = st.from_regex(schema["propertyNames"]["pattern"].replace("$", r"\Z"))
        return st.dictionaries(names, values_of(schema["additionalProperties"]), max_size=3)
    properties = schema.get("properties", {})
    required = {each: values_of(properties[each]) for each in schema.get("required", ())}
    optional = {each: values_of(found) for each, found in properties.items() if each not in required}
    return st.fixed_dictionaries(required, optional=optional)


def parse_or_refuse(parse: Parse, plain: Any) -> CompletionRequest | RequestError:
    """The parsed request, or the error that refuses it. Other exceptions are bugs."""
    try:
        return parse(plain, temperature=0.0)
    except RequestError as error:
        return error


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_body_is_parsed_or_refused(body: bytes) -> None:
    def parse(raw: bytes, *, temperature: float) -> CompletionRequest:
        return parse_chat(parse_json(raw), temperature=temperature)

    found = parse_or_refuse(parse, body)
    assert isinstance(found, RequestError)
    assert found.status == 400


@given(values_of(CHAT))
def test_a_described_chat_request_is_parsed_or_a_parameter_is_named(plain: dict[str, Any]) -> None:
    found = parse_or_refuse(parse_chat, plain)
    assert found.param is not None if isinstance(found, RequestError) else found.config_for(0, 5).max_new_tokens == 5


@given(values_of(COMPLETION))
def test_a_described_text_request_is_parsed_or_a_parameter_is_named(plain: dict[str, Any]) -> None:
    found = parse_or_refuse(parse_completion, plain)
    assert found.param is not None if isinstance(found, RequestError) else found.prompts


@given(JSON)
def test_any_value_in_any_parameter_is_parsed_or_refused(value: Any) -> None:
    for name in CHAT["properties"]:
        assert len(str(parse_or_refuse(parse_chat, {"model": "m", "messages": MESSAGES, name: value}))) < 1000


def test_the_description_is_json_and_has_every_parameter() -> None:
    plain = json.loads(json.dumps(openapi_document(needs_key=True)))
    body = plain["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == set(CHAT["properties"])
    assert plain["security"] == [{"key": []}]
    assert "security" not in openapi_document(needs_key=False)


def test_max_tokens_and_max_completion_tokens_must_agree() -> None:
    same = {"model": "m", "messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 5}
    assert parse_chat(same, temperature=0.0).max_new_tokens == 5
    with pytest.raises(RequestError, match="max_completion_tokens"):
        parse_chat({**same, "max_tokens": 6}, temperature=0.0)


def test_the_gateways_temperature_is_only_a_default() -> None:
    plain = {"model": "m", "messages": MESSAGES}
    assert parse_chat(plain, temperature=1.0).config.samples
    assert not parse_chat({**plain, "temperature": 0}, temperature=1.0).config.samples


def test_each_choice_has_its_own_seed() -> None:
    request = parse_chat({"model": "m", "messages": MESSAGES, "seed": 7, "n": 2, "temperature": 1}, temperature=0.0)
    assert [request.config_for(choice, 9).seed for choice in range(2)] == [7, 8]
    unseeded = parse_chat({"model": "m", "messages": MESSAGES}, temperature=1.0)
    assert unseeded.config_for(1, 9).seed is None


def test_an_error_names_the_path_of_a_nested_value() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(RequestError) as caught:
        parse_chat({"model": "m", "messages": [{"role": "user", "content": parts}]}, temperature=0.0)
    assert caught.value.param is not None
    assert caught.value.param.startswith("messages[0].content[1]")


def test_a_whole_number_may_be_written_as_a_float() -> None:
    check(5.0, {"type": "integer"}, "n")
    with pytest.raises(RequestError, match="whole number"):
        check(5.5, {"type": "integer"}, "n")
    with pytest.raises(RequestError, match="whole number"):
        check(True, {"type": "integer"}, "n")


def test_every_request_uses_the_gateways_draft() -> None:
    plain = {"model": "m", "messages": MESSAGES}
    assert parse_chat(plain, temperature=1.0, draft="off").config.draft == "off"
    assert parse_chat(plain, temperature=1.0).config.draft == "auto"

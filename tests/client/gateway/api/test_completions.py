"""The completion endpoints over toy peers, called by OpenAI's package and by a strict parser of events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings

from client.gateway.api.parameters import CHAT, COMPLETION
from client.gateway.api.schema import check
from tests.client.gateway.api.test_requests import values_of
from tests.client.gateway.http.strict_sse import chunks, events, text_of
from tests.client.gateway.toy_gateway import ToyGateway, toy_gateway
from tests.client.scripted_peer import CONTEXT, VOCAB, toy_text
from tests.client.toy_world import ToyTokenizer

UNSUPPORTED = "unsupported_parameter"
QUESTION = [{"role": "user", "content": "ABC"}]
TOKENIZER = ToyTokenizer()


@pytest.fixture(scope="module")
def gateway() -> Iterator[ToyGateway]:
    with toy_gateway(max_body=65_536) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def client(gateway: ToyGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(messages: list[dict[str, str]], count: int) -> str:
    return TOKENIZER.decode(toy_text(TOKENIZER.chat(messages), count))


def post(gateway: ToyGateway, path: str, plain: Any, **options: Any) -> httpx.Response:
    return gateway.http.post(path, json=plain, **options)


def ask(gateway: ToyGateway, **more: Any) -> httpx.Response:
    return post(gateway, "/v1/chat/completions", {"model": "toy", "messages": QUESTION, "max_tokens": 8, **more})


def test_an_answer_has_the_models_text_and_the_right_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="toy", messages=QUESTION, max_tokens=12)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == expected(QUESTION, 12)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(TOKENIZER.chat(QUESTION)), 12)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_streamed_answer_has_the_same_text(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="toy",
        messages=QUESTION,  # type: ignore[arg-type]
        max_completion_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    found = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in found[:-1]) == expected(QUESTION, 12)
    assert found[0].choices[0].delta.role == "assistant"
    assert found[-2].choices[0].finish_reason == "length"
    assert found[-1].usage is not None
    assert found[-1].usage.completion_tokens == 12
    assert not found[-1].choices


def test_several_prompts_are_continued_in_one_request(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="toy", prompt=["abc", "xyz"], n=2, max_tokens=5)
    texts = [choice.text for choice in answer.choices]
    wanted = [TOKENIZER.decode(toy_text(TOKENIZER.encode(text), 5)) for text in ("abc", "xyz")]
    assert texts == [wanted[0], wanted[0], wanted[1], wanted[1]]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 20)


def test_a_prompt_may_be_token_ids(client: openai.OpenAI) -> None:
    one = client.completions.create(model="toy", prompt=[1, 2, 3], max_tokens=5)
    two = client.completions.create(model="toy", prompt=[[1, 2, 3], [4]], max_tokens=5)
    assert one.choices[0].text == two.choices[0].text == TOKENIZER.decode(toy_text([1, 2, 3], 5))
    assert two.choices[1].text == TOKENIZER.decode(toy_text([4], 5))


def test_sampled_choices_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    def write() -> list[str | None]:
        answer = client.chat.completions.create(
            model="toy",
            messages=QUESTION,  # type: ignore[arg-type]
            max_tokens=9,
            n=3,
            temperature=1,
            seed=-5,
        )
        return [choice.message.content for choice in answer.choices]

    first = write()
    assert first == write()
    assert len(set(first)) == 3


def test_the_events_of_a_stream_follow_the_standard(gateway: ToyGateway) -> None:
    response = ask(gateway, stream=True, n=3, stream_options={"include_usage": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = chunks(response.content)
    assert {chunk["id"] for chunk in found} == {found[0]["id"]}
    assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"}
    for index in range(3):
        choices = [choice for chunk in found for choice in chunk["choices"] if choice["index"] == index]
        assert choices[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == "length"
        assert text_of(found, index) == expected(QUESTION, 8)
    assert all(chunk["usage"] is None for chunk in found[:-1])
    assert found[-1]["usage"]["completion_tokens"] == 24


def test_an_answer_ends_before_a_stop_text(gateway: ToyGateway) -> None:
    whole = expected(QUESTION, 8)
    answer = ask(gateway, stop=[whole[3:5]]).json()
    assert answer["choices"][0]["message"]["content"] == whole[:3]
    assert answer["choices"][0]["finish_reason"] == "stop"
    streamed = chunks(ask(gateway, stop=whole[3:5], stream=True).content)
    assert text_of(streamed) == whole[:3]


def test_the_end_of_text_token_is_not_in_the_answer_and_can_be_ignored() -> None:
    end = toy_text(TOKENIZER.chat(QUESTION), 3)[-1]
    with toy_gateway(eos=(end,)) as gateway:
        answer = ask(gateway, logprobs=True).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["message"]["content"] == expected(QUESTION, 2)
        assert len(answer["choices"][0]["logprobs"]["content"]) == 2
        assert answer["usage"]["completion_tokens"] == 3
        assert ask(gateway, ignore_eos=True).json()["choices"][0]["finish_reason"] == "length"


def test_log_probabilities_are_returned_on_request(gateway: ToyGateway) -> None:
    content = ask(gateway, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == expected(QUESTION, 8)
    assert {each["logprob"] for each in content} == {-0.5}
    assert content[0]["bytes"] == list(content[0]["token"].encode())
    assert ask(gateway).json()["choices"][0]["logprobs"] is None
    streamed = chunks(ask(gateway, logprobs=True, stream=True).content)
    tokens = [each for chunk in streamed for each in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert tokens == content
    text = post(gateway, "/v1/completions", {"model": "toy", "prompt": "abc", "logprobs": 0, "max_tokens": 4}).json()
    assert text["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3]
    body = {"model": "toy", "prompt": "abc", "logprobs": 0, "max_tokens": 4, "n": 2, "stream": True}
    found = [choice for chunk in chunks(post(gateway, "/v1/completions", body).content) for choice in chunk["choices"]]
    for index in range(2):
        logprobs = [choice["logprobs"] for choice in found if choice["index"] == index and choice["logprobs"]]
        assert [offset for each in logprobs for offset in each["text_offset"]] == [0, 1, 2, 3]


def test_an_answer_reports_its_hops_on_request(gateway: ToyGateway) -> None:
    plain = ask(gateway, swarm_metrics=True).json()
    assert [hop["name"] for hop in plain["swarm"][0]["hops"]] == ["a", "b", "c"]
    streamed = chunks(ask(gateway, swarm_metrics=True, stream=True).content)
    assert [hop["layers"] for hop in streamed[-1]["swarm"]["hops"]] == ["0:2", "2:4", "4:6"]
    assert "swarm" not in ask(gateway).json()


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("changed", "status", "param", "code"),
    [
        ({"model": "other"}, 404, "model", "model_not_found"),
        ({"model": None}, 400, "model", "missing_required_parameter"),
        ({"messages": []}, 400, "messages", "invalid_value"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content", "missing_required_parameter"),
        ({"temperature": 3}, 400, "temperature", "invalid_value"),
        ({"temperature": "hot"}, 400, "temperature", "invalid_value"),
        ({"top_p": 0}, 400, "top_p", "invalid_value"),
        ({"max_tokens": True}, 400, "max_tokens", "invalid_value"),
        ({"max_tokens": 1.5}, 400, "max_tokens", "invalid_value"),
        ({"max_tokens": CONTEXT}, 400, "max_tokens", "context_length_exceeded"),
        ({"tools": [{"type": "function"}]}, 400, "tools", UNSUPPORTED),
        ({"response_format": {"type": "json_object"}}, 400, "response_format.type", UNSUPPORTED),
        ({"store": True}, 400, "store", UNSUPPORTED),
        ({"stream_options": {"wishes": 1}}, 400, "stream_options.wishes", "unknown_parameter"),
        ({"logit_bias": {"one": 1}}, 400, "logit_bias", "invalid_value"),
        (
            {"stream_options": {"include_obfuscation": True}},
            400,
            "stream_options.include_obfuscation",
            "unsupported_parameter",
        ),
        ({"prompt_cache_retention": "24h"}, 400, "prompt_cache_retention", UNSUPPORTED),
        ({"logit_bias": {"500": 1}}, 400, "logit_bias", "invalid_value"),
        ({"stop_token_ids": [500]}, 400, "stop_token_ids", "invalid_value"),
        ({"top_logprobs": 2}, 400, "top_logprobs", "invalid_value"),
        ({"n": 17}, 400, "n", "invalid_value"),
        ({"max_completion_tokens": 9}, 400, "max_tokens", "invalid_value"),
        ({"best_friend": 1}, 400, "best_friend", "unknown_parameter"),
    ],
)
def test_an_invalid_parameter_is_named(
    gateway: ToyGateway, changed: dict[str, Any], status: int, param: str | None, code: str
) -> None:
    for stream in (False, True):
        response = ask(gateway, **changed, stream=stream)
        problem = response.json()["error"]
        assert (response.status_code, problem["param"], problem["code"]) == (status, param, code)
        assert problem["type"] == "invalid_request_error"


def test_unsupported_parameters_are_accepted_with_values_that_have_no_effect(gateway: ToyGateway) -> None:
    """Callers' libraries send such values by default."""
    without_effect = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": False,
        "user": "a user",
        "safety_identifier": "a user",
        "prompt_cache_key": "a key",
        "metadata": {"a": "b"},
        "logit_bias": None,
        "stop": None,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
    }
    history = [
        {"role": "developer", "content": "A"},
        {"role": "user", "content": [{"type": "text", "text": "B"}, {"type": "text", "text": "C"}]},
        {"role": "assistant", "content": "D", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "E", "name": "eve"},
    ]
    plain = [{"role": "user", "content": text} for text in ("A", "BC", "D", "E")]
    answer = ask(gateway, **without_effect, messages=history)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == expected(plain, 8)


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b'{"model": NaN}', "application/json", 400),
        (b"[" * 50_000, "application/json", 400),
        (b'{"n": ' + b"9" * 5000 + b"}", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (rb'{"model": "toy", "prompt": "a\ud800"}', "application/json", 400),
        (rb'{"model": "toy", "prompt": "a", "stop": ["\udfff"]}', "application/json", 400),
        (b'{"model": "toy"}', "text/plain", 415),
        (b" " * 70_000, "application/json", 413),
    ],
)
def test_a_malformed_body_is_refused(gateway: ToyGateway, body: bytes, kind: str, status: int) -> None:
    response = gateway.http.post("/v1/completions", content=body, headers={"content-type": kind})
    assert response.status_code == status
    assert response.json()["error"]["message"]


def test_the_error_for_a_long_prompt_has_the_numbers(gateway: ToyGateway) -> None:
    problem = ask(gateway, messages=[{"role": "user", "content": "A" * 500}], max_tokens=9).json()["error"]
    assert problem["code"] == "context_length_exceeded"
    assert all(number in problem["message"] for number in ("400", "504", "513"))


def test_without_max_tokens_the_gateways_default_or_the_rest_of_the_context_applies(gateway: ToyGateway) -> None:
    long = [{"role": "user", "content": "A" * (CONTEXT - 10)}]
    answer = ask(gateway, messages=long, max_tokens=None).json()
    assert answer["usage"]["total_tokens"] == CONTEXT
    text = post(gateway, "/v1/completions", {"model": "toy", "prompt": "abc"}).json()
    assert text["usage"]["completion_tokens"] == 16  # OpenAI's default there


def test_uncovered_layers_are_named_with_503() -> None:
    with toy_gateway() as gateway:
        first, second, third, spare = gateway.peers
        for peer in (second, spare):
            gateway.call(_kill(peer))
        with (
            openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
            pytest.raises(openai.InternalServerError) as caught,
        ):
            client.chat.completions.create(model="toy", messages=QUESTION)  # type: ignore[arg-type]
        assert caught.value.status_code == 503
        assert "2:4" in str(caught.value)
        assert caught.value.response.headers["retry-after"] == "1"
        assert first.dead is third.dead is False


def test_a_peer_that_dies_during_a_stream_does_not_change_its_text() -> None:
    with toy_gateway() as gateway:
        gateway.slow_down(0.01)
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(model="toy", messages=QUESTION, max_tokens=60, stream=True)  # type: ignore[arg-type]
            text = ""
            for number, chunk in enumerate(stream):
                text += chunk.choices[0].delta.content or ""
                if number == 10:
                    gateway.call(_kill(gateway.world.swarm.peers["b"]))
        assert text == expected(QUESTION, 60)


def test_an_error_during_a_stream_is_its_last_event() -> None:
    with toy_gateway() as gateway:
        gateway.slow_down(0.01)
        body = {"model": "toy", "messages": QUESTION, "max_tokens": 60, "stream": True}
        with gateway.http.stream("POST", "/v1/chat/completions", json=body) as response:
            raw = b""
            for part in response.iter_bytes():
                if not raw:
                    for name in ("b", "spare"):
                        gateway.call(_kill(gateway.world.swarm.peers[name]))
                raw += part
        assert response.status_code == 200
        *before, last = events(raw)
        assert len(before) > 1
        assert "2:4" in json.loads(last)["error"]["message"]
        assert gateway.sessions == 0


def _kill(peer: Any) -> Any:
    async def kill() -> None:
        peer.die()

    return kill


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("GET", "/v1/chat/completions", 405, "POST"),
        ("OPTIONS", "/v1/completions", 405, "POST"),
        ("POST", "/v1/models", 405, "GET, HEAD"),
        ("GET", "/v1/embeddings", 404, None),
        ("DELETE", "/", 405, "GET, HEAD"),
        ("GET", "/nothing", 404, None),
        ("GET", "/%2e%2e/app.py", 404, None),
    ],
)
def test_unknown_paths_and_wrong_methods_get_openais_error_object(
    gateway: ToyGateway, method: str, path: str, status: int, allowed: str | None
) -> None:
    response = gateway.http.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"
    if allowed is not None:
        assert set(response.headers["allow"].split(", ")) == set(allowed.split(", "))


def test_token_ids_outside_the_vocabulary_are_refused(gateway: ToyGateway) -> None:
    response = post(gateway, "/v1/completions", {"model": "toy", "prompt": [1, VOCAB]})
    assert response.status_code == 400
    assert str(VOCAB) in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "prompt"


def test_an_empty_prompt_is_refused(gateway: ToyGateway) -> None:
    for prompt in ("", ["abc", ""]):
        response = post(gateway, "/v1/completions", {"model": "toy", "prompt": prompt})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(("path", "schema"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
def test_responses_match_the_openapi_description(gateway: ToyGateway, path: str, schema: dict[str, Any]) -> None:
    described = gateway.http.get("/openapi.json").json()["paths"][path]["post"]
    assert described["requestBody"]["content"]["application/json"]["schema"] == schema

    @settings(max_examples=25, deadline=None)
    @given(plain=values_of(schema))
    def check_response(plain: dict[str, Any]) -> None:
        short = {"model": "toy", "max_tokens": 3, "max_completion_tokens": None, "n": 2}
        body = plain | {name: value for name, value in short.items() if name in schema["properties"]}
        response = gateway.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        documented = described["responses"][str(response.status_code)]["content"]
        if response.headers["content-type"].startswith("text/event-stream"):
            assert events(response.content)
        else:
            check(response.json(), documented["application/json"]["schema"], "answer")

    check_response()

"""`swarm serve` over real peers, called by OpenAI's package."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from swarm.app.local_swarm import Member
from tests.cases.peer_set import PeerSet
from tests.client.gateway.real_gateway import real_gateway, start_peers
from tests.conftest import ChatIds, GreedyReference
from tests.harness import ROOT, swarm_command, wait_until

QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": QUESTION}]
STORY = "Once upon a time there was a"


@dataclass
class GatewayUnderTest:
    members: list[Member]
    process: subprocess.Popen[str]
    url: str
    model: str


@pytest.fixture(scope="module")
def served(gateway_peers: PeerSet, smollm2_package: Path) -> Iterator[GatewayUnderTest]:
    """Two peers, a spare for the last layers, and a gateway."""
    members = [gateway_peers[name] for name in start_peers(gateway_peers, smollm2_package)]
    with real_gateway(members[0].address) as gateway:
        yield GatewayUnderTest(members, gateway.process, gateway.url, gateway.model)


@pytest.fixture(scope="module")
def client(served: GatewayUnderTest) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def story(smollm2_tokenizer: object, greedy_reference: GreedyReference) -> list[str]:
    """The unsplit model's continuation of STORY after 0, 1, 2, ... tokens."""
    ids = smollm2_tokenizer.encode(STORY).input_ids.data[0].tolist()  # type: ignore[attr-defined]
    after = greedy_reference(ids, 80)
    return [str(smollm2_tokenizer.decode(after[:count])) for count in range(81)]  # type: ignore[attr-defined]


def test_a_chat_gets_the_answer_of_the_unsplit_model(
    client: openai.OpenAI,
    served: GatewayUnderTest,
    chat_ids: ChatIds,
    greedy_reference: GreedyReference,
    smollm2_tokenizer: object,
) -> None:
    ids = chat_ids(QUESTION)
    expected = greedy_reference(ids, 8)
    text = smollm2_tokenizer.decode(expected[:7])  # type: ignore[attr-defined]  # the eighth token ends the text
    whole = client.chat.completions.create(model=served.model, messages=MESSAGES)  # type: ignore[arg-type]
    assert whole.choices[0].message.content == text
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ids), 8)
    streamed = client.chat.completions.create(model=served.model, messages=MESSAGES, stream=True)  # type: ignore[arg-type]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text
    # the next turn reuses the KV cache of this one
    turns = [*MESSAGES, {"role": "assistant", "content": text}, {"role": "user", "content": "And of Italy?"}]

    def cached_tokens() -> int | None:
        after = client.chat.completions.create(model=served.model, messages=turns, max_tokens=1)  # type: ignore[arg-type]
        assert after.usage is not None
        assert after.usage.prompt_tokens_details is not None
        return after.usage.prompt_tokens_details.cached_tokens

    # on a busy machine a turn may take the spare, which has not cached the first one
    wait_until(cached_tokens, "a turn is sent to the peers that cached the one before")


def test_sixty_four_streams_at_once_are_all_exact(served: GatewayUnderTest, story: list[str]) -> None:
    async def ask(client: openai.AsyncOpenAI) -> str:
        stream = await client.completions.create(model=served.model, prompt=STORY, max_tokens=6, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=300
        ) as client:
            return await asyncio.gather(*(ask(client) for _ in range(64)))

    before = psutil.Process(served.process.pid).memory_info().rss
    assert asyncio.run(main()) == [story[6]] * 64
    assert psutil.Process(served.process.pid).memory_info().rss - before < 100 << 20


def test_the_last_hop_applies_biases_and_penalties_and_returns_log_probabilities(
    client: openai.OpenAI, served: GatewayUnderTest, story: list[str], smollm2_tokenizer: object
) -> None:
    plain = client.completions.create(model=served.model, prompt=STORY, max_tokens=8, logprobs=3)
    assert plain.choices[0].text == story[8]
    found = plain.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert "".join(found.tokens) == story[8]
    assert found.top_logprobs is not None
    assert all(len(top) == 3 for top in found.top_logprobs)
    (usual,) = smollm2_tokenizer.encode(story[1], add_special_tokens=False).input_ids.data[0].tolist()  # type: ignore[attr-defined]
    other = client.completions.create(model=served.model, prompt=STORY, max_tokens=1, logit_bias={str(usual): -100})
    assert other.choices[0].text != story[1]
    again = client.completions.create(model=served.model, prompt=STORY, max_tokens=40, frequency_penalty=2)
    words = again.choices[0].text.split()
    assert len(set(words)) > len(set(story[40].split()))


def test_a_disconnected_caller_frees_every_hop(served: GatewayUnderTest) -> None:
    body = {"model": served.model, "prompt": STORY, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as response:
        parts = response.iter_bytes()
        next(parts)  # the iterator is kept: dropping it would close the connection
        wait_until(lambda: _open_sessions(served) == 2, "its sessions are open")
    closed_at = time.monotonic()
    wait_until(lambda: _open_sessions(served) == 0, "its sessions are closed")
    assert time.monotonic() - closed_at < 20  # about a second on an idle machine


def test_a_peer_that_is_killed_during_a_stream_does_not_change_its_text(
    client: openai.OpenAI, served: GatewayUnderTest, story: list[str]
) -> None:
    stream = client.completions.create(model=served.model, prompt=STORY, max_tokens=80, stream=True)
    text = ""
    for number, chunk in enumerate(stream):
        text += chunk.choices[0].text
        if number == 20:
            state = httpx.get(f"{served.url}/api/swarm", timeout=60).json()["models"][0]
            (route,) = state["routes_in_use"]
            victim = next(m for m in served.members if m.name == route["hops"][1]["name"])
            victim.kill()
    assert text == story[80]
    page = httpx.get(f"{served.url}/metrics").text
    assert f'swarm_gateway_reroutes_total{{model="{served.model}"}} 1.0' in page


def test_after_a_signal_the_answer_finishes_and_the_exit_code_is_0(served: GatewayUnderTest, story: list[str]) -> None:
    assert httpx.get(f"{served.url}/health").json()["ready"] is True
    body = {"model": served.model, "prompt": STORY, "max_tokens": 80, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        served.process.send_signal(signal.SIGTERM)
        assert "data: [DONE]" in list(lines)
    assert served.process.wait(60) == 0


def _open_sessions(served: GatewayUnderTest) -> int:
    """The number of open sessions in the metrics of all peers."""
    pages = []
    for member in served.members:
        event = member.event("metrics")
        assert event is not None
        with contextlib.suppress(httpx.TransportError):
            pages.append(httpx.get(event["metrics"]).text)
    lines = [line for page in pages for line in page.splitlines() if line.startswith("swarm_peer_sessions ")]
    return int(sum(float(line.split()[1]) for line in lines))


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        ("toy --initial-peer 127.0.0.1:1 --listen 0.0.0.0:0", {}, "--api-key-file"),
        ("--initial-peer 127.0.0.1:1", {}, "--all"),
        ("toy --demo", {}, "--demo"),
        ("--demo --listen 192.0.2.1:8000 --no-auth", {}, "cannot listen at 192.0.2.1:8000"),
        ("toy --initial-peer 127.0.0.1:1 --allow-origin site.example", {}, "site.example"),
        ("", {"MODELS": "toy", "INITIAL_PEER": "127.0.0.1:1 nowhere", "ALL": "1"}, "'nowhere'"),
        ("", {"API_KEY_FILE": "/nowhere/keys", "DEMO": "1"}, "/nowhere/keys"),
    ],
)
def test_invalid_options_are_named(words: str, variables: dict[str, str], message: str) -> None:
    environment = os.environ | {f"SWARM_SERVE_{name}": value for name, value in variables.items()}
    command = swarm_command("serve", *words.split())
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert message in done.stderr

"""Drafts over real peers and a real model: faster or slower, never another text."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from client import GenerationConfig, SwarmClient
from client.generation.generate import Reply, collect
from swarm.app.local_swarm import LocalSwarm
from tests.cases.conftest import ChatIds
from tests.conftest import GreedyReference
from tests.harness import run_swarm

PROMPT = "Repeat five times: the bee sat on the tree."
TOKENS = 24
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 5}


def test_no_draft_changes_a_greedy_or_a_sampled_text(
    standing_swarm: LocalSwarm, smollm2_package: Path, chat_ids: ChatIds, greedy_reference: GreedyReference
) -> None:
    """Look-up and a model (the target itself: the longest windows), fixed and tuned, one and several under way."""
    small = str(smollm2_package)
    ways: dict[str, dict[str, Any]] = {
        "none": {"draft": "off"},
        "auto": {},
        "look-up": {"draft": "ngram", "num_assistant_tokens": 5, "draft_windows": 3},
        "model": {"draft": small, "num_assistant_tokens": 3, "draft_windows": 1},
        "model ahead": {"draft": small, "num_assistant_tokens": 2, "draft_windows": 3},
    }

    async def write() -> dict[tuple[str, bool], Reply]:
        replies = {}
        async with (
            await SwarmClient.connect(smollm2_package, initial_peers=standing_swarm.addresses) as client,
            client.session(max_tokens=200) as chat,
        ):
            for way, options in ways.items():
                for sampled in (False, True):
                    how = SAMPLED if sampled else {}
                    config = GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True, **how, **options)
                    chat.reset()
                    replies[way, sampled] = await chat.send(PROMPT, config)
        return replies

    replies = asyncio.run(write())
    assert list(replies["none", False].token_ids) == greedy_reference(chat_ids(PROMPT), TOKENS)
    for (way, sampled), reply in replies.items():
        assert reply.token_ids == replies["none", sampled].token_ids, (way, sampled)
        guessing = reply.metrics.speculation
        if way.startswith("model"):
            assert guessing is not None
            # it reads a new prompt on the side, however long that takes here; the second time it knows it
            assert guessing.tokens_a_trip > 2 * sampled
            # an equal model that draws with the same numbers is wrong at most where the text ends
            assert guessing.accepted >= 0.8 * guessing.proposed


def test_all_logits_come_where_they_are_asked_for(standing_swarm: LocalSwarm, smollm2_package: Path) -> None:
    async def ask(kind: str) -> Reply:
        async with await SwarmClient.connect(smollm2_package, initial_peers=standing_swarm.addresses) as client:
            return await collect(client.generate(PROMPT, GenerationConfig(max_new_tokens=5, logits=kind)))

    for kind in ("f16", "f32"):
        reply = asyncio.run(ask(kind))
        assert len(reply.logprobs) == len(reply.token_ids)
        for choice, token in zip(reply.logprobs, reply.token_ids, strict=True):
            assert choice.logits is not None
            assert choice.logits.shape == (49_152,)
            assert int(choice.logits.argmax()) == token


def test_a_command_says_how_guessing_went(standing_swarm: LocalSwarm, smollm2_package: Path) -> None:
    words = ("--initial-peer", standing_swarm.addresses[0], "--max-new-tokens", "24")
    drafting = ("--draft", "ngram", "--draft-tokens", "4")
    done = run_swarm("generate", str(smollm2_package), PROMPT, *words, *drafting, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["speculation"]
    assert told["draft"] == "ngram"
    assert told["proposed"] >= told["accepted"] >= 0
    wrong = run_swarm("generate", str(smollm2_package), "x", *words, "--draft", "./nothing-here")
    assert wrong.returncode == 4
    assert "nothing-here" in wrong.stderr

"""Drafts over real peers and a real model never change the text."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from client import GenerationConfig, SwarmClient
from client.generation.generate import Reply, collect
from swarm.app.local_swarm import LocalSwarm
from tests.conftest import ChatIds, GreedyReference
from tests.harness import run_swarm

PROMPT = "Repeat five times: the bee sat on the tree."
TOKENS = 24
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 5}


def test_no_draft_changes_a_greedy_or_a_sampled_text(
    standing_swarm: LocalSwarm, smollm2_package: Path, chat_ids: ChatIds, greedy_reference: GreedyReference
) -> None:
    """Look-up and a draft model (the target itself: the longest windows), fixed and tuned, one or several in flight."""
    small = str(smollm2_package)
    drafts: dict[str, dict[str, Any]] = {
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
            for draft, options in drafts.items():
                for sampled in (False, True):
                    sampling = SAMPLED if sampled else {}
                    config = GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True, **sampling, **options)
                    chat.reset()
                    replies[draft, sampled] = await chat.send(PROMPT, config)
        return replies

    replies = asyncio.run(write())
    assert list(replies["none", False].token_ids) == greedy_reference(chat_ids(PROMPT), TOKENS)
    for (draft, sampled), reply in replies.items():
        assert reply.token_ids == replies["none", sampled].token_ids, (draft, sampled)
        speculation = reply.metrics.speculation
        if draft.startswith("model"):
            assert speculation is not None
            # The draft model reads a new prompt concurrently; the second time it has it cached.
            assert speculation.tokens_a_trip > 2 * sampled
            # An equal model with the same random numbers is wrong only at the end of the text.
            assert speculation.accepted >= 0.8 * speculation.proposed


def test_all_logits_are_returned_on_request(standing_swarm: LocalSwarm, smollm2_package: Path) -> None:
    async def generate(kind: str) -> Reply:
        async with await SwarmClient.connect(smollm2_package, initial_peers=standing_swarm.addresses) as client:
            return await collect(client.generate(PROMPT, GenerationConfig(max_new_tokens=5, logits=kind)))

    for kind in ("f16", "f32"):
        reply = asyncio.run(generate(kind))
        assert len(reply.logprobs) == len(reply.token_ids)
        for choice, token in zip(reply.logprobs, reply.token_ids, strict=True):
            assert choice.logits is not None
            assert choice.logits.shape == (49_152,)
            assert int(choice.logits.argmax()) == token


def test_the_command_reports_the_speculation(standing_swarm: LocalSwarm, smollm2_package: Path) -> None:
    arguments = ("--initial-peer", standing_swarm.addresses[0], "--max-new-tokens", "24")
    drafting = ("--draft", "ngram", "--draft-tokens", "4")
    done = run_swarm("generate", str(smollm2_package), PROMPT, *arguments, *drafting, "--json")
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)["speculation"]
    assert output["draft"] == "ngram"
    assert output["proposed"] >= output["accepted"] >= 0
    wrong = run_swarm("generate", str(smollm2_package), "x", *arguments, "--draft", "./nothing-here")
    assert wrong.returncode == 4
    assert "nothing-here" in wrong.stderr

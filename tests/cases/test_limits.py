"""Limits and faults: a full context, slow steps, and errors that are no peer's fault."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from client import GenerationConfig, SwarmClient
from client.config import ClientConfig
from client.events import Event, Stage, ignore_event
from client.generation.generate import FinishReason, Piece, collect
from swarm.app.local_swarm import LocalSwarm
from swarm.errors import ContextExceeded, PackageError
from tests.cases.observer import assert_healthy, digest_of, records_at, reserved
from tests.cases.peer_set import EventLog, slowed
from tests.conftest import ChatIds, GreedyReference
from tests.harness import run_swarm, wait_until

PROMPT = "Name three things that bees do."
CONTEXT = 8192


def exactly(tokens: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=tokens, ignore_eos=True)


async def connect(swarm: LocalSwarm, event_log: EventLog, **options: Any) -> SwarmClient:
    return await SwarmClient.connect(
        digest_of(swarm), initial_peers=swarm.addresses, config=ClientConfig(**options), on_event=event_log.on_event
    )


# -- full sessions


def test_a_full_session_ends_its_text_with_the_reason_and_keeps_it(
    standing_swarm: LocalSwarm, chat_ids: ChatIds, greedy_reference: GreedyReference
) -> None:
    prompt = chat_ids(PROMPT)
    room = len(prompt) + 20
    expected = greedy_reference(prompt, 21)  # The last token needs no KV cache.

    async def scenario() -> None:
        async with await connect(standing_swarm, EventLog()) as client, client.session(max_tokens=room) as chat:
            reply = await chat.send(PROMPT, exactly(500))
            assert reply.finish_reason is FinishReason.CONTEXT
            assert list(reply.token_ids) == expected
            assert reply.text == client.tokenizer.decode(expected)
            assert chat.messages[-1]["content"] == reply.text
            before = chat.messages
            with pytest.raises(ContextExceeded, match=rf"the prompt has \d+ tokens and there is room for {room}"):
                await chat.send("Go on.", exactly(500))
            assert chat.messages == before
            chat.reset()
            again = await chat.send(PROMPT, exactly(5))
            assert list(again.token_ids) == expected[:5]

    asyncio.run(scenario())


def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(standing_swarm: LocalSwarm) -> None:
    arguments = ("generate", digest_of(standing_swarm), "-", "--initial-peer", standing_swarm.addresses[0])
    done = run_swarm(*arguments, text="one two three four " * 2500)
    assert done.returncode == ContextExceeded.exit_code, done.stderr
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: the prompt ")
    assert str(CONTEXT) in last
    assert "shorten it" in last


# -- slow peers


def test_a_long_prompt_passes_a_slow_peer_in_chunks_without_a_ban(
    standing_swarm: LocalSwarm, greedy_reference: GreedyReference
) -> None:
    """The deadline of a single token would pass before a chunk is computed."""
    event_log = EventLog()
    chunk, tokens = 384, 1100

    async def scenario() -> tuple[list[int], list[Piece], list[int]]:
        async with await connect(standing_swarm, event_log, chunk_tokens=chunk, step_floor_s=0.5) as client:
            text = "The bees of the garden went out to see the flowers. " * 110
            prompt = client.encode(text, raw=True)[:tokens]
            text = client.tokenizer.decode(prompt)
            expected = asyncio.create_task(asyncio.to_thread(greedy_reference, prompt, 3))
            with slowed(standing_swarm.members[1], share=0.12):
                pieces = [piece async for piece in client.generate(text, exactly(3), raw=True)]
            assert client.encode(text, raw=True) == prompt
            return prompt, pieces, await expected

    prompt, pieces, expected = asyncio.run(scenario())
    assert len(prompt) == tokens
    assert [token for piece in pieces for token in piece.token_ids] == expected
    assert [(e.done, e.total) for e in event_log.of(Stage.PREFILL)] == [
        (n, tokens) for n in range(chunk, tokens, chunk)
    ]
    assert not event_log.of(Stage.REPAIRING, Stage.WAITING)
    assert pieces[-1].metrics is not None
    assert pieces[-1].metrics.repairs == 0


# -- errors of the client


class CallerError(Exception):
    """An error in the program that uses the client."""


def fail(*_: object) -> NoReturn:
    raise CallerError("a bug of this program")


def event_handler_fails(client: SwarmClient, event_log: EventLog) -> None:
    """The handler of progress events fails while steps are in flight."""

    def on_event(event: Event) -> None:
        if event.stage is Stage.PREFILL:
            event_log.forward_to = ignore_event
            fail()

    event_log.forward_to = on_event


def decoder_fails(client: SwarmClient, event_log: EventLog) -> None:
    """The decoder fails on the tokens of the peers."""
    original = client.tokenizer.decode

    def decode(ids: Sequence[int]) -> str:
        client.tokenizer.decode = original  # type: ignore[method-assign]
        fail()

    client.tokenizer.decode = decode  # type: ignore[method-assign]


@pytest.mark.parametrize("inject_error", [event_handler_fails, decoder_fails])
def test_an_error_of_the_client_is_raised_unchanged_and_no_peer_is_banned(
    inject_error: Callable[[SwarmClient, EventLog], None],
    standing_swarm: LocalSwarm,
    chat_ids: ChatIds,
    greedy_reference: GreedyReference,
) -> None:
    event_log = EventLog()

    async def scenario() -> None:
        async with await connect(standing_swarm, event_log, chunk_tokens=8) as client:
            inject_error(client, event_log)
            with pytest.raises(CallerError, match=r"^a bug of this program$"):
                await collect(client.generate(PROMPT, exactly(20)))
            # Each peer is the only one with its layers: the client would wait for the end of a ban.
            reply = await collect(client.generate(PROMPT, exactly(20)))
            assert list(reply.token_ids) == greedy_reference(chat_ids(PROMPT), 20)
            assert reply.metrics.repairs == 0

    asyncio.run(scenario())
    assert not event_log.of(Stage.REPAIRING, Stage.WAITING)
    records = records_at(standing_swarm.members[0], digest_of(standing_swarm))
    assert len(records) == 3
    wait_until(lambda: not asyncio.run(reserved(records.values())), "all KV cache is released")
    assert_healthy(standing_swarm)


FULL_DISK = ("bash", "-c", 'ulimit -f 16; exec "$@"', "bash")  # No file may grow beyond 16 KB.


@pytest.mark.parametrize(("prefix", "reason"), [(FULL_DISK, errno.EFBIG), ((), errno.ENOTDIR)])
def test_a_cache_that_cannot_be_written_is_named_and_no_peer_is_blamed(
    prefix: Sequence[str], reason: int, standing_swarm: LocalSwarm, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    if not prefix:
        cache.write_text("a file where a directory should be")
    arguments = ("generate", digest_of(standing_swarm), PROMPT, "--initial-peer", standing_swarm.addresses[0])
    done = run_swarm(*arguments, prefix=["env", f"XDG_CACHE_HOME={cache}", *prefix])
    assert done.returncode == PackageError.exit_code, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: {cache}")
    assert os.strerror(reason) in last
    assert "no peer's fault" in last
    assert "Traceback" not in done.stderr

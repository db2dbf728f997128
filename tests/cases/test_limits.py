"""Cases 7, 8 and 12: where a text ends, how long a step may take, and whose fault a failure is."""

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
from client.events import Event, Stage, unheard
from client.generation.generate import FinishReason, Piece, collect
from swarm.app.local_swarm import LocalSwarm
from swarm.errors import ContextExceeded, PackageError
from tests.cases.conftest import ChatIds
from tests.cases.observer import assert_well, digest_of, records_at, reserved
from tests.cases.town import Diary, slowed
from tests.conftest import GreedyReference
from tests.harness import run_swarm, wait_until

PROMPT = "Name three things that bees do."
CONTEXT = 8192


def exactly(tokens: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=tokens, ignore_eos=True)


async def connect(swarm: LocalSwarm, diary: Diary, **options: Any) -> SwarmClient:
    return await SwarmClient.connect(
        digest_of(swarm), initial_peers=swarm.addresses, config=ClientConfig(**options), on_event=diary.hear
    )


# -- case 7


def test_a_session_that_is_full_ends_its_text_says_so_and_keeps_it(
    standing_swarm: LocalSwarm, chat_ids: ChatIds, greedy_reference: GreedyReference
) -> None:
    prompt = chat_ids(PROMPT)
    room = len(prompt) + 20
    expected = greedy_reference(prompt, 21)  # the last token needs no room of its own

    async def story() -> None:
        async with await connect(standing_swarm, Diary()) as client, client.session(max_tokens=room) as chat:
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

    asyncio.run(story())


def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(standing_swarm: LocalSwarm) -> None:
    words = ("generate", digest_of(standing_swarm), "-", "--initial-peer", standing_swarm.addresses[0])
    done = run_swarm(*words, text="one two three four " * 2500)
    assert done.returncode == ContextExceeded.exit_code, done.stderr
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: the prompt ")
    assert str(CONTEXT) in last
    assert "shorten it" in last


# -- case 8


def test_a_long_prompt_comes_through_a_slow_peer_in_chunks_with_progress_and_without_a_ban(
    standing_swarm: LocalSwarm, greedy_reference: GreedyReference
) -> None:
    """A deadline for one token would be over before a chunk is computed."""
    diary = Diary()
    chunk, tokens = 384, 1100

    async def story() -> tuple[list[int], list[Piece], list[int]]:
        async with await connect(standing_swarm, diary, chunk_tokens=chunk, step_floor_s=0.5) as client:
            text = "The bees of the garden went out to see the flowers. " * 110
            prompt = client.encode(text, raw=True)[:tokens]
            text = client.tokenizer.decode(prompt)
            expected = asyncio.create_task(asyncio.to_thread(greedy_reference, prompt, 3))
            with slowed(standing_swarm.members[1], share=0.12):
                pieces = [piece async for piece in client.generate(text, exactly(3), raw=True)]
            assert client.encode(text, raw=True) == prompt
            return prompt, pieces, await expected

    prompt, pieces, expected = asyncio.run(story())
    assert len(prompt) == tokens
    assert [token for piece in pieces for token in piece.token_ids] == expected
    assert [(e.done, e.total) for e in diary.of(Stage.PREFILL)] == [(n, tokens) for n in range(chunk, tokens, chunk)]
    assert not diary.of(Stage.REPAIRING, Stage.WAITING)
    assert pieces[-1].metrics is not None
    assert pieces[-1].metrics.repairs == 0


# -- case 12


class OwnBug(Exception):
    """Of whoever uses the client."""


def fails(*_: object) -> NoReturn:
    raise OwnBug("a bug of this program")


def at_the_second_chunk(client: SwarmClient, diary: Diary) -> None:
    """Whoever hears of progress fails while steps are under way."""

    def hear(event: Event) -> None:
        if event.stage is Stage.PREFILL:
            diary.then = unheard
            fails()

    diary.then = hear


def at_the_first_token(client: SwarmClient, diary: Diary) -> None:
    """The decoder fails on what the peers answered."""
    right = client.tokenizer.decode

    def decode(ids: Sequence[int]) -> str:
        client.tokenizer.decode = right  # type: ignore[method-assign]
        fails()

    client.tokenizer.decode = decode  # type: ignore[method-assign]


@pytest.mark.parametrize("break_it", [at_the_second_chunk, at_the_first_token])
def test_a_failure_of_our_own_surfaces_as_it_is_and_no_peer_is_banned(
    break_it: Callable[[SwarmClient, Diary], None],
    standing_swarm: LocalSwarm,
    chat_ids: ChatIds,
    greedy_reference: GreedyReference,
) -> None:
    diary = Diary()

    async def story() -> None:
        async with await connect(standing_swarm, diary, chunk_tokens=8) as client:
            break_it(client, diary)
            with pytest.raises(OwnBug, match=r"^a bug of this program$"):
                await collect(client.generate(PROMPT, exactly(20)))
            # each of these peers is the only one of its layers: a ban of any would be waited for
            reply = await collect(client.generate(PROMPT, exactly(20)))
            assert list(reply.token_ids) == greedy_reference(chat_ids(PROMPT), 20)
            assert reply.metrics.repairs == 0

    asyncio.run(story())
    assert not diary.of(Stage.REPAIRING, Stage.WAITING)
    records = records_at(standing_swarm.members[0], digest_of(standing_swarm))
    assert len(records) == 3
    wait_until(lambda: not asyncio.run(reserved(records.values())), "all peers have their room back")
    assert_well(standing_swarm)


FULL_DISK = ("bash", "-c", 'ulimit -f 16; exec "$@"', "bash")  # no file may grow over 16 KB


@pytest.mark.parametrize(("prefix", "reason"), [(FULL_DISK, errno.EFBIG), ((), errno.ENOTDIR)])
def test_a_disk_that_takes_nothing_is_named_and_no_peer_is_blamed(
    prefix: Sequence[str], reason: int, standing_swarm: LocalSwarm, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    if not prefix:
        cache.write_text("a file where a directory should be")
    words = ("generate", digest_of(standing_swarm), PROMPT, "--initial-peer", standing_swarm.addresses[0])
    done = run_swarm(*words, prefix=["env", f"XDG_CACHE_HOME={cache}", *prefix])
    assert done.returncode == PackageError.exit_code, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: {cache}")
    assert os.strerror(reason) in last
    assert "no peer's fault" in last
    assert "Traceback" not in done.stderr

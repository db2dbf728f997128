"""Peers are killed, stopped and restarted while they compute: the text stays exactly the same.

Three stages, with spare peers for the middle one. Each test needs fewer spares than the one before, because starting a
peer takes longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from client import GenerationConfig, SwarmClient
from client.config import ClientConfig
from client.events import Event, Stage
from client.generation.chat import ChatSession
from client.generation.generate import Piece
from swarm.errors import NotCovered
from swarm.model.manifest import load_manifest
from tests.cases.peer_set import EventLog, PeerSet, PeerSpec, open_peer_set, peer_names, stopped
from tests.conftest import ChatIds, GreedyReference
from tests.harness import MAX_WAIT_S, ROOT, run_swarm, swarm_command, wait_until

PROMPT = "Name three things that bees do."
COUNTING = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,"  # The model continues it until it is stopped.
MIDDLE = "11:15"  # The shortest span: it is started most often.


@pytest.fixture(scope="module")
def peer_set(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerSet]:
    with open_peer_set(tmp_path_factory.mktemp("peers")) as peer_set:
        yield peer_set


@pytest.fixture(scope="module")
def digest(smollm2_package: Path) -> str:
    return load_manifest(smollm2_package).digest


class ThreeStages:
    """Peers `first` and `last`, and a number of peers for the middle."""

    def __init__(self, peer_set: PeerSet, package: Path) -> None:
        self.peer_set = peer_set
        self.first = PeerSpec("first", "0:11", package)
        self.last = PeerSpec("last", "15:30", package)
        options = ("--kv-tokens", "2048")  # Less than the others: a client that finds one full takes the next.
        self.middles = [PeerSpec(f"middle-{letter}", MIDDLE, package, options) for letter in "abc"]

    def serve(self, middles: int) -> list[PeerSpec]:
        """Have exactly `middles` peers serve the middle; returns them."""
        chosen = self.peer_set.pick(self.middles, middles)
        self.peer_set.start_exactly(self.first, *chosen, self.last)
        return chosen


@pytest.fixture
def stages(peer_set: PeerSet, smollm2_package: Path) -> ThreeStages:
    return ThreeStages(peer_set, smollm2_package)


def exactly(tokens: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=tokens, ignore_eos=True)


def tokens_of(pieces: Sequence[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


async def connect(stages: ThreeStages, digest: str, event_log: EventLog, **options: Any) -> SwarmClient:
    return await SwarmClient.connect(
        digest, initial_peers=stages.peer_set.addresses, config=ClientConfig(**options), on_event=event_log.on_event
    )


# -- a stopped peer


def test_a_stopped_peer_is_replaced_and_another_session_is_not_affected(
    stages: ThreeStages, digest: str, chat_ids: ChatIds, greedy_reference: GreedyReference
) -> None:
    """Both sessions share a client, its connections, the first peer and the last one."""
    stages.serve(middles=3)
    event_log = EventLog()
    expected = greedy_reference(chat_ids(PROMPT), 40)

    async def repeat_answers(chat: ChatSession, finished: asyncio.Event) -> list[list[int]]:
        answers = []
        while not finished.is_set():
            chat.reset()
            answers.append(list((await chat.send(PROMPT, exactly(40))).token_ids))
        return answers

    async def scenario() -> None:
        async with (
            asyncio.timeout(MAX_WAIT_S),
            await connect(stages, digest, event_log, step_floor_s=2.0) as client,
            contextlib.AsyncExitStack() as stack,
        ):
            interrupted, other_chat = await _chats_over_two_middles(client, stack)
            victim, other_route = peer_names(interrupted.route)[1], other_chat.route
            event_log.events.clear()
            finished = asyncio.Event()
            others = asyncio.create_task(repeat_answers(other_chat, finished))
            ids: list[int] = []
            with contextlib.ExitStack() as stop:
                async with aclosing(interrupted.stream(PROMPT, exactly(40))) as answer:
                    async for piece in answer:
                        ids.extend(piece.token_ids)
                        if len(ids) == 10:
                            stop.enter_context(stopped(stages.peer_set[victim]))
                finished.set()
                answers = await others
            assert piece.metrics is not None
            assert ids == expected
            assert piece.metrics.repairs == 1
            assert peer_names(interrupted.route) == peer_names(other_route)
            (repair,) = event_log.of(Stage.REPAIRING)
            assert stages.peer_set[victim].address.partition("#")[2][:8] in repair.text
            assert len(answers) > 1, "the other session stood still"
            assert all(answer == expected for answer in answers)
            assert other_chat.route == other_route

    asyncio.run(scenario())


async def _chats_over_two_middles(
    client: SwarmClient, stack: contextlib.AsyncExitStack
) -> tuple[ChatSession, ChatSession]:
    """Two chats with different peers in the middle: a client avoids a peer that is full."""
    by_middle: dict[str, ChatSession] = {}
    filling: list[ChatSession] = []
    while len(by_middle) < 2:
        chat = await stack.enter_async_context(client.session(max_tokens=600))
        await chat.send(PROMPT, exactly(1))
        chat.reset()
        _, *between, _ = peer_names(chat.route)
        if len(between) > 1:
            await chat.close()  # Not all links are measured yet, and this route has both peers.
        elif between[0] in by_middle:
            filling.append(chat)
        else:
            by_middle[between[0]] = chat
    for chat in filling:
        await chat.close()
    one, other = by_middle.values()
    return one, other


# -- a killed peer, with a spare


def test_a_peer_killed_during_decode_is_replaced_and_the_text_is_exact(
    stages: ThreeStages, digest: str, chat_ids: ChatIds, greedy_reference: GreedyReference
) -> None:
    stages.serve(middles=3)
    event_log = EventLog()

    async def scenario() -> list[Piece]:
        pieces: list[Piece] = []
        async with (
            await connect(stages, digest, event_log) as client,
            aclosing(client.generate(PROMPT, exactly(60))) as answer,
        ):
            async for piece in answer:
                pieces.append(piece)
                if len(pieces) == 20:
                    stages.peer_set[event_log.routes[-1][1]].kill()
            assert text_of(pieces) == client.tokenizer.decode(tokens_of(pieces))
        return pieces

    pieces = asyncio.run(scenario())
    assert tokens_of(pieces) == greedy_reference(chat_ids(PROMPT), 60)
    _assert_repaired_once(stages, event_log, pieces[-1])


def test_a_peer_killed_during_prefill_is_replaced_and_the_text_is_exact(
    stages: ThreeStages, digest: str, greedy_reference: GreedyReference
) -> None:
    stages.serve(middles=2)

    def kill(event: Event) -> None:
        if event.stage is Stage.PREFILL and event.done > event.total // 3 and len(event_log.routes) == 1:
            stages.peer_set[event_log.routes[-1][1]].kill()  # Every hop has chunks in flight.

    event_log = EventLog(forward_to=kill)

    async def scenario() -> tuple[list[int], list[Piece]]:
        async with await connect(stages, digest, event_log, chunk_tokens=16) as client:
            prompt = COUNTING * 10
            pieces = [piece async for piece in client.generate(prompt, exactly(16), raw=True)]
            return client.encode(prompt, raw=True), pieces

    prompt_ids, pieces = asyncio.run(scenario())
    assert tokens_of(pieces) == greedy_reference(prompt_ids, 16)
    _assert_repaired_once(stages, event_log, pieces[-1])
    done = [event.done for event in event_log.of(Stage.PREFILL)]
    restart = next(index for index in range(1, len(done)) if done[index] < done[index - 1])
    chunks = list(range(16, len(prompt_ids), 16))
    assert done[:restart] == chunks[:restart], "progress went back before the peer was lost"
    assert done[restart:] == chunks, "the prompt was not computed again exactly once from its start"


def _assert_repaired_once(stages: ThreeStages, event_log: EventLog, last: Piece) -> None:
    """One repair, without waiting, from a route with the killed peer to a route of running peers."""
    assert last.metrics is not None
    assert last.metrics.repairs == 1
    assert len(event_log.of(Stage.REPAIRING)) == 1
    assert not event_log.of(Stage.WAITING)
    before, after = event_log.routes
    assert [stages.peer_set[name].alive for name in before].count(False) == 1
    assert all(stages.peer_set[name].alive for name in after)
    assert peer_names(last.metrics.route) == after


# -- a restarted peer


def test_a_peer_restarted_three_times_has_one_record_and_no_route_uses_an_old_incarnation(
    stages: ThreeStages, digest: str, chat_ids: ChatIds, greedy_reference: GreedyReference
) -> None:
    (middle,) = stages.serve(middles=1)
    event_log = EventLog()

    async def restart() -> None:
        """Restart it on the same address: connections to an old incarnation reach the new one."""
        address = stages.peer_set[middle.name].address.partition("#")[0]
        for _ in range(3):
            stages.peer_set[middle.name].kill()
            stages.peer_set.start(middle, listen=address)
            await asyncio.to_thread(stages.peer_set.wait, middle, "chosen")

    async def scenario() -> list[Piece]:
        pieces: list[Piece] = []
        async with (
            asyncio.timeout(MAX_WAIT_S),
            await connect(
                stages, digest, event_log, wait_for_peers_s=MAX_WAIT_S, repair_timeout_s=MAX_WAIT_S
            ) as client,
            aclosing(client.generate(PROMPT, exactly(40))) as answer,
        ):
            async for piece in answer:
                pieces.append(piece)
                if len(pieces) == 10:
                    await restart()
        return pieces

    pieces = asyncio.run(scenario())
    assert tokens_of(pieces) == greedy_reference(chat_ids(PROMPT), 40)
    assert pieces[-1].metrics is not None
    assert pieces[-1].metrics.repairs == 1
    assert not event_log.of(Stage.REPAIRING), "a route used an old incarnation"
    assert event_log.of(Stage.WAITING)
    stages.peer_set.wait(middle)
    entries = _entries(stages, digest, middle)
    assert len(entries) == 1
    assert entries[0]["hop"] == 1
    assert not entries[0]["unreachable"]


def _entries(stages: ThreeStages, digest: str, spec: PeerSpec) -> list[dict[str, Any]]:
    """The entries of this peer in the output of `swarm routes`."""
    done = run_swarm("routes", digest, "--json", "--initial-peer", stages.peer_set.addresses[0])
    assert done.returncode == 0, done.stderr
    return [peer for peer in json.loads(done.stdout)["peers"] if peer["name"] == spec.name]


# -- a killed peer, without a spare


def test_without_a_spare_the_error_names_the_uncovered_layers_and_the_text_so_far_stays(
    stages: ThreeStages, digest: str, greedy_reference: GreedyReference, tmp_path: Path
) -> None:
    (middle,) = stages.serve(middles=1)
    event_log = EventLog()
    command = RunningCommand(
        "generate", digest, COUNTING, "--raw", "--initial-peer", stages.peer_set.addresses[0], folder=tmp_path
    )

    pieces: list[Piece] = []

    async def generate(client: SwarmClient) -> None:
        async with aclosing(client.generate(COUNTING, exactly(200), raw=True)) as answer:
            async for piece in answer:
                pieces.append(piece)
                if len(pieces) == 20:
                    await asyncio.to_thread(wait_until, lambda: command.text, "the command answers")
                    stages.peer_set[middle.name].kill()

    async def scenario() -> list[int]:
        async with (
            await connect(stages, digest, event_log, wait_for_peers_s=1.0) as client,
            asyncio.timeout(MAX_WAIT_S),
        ):
            with pytest.raises(NotCovered, match=MIDDLE) as caught:
                await generate(client)
            assert caught.value.missing == ((11, 15),)
            return client.encode(COUNTING, raw=True)

    with command:
        prompt_ids = asyncio.run(scenario())
        assert tokens_of(pieces) == greedy_reference(prompt_ids, len(tokens_of(pieces)))
        # No repair if the client notices the loss between two steps: it then plans another route first.
        assert len(event_log.of(Stage.REPAIRING)) <= 1
        assert command.process.wait(MAX_WAIT_S) == NotCovered.exit_code
    last_line = command.errors.splitlines()[-1]
    assert last_line.startswith("error: ")
    assert MIDDLE in last_line
    assert "Traceback" not in command.errors
    texts = sorted((command.text.removesuffix("\n"), text_of(pieces)), key=len)
    assert texts[0]
    assert texts[1].startswith(texts[0])


class RunningCommand:
    """A `swarm` command that runs; leaving the context kills it."""

    def __init__(self, *words: str, folder: Path) -> None:
        self._output, self._errors = folder / "stdout", folder / "stderr"
        with self._output.open("wb") as out, self._errors.open("wb") as err:
            self.process = subprocess.Popen(
                swarm_command(*words), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    @property
    def text(self) -> str:
        return self._output.read_text()

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

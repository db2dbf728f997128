"""Cases 1, 2 and 3: peers are killed, stopped and restarted while they compute. The text is as if nothing had been.

Three peers in a row, with spares for the one in the middle: fewer from test to test, since starting one takes longest.
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
from tests.cases.conftest import ChatIds
from tests.cases.town import Diary, House, Town, names_on, stopped, town_in
from tests.conftest import GreedyReference
from tests.harness import PATIENCE_S, ROOT, run_swarm, swarm_command, wait_until

PROMPT = "Name three things that bees do."
COUNTING = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,"  # it goes on for as long as it may
MIDDLE = "11:15"  # the shortest there is: it is started most often


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    with town_in(tmp_path_factory.mktemp("town")) as town:
        yield town


@pytest.fixture(scope="module")
def digest(smollm2_package: Path) -> str:
    return load_manifest(smollm2_package).digest


class Row:
    """`first`, `last`, and as many in the middle as a test asks for."""

    def __init__(self, town: Town, package: Path) -> None:
        self.town = town
        self.first = House("first", "0:11", package)
        self.last = House("last", "15:30", package)
        room = ("--kv-tokens", "2048")  # less than the others have: who finds one full goes to the next
        self.middles = [House(f"middle-{letter}", MIDDLE, package, room) for letter in "abc"]

    def stand(self, middles: int) -> list[House]:
        """That many serve the middle now."""
        there = self.town.some(self.middles, middles)
        self.town.populate(self.first, *there, self.last)
        return there


@pytest.fixture
def row(town: Town, smollm2_package: Path) -> Row:
    return Row(town, smollm2_package)


def exactly(tokens: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=tokens, ignore_eos=True)


def tokens_of(pieces: Sequence[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


async def connect(row: Row, digest: str, diary: Diary, **options: Any) -> SwarmClient:
    return await SwarmClient.connect(
        digest, initial_peers=row.town.addresses, config=ClientConfig(**options), on_event=diary.hear
    )


# -- case 2


def test_a_stopped_peer_is_left_out_and_the_session_beside_it_goes_on_as_if_nothing_was(
    row: Row, digest: str, chat_ids: ChatIds, greedy_reference: GreedyReference
) -> None:
    """Both sessions share a client, its connections, the first peer and the last one."""
    row.stand(middles=3)
    diary = Diary()
    expected = greedy_reference(chat_ids(PROMPT), 40)

    async def turns(chat: ChatSession, over: asyncio.Event) -> list[list[int]]:
        answers = []
        while not over.is_set():
            chat.reset()
            answers.append(list((await chat.send(PROMPT, exactly(40))).token_ids))
        return answers

    async def story() -> None:
        async with (
            asyncio.timeout(PATIENCE_S),
            await connect(row, digest, diary, step_floor_s=2.0) as client,
            contextlib.AsyncExitStack() as stack,
        ):
            struck, beside = await _sessions_over_both(client, stack)
            victim, route_beside = names_on(struck.route)[1], beside.route
            diary.events.clear()
            over = asyncio.Event()
            others = asyncio.create_task(turns(beside, over))
            ids: list[int] = []
            with contextlib.ExitStack() as stop:
                async with aclosing(struck.stream(PROMPT, exactly(40))) as answer:
                    async for piece in answer:
                        ids.extend(piece.token_ids)
                        if len(ids) == 10:
                            stop.enter_context(stopped(row.town[victim]))
                over.set()
                answers = await others
            assert piece.metrics is not None
            assert ids == expected
            assert piece.metrics.repairs == 1
            assert names_on(struck.route) == names_on(route_beside)
            (repair,) = diary.of(Stage.REPAIRING)
            assert row.town[victim].address.partition("#")[2][:8] in repair.text
            assert len(answers) > 1, "the session beside stood still"
            assert all(answer == expected for answer in answers)
            assert beside.route == route_beside

    asyncio.run(story())


async def _sessions_over_both(client: SwarmClient, stack: contextlib.AsyncExitStack) -> tuple[ChatSession, ChatSession]:
    """Two chats whose routes differ in the middle: where a peer is full, the next one goes elsewhere."""
    over: dict[str, ChatSession] = {}
    filling: list[ChatSession] = []
    while len(over) < 2:
        chat = await stack.enter_async_context(client.session(max_tokens=600))
        await chat.send(PROMPT, exactly(1))
        chat.reset()
        _, *between, _ = names_on(chat.route)
        if len(between) > 1:
            await chat.close()  # not all ways are measured yet, and this one led over both
        elif between[0] in over:
            filling.append(chat)
        else:
            over[between[0]] = chat
    for chat in filling:
        await chat.close()
    one, other = over.values()
    return one, other


# -- case 1, with a spare


def test_a_peer_killed_at_a_token_is_replaced_by_the_spare_and_the_text_is_exact(
    row: Row, digest: str, chat_ids: ChatIds, greedy_reference: GreedyReference
) -> None:
    row.stand(middles=3)
    diary = Diary()

    async def story() -> list[Piece]:
        pieces: list[Piece] = []
        async with (
            await connect(row, digest, diary) as client,
            aclosing(client.generate(PROMPT, exactly(60))) as answer,
        ):
            async for piece in answer:
                pieces.append(piece)
                if len(pieces) == 20:
                    row.town[diary.routes[-1][1]].kill()
            assert text_of(pieces) == client.tokenizer.decode(tokens_of(pieces))
        return pieces

    pieces = asyncio.run(story())
    assert tokens_of(pieces) == greedy_reference(chat_ids(PROMPT), 60)
    _assert_repaired_once(row, diary, pieces[-1])


def test_a_peer_killed_while_a_prompt_is_read_is_replaced_by_the_spare_and_the_text_is_exact(
    row: Row, digest: str, greedy_reference: GreedyReference
) -> None:
    row.stand(middles=2)

    def kill(event: Event) -> None:
        if event.stage is Stage.PREFILL and event.done > event.total // 3 and len(diary.routes) == 1:
            row.town[diary.routes[-1][1]].kill()  # chunks are under way on every hop

    diary = Diary(then=kill)

    async def story() -> tuple[list[int], list[Piece]]:
        async with await connect(row, digest, diary, chunk_tokens=16) as client:
            prompt = COUNTING * 10
            pieces = [piece async for piece in client.generate(prompt, exactly(16), raw=True)]
            return client.encode(prompt, raw=True), pieces

    prompt_ids, pieces = asyncio.run(story())
    assert tokens_of(pieces) == greedy_reference(prompt_ids, 16)
    _assert_repaired_once(row, diary, pieces[-1])
    done = [event.done for event in diary.of(Stage.PREFILL)]
    again = next(place for place in range(1, len(done)) if done[place] < done[place - 1])
    chunks = list(range(16, len(prompt_ids), 16))
    assert done[:again] == chunks[:again], "progress went back before the peer was lost"
    assert done[again:] == chunks, "the prompt was not read again, once, from its start"


def _assert_repaired_once(row: Row, diary: Diary, last: Piece) -> None:
    """From a route with the peer that was killed to one of peers that live, without a wait."""
    assert last.metrics is not None
    assert last.metrics.repairs == 1
    assert len(diary.of(Stage.REPAIRING)) == 1
    assert not diary.of(Stage.WAITING)
    before, after = diary.routes
    assert [row.town[name].alive for name in before].count(False) == 1
    assert all(row.town[name].alive for name in after)
    assert names_on(last.metrics.route) == after


# -- case 3


def test_a_peer_restarted_three_times_has_one_entry_and_its_former_lives_are_never_routed_to(
    row: Row, digest: str, chat_ids: ChatIds, greedy_reference: GreedyReference
) -> None:
    (middle,) = row.stand(middles=1)
    diary = Diary()

    async def restart() -> None:
        """At the same place: who means a former life reaches the next one."""
        place = row.town[middle.name].address.partition("#")[0]
        for _ in range(3):
            row.town[middle.name].kill()
            row.town.start(middle, listen=place)
            await asyncio.to_thread(row.town.wait, middle, "chosen")

    async def story() -> list[Piece]:
        pieces: list[Piece] = []
        async with (
            asyncio.timeout(PATIENCE_S),
            await connect(row, digest, diary, wait_for_peers_s=PATIENCE_S, repair_timeout_s=PATIENCE_S) as client,
            aclosing(client.generate(PROMPT, exactly(40))) as answer,
        ):
            async for piece in answer:
                pieces.append(piece)
                if len(pieces) == 10:
                    await restart()
        return pieces

    pieces = asyncio.run(story())
    assert tokens_of(pieces) == greedy_reference(chat_ids(PROMPT), 40)
    assert pieces[-1].metrics is not None
    assert pieces[-1].metrics.repairs == 1
    assert not diary.of(Stage.REPAIRING), "a route led to a former life"
    assert diary.of(Stage.WAITING)
    row.town.wait(middle)
    entries = _entries(row, digest, middle)
    assert len(entries) == 1
    assert entries[0]["hop"] == 1
    assert not entries[0]["unreachable"]


def _entries(row: Row, digest: str, house: House) -> list[dict[str, Any]]:
    """What `swarm routes` lists of this peer."""
    done = run_swarm("routes", digest, "--json", "--initial-peer", row.town.addresses[0])
    assert done.returncode == 0, done.stderr
    return [peer for peer in json.loads(done.stdout)["peers"] if peer["name"] == house.name]


# -- case 1, without a spare


def test_without_a_spare_the_uncovered_layers_are_named_and_the_text_so_far_is_kept(
    row: Row, digest: str, greedy_reference: GreedyReference, tmp_path: Path
) -> None:
    (middle,) = row.stand(middles=1)
    diary = Diary()
    command = _Command("generate", digest, COUNTING, "--raw", "--initial-peer", row.town.addresses[0], folder=tmp_path)

    pieces: list[Piece] = []

    async def answered(client: SwarmClient) -> None:
        async with aclosing(client.generate(COUNTING, exactly(200), raw=True)) as answer:
            async for piece in answer:
                pieces.append(piece)
                if len(pieces) == 20:
                    await asyncio.to_thread(wait_until, lambda: command.text, "the command answers")
                    row.town[middle.name].kill()

    async def story() -> list[int]:
        async with await connect(row, digest, diary, wait_for_peers_s=1.0) as client, asyncio.timeout(PATIENCE_S):
            with pytest.raises(NotCovered, match=MIDDLE) as caught:
                await answered(client)
            assert caught.value.missing == ((11, 15),)
            return client.encode(COUNTING, raw=True)

    with command:
        prompt_ids = asyncio.run(story())
        assert tokens_of(pieces) == greedy_reference(prompt_ids, len(tokens_of(pieces)))
        # none, where the loss is heard of between two steps: then another route is looked for before the next
        assert len(diary.of(Stage.REPAIRING)) <= 1
        assert command.process.wait(PATIENCE_S) == NotCovered.exit_code
    last_line = command.errors.splitlines()[-1]
    assert last_line.startswith("error: ")
    assert MIDDLE in last_line
    assert "Traceback" not in command.errors
    texts = sorted((command.text.removesuffix("\n"), text_of(pieces)), key=len)
    assert texts[0]
    assert texts[1].startswith(texts[0])


class _Command:
    """`swarm ...` while it runs; a context that ends it."""

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

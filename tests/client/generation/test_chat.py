from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from client.config import GenerationConfig
from swarm.errors import BadStep, ContextExceeded, LocalProtocolError
from tests.client.pipeline.test_pipeline import at_step, failing
from tests.client.scripted_peer import toy_text
from tests.client.toy_world import ToyTokenizer, World, run
from tests.swarm.event_loops import until

SHORT = GenerationConfig(max_new_tokens=6)


def test_a_turn_sends_only_what_is_new() -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        client = world.client()
        async with client.session(SHORT) as chat:
            first = await chat.send("Hello")
            before = list(chat.messages)
            second = await chat.send("Again")
            asked = client.encode([*before, {"role": "user", "content": "Again"}])
            assert list(second.token_ids) == toy_text(asked, 6)
            # the last token of an answer is computed only in the next turn
            assert second.metrics.reused_tokens == first.metrics.prompt_tokens + 5
            assert sum(len(f.tokens) for f in world.swarm.peers["c"].steps) == len(asked) + 5
            assert [m["role"] for m in chat.messages] == ["user", "assistant", "user", "assistant"]
            assert "→" in chat.route
        assert world.swarm.open_sessions == 0

    run(test)


def test_reset_forgets_the_conversation_but_not_the_system_prompt() -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        client = world.client()
        async with client.session(SHORT, system="Be brief") as chat:
            first = await chat.send("Hello")
            chat.reset()
            assert chat.messages == ({"role": "system", "content": "Be brief"},)
            assert (await chat.send("Hello")).token_ids == first.token_ids

    run(test)


def test_a_message_during_an_answer_does_not_disturb_the_answer() -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        client = world.client()
        async with client.session(replace(SHORT, draft="off")) as chat:
            first = asyncio.create_task(chat.send("Hello"))
            await until(lambda: bool(world.swarm.peers["a"].steps))
            with pytest.raises(LocalProtocolError, match="still answering"):
                await chat.send("Wait")
            reply = await first
            assert list(reply.token_ids) == toy_text(client.encode([{"role": "user", "content": "Hello"}]), 6)
            assert len(reply.metrics.overheads_s) == 5  # one for each step after the first

    run(test)


def test_a_conversation_survives_the_loss_of_a_peer_between_two_turns() -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        client = world.client()
        async with client.session(SHORT) as chat:
            await chat.send("Hello")
            world.swarm.peers["b"].die()
            before = list(chat.messages)
            reply = await chat.send("Again")
            asked = client.encode([*before, {"role": "user", "content": "Again"}])
            assert list(reply.token_ids) == toy_text(asked, 6)

    run(test)


def test_a_broken_off_answer_stays_as_far_as_it_came() -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        async with world.client().session(SHORT) as chat:
            async with aclosing(chat.stream("Hello")) as pieces:
                text = (await anext(pieces)).text + (await anext(pieces)).text
            assert chat.messages[-1] == {"role": "assistant", "content": text}
            before = list(chat.messages)
            reply = await chat.send("Go on")
            asked = world.client().encode([*before, {"role": "user", "content": "Go on"}])
            assert list(reply.token_ids) == toy_text(asked, 6)

    run(test)


def test_the_next_message_breaks_off_an_answer_whose_reader_has_left() -> None:
    """Python closes a generator only some time after `break`: the next message may come earlier."""

    async def test(world: World) -> None:
        await world.add_three_peers()
        async with world.client().session(SHORT) as chat:
            abandoned = chat.stream("Hello")
            text = (await anext(abandoned)).text
            asked = world.client().encode(
                [
                    {"role": "user", "content": "Hello"},
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": "Go on"},
                ]
            )
            assert list((await chat.send("Go on")).token_ids) == toy_text(asked, 6)
            conversation = chat.messages
            with pytest.raises(LocalProtocolError, match="broken off"):
                await anext(abandoned)
            assert chat.messages == conversation
            assert [message["role"] for message in conversation] == ["user", "assistant", "user", "assistant"]

    run(test)


def test_a_message_while_a_reader_waits_is_refused_and_the_answer_comes() -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        async with world.client().session(SHORT) as chat:
            sending = asyncio.create_task(chat.send("Hello"))
            await asyncio.sleep(0)
            with pytest.raises(LocalProtocolError, match="still answering"):
                await chat.send("Again")
            assert [*(await sending).token_ids] == toy_text(
                ToyTokenizer().chat([{"role": "user", "content": "Hello"}]), 6
            )
            assert len(chat.messages) == 2

    run(test)


def test_a_reset_forgets_the_answer_under_way_too() -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        async with world.client().session(SHORT) as chat:
            async with aclosing(chat.stream("Hello")) as pieces:
                await anext(pieces)
                chat.reset()
            assert chat.messages == ()

    run(test)


def test_a_cancelled_answer_stays_too() -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        async with world.client().session(SHORT) as chat:
            sending = asyncio.create_task(chat.send("Hello"))
            world.swarm.peers["b"].on_step = at_step(4, sending.cancel)
            with pytest.raises(asyncio.CancelledError):
                await sending
            assert chat.messages[-1]["role"] == "assistant"
            assert len(chat.messages[-1]["content"]) >= 1
            assert (await chat.send("Again")).text

    run(test)


def test_a_turn_that_fails_can_be_tried_again() -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        async with world.client().session(SHORT) as chat:
            world.swarm.peers["a"].on_step = at_step(3, failing(BadStep("no")))
            with pytest.raises(BadStep):
                await chat.send("Hello")
            assert chat.messages == ()
            reply = await chat.send("Hello")
            assert list(reply.token_ids) == toy_text(ToyTokenizer().chat([{"role": "user", "content": "Hello"}]), 6)

    run(test)


def test_a_full_context_says_so() -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        async with world.client().session(SHORT, max_tokens=20) as chat:
            reply = await chat.send("0123456789")
            assert len(reply.token_ids) == 6
            with pytest.raises(ContextExceeded, match="room for 20"):
                await chat.send("0123456789")
            chat.reset()
            assert (await chat.send("0123456789")).text == reply.text

    run(test)

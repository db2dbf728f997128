"""Answers over toy peers, through `SwarmClient`."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from client.config import GenerationConfig
from client.generation.generate import FinishReason, collect
from swarm.errors import ConfigError, ContextExceeded, NotCovered
from tests.client.pipeline.test_pipeline import at_step, failing
from tests.client.scripted_peer import CONTEXT, toy_text
from tests.client.toy_world import ToyTokenizer, World, run


def text_of(ids: list[int]) -> str:
    return ToyTokenizer().decode(ids)


def test_the_answer_begins_after_the_prompt(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        client = world.client()
        question = "What is it?"
        reply = await collect(client.generate(question, GenerationConfig(max_new_tokens=9)))
        expected = toy_text(client.encode(question), 9)
        assert list(reply.token_ids) == expected
        assert reply.text == text_of(expected)
        assert reply.finish_reason is FinishReason.LENGTH
        assert world.swarm.open_sessions == 0

    run(test)


def test_raw_and_messages_are_taken_as_they_are() -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        client = world.client()
        assert client.encode("ab", raw=True) == [0, 1]
        messages = [{"role": "system", "content": "!"}, {"role": "user", "content": "#"}]
        assert client.encode(messages) == [5, 1, 0, 2, 1, 2, 2, 1]
        reply = await collect(client.generate("ab", GenerationConfig(max_new_tokens=3), raw=True))
        assert list(reply.token_ids) == toy_text([0, 1], 3)

    run(test)


def end_of(world_eos: list[int], config: GenerationConfig) -> tuple[list[int], str, FinishReason]:
    async def test(world: World) -> tuple[list[int], str, FinishReason]:
        await world.add_three_peers()
        reply = await collect(world.client().generate("ab", config, raw=True))
        return list(reply.token_ids), reply.text, reply.finish_reason

    return run(test, eos=world_eos)


def test_an_end_of_text_id_ends_the_answer_and_is_not_in_its_text() -> None:
    ids = toy_text([0, 1], 20)
    place = next(i for i in range(3, 20) if ids[i] not in ids[:i])
    whole = ids[: place + 1]
    assert end_of([ids[place]], GenerationConfig()) == (whole, text_of(whole[:-1]), FinishReason.STOP)
    stops = GenerationConfig(stop_token_ids=(ids[place],))
    assert end_of([], stops) == (whole, text_of(whole[:-1]), FinishReason.STOP)
    ignored = GenerationConfig(ignore_eos=True, max_new_tokens=20)
    assert end_of([ids[place]], ignored) == (ids, text_of(ids), FinishReason.LENGTH)


def test_a_stop_string_across_tokens_is_found_and_not_shown() -> None:
    ids = toy_text([0, 1], 20)
    text = text_of(ids)
    config = GenerationConfig(stop_strings=[text[6:9]], max_new_tokens=20)  # type: ignore[arg-type]
    at = text.index(text[6:9])
    assert end_of([], config) == (ids[: at + 3], text[:at], FinishReason.STOP_STRING)


def test_the_end_of_the_context_keeps_the_text() -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        prompt = "a" * (CONTEXT - 3)
        reply = await collect(world.client().generate(prompt, GenerationConfig(max_new_tokens=50), raw=True))
        # the last token needs no position
        assert list(reply.token_ids) == toy_text([0] * (CONTEXT - 3), 4)
        assert reply.finish_reason is FinishReason.CONTEXT

    run(test)


def test_a_peers_own_limit_keeps_the_text_too() -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        world.swarm.peers["b"].on_step = at_step(5, failing(ContextExceeded("no more room")))
        reply = await collect(world.client().generate("ab", raw=True))
        assert list(reply.token_ids) == toy_text([0, 1], 5)
        assert reply.finish_reason is FinishReason.CONTEXT
        assert world.swarm.open_sessions == 0

    run(test)


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_sent() -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        with pytest.raises(ContextExceeded, match=f"{CONTEXT + 1} tokens and there is room for {CONTEXT}"):
            await collect(world.client().generate("a" * (CONTEXT + 1), raw=True))
        assert all(peer.opened == 0 for peer in world.swarm.peers.values())

    run(test)


def test_an_empty_prompt_and_an_impossible_stop_are_refused() -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        with pytest.raises(ConfigError, match="prompt is empty"):
            await collect(world.client().generate("", raw=True))
        with pytest.raises(ConfigError, match="stop_token_ids has 97"):
            await collect(world.client().generate("a", GenerationConfig(stop_token_ids=(97,)), raw=True))

    run(test)


def test_the_same_seed_gives_the_same_text_and_no_seed_varies() -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        client = world.client()
        seeded = GenerationConfig(temperature=1.0, seed=3, max_new_tokens=8)
        free = GenerationConfig(temperature=1.0, max_new_tokens=8)
        assert (await collect(client.generate("ab", seeded))).text == (
            await collect(client.generate("ab", seeded))
        ).text
        assert len({(await collect(client.generate("ab", free))).text for _ in range(4)}) > 1

    run(test)


def test_log_probabilities_come_with_their_tokens() -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        pieces = [p async for p in world.client().generate("ab", GenerationConfig(logprobs=0, max_new_tokens=4))]
        assert [choice.token for piece in pieces for choice in piece.logprobs] == [p.token_ids[0] for p in pieces]
        assert all(choice.logprob == -0.5 for piece in pieces for choice in piece.logprobs)

    run(test)


@pytest.mark.parametrize("how", ["break", "aclose", "cancel", "error"])
def test_leaving_early_closes_all_sessions(how: str) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        client = world.client()

        async def read() -> None:
            async for _ in client.generate("ab", GenerationConfig(max_new_tokens=300)):
                if how == "break":
                    break
                if how == "error":
                    raise OSError("the reader's disk is full")
                if how == "cancel":
                    task = asyncio.current_task()
                    assert task is not None
                    task.cancel()

        if how == "aclose":
            async with aclosing(client.generate("ab")) as pieces:
                await anext(pieces)
        else:
            await asyncio.gather(asyncio.create_task(read()), return_exceptions=True)
        await client.close()
        assert world.swarm.open_sessions == 0

    run(test)


@pytest.mark.parametrize("turns", range(0, 100, 7))
def test_a_client_that_ends_at_any_moment_leaves_no_session(turns: int) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        client = world.client()
        task = asyncio.create_task(collect(client.generate("ab", GenerationConfig(max_new_tokens=3))))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert world.swarm.open_sessions == 0
        await client.close()
        await client.close()

    run(test)


def test_the_error_names_the_layers_that_no_peer_serves() -> None:
    async def test(world: World) -> None:
        await world.swarm.add("a", "0:2")
        await world.swarm.add("c", "4:6")
        pieces = world.client().generate("ab")
        with pytest.raises(NotCovered, match="2:4"):
            await anext(pieces)

    run(test)


def test_the_metrics_add_up() -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        reply = await collect(world.client().generate("ab", GenerationConfig(max_new_tokens=30)))
        metrics = reply.metrics
        assert (metrics.prompt_tokens, metrics.new_tokens, metrics.reused_tokens, metrics.repairs) == (6, 30, 0, 0)
        assert [(hop.name, hop.layers) for hop in metrics.hops] == [("a", "0:2"), ("b", "2:4"), ("c", "4:6")]
        hops = sum(h.queue_s + h.compute_s + h.codec_s + h.other_s + h.network_s for h in metrics.hops)
        assert hops + metrics.return_s + metrics.client_s == pytest.approx(metrics.token_s)
        assert metrics.tokens_per_second == pytest.approx(1 / metrics.token_s)
        assert 0 < metrics.ttft_s < metrics.total_s
        plain = reply.to_plain()
        assert {"text", "token_ids", "tokens_per_second", "ttft_s", "hops", "finish_reason"} <= set(plain)

    run(test)


def test_a_repair_is_counted() -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        world.swarm.peers["b"].on_step = at_step(4, world.swarm.peers["b"].die)
        reply = await collect(world.client().generate("ab", GenerationConfig(max_new_tokens=9), raw=True))
        assert list(reply.token_ids) == toy_text([0, 1], 9)
        assert reply.metrics.repairs == 1
        assert "spare" in reply.metrics.route

    run(test)


# -- peers that attend to a part of the text


def test_a_prompt_is_sent_to_peers_that_attend_to_all_of_it() -> None:
    async def test(world: World) -> None:
        await world.swarm.add("narrow", "0:3", attends_to=10)
        await world.swarm.add("wide", "0:3", layer_time_s=0.01)
        await world.swarm.add("rest", "3:6", attends_to=50)
        for count, first in ((9, "narrow"), (11, "wide")):
            reply = await collect(world.client().generate("a" * count, GenerationConfig(max_new_tokens=9), raw=True))
            assert list(reply.token_ids) == toy_text([0] * count, 9)
            assert world.event_texts("connected")[-1].startswith(first)

    run(test)


def test_a_prompt_that_no_peer_attends_to_is_refused_at_once_and_not_sent() -> None:
    async def test(world: World) -> None:
        await world.swarm.add("narrow", "0:3", attends_to=10)
        await world.swarm.add("rest", "3:6", attends_to=20)
        with pytest.raises(ContextExceeded, match="the prompt has 30 tokens and peer narrow attends to 10: shorten"):
            await collect(world.client().generate("a" * 30, GenerationConfig(max_new_tokens=9), raw=True))
        assert world.event_texts("connected") == world.event_texts("waiting") == []

    run(test)


def test_a_text_and_a_conversation_may_outgrow_what_a_peer_attends_to() -> None:
    """Only the new tokens of a turn must fit. Tokens that were computed before, even by another peer, do not count."""

    async def test(world: World) -> None:
        narrow = await world.swarm.add("narrow", "0:6", attends_to=30)
        await world.swarm.add("spare", "0:6", layer_time_s=0.01, attends_to=30)
        async with world.client().session() as chat:
            for turn in range(3):
                reply = await chat.send("!" * 9, GenerationConfig(max_new_tokens=20))
                assert len(reply.token_ids) == 20
                if turn == 1:
                    narrow.die()
            with pytest.raises(ContextExceeded, match="peer spare attends to 30"):
                await chat.send("!" * 40)
            assert len((await chat.send("!" * 9, GenerationConfig(max_new_tokens=5))).token_ids) == 5

    run(test)

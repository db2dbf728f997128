"""Exactness under faults: real sockets and messages, a toy model, scripted failures."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from client.events import Stage
from swarm.errors import (
    BadStep,
    ContextExceeded,
    DirectoryError,
    EngineError,
    LocalProtocolError,
    NotCovered,
    PeerBusy,
    PeerFailed,
    PeerLeaving,
    PeerLost,
    RemoteProtocolError,
    SwarmError,
    UnknownModel,
    UnknownSession,
)
from swarm.model.manifest import StaticSpec
from swarm.sampling import Sampling
from swarm.wire.messages import Forward, Hello, Hidden, OpenSession, Output
from tests.client.scripted_peer import ScriptedPeer, toy_text
from tests.client.toy_world import QUICK, World, run
from tests.swarm.event_loops import until

COUNT = 12


def at_step(number: int, act: Callable[[], object]) -> Callable[[int, Forward], None]:
    """Call `act` once, before the step of this number is computed."""
    pending = [act]

    def on_step(count: int, forward: Forward) -> None:
        if count >= number and pending:
            pending.pop()()

    return on_step


def failing(error: SwarmError) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


def test_a_text_over_three_peers_is_the_models_text(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert pipeline.describe_route() == "a 0:2 → b 2:4 → c 4:6"
        assert pipeline.repairs == 0
        await pipeline.close()
        assert world.swarm.open_sessions == 0

    run(test)


def test_a_prompt_is_sent_in_chunks_and_several_are_in_flight(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        pipeline = world.pipeline()
        await world.write(pipeline, prompt, 1)
        starts = [forward.start for forward in world.swarm.peers["c"].steps]
        rows = [forward.rows for forward in world.swarm.peers["c"].steps]
        assert starts == [0, 8, 16, 24, 32, 40]
        assert rows == [0, 0, 0, 0, 0, 1]
        sent = [answer.sent_at for answer in world.answers]
        assert sent[2] <= world.answers[0].received_at  # the third was sent before the first was answered
        assert [event.done for event in world.events if event.stage is Stage.PREFILL] == [8, 16, 24, 32, 40]
        await pipeline.close()

    run(test)


def test_only_tokens_that_are_not_computed_are_sent(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        pipeline = world.pipeline()
        written = await world.write(pipeline, prompt, 3)
        before = len(world.answers)
        longer = [*prompt, *written, 1, 2, 3]
        await pipeline.advance(longer, Sampling())
        assert world.answers[before].forward.start == len(prompt) + 2  # the last token was not computed yet
        await pipeline.advance(longer[:20], Sampling())
        assert world.answers[-1].forward.start == 19  # all are cached: the last position again, for its answer
        changed = [*prompt[:30], 9, 9]  # 20 are cached now
        answer = await pipeline.advance(changed, Sampling())
        assert [a.forward.start for a in world.answers[-2:]] == [20, 28]
        assert int(answer.output.ids[-1]) == toy_text(changed, 1)[0]
        await pipeline.close()

    run(test)


def test_a_step_that_was_sent_ahead_is_not_sent_again(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        pipeline = world.pipeline()
        known = list(prompt)
        for _ in range(4):
            known.append(int((await pipeline.advance(known, Sampling())).output.ids[-1]))
            pipeline.send_ahead(len(known) - 1, known[-1:], Sampling())
        await pipeline.advance(known, Sampling())
        assert known[len(prompt) :] == toy_text(prompt, 4)
        starts = [forward.start for forward in world.swarm.peers["c"].steps if forward.rows]
        assert starts == [40, *range(len(prompt), len(known))]
        await pipeline.close()

    run(test)


@pytest.mark.parametrize("fault", [None, "cut"])
def test_a_step_that_was_sent_ahead_for_another_token_changes_nothing(prompt: list[int], fault: str | None) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        pipeline = world.pipeline()
        known = [*prompt, int((await pipeline.advance(prompt, Sampling())).output.ids[-1])]
        pipeline.send_ahead(len(known) - 1, known[-1:], Sampling())
        if fault:
            world.swarm.peers["b"].cut()
        other = [*prompt, known[-1] ^ 1, 2]
        answer = await pipeline.advance(other, Sampling())
        assert int(answer.output.ids[-1]) == toy_text(other, 1)[0]
        await pipeline.close()
        assert world.swarm.open_sessions == 0

    run(test)


FAULTS: dict[str, Callable[[ScriptedPeer], Callable[[], object]]] = {
    "the process is killed": lambda peer: peer.die,
    "the connections break": lambda peer: peer.cut,
    "it fails": lambda peer: failing(PeerFailed("the device is gone")),
    "it forgets the session": lambda peer: failing(UnknownSession("expired")),
    "it announces that it leaves": lambda peer: failing(PeerLeaving("gone in a moment")),
    "the process is stopped": lambda peer: peer.freeze,
    "it computes nothing any more": lambda peer: peer.get_stuck,
}
# a stall is found only after a deadline, so there are few of these cases
CASES = [(place, step, fault) for fault in list(FAULTS)[:5] for step in (0, 2, 5, 9) for place in "abc"]
CASES += [(place, step, fault) for fault in list(FAULTS)[5:] for place, step in (("a", 0), ("b", 4), ("c", 9))]


@pytest.mark.parametrize(("place", "step", "fault"), CASES)
def test_a_failed_hop_is_replaced_and_no_token_is_lost_or_repeated(
    prompt: list[int], place: str, step: int, fault: str
) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        await world.swarm.add("a2", "0:2", layer_time_s=0.01)
        await world.swarm.add("c2", "4:6", layer_time_s=0.01)
        peer = world.swarm.peers[place]
        peer.on_step = at_step(step, FAULTS[fault](peer))
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert pipeline.repairs == 1
        spare = {"a": "a2", "b": "spare", "c": "c2"}[place]
        replaced = fault != "it forgets the session"
        assert (spare in pipeline.describe_route()) == replaced
        await pipeline.close()

    run(test)


def test_a_repair_does_not_change_a_sampled_text(prompt: list[int]) -> None:
    sampling = Sampling(temperature=0.8, seed=5)

    async def test(world: World) -> None:
        await world.add_three_peers()
        peer = world.swarm.peers["b"]
        peer.on_step = at_step(10, peer.die)
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT, sampling) == toy_text(prompt, COUNT, sampling)
        await pipeline.close()

    run(test)


def test_peers_that_fail_one_after_the_other_are_all_replaced(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        for place, step in (("a", 3), ("b", 8), ("c", 14)):
            peer = world.swarm.peers[place]
            peer.on_step = at_step(step, peer.cut)
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert pipeline.repairs >= 2
        await pipeline.close()
        assert world.swarm.open_sessions == 0

    run(test)


def test_a_failure_while_repairing_is_repaired(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        await world.swarm.add("third", "2:4", layer_time_s=0.1)
        peer, spare = world.swarm.peers["b"], world.swarm.peers["spare"]
        peer.on_step = at_step(4, peer.die)

        def die(ask: OpenSession) -> None:
            spare.die()
            raise PeerFailed("no more")

        spare.on_open = die
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert "third" in pipeline.describe_route()
        await pipeline.close()

    run(test)


def test_without_a_spare_the_error_names_the_uncovered_layers(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        for name, span in (("a", "0:2"), ("b", "2:4"), ("c", "4:6")):
            await world.swarm.add(name, span)
        peer = world.swarm.peers["b"]
        peer.on_step = at_step(8, peer.die)
        pipeline = world.pipeline()
        with pytest.raises(NotCovered, match="2:4") as caught:
            await world.write(pipeline, prompt, COUNT)
        assert caught.value.missing == ((2, 4),)
        assert world.event_texts(Stage.WAITING)
        await pipeline.close()
        assert not peer.sessions

    run(test)


@pytest.mark.parametrize("restarts", [False, True])
def test_no_route_uses_a_process_that_ended_between_two_tokens(prompt: list[int], restarts: bool) -> None:
    """Its record and the measured link to it are still known; another process may answer at its address."""

    async def test(world: World) -> None:
        await world.add_three_peers()
        pipeline = world.pipeline()
        written = await world.write(pipeline, prompt, 4)
        ended = world.swarm.peers["b"]
        if restarts:
            ended.incarnation += 1
            ended.cut()
        else:
            ended.die()
        await until(lambda: not pipeline.is_healthy)
        written += await world.write(pipeline, [*prompt, *written], 4)
        assert written == toy_text(prompt, 8)
        assert "spare" in pipeline.describe_route()
        assert len(world.event_texts(Stage.CONNECTED)) == 2
        assert not world.event_texts(Stage.REPAIRING)
        await pipeline.close()

    run(test)


def test_a_peer_that_joins_meanwhile_is_waited_for(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.swarm.add("a", "0:2")
        await world.swarm.add("c", "4:6")
        pipeline = world.pipeline()
        writing = asyncio.create_task(world.write(pipeline, prompt, COUNT))
        await world.until_event(Stage.WAITING)
        await world.swarm.add("b", "2:4")
        assert await writing == toy_text(prompt, COUNT)
        await pipeline.close()

    run(test, config=dataclasses.replace(QUICK, wait_for_peers_s=30.0))


def test_the_client_relays_between_peers_that_cannot_reach_each_other(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        a, b, c = (world.swarm.peers[name] for name in "abc")
        a.unreachable = {b.peer_id}
        b.unreachable = {c.peer_id}
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert pipeline.describe_route() == "a 0:2 ⇢ b 2:4 ⇢ c 4:6"
        assert a.relayed == b.relayed == len(c.steps)
        assert pipeline.repairs == 0
        await pipeline.close()

    run(test)


def test_a_broken_link_between_two_peers_bans_neither(prompt: list[int]) -> None:
    """Hop a loses its connection to b, which still answers the client."""

    async def test(world: World) -> None:
        await world.swarm.add("a", "0:2")
        await world.swarm.add("b", "2:4")
        await world.swarm.add("c", "4:6")
        a, b = world.swarm.peers["a"], world.swarm.peers["b"]

        def cut_between() -> None:
            for session in b.sessions.values():
                assert session.previous_hop is not None
                session.previous_hop.abort(PeerLost("cut"))
            a.unreachable = {b.peer_id}

        b.on_step = at_step(9, cut_between)
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert pipeline.describe_route() == "a 0:2 ⇢ b 2:4 → c 4:6"
        await pipeline.close()

    run(test)


def test_a_busy_peer_is_replaced(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()

        def refuse(ask: OpenSession) -> None:
            raise PeerBusy("no room", retry_after=30.0)

        world.swarm.peers["b"].on_open = refuse
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert "spare" in pipeline.describe_route()
        await pipeline.close()

    run(test)


def test_a_busy_peer_without_a_spare_is_waited_for(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        for name, span in (("a", "0:2"), ("b", "2:4"), ("c", "4:6")):
            await world.swarm.add(name, span)
        refusals = [PeerBusy("no room", retry_after=0.2)] * 2

        def refuse(ask: OpenSession) -> None:
            if refusals:
                raise refusals.pop()

        world.swarm.peers["b"].on_open = refuse
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert world.event_texts(Stage.WAITING)
        await pipeline.close()

    run(test)


def test_a_peer_that_stays_busy_too_long_surfaces_as_busy(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        for name, span in (("a", "0:2"), ("b", "2:4"), ("c", "4:6")):
            await world.swarm.add(name, span)

        def refuse(ask: OpenSession) -> None:
            raise PeerBusy("no room here", retry_after=60.0)

        world.swarm.peers["b"].on_open = refuse
        pipeline = world.pipeline()
        with pytest.raises(PeerBusy, match="no room here"):
            await world.write(pipeline, prompt, 1)
        await pipeline.close()
        assert world.swarm.open_sessions == 0

    run(test, config=dataclasses.replace(QUICK, repair_timeout_s=1.0))


def test_a_leaving_peer_is_replaced_between_two_tokens(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        pipeline = world.pipeline()
        written = await world.write(pipeline, prompt, 4)
        await world.swarm.peers["b"].leave()
        await until(lambda: not pipeline.is_healthy)
        written += await world.write(pipeline, [*prompt, *written], 4)
        assert written == toy_text(prompt, 8)
        assert "spare" in pipeline.describe_route()
        assert not world.event_texts(Stage.REPAIRING)
        assert not world.swarm.peers["b"].sessions
        await pipeline.close()

    run(test)


def test_a_leaving_peer_without_a_spare_is_used_until_it_is_gone(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        for name, span in (("a", "0:2"), ("b", "2:4"), ("c", "4:6")):
            await world.swarm.add(name, span)
        pipeline = world.pipeline()
        written = await world.write(pipeline, prompt, 4)
        await world.swarm.peers["b"].leave()
        await asyncio.sleep(0.05)
        written += await world.write(pipeline, [*prompt, *written], 4)
        assert written == toy_text(prompt, 8)
        await pipeline.close()

    run(test)


def test_a_record_of_an_earlier_process_is_not_used(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        world.swarm.peers["b"].incarnation = 2  # the published record is that of the first process
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert "spare" in pipeline.describe_route()
        assert world.swarm.peers["b"].opened == 0
        await pipeline.close()

    run(test)


def test_a_peer_with_another_key_at_the_address_is_not_used(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        b, other = world.swarm.peers["b"], world.swarm.peers["spare"]
        record = dataclasses.replace(b.record(), addresses=(other.address.host_port,))
        await world.swarm.directory.publish(record.sign(b.identity))
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert "spare" in pipeline.describe_route()
        await pipeline.close()

    run(test)


INVALID_OUTPUTS: dict[str, Callable[[Output], Output]] = {
    "a token beyond the vocabulary": lambda o: dataclasses.replace(o, ids=o.ids + 97),
    "a token below zero": lambda o: dataclasses.replace(o, ids=o.ids - 98),
    "too many tokens": lambda o: dataclasses.replace(o, ids=np.zeros(3, np.int32)),
    "an answer to a later step": lambda o: dataclasses.replace(o, step=o.step + 1),
    "log-probabilities that were not asked for": lambda o: dataclasses.replace(
        o, logprobs=np.zeros(len(o.ids), np.float32)
    ),
}


@pytest.mark.parametrize("what", INVALID_OUTPUTS)
def test_a_peer_that_sends_an_invalid_output_is_replaced(prompt: list[int], what: str) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        await world.swarm.add("c2", "4:6", layer_time_s=0.01)
        world.swarm.peers["c"].alter_output = INVALID_OUTPUTS[what]
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert "c2" in pipeline.describe_route()
        await pipeline.close()

    run(test)


def test_the_sender_of_relayed_hidden_states_of_a_wrong_shape_is_replaced(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        b, c = world.swarm.peers["b"], world.swarm.peers["c"]
        b.unreachable = {c.peer_id}
        b.alter_output = lambda o: dataclasses.replace(o, hidden=np.zeros((1, 3), np.float32))
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert "spare" in pipeline.describe_route()
        await pipeline.close()

    run(test)


INVALID_HIDDEN: dict[str, Callable[[Hidden], Hidden]] = {
    "of another width": lambda hidden: hidden[:, :3],
    "that are not numbers": lambda hidden: hidden * np.float32(np.nan),
}


@pytest.mark.parametrize("what", INVALID_HIDDEN)
def test_if_a_hop_refuses_hidden_states_their_sender_is_replaced(prompt: list[int], what: str) -> None:
    """Which of the two is at fault shows when the client relays between them."""

    async def test(world: World) -> None:
        await world.add_three_peers()
        b = world.swarm.peers["b"]

        def start_altering() -> None:
            b.alter_hidden = INVALID_HIDDEN[what]

        b.on_step = at_step(7, start_altering)
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert pipeline.describe_route() == "a 0:2 → spare 2:4 → c 4:6"
        refused, found = world.event_texts("repairing")
        assert "peer c refuses what peer b sends" in refused
        assert "peer b sent hidden states" in found
        await pipeline.close()

    run(test)


@pytest.mark.parametrize(("name", "error"), [("a", BadStep("this step is wrong")), ("b", ContextExceeded("too long"))])
def test_an_error_that_is_no_peers_fault_surfaces_and_bans_no_peer(
    prompt: list[int], name: str, error: SwarmError
) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        peer = world.swarm.peers[name]
        peer.on_step = at_step(7, failing(error))
        pipeline = world.pipeline()
        with pytest.raises(type(error), match=str(error)):
            await world.write(pipeline, prompt, COUNT)
        assert pipeline.repairs == 0
        # the same peers can be used at once
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert pipeline.describe_route() == "a 0:2 → b 2:4 → c 4:6"
        await pipeline.close()

    run(test)


def test_a_local_bug_surfaces_and_bans_no_peer(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        pipeline = world.pipeline()

        def full_disk(_: object) -> None:
            raise OSError("no space left on device")

        pipeline.on_answer = full_disk
        with pytest.raises(OSError, match="no space"):
            await world.write(pipeline, prompt, COUNT)
        pipeline.on_answer = world.answers.append
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert pipeline.describe_route() == "a 0:2 → b 2:4 → c 4:6"
        await pipeline.close()

    run(test)


@pytest.mark.parametrize("relayed", [False, True])
@pytest.mark.parametrize("step", [0, 1, 3, 6, 8])
def test_a_cancelled_step_leaves_the_session_usable(prompt: list[int], step: int, relayed: bool) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        if relayed:
            world.swarm.peers["b"].unreachable = {world.swarm.peers["c"].peer_id}
        pipeline = world.pipeline()
        writing = asyncio.create_task(world.write(pipeline, prompt, COUNT))
        world.swarm.peers["b"].on_step = at_step(step, lambda: bool(writing.cancel()))
        with pytest.raises(asyncio.CancelledError):
            await writing
        other = [*prompt[:20], 4, 4, 4]
        assert await world.write(pipeline, other, COUNT) == toy_text(other, COUNT)
        assert pipeline.repairs == 0
        await pipeline.close()
        assert world.swarm.open_sessions == 0

    run(test)


@pytest.mark.parametrize("turns", range(0, 60, 3))
def test_a_cancellation_at_any_moment_leaves_no_session_open(prompt: list[int], turns: int) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        pipeline = world.pipeline()
        writing = asyncio.create_task(world.write(pipeline, prompt, COUNT))
        for _ in range(turns):
            await asyncio.sleep(0)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await pipeline.close()
        await pipeline.close()
        assert world.swarm.open_sessions == 0

    run(test)


def test_sessions_do_not_disturb_each_other(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        peer = world.swarm.peers["b"]
        peer.on_step = at_step(30, peer.die)
        prompts = [prompt[start:] for start in range(0, 40, 5)]
        pipelines = [world.pipeline(60) for _ in prompts]
        texts = await asyncio.gather(
            *(world.write(pipeline, one, COUNT) for pipeline, one in zip(pipelines, prompts, strict=True))
        )
        assert texts == [toy_text(one, COUNT) for one in prompts]
        await asyncio.gather(*(pipeline.close() for pipeline in pipelines))
        assert world.swarm.open_sessions == 0

    run(test)


def test_a_text_longer_than_the_new_peer_attends_to_is_sent_in_small_steps(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        first = await world.swarm.add("first", "0:6")
        next_ = await world.swarm.add("next", "0:6", layer_time_s=0.01, attends_to=5)
        first.on_step = at_step(9, first.die)
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt[:4], COUNT) == toy_text(prompt[:4], COUNT)
        assert max(len(step.tokens) for step in next_.steps) == 5 < world.config.chunk_tokens
        await pipeline.close()

    run(test)


@pytest.mark.parametrize(("attends_to", "furthest"), [(0, (60, 60)), (20, (24, 44)), (60, (60, 60))])
def test_guesses_are_bounded_if_a_hop_has_a_sliding_cache(attends_to: int, furthest: tuple[int, int]) -> None:
    async def test(world: World) -> None:
        await world.swarm.add("a", "0:6", attends_to=attends_to)
        world.swarm.manifest.__dict__["static"] = StaticSpec(context=20, chunk=8, sinks=2, rewind=4)
        pipeline = world.pipeline(60)
        await pipeline.advance([1, 2, 3], Sampling())
        assert (pipeline.furthest(3), pipeline.furthest(40)) == furthest
        await pipeline.close()

    run(test)


def test_a_session_answers_one_question_at_a_time(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        pipeline = world.pipeline()
        first = asyncio.create_task(pipeline.advance(prompt, Sampling()))
        await asyncio.sleep(0)
        with pytest.raises(LocalProtocolError, match="still answering"):
            await pipeline.advance(prompt, Sampling())
        with pytest.raises(LocalProtocolError, match="still answering"):
            pipeline.begin(prompt)
        await first
        await pipeline.close()
        with pytest.raises(LocalProtocolError, match="closed"):
            await pipeline.advance(prompt, Sampling())

    run(test)


@pytest.mark.parametrize("turns", range(0, 80, 8))
def test_closing_a_session_during_a_step_raises_in_the_step(prompt: list[int], turns: int) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        pipeline = world.pipeline()
        writing = asyncio.create_task(world.write(pipeline, prompt, 300))
        for _ in range(turns):
            await asyncio.sleep(0)
        await pipeline.close()
        with pytest.raises(LocalProtocolError, match="closed"):
            await writing
        assert world.swarm.open_sessions == 0

    run(test)


@pytest.mark.parametrize("turns", range(0, 60, 3))
def test_closing_a_session_while_it_answers_raises_at_once(prompt: list[int], turns: int) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        pipeline = world.pipeline()
        writing = asyncio.create_task(world.write(pipeline, prompt, COUNT))
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.gather(pipeline.close(), pipeline.close())
        (outcome,) = await asyncio.gather(writing, return_exceptions=True)
        assert isinstance(outcome, LocalProtocolError) or outcome == toy_text(prompt, COUNT)
        assert world.swarm.open_sessions == 0
        assert not world.event_texts(Stage.REPAIRING)

    run(test)


def test_closing_a_session_does_not_wait_for_a_stalled_peer(prompt: list[int]) -> None:
    slow = dataclasses.replace(QUICK, step_floor_s=600.0)

    async def test(world: World) -> None:
        await world.add_three_peers()
        pipeline = world.pipeline()
        peer = world.swarm.peers["b"]
        stuck = asyncio.Event()

        def get_stuck() -> None:
            peer.get_stuck()
            stuck.set()

        peer.on_step = at_step(2, get_stuck)
        answering = asyncio.create_task(world.write(pipeline, prompt, COUNT))
        await stuck.wait()
        await pipeline.close()
        with pytest.raises(LocalProtocolError, match="closed while it was answering"):
            await answering

    run(test, config=slow)


def test_repairs_end_after_max_repairs(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()

        def always(count: int, forward: Forward) -> None:
            raise UnknownSession("never heard of it")

        world.swarm.peers["c"].on_step = always
        pipeline = world.pipeline()
        with pytest.raises(UnknownSession, match="never heard"):
            await world.write(pipeline, prompt, 1)
        assert world.swarm.peers["c"].opened == QUICK.max_repairs + 1
        await pipeline.close()
        assert world.swarm.open_sessions == 0

    run(test)


def test_a_slow_peer_is_not_taken_for_a_stalled_one(prompt: list[int]) -> None:
    """Steps take longer than their deadline and are computed: no peer is replaced."""

    async def test(world: World) -> None:
        for name, span in (("a", "0:2"), ("b", "2:4"), ("c", "4:6")):
            await world.swarm.add(name, span)
        world.swarm.peers["b"].delay_s = 0.25
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, 3) == toy_text(prompt, 3)
        assert not world.event_texts(Stage.REPAIRING)
        await pipeline.close()

    run(test, config=dataclasses.replace(QUICK, step_floor_s=0.05, stall_s=5.0))


def test_a_peer_that_computes_for_others_only_is_replaced_without_a_ban(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        peer = world.swarm.peers["b"]
        peer.computes_for_others = True
        peer.on_step = at_step(5, peer.get_stuck)
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert "spare" in pipeline.describe_route()
        assert "computes for other sessions only" in world.event_texts(Stage.REPAIRING)[0]
        assert not world.planner._peer_health.may_be_tried(peer.peer_id, peer.incarnation)
        await pipeline.close()

    run(test, config=dataclasses.replace(QUICK, slow_s=1.5, ban_s=300.0))


def test_a_slow_peer_that_no_other_can_replace_is_waited_for(prompt: list[int]) -> None:
    """Giving it up would end the text, and help no session."""

    async def test(world: World) -> None:
        for name, span in (("a", "0:2"), ("b", "2:4"), ("c", "4:6")):
            await world.swarm.add(name, span)
        peer = world.swarm.peers["b"]
        peer.computes_for_others, peer.delay_s = True, 3.0
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt[:5], 1) == toy_text(prompt[:5], 1)
        assert not world.event_texts(Stage.REPAIRING)
        await pipeline.close()

    run(test, config=dataclasses.replace(QUICK, slow_s=0.8))


def test_without_a_spare_a_peer_that_answers_a_ping_is_used_again_at_once(prompt: list[int]) -> None:
    """A ban with no other peer would be an outage of the client's own making."""

    async def test(world: World) -> None:
        for name, span in (("a", "0:2"), ("b", "2:4"), ("c", "4:6")):
            await world.swarm.add(name, span)
        peer = world.swarm.peers["b"]
        peer.on_step = at_step(5, peer.cut)
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert len(world.event_texts(Stage.REPAIRING)) == 1
        await pipeline.close()

    run(test, config=dataclasses.replace(QUICK, ban_s=300.0, ban_limit_s=300.0))


def test_many_sessions_that_see_one_incident_ban_the_peer_for_one(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        peer = world.swarm.peers["b"]
        peer.on_step = at_step(20, peer.cut)
        pipelines = [world.pipeline() for _ in range(12)]
        texts = await asyncio.gather(*(world.write(pipeline, prompt, COUNT) for pipeline in pipelines))
        assert texts == [toy_text(prompt, COUNT)] * 12
        assert len(world.event_texts(Stage.REPAIRING)) > 1
        banned = world.planner._peer_health.remaining([(peer.peer_id, peer.incarnation)])
        assert 0 < banned[peer.peer_id] <= 30.0
        for pipeline in pipelines:
            await pipeline.close()

    run(test, config=dataclasses.replace(QUICK, ban_s=30.0))


@pytest.mark.parametrize("odd", [DirectoryError, UnknownModel, EngineError])
def test_a_peer_that_refuses_a_session_with_an_unexpected_error_is_replaced(
    prompt: list[int], odd: type[SwarmError]
) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()

        def refuse(_: OpenSession) -> None:
            raise odd("not in the mood")

        world.swarm.peers["b"].on_open = refuse
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, 3) == toy_text(prompt, 3)
        assert "spare" in pipeline.describe_route()
        await pipeline.close()

    run(test)


@pytest.mark.parametrize("odd", [DirectoryError, UnknownModel, BadStep])
def test_a_peer_that_refuses_connections_with_an_unexpected_error_is_replaced(
    prompt: list[int], odd: type[SwarmError]
) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()

        def refuse() -> Hello:
            raise odd("not in the mood")

        world.swarm.peers["b"].make_hello = refuse
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, 3) == toy_text(prompt, 3)
        assert "spare" in pipeline.describe_route()
        await pipeline.close()

    run(test)


def test_a_peers_complaint_about_our_bytes_is_a_local_error(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        peer = world.swarm.peers["b"]
        peer.on_step = at_step(3, failing(RemoteProtocolError("your bytes are wrong")))
        pipeline = world.pipeline()
        with pytest.raises(LocalProtocolError, match="your bytes are wrong"):
            await world.write(pipeline, prompt, 1)
        await pipeline.close()

    run(test)

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
from tests.client.scripted import ScriptedPeer, toy_text
from tests.client.world import QUICK, World, run
from tests.swarm.event_loops import until

COUNT = 12


def at_step(number: int, act: Callable[[], object]) -> Callable[[int, Forward], None]:
    """Act once, when the step of this number is to be computed."""
    todo = [act]

    def on_step(count: int, forward: Forward) -> None:
        if count >= number and todo:
            todo.pop()()

    return on_step


def failing(error: SwarmError) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


def test_a_text_over_three_peers_is_the_models_text(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.three()
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert pipeline.describe_route() == "a 0:2 → b 2:4 → c 4:6"
        assert pipeline.repairs == 0
        await pipeline.close()
        assert world.swarm.open_sessions == 0

    run(test)


def test_a_prompt_goes_out_in_chunks_of_which_several_are_in_flight(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.three()
        pipeline = world.pipeline()
        await world.write(pipeline, prompt, 1)
        starts = [forward.start for forward in world.swarm.peers["c"].steps]
        rows = [forward.rows for forward in world.swarm.peers["c"].steps]
        assert starts == [0, 8, 16, 24, 32, 40]
        assert rows == [0, 0, 0, 0, 0, 1]
        sent = [answer.sent_at for answer in world.answers]
        assert sent[2] <= world.answers[0].received_at  # the third left before the first was answered
        assert [event.done for event in world.events if event.stage is Stage.PREFILL] == [8, 16, 24, 32, 40]
        await pipeline.close()

    run(test)


def test_only_what_is_new_is_sent(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.three()
        pipeline = world.pipeline()
        said = await world.write(pipeline, prompt, 3)
        before = len(world.answers)
        longer = [*prompt, *said, 1, 2, 3]
        await pipeline.advance(longer, Sampling())
        assert world.answers[before].forward.start == len(prompt) + 2  # the last token of before was not computed yet
        await pipeline.advance(longer[:20], Sampling())
        assert world.answers[-1].forward.start == 19  # all known: one position again, for its answer
        changed = [*prompt[:30], 9, 9]  # 20 are cached now
        answer = await pipeline.advance(changed, Sampling())
        assert [a.forward.start for a in world.answers[-2:]] == [20, 28]
        assert int(answer.output.ids[-1]) == toy_text(changed, 1)[0]
        await pipeline.close()

    run(test)


def test_a_step_that_was_sent_ahead_is_not_sent_again(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.three()
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
def test_a_step_that_was_sent_ahead_in_vain_changes_nothing(prompt: list[int], fault: str | None) -> None:
    async def test(world: World) -> None:
        await world.three()
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
    "it says that it leaves": lambda peer: failing(PeerLeaving("gone in a moment")),
    "the process is stopped": lambda peer: peer.freeze,
    "it computes nothing any more": lambda peer: peer.get_stuck,
}
# a stall takes its deadline to be found: a few of them are enough
CASES = [(place, step, fault) for fault in list(FAULTS)[:5] for step in (0, 2, 5, 9) for place in "abc"]
CASES += [(place, step, fault) for fault in list(FAULTS)[5:] for place, step in (("a", 0), ("b", 4), ("c", 9))]


@pytest.mark.parametrize(("place", "step", "fault"), CASES)
def test_no_token_is_lost_and_none_comes_twice(prompt: list[int], place: str, step: int, fault: str) -> None:
    async def test(world: World) -> None:
        await world.three()
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


def test_sampled_text_survives_a_repair_too(prompt: list[int]) -> None:
    sampling = Sampling(temperature=0.8, seed=5)

    async def test(world: World) -> None:
        await world.three()
        peer = world.swarm.peers["b"]
        peer.on_step = at_step(10, peer.die)
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT, sampling) == toy_text(prompt, COUNT, sampling)
        await pipeline.close()

    run(test)


def test_peers_that_fail_one_after_the_other_are_all_survived(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.three()
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
        await world.three()
        await world.swarm.add("third", "2:4", layer_time_s=0.1)
        peer, spare = world.swarm.peers["b"], world.swarm.peers["spare"]
        peer.on_step = at_step(4, peer.die)

        def dies(ask: OpenSession) -> None:
            spare.die()
            raise PeerFailed("no more")

        spare.on_open = dies
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert "third" in pipeline.describe_route()
        await pipeline.close()

    run(test)


def test_without_a_spare_the_uncovered_layers_are_named(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        for name, span in (("a", "0:2"), ("b", "2:4"), ("c", "4:6")):
            await world.swarm.add(name, span)
        peer = world.swarm.peers["b"]
        peer.on_step = at_step(8, peer.die)
        pipeline = world.pipeline()
        with pytest.raises(NotCovered, match="2:4") as caught:
            await world.write(pipeline, prompt, COUNT)
        assert caught.value.missing == ((2, 4),)
        assert world.said(Stage.WAITING)
        await pipeline.close()
        assert not peer.sessions

    run(test)


@pytest.mark.parametrize("lives_on", [False, True])
def test_no_route_leads_to_a_process_that_ended_between_two_tokens(prompt: list[int], lives_on: bool) -> None:
    """Its record outlives it, and so does what was measured of the way to it; another process may answer there."""

    async def test(world: World) -> None:
        await world.three()
        pipeline = world.pipeline()
        said = await world.write(pipeline, prompt, 4)
        ended = world.swarm.peers["b"]
        if lives_on:
            ended.incarnation += 1
            ended.cut()
        else:
            ended.die()
        await until(lambda: not pipeline.is_healthy)
        said += await world.write(pipeline, [*prompt, *said], 4)
        assert said == toy_text(prompt, 8)
        assert "spare" in pipeline.describe_route()
        assert len(world.said(Stage.CONNECTED)) == 2
        assert not world.said(Stage.REPAIRING)
        await pipeline.close()

    run(test)


def test_a_peer_that_joins_meanwhile_is_waited_for(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.swarm.add("a", "0:2")
        await world.swarm.add("c", "4:6")
        pipeline = world.pipeline()
        writing = asyncio.create_task(world.write(pipeline, prompt, COUNT))
        await world.until_said(Stage.WAITING)
        await world.swarm.add("b", "2:4")
        assert await writing == toy_text(prompt, COUNT)
        await pipeline.close()

    run(test, config=dataclasses.replace(QUICK, wait_for_peers_s=30.0))


def test_peers_that_cannot_reach_each_other_are_relayed_between(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.three()
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


def test_a_way_between_two_peers_that_breaks_blames_neither(prompt: list[int]) -> None:
    """Hop a loses its connection to b, which answers the client all the while."""

    async def test(world: World) -> None:
        await world.swarm.add("a", "0:2")
        await world.swarm.add("b", "2:4")
        await world.swarm.add("c", "4:6")
        a, b = world.swarm.peers["a"], world.swarm.peers["b"]

        def cut_between() -> None:
            for session in b.sessions.values():
                assert session.bringer is not None
                session.bringer.abort(PeerLost("cut"))
            a.unreachable = {b.peer_id}

        b.on_step = at_step(9, cut_between)
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert pipeline.describe_route() == "a 0:2 ⇢ b 2:4 → c 4:6"
        await pipeline.close()

    run(test)


def test_a_busy_peer_is_passed_over_without_a_ban(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.three()

        def refuse(ask: OpenSession) -> None:
            raise PeerBusy("no room", retry_after=30.0)

        world.swarm.peers["b"].on_open = refuse
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert "spare" in pipeline.describe_route()
        await pipeline.close()

    run(test)


def test_room_that_is_promised_is_waited_for(prompt: list[int]) -> None:
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
        assert world.said(Stage.WAITING)
        await pipeline.close()

    run(test)


def test_busy_for_too_long_says_busy(prompt: list[int]) -> None:
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


def test_a_leaving_peer_is_left_between_two_tokens(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.three()
        pipeline = world.pipeline()
        said = await world.write(pipeline, prompt, 4)
        await world.swarm.peers["b"].leave()
        await until(lambda: not pipeline.is_healthy)
        said += await world.write(pipeline, [*prompt, *said], 4)
        assert said == toy_text(prompt, 8)
        assert "spare" in pipeline.describe_route()
        assert not world.said(Stage.REPAIRING)
        assert not world.swarm.peers["b"].sessions
        await pipeline.close()

    run(test)


def test_a_leaving_peer_without_a_successor_is_used_while_it_lasts(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        for name, span in (("a", "0:2"), ("b", "2:4"), ("c", "4:6")):
            await world.swarm.add(name, span)
        pipeline = world.pipeline()
        said = await world.write(pipeline, prompt, 4)
        await world.swarm.peers["b"].leave()
        await asyncio.sleep(0.05)
        said += await world.write(pipeline, [*prompt, *said], 4)
        assert said == toy_text(prompt, 8)
        await pipeline.close()

    run(test)


def test_a_restarted_peer_is_not_taken_for_its_old_self(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.three()
        world.swarm.peers["b"].incarnation = 2  # its record on the board is still of the first
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert "spare" in pipeline.describe_route()
        assert world.swarm.peers["b"].opened == 0
        await pipeline.close()

    run(test)


def test_another_key_at_the_address_is_not_believed(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.three()
        b, other = world.swarm.peers["b"], world.swarm.peers["spare"]
        record = dataclasses.replace(b.record(), addresses=(other.address.place,))
        await world.swarm.directory.publish(record.seal(b.identity))
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert "spare" in pipeline.describe_route()
        await pipeline.close()

    run(test)


NONSENSE: dict[str, Callable[[Output], Output]] = {
    "a token beyond the vocabulary": lambda o: dataclasses.replace(o, ids=o.ids + 97),
    "a token below zero": lambda o: dataclasses.replace(o, ids=o.ids - 98),
    "too many tokens": lambda o: dataclasses.replace(o, ids=np.zeros(3, np.int32)),
    "an answer to a later step": lambda o: dataclasses.replace(o, step=o.step + 1),
    "log-probabilities that nobody asked for": lambda o: dataclasses.replace(
        o, logprobs=np.zeros(len(o.ids), np.float32)
    ),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_a_peer_that_answers_nonsense_is_replaced(prompt: list[int], what: str) -> None:
    async def test(world: World) -> None:
        await world.three()
        await world.swarm.add("c2", "4:6", layer_time_s=0.01)
        world.swarm.peers["c"].alter = NONSENSE[what]
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert "c2" in pipeline.describe_route()
        await pipeline.close()

    run(test)


def test_hidden_states_of_the_wrong_shape_blame_their_sender(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.three()
        b, c = world.swarm.peers["b"], world.swarm.peers["c"]
        b.unreachable = {c.peer_id}
        b.alter = lambda o: dataclasses.replace(o, hidden=np.zeros((1, 3), np.float32))
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert "spare" in pipeline.describe_route()
        await pipeline.close()

    run(test)


SPOILT: dict[str, Callable[[Hidden], Hidden]] = {
    "of another width": lambda hidden: hidden[:, :3],
    "that are no numbers": lambda hidden: hidden * np.float32(np.nan),
}


@pytest.mark.parametrize("what", SPOILT)
def test_hidden_states_that_the_next_hop_refuses_blame_their_sender_and_not_who_refuses(
    prompt: list[int], what: str
) -> None:
    """Which of the two it is shows when they come by way of the client."""

    async def test(world: World) -> None:
        await world.three()
        b = world.swarm.peers["b"]

        def spoil() -> None:
            b.spoil = SPOILT[what]

        b.on_step = at_step(7, spoil)
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, COUNT) == toy_text(prompt, COUNT)
        assert pipeline.describe_route() == "a 0:2 → spare 2:4 → c 4:6"
        refused, found = world.said("repairing")
        assert "peer c refuses what peer b sends" in refused
        assert "peer b sent hidden states" in found
        await pipeline.close()

    run(test)


@pytest.mark.parametrize(("name", "error"), [("a", BadStep("this step is wrong")), ("b", ContextExceeded("too long"))])
def test_what_is_no_peers_fault_surfaces_and_nobody_is_banned(prompt: list[int], name: str, error: SwarmError) -> None:
    async def test(world: World) -> None:
        await world.three()
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


def test_a_local_bug_surfaces_and_nobody_is_banned(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.three()
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
        await world.three()
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
def test_cancelled_at_any_moment_nothing_stays_open(prompt: list[int], turns: int) -> None:
    async def test(world: World) -> None:
        await world.three()
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
        await world.three()
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


def test_a_text_that_outgrew_its_next_peer_is_read_in_steps_that_it_takes(prompt: list[int]) -> None:
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
def test_guesses_are_bounded_where_a_hop_of_the_route_slides(attends_to: int, furthest: tuple[int, int]) -> None:
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
        await world.three()
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
def test_a_session_that_is_closed_under_a_step_says_so(prompt: list[int], turns: int) -> None:
    async def test(world: World) -> None:
        await world.three()
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
def test_a_session_that_is_closed_while_it_answers_says_so_at_once(prompt: list[int], turns: int) -> None:
    async def test(world: World) -> None:
        await world.three()
        pipeline = world.pipeline()
        writing = asyncio.create_task(world.write(pipeline, prompt, COUNT))
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.gather(pipeline.close(), pipeline.close())
        (outcome,) = await asyncio.gather(writing, return_exceptions=True)
        assert isinstance(outcome, LocalProtocolError) or outcome == toy_text(prompt, COUNT)
        assert world.swarm.open_sessions == 0
        assert not world.said(Stage.REPAIRING)

    run(test)


def test_a_session_that_is_closed_while_a_peer_does_not_answer_does_not_wait_for_it(prompt: list[int]) -> None:
    slow = dataclasses.replace(QUICK, step_floor_s=600.0)

    async def test(world: World) -> None:
        await world.three()
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


def test_endless_failure_comes_to_an_end(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.three()

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


def test_a_slow_peer_is_not_a_stalled_one(prompt: list[int]) -> None:
    """Steps take longer than their deadline, and get done: nobody is given up."""

    async def test(world: World) -> None:
        for name, span in (("a", "0:2"), ("b", "2:4"), ("c", "4:6")):
            await world.swarm.add(name, span)
        world.swarm.peers["b"].delay_s = 0.25
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, 3) == toy_text(prompt, 3)
        assert not world.said(Stage.REPAIRING)
        await pipeline.close()

    run(test, config=dataclasses.replace(QUICK, step_floor_s=0.05, stall_s=5.0))


@pytest.mark.parametrize("odd", [DirectoryError, UnknownModel, EngineError])
def test_a_peer_that_refuses_a_session_in_an_odd_way_is_replaced(prompt: list[int], odd: type[SwarmError]) -> None:
    async def test(world: World) -> None:
        await world.three()

        def refuse(_: OpenSession) -> None:
            raise odd("not in the mood")

        world.swarm.peers["b"].on_open = refuse
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, 3) == toy_text(prompt, 3)
        assert "spare" in pipeline.describe_route()
        await pipeline.close()

    run(test)


@pytest.mark.parametrize("odd", [DirectoryError, UnknownModel, BadStep])
def test_a_peer_that_refuses_greetings_in_an_odd_way_is_passed_over(prompt: list[int], odd: type[SwarmError]) -> None:
    async def test(world: World) -> None:
        await world.three()

        def refuse() -> Hello:
            raise odd("not in the mood")

        world.swarm.peers["b"].greeting = refuse
        pipeline = world.pipeline()
        assert await world.write(pipeline, prompt, 3) == toy_text(prompt, 3)
        assert "spare" in pipeline.describe_route()
        await pipeline.close()

    run(test)


def test_remote_protocol_errors_of_ours_are_not_the_peers(prompt: list[int]) -> None:
    async def test(world: World) -> None:
        await world.three()
        peer = world.swarm.peers["b"]
        peer.on_step = at_step(3, failing(RemoteProtocolError("your bytes are wrong")))
        pipeline = world.pipeline()
        with pytest.raises(LocalProtocolError, match="your bytes are wrong"):
            await world.write(pipeline, prompt, 1)
        await pipeline.close()

    run(test)

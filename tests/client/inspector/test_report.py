"""The route inspector: its data, its picture at several widths, and its commands over real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import io
import json
import math
import subprocess
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from client.config import GenerationConfig
from client.inspector.cli import routes
from client.inspector.picture import Picture, Scale, picture_models
from client.inspector.report import Inspection, MeasuredLink, ModelView, inspect_swarm, measure_links, view_model
from client.options import (
    DEFAULT_SESSION_TOKENS,
    package_manifest,
    parse_initial_peers,
    parse_numerics,
    write_json,
)
from swarm.discovery.directory import MemoryDirectory
from swarm.discovery.records import LEAVING, PeerRecord
from swarm.errors import AddressError, ConfigError, PackageError, PeerUnreachable
from swarm.model.manifest import MANIFEST
from swarm.model.spans import LayerRange
from swarm.routing.plan import RouteRequest
from swarm.transport.link import LinkQuality
from swarm.wire.messages import Hello
from tests.harness import ROOT, run_swarm, swarm_command
from tests.swarm.discovery.toy_query_peer import HELLO, QueryPeer, model_record, query_peer, toy_files, toy_manifest
from tests.swarm.routing.test_choose import EXACT, FAST, MS, NOW, peer

REQUEST = RouteRequest(layers=30, hidden_bytes=2304, kv_tokens=100)
MANIFEST_BYTES = toy_manifest(toy_files()).to_json()
DIGEST = toy_manifest(toy_files()).digest


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await test

    asyncio.run(bounded())


def links_of(records: Sequence[PeerRecord]) -> dict[str, MeasuredLink]:
    return {record.peer_id: MeasuredLink(rtt_s=2 * MS, bytes_per_s=1e8) for record in records}


def inspect_toy(
    records: Sequence[PeerRecord], request: RouteRequest = REQUEST, links: dict[str, MeasuredLink] | None = None
) -> Inspection:
    return inspect_swarm("smollm2", "9f3a" * 16, records, request, links=links_of(records) | (links or {}), now=NOW)


COVERED = [
    peer("anna", "0:11"),
    peer("bernd", "11:22", queue=2, sessions=3),
    peer("carol", "22:30"),
    peer("dora", "11:30", layer_time_s=3 * MS, entries=(22,)),
    peer("emil", "0:11", state=LEAVING),
]
BROKEN = [record for record in COVERED if record.name not in ("bernd", "dora")]


def draw(inspection: Inspection, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(Picture(inspection))
    return out.getvalue()


# -- data ----------------------------------------------------------------------------------------------------------


def test_each_peer_is_on_the_route_spare_or_left_out_with_a_reason() -> None:
    seen = inspect_toy(COVERED)
    assert seen.covered
    assert {view.record.name: view.hop for view in seen.peers if view.hop is not None} == {
        "anna": 0,
        "bernd": 1,
        "carol": 2,
    }
    assert {view.record.name: view.left_out for view in seen.peers if view.left_out} == {"emil": "is leaving"}
    assert [view.record.name for view in seen.peers] == ["anna", "emil", "bernd", "dora", "carol"]
    assert seen.coverage == (1,) * 11 + (2,) * 19


def test_missing_layers_are_reported_without_an_error() -> None:
    seen = inspect_toy(BROKEN)
    assert not seen.covered
    assert seen.missing == (LayerRange(11, 22),)
    assert "no peer serves layers 11:22" in seen.problem
    assert seen.coverage[11:22] == (0,) * 11


def test_the_plain_form_is_json_with_the_documented_fields() -> None:
    far = {"id-dora": MeasuredLink(rtt_s=math.inf, problem="the connection is refused")}
    for records in (COVERED, BROKEN, []):
        plain = json.loads(json.dumps(inspect_toy(records, links=far).to_plain(), allow_nan=False))
        assert set(plain) == {
            "schema", "model", "at", "request", "covered", "problem", "missing", "coverage", "peers", "route",
            "alternatives",
        }  # fmt: skip
    plain = inspect_toy(COVERED, links=far).to_plain()
    assert plain["schema"] == 1
    assert plain["model"] == {"name": "smollm2", "digest": "9f3a" * 16, "layers": 30}
    dora = next(view for view in plain["peers"] if view["name"] == "dora")
    assert (dora["rtt_s"], dora["unreachable"]) == (None, "the connection is refused")
    assert dora["left_out"] == "cannot be reached from here"
    hops = plain["route"]["hops"]
    assert [hop["span"] for hop in hops] == ["0:11", "11:22", "22:30"]
    assert plain["route"]["step_s"] == pytest.approx(sum(hop["total_s"] for hop in hops) + plain["route"]["return_s"])
    assert plain["alternatives"][0]["kind"] == "without"


def test_peers_of_the_same_name_get_distinct_names() -> None:
    twins = [replace(peer("box", "0:30"), peer_id="aaaa1111"), replace(peer("box", "0:30"), peer_id="bbbb2222")]
    seen = inspect_toy(twins)
    assert [seen.name_of(twin.peer_id) for twin in twins] == ["box aaaa", "box bbbb"]
    assert seen.name_of("somebody-else") == "somebody"


def test_a_model_counts_only_layers_of_peers_that_are_not_leaving() -> None:
    model = model_record("d" * 64, layers=30)
    view = view_model(model, [*BROKEN, peer("liar", "0:99")])
    assert (view.peers, view.layers_covered, view.missing) == (2, 19, (LayerRange(11, 22),))


# -- picture -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120, 160, 200])
@pytest.mark.parametrize("records", [COVERED, BROKEN, [], [*COVERED, peer("x" * 200, "0:30", device="d" * 200)]])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_cut(width: int, records: list[PeerRecord]) -> None:
    text = draw(inspect_toy(records), width)
    assert max(map(len, text.splitlines())) <= width
    for record in records:
        assert record.name[:10] in text
        assert str(record.span) in text
    if len(records) and max(len(record.name) for record in records) < 20:
        assert all(record.addresses[0] in text for record in records)
        assert "…" not in text


def test_hops_spares_and_gaps_are_distinct_without_colour() -> None:
    lines = draw(inspect_toy(COVERED), 60).splitlines()
    assert "█" * 11 + "·" * 19 in next(line for line in lines if line.startswith("1 anna"))
    assert "·" * 11 + "█" * 11 + "·" * 8 in next(line for line in lines if line.startswith("2 bernd"))
    assert "·" * 11 + "▒" * 19 in next(line for line in lines if line.startswith("  dora"))
    assert "░" * 11 + "·" * 19 in next(line for line in lines if line.startswith("  emil"))
    copies = next(line for line in lines if line.startswith("  copies"))
    assert "1──────────2" in copies
    broken = draw(inspect_toy(BROKEN), 80)
    assert "×" * 11 in broken
    assert "NOT COVERED" in broken
    assert "no peer serves layers 11:22" in broken.replace("\n", " ")


def test_the_route_shows_the_cost_of_each_hop_and_why_others_lost() -> None:
    text = draw(inspect_toy(COVERED), 120)
    assert "a step takes" in text
    assert "no route: no other peer serves 0:11" in text
    assert "with dora" in text
    assert "ms more compute" in text
    assert "is leaving" in text
    slow = draw(inspect_toy(COVERED, replace(REQUEST, objective="throughput")), 120)
    assert "slowest stage" in slow


def test_a_relayed_hop_is_marked() -> None:
    unconnected = [replace(COVERED[0], links={"id-bernd": LinkQuality(rtt_s=math.inf)}), *COVERED[1:3]]
    assert "bernd (relayed)" in draw(inspect_toy(unconnected), 80)


def test_a_route_in_other_numerics_is_a_runner_up() -> None:
    text = draw(inspect_toy([*COVERED, peer("gina", "0:30", numerics=FAST, layer_time_s=9 * MS)]), 120)
    assert "other numerics" in text
    assert "computes in bf16/u8, not in f32/f32" in text


def test_names_from_the_network_are_never_markup() -> None:
    assert "[red]x[/red]" in draw(inspect_toy([peer("[red]x[/red]", "0:30", device="[/]")]), 120)


@pytest.mark.parametrize(("layers", "cells"), [(30, 50), (30, 90), (80, 50), (1, 10), (4096, 48)])
def test_every_layer_has_a_cell_and_every_cell_has_a_layer(layers: int, cells: int) -> None:
    scale = Scale(layers, cells)
    assert scale.cells <= cells
    shown = [layer for cell in range(scale.cells) for layer in scale.layers(cell)]
    assert set(shown) == set(range(layers))
    assert all(first in scale.layers(scale.cell(first)) for first in range(layers))


def test_models_are_listed_with_their_size_and_missing_layers() -> None:
    model = model_record("d" * 64, name="smollm2", layers=30, layer_bytes=2_712_000)
    out = io.StringIO()
    views = [ModelView(model=model, peers=2, missing=(LayerRange(11, 22),))]
    Console(file=out, width=80).print(picture_models(views))
    for expected in ("smollm2", "dddddddddddd", "19/30", "6.4 MB", "a test", "no peer serves layers 11:22"):
        assert expected in out.getvalue()
    long = ModelView(model=dataclasses.replace(model, name="a-model-of-a-very-long-name"), peers=2, missing=())
    narrow = io.StringIO()
    Console(file=narrow, width=60).print(picture_models([long]))
    row = next(line for line in narrow.getvalue().splitlines() if "30/30" in line)
    assert "a-m…" in row
    assert all(word in row for word in ("dddddddddddd", "6.4 MB"))
    assert views[0].to_plain()["layer_bytes"] == 2_712_000
    assert views[0].to_plain()["layer_memory_bytes"] == 6_424_000


# -- options -------------------------------------------------------------------------------------------------------


def test_numerics_and_addresses_are_parsed_or_quoted_in_an_error(tmp_path: Path) -> None:
    assert parse_numerics("") is None
    assert parse_numerics("f32/f32") == EXACT
    assert parse_numerics("f32") == EXACT
    for text in ("f32/", "a/b/c", "f 32"):
        with pytest.raises(ConfigError, match="is not valid as numerics"):
            parse_numerics(text)
    with pytest.raises(ConfigError, match="--initial-peer"):
        parse_initial_peers([])
    with pytest.raises(AddressError, match="a:0"):
        parse_initial_peers(["b:1", "a:0"])


def test_a_package_is_distinguished_from_a_name_by_its_manifest(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(MANIFEST_BYTES)
    found = package_manifest(str(tmp_path))
    assert found is not None
    assert found.digest == DIGEST
    assert package_manifest("smollm2-135m-instruct") is None
    with pytest.raises(PackageError, match="nothing"):
        package_manifest(str(tmp_path / "nothing"))


def test_nothing_is_written_where_json_cannot_be_encoded(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json({"fine": 1, "cost_s": math.inf})
    assert capsys.readouterr().out == ""
    write_json({"fine": 1}, indent=None)
    assert capsys.readouterr().out == '{"fine": 1}\n'


def test_the_default_kv_tokens_of_routes_are_those_of_generate() -> None:
    assert GenerationConfig().max_new_tokens < DEFAULT_SESSION_TOKENS
    default = inspect.signature(routes).parameters["kv_tokens"].default
    assert default == DEFAULT_SESSION_TOKENS
    assert f"for {REQUEST.kv_tokens} tokens of cache" in draw(inspect_toy(COVERED), 120)


# -- over real sockets ---------------------------------------------------------------------------------------------


async def toy_swarm(stack: AsyncExitStack, *spans: str) -> list[QueryPeer]:
    """Announced peers of the toy model, with one directory."""
    directory = MemoryDirectory()
    peers = []
    for i, span in enumerate(spans):
        starting = query_peer(directory, name=f"peer{i}", span=LayerRange.parse(span), manifest=MANIFEST_BYTES)
        peers.append(await stack.enter_async_context(starting))
        await peers[-1].announce(DIGEST)
        await directory.publish(model_record(DIGEST).sign(peers[-1].identity))
    return peers


async def swarm(*words: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(run_swarm, *words)


def test_peers_are_measured_and_unreachable_ones_have_a_reason() -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            near, gone, restarted = await toy_swarm(stack, "0:3", "0:3", "0:3")
            records = [
                near.record(DIGEST),
                gone.record(DIGEST),
                restarted.record(DIGEST, incarnation=7),
                near.record(DIGEST, peer_id="a" * 32),
                near.record(DIGEST, peer_id="b" * 32, addresses=()),
            ]
            await gone.listener.close()
            links = await measure_links(records, HELLO)
            assert links[near.identity.peer_id].reachable
            assert links[near.identity.peer_id].bytes_per_s > 0
            assert records[1].addresses[0] in links[gone.identity.peer_id].problem
            assert "restarted" in links[restarted.identity.peer_id].problem
            assert not links["a" * 32].reachable
            assert links["a" * 32].problem
            assert "b" * 32 not in links

    run(test())


def test_a_silent_peer_delays_no_other_and_a_bug_is_raised() -> None:
    async def stuck(record: PeerRecord, hello: Hello, timeout: float) -> LinkQuality:
        if record.name == "stuck":
            await asyncio.Event().wait()
        if record.name == "dead":
            raise PeerUnreachable("nobody listens there")
        return LinkQuality(rtt_s=MS)

    async def buggy(record: PeerRecord, hello: Hello, timeout: float) -> LinkQuality:
        raise ZeroDivisionError

    async def test() -> None:
        records = [peer("stuck", "0:3"), peer("dead", "0:3"), *(peer(f"p{i}", "0:3") for i in range(40))]
        links = await measure_links(records, HELLO, timeout=0.05, probe=stuck)
        assert links["id-stuck"].problem.startswith("no answer within")
        assert links["id-dead"].problem == "nobody listens there"
        assert sum(link.reachable for link in links.values()) == 40
        with pytest.raises(ExceptionGroup) as caught:
            await measure_links(records, HELLO, probe=buggy)
        assert caught.group_contains(ZeroDivisionError)

    run(test())


def test_routes_draws_the_route_and_notes_trusted_addresses() -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            first, *_ = await toy_swarm(stack, "0:1", "1:3", "1:3")
            done = await swarm("routes", "toy", "--initial-peer", str(first.address))
            assert done.returncode == 0, done.stderr
            assert "1 peer0" in done.stdout
            assert "a step takes" in done.stdout
            assert "covered" in done.stdout
            assert f"{first.address.host_port} was taken on trust" in done.stderr
            assert str(first.pinned) in done.stderr.replace("\n", "")

    run(test())


def test_routes_as_json_is_one_object_by_name_digest_or_package(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(MANIFEST_BYTES)

    async def test() -> None:
        async with AsyncExitStack() as stack:
            first, _ = await toy_swarm(stack, "0:1", "1:3")
            for model in ("toy", DIGEST, str(tmp_path)):
                done = await swarm("routes", model, "--initial-peer", str(first.pinned), "--json")
                plain = json.loads(done.stdout)
                assert plain["model"] == {"name": "toy", "digest": DIGEST, "layers": 3}
                assert [hop["span"] for hop in plain["route"]["hops"]] == ["0:1", "1:3"]
                assert all(view["rtt_s"] > 0 for view in plain["peers"])
                assert done.stderr == ""

    run(test())


def test_routes_of_an_uncovered_model_draws_and_exits_with_3() -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            first, leaving = await toy_swarm(stack, "0:1", "1:3")
            await leaving.announce(DIGEST, state=LEAVING)
            done = await swarm("routes", "toy", "--initial-peer", str(first.pinned))
            assert done.returncode == 3
            assert "NOT COVERED" in done.stdout
            assert "×" in done.stdout
            assert "layers 1:3 are served only by peers that cannot be used: peer1 (1:3) is leaving" in done.stderr
            again = await swarm("routes", "toy", "--initial-peer", str(first.pinned), "--json")
            assert again.returncode == 3
            assert json.loads(again.stdout)["missing"] == ["1:3"]

    run(test())


def test_watching_survives_the_peer_it_started_from() -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            first, _ = await toy_swarm(stack, "0:3", "0:3")
            words = ("routes", "toy", "--initial-peer", str(first.pinned), "--watch", "--every", "0.1", "--json")
            watcher = await asyncio.create_subprocess_exec(
                *swarm_command(*words), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, limit=1 << 20
            )
            try:
                assert watcher.stdout is not None
                seen = json.loads(await watcher.stdout.readline())
                assert sum(view["rtt_s"] is not None for view in seen["peers"]) == 2
                await first.listener.close()
                while sum(view["rtt_s"] is not None for view in seen["peers"]) == 2:
                    seen = json.loads(await watcher.stdout.readline())
                assert seen["covered"]
                assert seen["route"]["hops"][0]["name"] == "peer1"
            finally:
                watcher.send_signal(2)
                await watcher.communicate()
            assert watcher.returncode == 130

    run(test())


def test_models_lists_what_is_served() -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            first, _ = await toy_swarm(stack, "0:1", "2:3")
            done = await swarm("models", "--initial-peer", str(first.pinned))
            assert done.returncode == 0, done.stderr
            assert "no peer serves layers 1:2" in done.stdout
            plain = json.loads((await swarm("models", "--initial-peer", str(first.pinned), "--json")).stdout)
            (model,) = plain["models"]
            assert (model["name"], model["layers_covered"], model["missing"], model["peers"]) == ("toy", 2, ["1:2"], 2)

    run(test())


def test_models_of_an_empty_swarm_is_no_error() -> None:
    async def test() -> None:
        async with query_peer() as alone:
            done = await swarm("models", "--initial-peer", str(alone.pinned), "--json")
            assert (done.returncode, json.loads(done.stdout)) == (0, {"schema": 1, "models": []})
            unknown = await swarm("routes", "nix", "--initial-peer", str(alone.pinned))
            assert unknown.returncode == 3
            assert "no peer serves 'nix'" in unknown.stderr

    run(test())

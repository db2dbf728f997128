"""`swarm join` as real processes with the real model and a real DHT, from start to shutdown."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from pathlib import Path

import pytest

from swarm.app.local_swarm import LISTENING, LocalSwarm, Member
from swarm.discovery.records import LEAVING, SERVING
from swarm.model.manifest import load_manifest
from swarm.model.spans import LayerRange
from tests.cases.observer import records_at
from tests.harness import is_listening, listening_ports, process_tree, run_swarm, still_running, wait_until

FRONT, BACK = LayerRange(0, 15), LayerRange(15, 30)
MAX_SHUTDOWN_S = 10.0
"""After this time no port and no child process is left."""


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def assert_all_end(members: list[Member], number: signal.Signals) -> None:
    """Signal each member; its process, its children and its ports must be gone in time."""
    families = [process_tree(member) for member in members]
    ports = set().union(*map(listening_ports, families))
    assert ports
    for member in members:
        member.signal(number)
    for member in members:
        member.process.wait(timeout=MAX_SHUTDOWN_S)
    wait_until(lambda: not any(map(still_running, families)), "no child is left", MAX_SHUTDOWN_S)
    assert not [port for port in ports if is_listening(port)]


def test_a_peer_joins_by_model_name_and_another_leaves_by_ctrl_c(smollm2_package: Path, tmp_path: Path) -> None:
    manifest = load_manifest(smollm2_package)
    with LocalSwarm(tmp_path / "swarm", options=["--threads", "1", "--grace", "1"]) as swarm:
        first = swarm.join(smollm2_package, FRONT, name="first")
        swarm.wait(phase=LISTENING)
        swarm.wait()
        second = swarm.join(
            manifest.name,
            "auto",
            name="second",
            initial=[first.address],
            options=["--cache-dir", str(tmp_path / "cache"), "--kv-tokens", "2000"],
        )
        swarm.wait()
        announced = second.event("announced")
        assert announced is not None
        assert announced["span"] == "15:30"
        assert announced["model"] == {"name": manifest.name, "digest": manifest.digest}
        assert announced["pid"] == second.process.pid
        phases = [str(event["phase"]) for event in second.events if event["phase"] != LISTENING]
        assert phases == ["started", "chosen", "fetched", "checked", "tested", "loaded", "announced"]
        fetched = {path.name for path in (tmp_path / "cache" / "packages").glob("*/layer_*.bin")}
        assert fetched == {f"layer_{layer:03d}.bin" for layer in BACK}

        wait_until(lambda: records_at(second, manifest.digest).keys() == {"first", "second"}, "both are listed")
        both = records_at(second, manifest.digest)
        assert both["first"].span == FRONT
        assert both["first"].holds == (manifest.span,)
        assert both["second"].span == BACK
        assert both["second"].holds == (BACK,)
        assert both["second"].kv_total == both["second"].kv_free == 2000
        assert both["second"].layer_time_s > 0
        assert {record.state for record in both.values()} == {SERVING}

        # The record says "leaving" before the peer ends.
        processes, ports = process_tree(first), listening_ports(process_tree(first))
        first.signal(signal.SIGINT)
        state = wait_until(
            lambda: (r := records_at(second, manifest.digest).get("first")) is None or (r.state != SERVING and r.state),
            "its record says that it leaves, or has expired",
            MAX_SHUTDOWN_S,
        )
        assert state in (LEAVING, True)
        assert first.process.wait(timeout=MAX_SHUTDOWN_S) == 0
        wait_until(lambda: not still_running(processes), "no child is left", MAX_SHUTDOWN_S)
        assert not [port for port in ports if is_listening(port)]

        assert_all_end([second], signal.SIGKILL)


def test_a_bootstrap_answers_queries_without_a_model_and_ctrl_c_twice_ends_it(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path / "swarm") as swarm:
        bootstrap = swarm.bootstrap()
        swarm.wait()
        assert records_at(bootstrap, "0" * 64) == {}
        processes = process_tree(bootstrap)
        bootstrap.signal(signal.SIGINT)
        bootstrap.signal(signal.SIGINT)
        bootstrap.process.wait(timeout=MAX_SHUTDOWN_S)
        wait_until(lambda: not still_running(processes), "no child is left", MAX_SHUTDOWN_S)


def test_ctrl_c_while_a_peer_loads_leaves_no_process(smollm2_package: Path, tmp_path: Path) -> None:
    with LocalSwarm(tmp_path / "swarm") as swarm:
        member = swarm.join(smollm2_package, FRONT)
        swarm.wait(phase="checked")
        processes = process_tree(member)
        member.signal(signal.SIGINT)
        assert member.process.wait(timeout=MAX_SHUTDOWN_S) == 130
        wait_until(lambda: not still_running(processes), "no child is left", MAX_SHUTDOWN_S)


def test_a_damaged_file_is_named_and_never_announced(smollm2_package: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(smollm2_package, damaged, copy_function=os.symlink)
    damaged_file = damaged / "layer_007.bin"
    raw = bytearray(damaged_file.read_bytes())
    raw[1000] ^= 1
    damaged_file.unlink()
    damaged_file.write_bytes(raw)
    done = run_swarm("join", str(damaged), "--layers", "0:15", "--listen", "127.0.0.1:0", "--json")
    assert done.returncode == 4
    assert f"error: {damaged_file} is damaged" in done.stderr.splitlines()[-1]
    assert "announced" not in done.stdout
    damaged_file.unlink()
    done = run_swarm("join", str(damaged), "--layers", "0:15", "--listen", "127.0.0.1:0", "--json")
    assert done.returncode == 4
    assert f"error: {damaged_file} cannot be read" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("address", ["10.0.0.1", " 10.0.0.1:5", "10.0.0.1:0", "/ip4/10.0.0.1/tcp/5", "x:y"])
def test_a_malformed_address_is_quoted_in_one_line(address: str) -> None:
    done = run_swarm("join", "model", "--initial-peer", address)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {address!r} is not an address: ")


def test_initial_peers_that_are_down_are_retried_with_a_message() -> None:
    done = run_swarm(
        *("bootstrap", "--initial-peer", "127.0.0.1:1", "--listen", "127.0.0.1:0", "--wait", "1.2"), timeout=60
    )
    assert done.returncode == 7
    assert "127.0.0.1:1 cannot be reached" in done.stderr
    assert "trying again" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_refused_at_once(smollm2_package: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run_swarm("join", str(smollm2_package), "--listen", address)
    assert done.returncode == 2
    assert f"error: cannot listen on {address}" in done.stderr

"""Malformed addresses, and initial peers that are down."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swarm.app.local_swarm import LocalSwarm
from swarm.app.main import app
from tests.cases.observer import digest_of
from tests.harness import is_listening, run_swarm, wait_until

COMMANDS = {
    "join": ["join", "model"],
    "bootstrap": ["bootstrap"],
    "generate": ["generate", "model", "hello"],
    "chat": ["chat", "model"],
    "routes": ["routes", "model"],
    "models": ["models"],
    "doctor": ["doctor"],
}
MALFORMED = [
    *("", " ", ":", "localhost", "10.0.0.1", "31337", "10.0.0.1:", ":31337", "10.0.0.1:port", "10.0.0.1:3 1337"),
    *("10.0.0.1 :31337", " 10.0.0.1:31337", "10.0.0.1:31337\n", "10.0.0.1:0", "10.0.0.1:-1", "10.0.0.1:65536"),
    *("10.0.0.1:٣", "tcp://10.0.0.1:31337", "/ip4/10.0.0.1/tcp/31337/p2p/Qm", "10.0.0.1:31337#", "::1:31337"),
    *("10.0.0.1:31337#short", "10.0.0.1:31337#" + "A" * 32, "[::1:31337", "a b:1", "x" * 300 + ":1"),
]


def invoke(arguments: Sequence[str]) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_a_malformed_address_in_one_line(command: str) -> None:
    for address in MALFORMED:
        result = invoke([*COMMANDS[command], "--initial-peer", "127.0.0.1:1", "--initial-peer", address])
        assert result.exit_code == 2, (address, result.output)
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"error: {address!r} is not an address: "), line
        assert "HOST:PORT" in line
        assert result.stdout == ""


@pytest.mark.parametrize("command", ["join", "bootstrap", "doctor"])
@pytest.mark.parametrize("address", ["nonsense", "10.0.0.1 :5", "tcp://0.0.0.0:5", "0.0.0.0:99999"])
def test_a_malformed_listen_address_is_named_in_one_line(command: str, address: str) -> None:
    result = invoke([*COMMANDS[command], "--listen", address])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {address!r} is not an address: ")


@pytest.mark.parametrize("command", ["generate", "chat", "routes", "models"])
def test_a_client_names_all_its_initial_peers_if_they_are_down(command: str) -> None:
    unreachable = [f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"]
    arguments = [word for address in unreachable for word in ("--initial-peer", address)]
    result = invoke([*COMMANDS[command], *arguments])
    assert result.exit_code == 7, result.output
    *_, last = result.stderr.splitlines()
    assert last.startswith("error: no peer of the swarm can be reached: ")
    for address in unreachable:
        assert address in last


def test_the_doctor_names_an_initial_peer_that_is_down() -> None:
    unreachable = f"127.0.0.1:{free_port()}"
    done = run_swarm("doctor", "--initial-peer", unreachable, "--listen", "127.0.0.1:0", "--json")
    assert done.returncode == 1
    findings = json.loads(done.stdout)["findings"]
    (failed,) = [finding for finding in findings if finding["level"] == "FAIL"]
    assert unreachable in failed["text"]
    assert failed["advice"]


def test_one_reachable_initial_peer_is_enough(standing_swarm: LocalSwarm) -> None:
    arguments = [f"--initial-peer=127.0.0.1:{free_port()}", f"--initial-peer={standing_swarm.addresses[-1]}"]
    result = invoke(["models", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["models"][0]["digest"] == digest_of(standing_swarm)


def test_a_peer_retries_and_joins_when_the_bootstrap_starts(smollm2_package: Path, tmp_path: Path) -> None:
    addresses = [f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"]
    with LocalSwarm(tmp_path, options=["--threads", "1"]) as swarm:
        peer = swarm.join(smollm2_package, "0:4", name="early", initial=addresses)
        wait_until(lambda: peer.log.read_text().count("trying again") or not peer.alive, "the peer tries again")
        assert peer.alive, peer.log_tail()
        assert all(address in peer.log.read_text() for address in addresses)
        bootstrap = swarm.bootstrap(listen=addresses[1])
        swarm.wait()
        digest = digest_of(swarm)
        done = run_swarm("models", "--initial-peer", bootstrap.address, "--json")
        assert done.returncode == 0, done.stderr
        assert [model["digest"] for model in json.loads(done.stdout)["models"]] == [digest]
        # The peer is a member now and does not need the bootstrap.
        bootstrap.kill()
        wait_until(lambda: not is_listening(int(addresses[1].rpartition(":")[2])), "the bootstrap has ended")
        done = run_swarm("models", "--initial-peer", addresses[1], "--initial-peer", peer.address, "--json")
        assert done.returncode == 0, done.stderr
        assert [model["digest"] for model in json.loads(done.stdout)["models"]] == [digest]
        assert "Traceback" not in peer.log.read_text()


def free_port() -> int:
    """A port on which no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port

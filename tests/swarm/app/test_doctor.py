"""Each check gives OK, WARN or FAIL, with advice for the latter two."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from peer.loading.capacity import default_kv_tokens
from swarm.app.doctor import (
    Finding,
    Level,
    check_clock,
    check_daemon,
    check_devices,
    check_fit,
    check_package,
    check_peer,
    check_system,
)
from swarm.app.local_swarm import LocalSwarm
from swarm.model.manifest import load_manifest
from swarm.model.memory_footprint import default_memory_limit
from swarm.transport.address import Address
from tests.harness import run_swarm
from tests.test_layout import loaded_by

HERE = Address("127.0.0.1", 0)


def gather(findings: AsyncIterator[Finding]) -> list[Finding]:
    async def run() -> list[Finding]:
        return [finding async for finding in findings]

    return asyncio.run(run())


def levels(findings: list[Finding]) -> dict[str, Level]:
    return {finding.topic: finding.level for finding in findings}


def test_every_finding_that_is_not_ok_has_advice(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
        closed.close()
        findings = [
            *check_system(),
            *check_devices(),
            *check_package(tmp_path),
            *gather(check_peer(Address("127.0.0.1", port), HERE)),
            *(check_clock(skew, HERE) for skew in (-9, -2, 0, 2, 9)),
        ]
    assert {finding.level for finding in findings} == set(Level)
    assert all(bool(finding.advice) == (finding.level is not Level.OK) for finding in findings)


def test_the_cpu_is_found_with_its_properties() -> None:
    (cpu,) = [finding for finding in check_devices() if finding.text.startswith("CPU")]
    assert cpu.level is Level.OK
    assert cpu.values["FULL_DEVICE_NAME"]
    assert "FP32" in cpu.values["OPTIMIZATION_CAPABILITIES"]


def test_an_npu_gets_advice_about_static_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    core = SimpleNamespace(available_devices=["NPU"], get_property=lambda *_: ())
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Core=lambda: core))
    (npu,) = check_devices()
    assert npu.level is Level.WARN
    assert "--static" in npu.advice


@pytest.mark.parametrize(
    ("skew", "level"), [(0.2, Level.OK), (-0.2, Level.OK), (1.5, Level.WARN), (-4.0, Level.FAIL), (60.0, Level.FAIL)]
)
def test_a_clock_is_judged_by_the_dhts_limit(skew: float, level: Level) -> None:
    assert check_clock(skew, HERE).level is level


def test_an_unreachable_peer_is_a_failed_check() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    (finding,) = gather(check_peer(Address("127.0.0.1", port), HERE))
    assert (finding.topic, finding.level) == ("peer", Level.FAIL)
    assert f"127.0.0.1:{port}" in finding.text


def test_a_peers_connection_clock_and_reach_are_checked(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path) as swarm:
        peer = swarm.bootstrap()
        swarm.wait()
        pinned = Address.parse(peer.address)
        findings = gather(check_peer(pinned, HERE))
        assert levels(findings) == dict.fromkeys(("peer", "clock", "reach"), Level.OK)
        assert "as expected" in findings[0].text
        (trusted, *_) = gather(check_peer(Address(pinned.host, pinned.port), HERE))
        assert str(pinned) in trusted.text
        with socket.create_server(("127.0.0.1", 0)) as taken:
            listen_address = Address("127.0.0.1", taken.getsockname()[1])
            (*_, reach) = gather(check_peer(listen_address=listen_address, address=pinned))
            assert f"port {listen_address.port} is taken" in reach.text
        (stranger,) = gather(check_peer(Address(pinned.host, pinned.port, "a" * 32), HERE))
        assert (stranger.topic, stranger.level) == ("peer", Level.FAIL)


def test_the_daemon_starts_and_stops() -> None:
    assert asyncio.run(check_daemon("127.0.0.1")).level is Level.OK


def test_the_layers_that_fit_depend_on_the_memory(smollm2_package: Path) -> None:
    assert levels(list(check_package(smollm2_package))) == {"package": Level.OK, "capacity": Level.OK}
    manifest = load_manifest(smollm2_package)
    assert check_fit(manifest, 64 << 30).values["layers_that_fit"] == len(manifest.layers)
    assert 0 < check_fit(manifest, 500 << 20).values["layers_that_fit"] < len(manifest.layers)
    assert check_fit(manifest, 100 << 20).level is Level.FAIL


def test_a_damaged_file_is_named(smollm2_package: Path, tmp_path: Path) -> None:
    package = Path(shutil.copytree(smollm2_package, tmp_path / "package"))
    (package / "layer_004.bin").write_bytes(b"no layer")
    (finding,) = check_package(package)
    assert finding.level is Level.FAIL
    assert "layer_004.bin" in finding.text


def test_the_command_ends_with_1_if_anything_fails(tmp_path: Path) -> None:
    done = run_swarm("doctor", str(tmp_path), "--json", "--listen", "127.0.0.1:0")
    findings = json.loads(done.stdout)["findings"]
    assert done.returncode == 1
    assert {finding["topic"] for finding in findings if finding["level"] == "FAIL"} == {"package"}


def test_the_command_ends_with_0_if_nothing_fails() -> None:
    done = run_swarm("doctor", "--listen", "127.0.0.1:0")
    assert done.returncode == 0, done.stdout
    assert all(line.split()[0] in ("OK", "WARN", "→") for line in done.stdout.splitlines())


class _Lacking(MetaPathFinder):
    """Simulates an installation in which some modules cannot be imported."""

    def __init__(self, error: Exception, *names: str) -> None:
        self._error = error
        self._names = names

    def find_spec(self, name: str, *_: object) -> None:
        if name in self._names:
            raise self._error


@pytest.mark.parametrize("error", [ImportError("libopenvino.so: no such file"), RuntimeError("two versions of it")])
def test_a_broken_openvino_or_hivemind_is_a_finding(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [_Lacking(error, "openvino", "swarm.discovery.dht"), *sys.meta_path])
    for name in ("openvino", "swarm.discovery.dht"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    findings = [*check_devices(), asyncio.run(check_daemon("127.0.0.1"))]
    assert levels(findings) == {"device": Level.FAIL, "daemon": Level.FAIL}
    assert all(str(error) in finding.text and finding.advice for finding in findings)


def test_importing_the_doctor_imports_neither_openvino_nor_hivemind() -> None:
    assert loaded_by("import swarm.app.doctor_cli", "openvino", "hivemind", "torch") == set()


def test_an_address_of_another_machine_is_named(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path) as swarm:
        peer = swarm.bootstrap()
        swarm.wait()
        (*_, reach) = gather(check_peer(Address.parse(peer.address), Address("192.0.2.1", 5)))
    assert (reach.topic, reach.level) == ("reach", Level.FAIL)
    assert "192.0.2.1" in reach.text
    assert "--listen" in reach.advice


def test_the_fit_uses_the_memory_share_of_join(smollm2_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = load_manifest(smollm2_package)
    free = psutil.virtual_memory()._replace(available=700_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    finding = check_fit(manifest)
    assert finding == check_fit(manifest, default_memory_limit(700_000_000))
    assert finding.values["kv_tokens"] == default_kv_tokens(manifest)

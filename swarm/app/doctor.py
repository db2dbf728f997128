"""Checks whether this machine can take part in a swarm, with advice for each problem.

Each check returns or yields findings and does not raise for problems. `doctor_cli.py` shows them.
"""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from peer.loading.capacity import default_kv_tokens, layers_that_fit, needed_bytes
from swarm.discovery.peer_directory import first_contact_note
from swarm.errors import ConfigError, SwarmError
from swarm.model.manifest import Manifest, check_files, load_manifest
from swarm.model.memory_footprint import EMPTY_PEER_BYTES, default_memory_limit, format_bytes
from swarm.model.spans import LayerRange
from swarm.transport.address import Address
from swarm.transport.channel import Channel
from swarm.transport.hello import client_hello, peer_hello
from swarm.transport.identity import Identity
from swarm.transport.link import measure_link
from swarm.transport.listener import Listener
from swarm.transport.stream import Stream, listen
from swarm.wire.queries import AskReach, Ping, Pong, Reach

MAX_SKEW_S = 3.0
"""hivemind refuses peers whose clock differs by more than this."""
WARN_SKEW_S = 1.0
MIN_MEMORY = 2 << 30
_TIMEOUT_S = 10.0
_KV = "f32"  # The default of `swarm join`.
_INSTALLATION_ERRORS = (ImportError, RuntimeError, OSError, AttributeError, TypeError)
"""Errors that a broken installation raises on import or first use."""


_REINSTALL = "install aipc-swarm again, best into a fresh environment: pip install aipc-swarm"


class Level(StrEnum):
    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of a check. `advice` says what to do, empty on OK. `values` holds the numbers for `--json`."""

    level: Level
    topic: str
    text: str
    advice: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


async def run_checks(
    *, package: Path | None = None, initial_peers: Sequence[Address] = (), listen_address: Address
) -> AsyncIterator[Finding]:
    """Run every check, fastest first. `listen_address` is where a peer on this machine would listen."""
    for finding in (*check_system(), *check_devices(), check_memory()):
        yield finding
    if package is not None:
        for finding in await asyncio.to_thread(lambda: list(check_package(package))):
            yield finding
    yield await check_daemon(listen_address.host)
    for address in initial_peers:
        async for finding in check_peer(address, listen_address):
            yield finding


def check_system() -> Iterator[Finding]:
    system = platform.system()
    if system != "Linux":
        advice = "on Windows use WSL2; elsewhere a Linux machine: hivemind's daemon is built for Linux"
        yield Finding(level=Level.FAIL, topic="system", text=f"this is {system}, not Linux", advice=advice)
    else:
        kind = "Linux under WSL2" if "microsoft" in platform.release().lower() else "Linux"
        yield Finding(
            level=Level.OK, topic="system", text=f"{kind}, {os.cpu_count()} cores, Python {platform.python_version()}"
        )
    try:
        runtime, genai = version("openvino"), version("openvino-genai")
    except PackageNotFoundError as error:
        yield Finding(
            level=Level.FAIL,
            topic="openvino",
            text=f"{error.name} is not installed",
            advice=_REINSTALL,
        )
        return
    if runtime.split(".")[:2] != genai.split(".")[:2]:
        yield Finding(
            level=Level.FAIL,
            topic="openvino",
            text=f"openvino {runtime} and openvino-genai {genai} are different releases",
            advice="install the same release of both: the tokenizers of one do not load in the other",
        )
    else:
        yield Finding(level=Level.OK, topic="openvino", text=f"openvino {runtime}, openvino-genai {genai}")


def check_devices() -> Iterator[Finding]:
    """OpenVINO's devices and their properties."""
    try:
        import openvino as ov  # Imported here because the installation may be broken.

        core = ov.Core()
        devices = core.available_devices
    except _INSTALLATION_ERRORS as error:
        text = f"OpenVINO cannot be used: {_reason(error)}"
        yield Finding(level=Level.FAIL, topic="device", text=text, advice=_REINSTALL)
        return
    if not devices:
        yield Finding(
            level=Level.FAIL,
            topic="device",
            text="OpenVINO finds no device, not even the CPU",
            advice="its plugins are missing: install openvino again",
        )
    for device in devices:
        try:
            supported = core.get_property(device, "SUPPORTED_PROPERTIES")
            values = {
                name: _property_text(core.get_property(device, name))
                for name in _DEVICE_PROPERTIES
                if name in supported
            }
        except RuntimeError as error:
            text = f"the properties of {device} cannot be read: {_reason(error)}"
            yield Finding(
                level=Level.FAIL, topic="device", text=text, advice="install its driver again, or use another --device"
            )
            continue
        defaults = [f"{word} {values[name]}" for name, word in _SHOWN_PROPERTIES.items() if name in values]
        text = f"{device}: {values.get('FULL_DEVICE_NAME', '?')}; {', '.join(defaults)}"
        if device.startswith("NPU"):
            yield Finding(
                level=Level.WARN,
                topic="device",
                text=text,
                advice="it runs only static graphs: export with --static CONTEXT, join with --precision performance",
                values=values,
            )
        else:
            yield Finding(level=Level.OK, topic="device", text=text, values=values)


def _reason(error: Exception) -> str:
    """The last line of the message: earlier lines are positions in OpenVINO's sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _property_text(value: Any) -> str:
    """A property as text."""
    if isinstance(value, (list, tuple, set)):
        return " ".join(map(_property_text, value))
    return str(value.get_type_name()) if hasattr(value, "get_type_name") else str(value)


_DEVICE_PROPERTIES = (
    "FULL_DEVICE_NAME",
    "DEVICE_TYPE",
    "DEVICE_ARCHITECTURE",
    "OPTIMIZATION_CAPABILITIES",
    "INFERENCE_PRECISION_HINT",
    "KV_CACHE_PRECISION",
    "INFERENCE_NUM_THREADS",
    "GPU_DEVICE_TOTAL_MEM_SIZE",
    "NPU_DRIVER_VERSION",
)
_SHOWN_PROPERTIES = {
    "INFERENCE_PRECISION_HINT": "computes in",
    "KV_CACHE_PRECISION": "KV cache in",
    "GPU_DEVICE_TOTAL_MEM_SIZE": "memory",
}


def check_memory() -> Finding:
    memory = psutil.virtual_memory()
    values = {"available": memory.available, "total": memory.total}
    text = f"{format_bytes(memory.available)} of {format_bytes(memory.total)} are free"
    if memory.available < MIN_MEMORY:
        return Finding(
            level=Level.WARN,
            topic="memory",
            text=text,
            advice=f"a peer without layers takes {format_bytes(EMPTY_PEER_BYTES)}: close programs, or serve few layers",
            values=values,
        )
    return Finding(level=Level.OK, topic="memory", text=text, values=values)


def check_package(package: Path) -> Iterator[Finding]:
    """Check all files of `package` against its manifest, and how many layers fit into memory. Reads all files."""
    try:
        manifest = load_manifest(package)
        check_files(package, manifest.files(manifest.parts))
    except SwarmError as error:
        yield Finding(level=Level.FAIL, topic="package", text=str(error), advice="export or fetch it again")
        return
    text = f"{manifest.name}, {len(manifest.layers)} layers, {manifest.weights}: all files match the manifest"
    yield Finding(level=Level.OK, topic="package", text=text, values={"digest": manifest.digest})
    yield check_fit(manifest)


def check_fit(manifest: Manifest, memory: int | None = None) -> Finding:
    """How many layers fit into `memory` bytes, by default into the share of free memory that `swarm join` takes."""
    room = default_memory_limit(psutil.virtual_memory().available) if memory is None else memory
    layers, kv_tokens = len(manifest.layers), default_kv_tokens(manifest)
    fit = layers_that_fit(manifest, room, kv=_KV, kv_tokens=kv_tokens)
    values = {"layers": layers, "layers_that_fit": fit, "kv_tokens": kv_tokens}
    text = f"{fit} of {layers} layers fit into {format_bytes(room)} with {kv_tokens} tokens of {_KV} cache"
    if fit:
        return Finding(level=Level.OK, topic="capacity", text=text, values=values)
    smallest = min(
        needed_bytes(manifest, LayerRange(layer, layer + 1), kv=_KV, kv_tokens=kv_tokens) for layer in range(layers)
    )
    advice = (
        f"the smallest layer needs {format_bytes(smallest)}: free memory, allow more (--max-memory), "
        "or serve a model with fewer bits per weight"
    )
    return Finding(level=Level.FAIL, topic="capacity", text=text, advice=advice, values=values)


async def check_daemon(host: str) -> Finding:
    """Start hivemind's daemon and a DHT node on a free port, and stop them."""
    began = time.monotonic()
    try:
        from swarm.discovery.dht import HivemindDirectory  # Imported here because the installation may be broken.

        directory = await HivemindDirectory.start(host=host, port=0, announce_hosts=["127.0.0.1"])
        await directory.close()
    except (SwarmError, *_INSTALLATION_ERRORS) as error:
        text = str(error) if isinstance(error, SwarmError) else f"hivemind cannot be used: {_reason(error)}"
        advice = "`swarm join` cannot run here without it; clients can, because they need no DHT node"
        return Finding(level=Level.FAIL, topic="daemon", text=text, advice=advice)
    took = time.monotonic() - began
    text = f"hivemind's daemon starts and stops in {took:.1f} s"
    return Finding(level=Level.OK, topic="daemon", text=text, values={"seconds": took})


async def check_peer(address: Address, listen_address: Address) -> AsyncIterator[Finding]:
    """Check that the peer answers, that its clock agrees, and that it can connect back to this machine."""
    try:
        channel = await Channel.open([address], client_hello(), timeout=_TIMEOUT_S)
    except SwarmError as error:
        advice = "check that the peer is running and that its firewall allows this port"
        yield Finding(level=Level.FAIL, topic="peer", text=str(error), advice=advice)
        return
    try:
        link = await measure_link(channel)
        yield _describe_peer(address, channel.peer_id, link.rtt_s)
        sent_at = time.time()
        pong = await channel.ask(Ping(request=channel.next_request()), Pong, timeout=_TIMEOUT_S)
        yield check_clock(pong.time - (sent_at + time.time()) / 2, address)
        yield await _check_reach(channel, listen_address)
    except SwarmError as error:
        advice = "the connection failed during the check: try again"
        yield Finding(level=Level.FAIL, topic="peer", text=str(error), advice=advice)
    finally:
        await channel.close()


def check_clock(skew: float, address: Address) -> Finding:
    """Judge `skew`, the peer's clock minus this machine's, in seconds."""
    direction = "ahead of" if skew > 0 else "behind"
    text = f"the clock of {address.host_port} is {abs(skew):.2f} s {direction} this machine's"
    values = {"skew_s": skew}
    if abs(skew) > MAX_SKEW_S:
        advice = f"over {MAX_SKEW_S:.0f} s the DHT refuses it: set both clocks by NTP (timedatectl set-ntp true)"
        return Finding(level=Level.FAIL, topic="clock", text=text, advice=advice, values=values)
    if abs(skew) > WARN_SKEW_S:
        advice = "records expire at the wrong time: set both clocks by NTP (timedatectl set-ntp true)"
        return Finding(level=Level.WARN, topic="clock", text=text, advice=advice, values=values)
    return Finding(level=Level.OK, topic="clock", text=text, values=values)


def _describe_peer(address: Address, peer_id: str, rtt_s: float) -> Finding:
    found = Address(address.host, address.port, peer_id)
    known = f"it is {peer_id}, as expected" if address.peer_id else first_contact_note(found)
    text = f"{address.host_port} answers in {rtt_s * 1e3:.1f} ms; {known}"
    return Finding(level=Level.OK, topic="peer", text=text, values={"peer_id": peer_id, "rtt_s": rtt_s})


async def _check_reach(channel: Channel, listen_address: Address) -> Finding:
    """Listen as a peer would, and ask the other peer to connect to it."""
    identity = Identity.generate()
    try:
        listener = await _listen(identity, listen_address)
    except ConfigError as error:
        advice = "--listen must name an address of this machine, such as 0.0.0.0:31337"
        return Finding(level=Level.FAIL, topic="reach", text=str(error), advice=advice)
    port = listener.port
    try:
        ask = AskReach(request=channel.next_request(), port=port, peer_id=identity.peer_id)
        reach = await channel.ask(ask, Reach, timeout=_TIMEOUT_S)
    finally:
        await listener.close()
    values = {"address": reach.address, "problem": reach.problem}
    wanted = listen_address.port
    taken = f" (port {wanted} is taken here: another port was tested)" if wanted not in (0, port) else ""
    if not reach.problem:
        text = f"the peer reaches this machine at {reach.address}{taken}"
        return Finding(level=Level.OK, topic="reach", text=text, values=values)
    return Finding(
        level=Level.WARN,
        topic="reach",
        text=f"the peer cannot reach this machine at {reach.address}{taken}: {reach.problem}",
        advice=f"allow TCP port {wanted or port} in this machine's firewall and router; clients do not need that, and "
        "between two peers that cannot reach each other the client relays",
        values=values,
    )


async def _listen(identity: Identity, listen_address: Address) -> Listener:
    """Listen at `listen_address`, or on a free port if that one is taken.

    Raises ConfigError if the host is not an address of this machine.
    """

    async def close_stream(stream: Stream) -> None:
        await stream.close()

    try:
        return await listen(listen_address.host, listen_address.port, identity, peer_hello, close_stream)
    except ConfigError:
        return await listen(listen_address.host, 0, identity, peer_hello, close_stream)

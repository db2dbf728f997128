"""Resident memory of a peer against the bytes of its span.

What an empty peer costs is measured as one: a peer of a model of the same shape whose layers weigh next
to nothing would still load Python, hivemind with torch, OpenVINO and its plugin. Here it is a bootstrap
member, plus what OpenVINO adds to a process that has compiled a graph of one addition.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from client.client import SwarmClient
from client.config import GenerationConfig
from reproduction.experiment import Report, Row, Say
from reproduction.machine import machine
from reproduction.models import Model, smollm2
from reproduction.peers import pinned_swarm
from swarm import loops
from swarm.localswarm import LocalSwarm
from swarm.spans import LayerRange

TOKENS = 384
_OPENVINO = """
import os, psutil, numpy as np
before = psutil.Process().memory_info().rss
import openvino as ov
from openvino import opset15 as ops
x = ops.parameter([-1], ov.Type.f32, name="x")
request = ov.Core().compile_model(ov.Model([ops.result(ops.add(x, x))], [x], "empty"), "CPU").create_infer_request()
request.infer({0: np.ones(4, np.float32)})
print(psutil.Process().memory_info().rss - before)
"""


def run(say: Say) -> Report:
    model = smollm2(say)
    empty = _bootstrap() + int(
        subprocess.run([sys.executable, "-c", _OPENVINO], check=True, capture_output=True).stdout
    )
    say(f"an empty peer takes {empty / 1e6:.0f} MB")
    rows = [Row(configuration="empty peer", value=empty / 1e6, unit="MB")]
    ratios = {}
    layers = len(model.manifest.layers)
    cuts = model.manifest.grid[4]
    for name, spans in {
        "whole": [model.manifest.span],
        "halves": [LayerRange(0, cuts), LayerRange(cuts, layers)],
        "thirds": [LayerRange(0, 11), LayerRange(11, 19), LayerRange(19, layers)],
    }.items():
        for span, resident in zip(spans, _resident(model, spans), strict=True):
            kv = 4 * model.manifest.kv_elements(span) * TOKENS
            size = model.manifest.span_bytes(span)
            ratio = (resident - empty - kv) / size
            rows += [
                Row(configuration=f"{name} {span}: span on disk", value=size / 1e6, unit="MB"),
                Row(configuration=f"{name} {span}: resident", value=resident / 1e6, unit="MB"),
            ]
            ratios[f"{name}_{span.first}_{span.last}"] = ratio
            say(f"{name} {span}: {resident / 1e6:.0f} MB resident, {ratio:.2f} of its span beside KV and an empty peer")
    return Report(
        experiment="memory",
        machine=machine(),
        rows=rows,
        ratios=ratios,
        goals=dict.fromkeys(ratios, ("<=", 1.3)),
        notes=[f"(resident - KV of {TOKENS} tokens in f32 - empty peer) / span on disk, after a generation"],
    )


def _bootstrap() -> int:
    with tempfile.TemporaryDirectory(prefix="reproduction-") as folder, LocalSwarm(Path(folder)) as swarm:
        member = swarm.bootstrap()
        swarm.wait([member])
        return _rss(member.process.pid)


def _resident(model: Model, spans: list[LayerRange]) -> list[int]:
    with pinned_swarm(model, spans) as swarm:
        loops.run(_generate(model, swarm))
        return [_rss(member.process.pid) for member in swarm.members]


async def _generate(model: Model, swarm: LocalSwarm) -> None:
    async with await SwarmClient.connect(model.manifest.digest, initial_peers=swarm.addresses) as client:
        config = GenerationConfig(max_new_tokens=TOKENS - 64, ignore_eos=True)
        async for _ in client.generate("Tell me about the sea.", config):
            pass


def _rss(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)

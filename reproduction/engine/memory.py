"""Resident memory of a peer against the size of its span, and against what `swarm join` plans for it.

An empty peer has no layers but loads Python, a DHT node, OpenVINO and its plugin. It is measured as a bootstrap peer
plus the memory that OpenVINO adds to a process that compiles a graph of one addition.

Two models, because small matrices are packed twice and large ones once (`swarm.model.memory_footprint`): SmolLM2-135M,
and six layers with the widths of Llama-3.2-1B.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from client.client import SwarmClient
from client.config import GenerationConfig
from peer.loading.capacity import needed_bytes
from reproduction.experiment import Log, Report, Row
from reproduction.harness.machine import machine
from reproduction.harness.peers import pinned_swarm
from reproduction.models.random_models import wide_shaped
from reproduction.models.real import Model, smollm2
from swarm.app.local_swarm import LocalSwarm
from swarm.model.spans import LayerRange
from swarm.process import event_loop

TOKENS = 384
_SMALL = {"whole": ["0:30"], "halves": ["0:15", "15:30"], "thirds": ["0:11", "11:19", "19:30"]}
_WIDE = {"wide": ["0:2", "2:4", "4:6"]}
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


def run(log: Log) -> Report:
    small = smollm2(log)
    empty = _bootstrap() + int(
        subprocess.run([sys.executable, "-c", _OPENVINO], check=True, capture_output=True).stdout
    )
    log(f"an empty peer takes {empty / 1e6:.0f} MB")
    rows = [Row(configuration="empty peer", value=empty / 1e6, unit="MB")]
    ratios, planned = {}, {}
    for model, cases in ((small, _SMALL), (wide_shaped(log), _WIDE)):
        for name, texts in cases.items():
            spans = [LayerRange.parse(text) for text in texts]
            for span, resident in zip(spans, _resident(model, spans), strict=True):
                plan = needed_bytes(model.manifest, span, kv="f32", kv_tokens=TOKENS)
                kv = 4 * model.manifest.kv_elements(span) * TOKENS
                size = model.manifest.span_bytes(span)
                key = f"{name}_{span.first}_{span.last}"
                ratios[key] = (resident - empty - kv) / size
                planned[f"planned_{key}"] = plan / resident
                for quantity, value in (("on disk", size), ("resident", resident), ("planned", plan)):
                    rows.append(Row(configuration=f"{name} {span}: {quantity}", value=value / 1e6, unit="MB"))
                log(
                    f"{name} {span}: {resident / 1e6:.0f} MB resident ({plan / 1e6:.0f} planned), "
                    f"{ratios[key]:.2f} of its span without KV and an empty peer"
                )
    return Report(
        experiment="memory",
        machine=machine(),
        rows=rows,
        ratios=ratios | planned,
        goals=dict.fromkeys(ratios, ("<=", 1.3)) | dict.fromkeys(planned, (">=", 1.0)),
        notes=[
            f"(resident - KV of {TOKENS} tokens in f32 - empty peer) / span on disk, after a generation",
            "planned: the memory that `swarm join` plans, relative to the resident memory",
        ],
    )


def _bootstrap() -> int:
    with tempfile.TemporaryDirectory(prefix="reproduction-") as folder, LocalSwarm(Path(folder)) as swarm:
        member = swarm.bootstrap()
        swarm.wait([member])
        return _rss(member.process.pid)


def _resident(model: Model, spans: list[LayerRange]) -> list[int]:
    with pinned_swarm(model, spans) as swarm:
        event_loop.run(_generate(model, swarm))
        return [_rss(member.process.pid) for member in swarm.members]


async def _generate(model: Model, swarm: LocalSwarm) -> None:
    async with await SwarmClient.connect(model.manifest.digest, initial_peers=swarm.addresses) as client:
        config = GenerationConfig(max_new_tokens=TOKENS - 64, ignore_eos=True, draft="off")
        async for _ in client.generate("Tell me about the sea.", config):
            pass


def _rss(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)

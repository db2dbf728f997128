"""Seconds per layer of an export to int4, against nncf's own time to compress the layer's graph.

Layers with the shape of Llama-3-8B. The first layer is not counted: it includes the tracing for all layers.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from pathlib import Path

from export.graph.compress import Format, compress
from export.package.from_checkpoint import CheckpointExport, write_parts
from export.package.journal import Journal
from export.package.part_builder import PartBuilder
from reproduction.experiment import Log, Report, Row
from reproduction.harness.machine import machine
from reproduction.models.random_checkpoints import LLAMA_8B, scratch, write_checkpoint
from reproduction.models.real import smollm2
from swarm.engine.memory import release_memory
from swarm.model.manifest import layer_part
from swarm.process.folders import cache_folder

LAYERS = 6


def run(log: Log) -> Report:
    tokenizer = smollm2(log).package
    with scratch(cache_folder() / "reproduction", 8 * 10**9) as folder:
        log(f"writing {LAYERS} layers")
        write_checkpoint(folder / "checkpoint", LLAMA_8B, LAYERS, tokenizer)
        work = CheckpointExport.open(folder / "checkpoint", Format(weights="int4"))
        nncf_seconds = _nncf(work, folder / "traced", log)
        export_seconds = _export(work, folder / "out.partial", log)
        nncf_seconds += _nncf(work, folder / "traced again", log)
    middle = {"export": statistics.median(export_seconds), "nncf": statistics.median(nncf_seconds)}
    return Report(
        experiment="export_speed",
        machine=machine(),
        rows=[
            Row(configuration="a layer, exported", value=middle["export"], unit="s"),
            Row(configuration="a layer, compressed by nncf alone", value=middle["nncf"], unit="s"),
        ],
        ratios={"export_vs_nncf": middle["export"] / middle["nncf"]},
        goals={"export_vs_nncf": ("<=", 1.5)},
        notes=[
            f"int4, group 128, medians of {len(export_seconds)} and {len(nncf_seconds)} layers of 218 million weights"
        ],
    )


def _export(work: CheckpointExport, folder: Path, log: Log) -> list[float]:
    """Seconds to read, insert, compress, write, hash, compile and record each layer but the first."""
    times: list[float] = []

    def on_progress(_part: str, done: int, _total: int) -> None:
        times.append(time.perf_counter())
        log(f"exported {done}")

    write_parts(work, Journal(folder), [layer_part(i) for i in range(work.layers)], on_progress)
    return [after - before for before, after in pairwise(times[1:])]


def _nncf(work: CheckpointExport, folder: Path, log: Log) -> list[float]:
    builder = PartBuilder(work.decoder, work.family, folder)
    seconds: list[float] = []
    for layer in range(work.layers):
        part = builder.make(layer_part(layer), layer, (None,) * work.layers)
        started = time.perf_counter()
        compress(part.model, work.format, is_layer=True)
        seconds.append(time.perf_counter() - started)
        del part
        release_memory(work.decoder.checkpoint.directory)
        log(f"nncf alone: layer {layer} {seconds[-1]:.2f} s")
    return seconds[1:]

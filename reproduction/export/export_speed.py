"""Seconds a layer of an export to int4, against nncf's own time to compress that layer's graph.

Layers of Llama-3-8B's shape. The first layer also pays for tracing, once for all layers alike, and is left out.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from pathlib import Path

from export.graph.compress import Format, compress
from export.package.from_checkpoint import Work, write_parts
from export.package.journal import Journal
from export.package.parts import PartBuilder
from reproduction.experiment import Report, Row, Say
from reproduction.harness.machine import machine
from reproduction.models.made_up import LLAMA_8B, scratch, write_checkpoint
from reproduction.models.real import smollm2
from swarm.engine.memory import release_memory
from swarm.model.manifest import layer_part
from swarm.process.folders import cache_folder

LAYERS = 6


def run(say: Say, *, layers: int = LAYERS) -> Report:
    tokenizer = smollm2(say).package
    with scratch(cache_folder() / "reproduction", 8 * 10**9) as folder:
        say(f"writing {layers} layers")
        write_checkpoint(folder / "checkpoint", LLAMA_8B, layers, tokenizer)
        work = Work.on(folder / "checkpoint", Format(weights="int4"))
        alone = _nncf(work, folder / "traced", say)
        whole = _export(work, folder / "out.partial", say)
        alone += _nncf(work, folder / "traced again", say)
    middle = {"export": statistics.median(whole), "nncf": statistics.median(alone)}
    return Report(
        experiment="export_speed",
        machine=machine(),
        rows=[
            Row(configuration="a layer, exported", value=middle["export"], unit="s"),
            Row(configuration="a layer, compressed by nncf alone", value=middle["nncf"], unit="s"),
        ],
        ratios={"export_vs_nncf": middle["export"] / middle["nncf"]},
        goals={"export_vs_nncf": ("<=", 1.5)},
        notes=[f"int4, group 128, medians of {len(whole)} and {len(alone)} layers of 218 million weights"],
    )


def _export(work: Work, folder: Path, say: Say) -> list[float]:
    """Seconds of each layer but the first: read, put in, compressed, written, hashed, compiled, recorded."""
    times: list[float] = []

    def note(_what: str, done: int, _total: int) -> None:
        times.append(time.perf_counter())
        say(f"exported {done}")

    write_parts(work, Journal(folder), [layer_part(i) for i in range(work.layers)], note)
    return [after - before for before, after in pairwise(times[1:])]


def _nncf(work: Work, folder: Path, say: Say) -> list[float]:
    pieces = PartBuilder(work.decoder, work.family, folder)
    seconds: list[float] = []
    for layer in range(work.layers):
        piece = pieces.make(layer_part(layer), layer, (None,) * work.layers)
        begun = time.perf_counter()
        compress(piece.model, work.format, is_layer=True)
        seconds.append(time.perf_counter() - begun)
        del piece
        release_memory(work.decoder.checkpoint.directory)
        say(f"nncf alone: layer {layer} {seconds[-1]:.2f} s")
    return seconds[1:]

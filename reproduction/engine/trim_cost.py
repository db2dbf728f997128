"""Rewinding three positions of a stateful KV cache: by mask, and by copying the remaining state."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from reproduction.experiment import Log, Report, Row
from reproduction.harness.machine import machine
from reproduction.models.real import smollm2
from swarm.engine.base import Step
from swarm.engine.compose import open_engine
from swarm.engine.stateful import StatefulEngine, _keep_slots

LENGTHS = (64, 256, 1024, 4096)
TIMES = 9
_REWOUND = 3


def run(log: Log) -> Report:
    model = smollm2(log)
    engine = open_engine(model.package, model.manifest, model.manifest.span, threads=1)
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    for length in LENGTHS:
        unrewound, masked, trim = _measure(engine, length)
        rows += [
            Row(configuration=f"{length} cached: a step of one token", value=unrewound * 1e3, unit="ms"),
            Row(configuration=f"{length} cached: the same after a mask rewind", value=masked * 1e3, unit="ms"),
            Row(configuration=f"{length} cached: trim by state", value=trim * 1e3, unit="ms", published=48),
        ]
        ratios[f"mask_share_of_step_{length}"] = masked / unrewound - 1
        ratios[f"trim_share_of_step_{length}"] = trim / unrewound
        log(f"{length}: step {unrewound * 1e3:.1f} ms, after a mask rewind {masked * 1e3:.1f}, trim {trim * 1e3:.1f}")
    return Report(
        experiment="trim_cost",
        machine=machine(),
        rows=rows,
        ratios=ratios,
        notes=[
            f"{_REWOUND} positions rewound; medians of {TIMES}; published: 48 ms on a GPU, a mask under 1 % of a step"
        ],
    )


def _measure(engine: StatefulEngine, length: int) -> tuple[float, float, float]:
    """Seconds of a step over `length` live slots, of a step with dead slots among them, and of a trim."""
    engine.close("run")
    engine.open("run", length + 200)
    ids = np.random.default_rng(0).integers(10, 10_000, length).astype(np.int32)
    for start in range(0, length, 256):
        _forward(engine, start, ids[start : start + 256])
    unrewound, masked, trim = [], [], []
    session = engine._sessions["run"]
    one = ids[:1]
    for _ in range(TIMES):
        end = session.ledger.length
        unrewound.append(_timed(functools.partial(_forward, engine, end, one)))
        _forward(engine, end + 1, ids[:_REWOUND])
        masked.append(_timed(functools.partial(_forward, engine, end + 1, one)))
        keep = np.arange(session.ledger.slots, dtype=np.int64)
        trim.append(_timed(functools.partial(_keep_slots, session.request, keep, slots=len(keep))))
    return statistics.median(unrewound), statistics.median(masked), statistics.median(trim)


def _forward(engine: StatefulEngine, start: int, tokens: NDArray[np.int32]) -> None:
    (result,) = engine.forward([Step(session="run", start=start, tokens=tokens, rows=1)])
    if isinstance(result, Exception):
        raise result


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started

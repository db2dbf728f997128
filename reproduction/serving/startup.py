"""Seconds from process start: `swarm --help`, `swarm join` (cold and warm), `swarm generate` to its first token.

Cold means no cached compiled graphs; the model files are in the system's page cache.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from reproduction.experiment import ROUNDS, Log, Report, Row
from reproduction.harness.machine import machine
from reproduction.harness.peers import pinned_swarm
from reproduction.models.real import Model, smollm2
from swarm.app.local_swarm import LocalSwarm


def run(log: Log) -> Report:
    model = smollm2(log)
    seconds: dict[str, list[float]] = {"help": [], "cold": [], "warm": [], "first_token": []}
    with pinned_swarm(model, [model.manifest.span]) as swarm:
        for round_ in range(ROUNDS):
            seconds["help"].append(_help())
            with tempfile.TemporaryDirectory(prefix="reproduction-") as cache:
                seconds["cold"].append(_join(model, swarm, Path(cache)))
                seconds["warm"].append(_join(model, swarm, Path(cache)))
            seconds["first_token"].append(_first_token(model, swarm))
            log(f"round {round_ + 1} of {ROUNDS}: " + ", ".join(f"{k} {v[-1]:.2f} s" for k, v in seconds.items()))
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    names = {
        "help": "swarm --help",
        "cold": "swarm join to announced, no compiled graph cached",
        "warm": "swarm join to announced, compiled graph cached",
        "first_token": "swarm generate to its first token",
    }
    return Report(
        experiment="startup",
        machine=machine(),
        rows=[Row(configuration=text, value=middle[name], unit="s") for name, text in names.items()],
        ratios={"help_s": middle["help"], "warm_vs_cold": middle["warm"] / middle["cold"]},
        goals={"help_s": ("<=", 0.5)},
        notes=["the joining peer takes all 30 layers; another peer serves them on the other core"],
    )


def _help() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "swarm", "--help"], check=True, capture_output=True)
    return time.perf_counter() - started


def _join(model: Model, swarm: LocalSwarm, cache: Path) -> float:
    with (
        tempfile.TemporaryDirectory(prefix="reproduction-") as folder,
        LocalSwarm(Path(folder), options=["--threads", "1", "--cache-dir", str(cache), "--grace", "0.5"]) as joining,
    ):
        started = time.perf_counter()
        member = joining.join(model.package, model.manifest.span, initial=swarm.addresses)
        joining.wait([member])
        return time.perf_counter() - started


def _first_token(model: Model, swarm: LocalSwarm) -> float:
    command = [sys.executable, "-m", "swarm", "generate", model.manifest.name, "Hello", "--max-new-tokens", "4"]
    command += [word for address in swarm.addresses for word in ("--initial-peer", address)]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        took = time.perf_counter() - started
        process.stdout.read()
    return took

"""The self-test of a span, in a child process: a crash of a device plugin becomes an error message.

`python -m peer.loading.self_test PACKAGE A:B [options]` composes and compiles the span (which fills the engine's cache
of compiled graphs for the peer), runs random input, and writes one line of JSON. `self_test` starts it and reads the
line.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from swarm.engine.base import Engine, Step
from swarm.engine.choice import EngineKind, engines_to_try, max_tokens_of, open_chosen_engine
from swarm.errors import EngineError, PackageError, SwarmError, UnsupportedModel
from swarm.model.manifest import Manifest, load_manifest
from swarm.model.spans import LayerRange
from swarm.process.child_process import module_command, module_environment

_PREFILL_TOKENS, _DECODE_STEPS, _REWIND_TOKENS = 64, 16, 4
_KV_TOKENS = 256
SESSION = "self-test"
# Allowed difference between the results of a step before and after a rewind, relative to the largest value.
_TOLERANCE = {"f32": 1e-3}
_LOOSE_TOLERANCE = 0.1  # bf16, and KV caches of 8 bits
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """The result of a self-test. Times are seconds per layer: of a decode step, and of one token in prefill.

    `fallback_reason` says why the first choice of engine failed; empty if it is `engine`. `remembered` marks the result
    of an earlier start.
    """

    numerics: str
    layer_time_s: float
    prefill_time_s: float
    engine: EngineKind = "stateful"
    fallback_reason: str = ""
    remembered: bool = False


async def self_test(
    package: Path,
    span: LayerRange,
    *,
    engine: str = "auto",
    device: str = "CPU",
    precision: str = "accuracy",
    threads: int = 0,
    cache_dir: Path | None = None,
    timeout: float = 900.0,
) -> SelfTest:
    """Run the test in a child process; with `engine="auto"`, once for each engine until one passes.

    The child never outlives this call, even if it is cancelled. Raises EngineError that says how the test failed and
    what to try, PackageError for the files, ConfigError if the device cannot run the engine.
    """
    fallback_reason = ""
    *others, last = engines_to_try(engine, device)
    for kind in others:
        try:
            return await _run_child(package, span, kind, device, precision, threads, cache_dir, timeout)
        except EngineError as error:
            fallback_reason = str(error)
    tested = await _run_child(package, span, last, device, precision, threads, cache_dir, timeout)
    return replace(tested, fallback_reason=fallback_reason)


async def _run_child(
    package: Path,
    span: LayerRange,
    kind: EngineKind,
    device: str,
    precision: str,
    threads: int,
    cache_dir: Path | None,
    timeout: float,
) -> SelfTest:
    command = [*module_command("peer.loading.self_test"), str(package), str(span)]
    command += ["--parent", str(os.getpid()), "--engine", kind, "--device", device]
    command += ["--precision", precision, "--threads", str(threads)]
    command += ["--cache-dir", str(cache_dir)] if cache_dir else []
    # A new process group: Ctrl-C in a terminal must reach the peer only.
    child = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env=module_environment(),
    )
    try:
        async with asyncio.timeout(timeout):
            out, err = await child.communicate()
    except TimeoutError as error:
        raise EngineError(
            f"the self-test of layers {span} did not end within {timeout:.0f} s: serve fewer layers, "
            "or check whether this machine is busy"
        ) from error
    finally:
        if child.returncode is None:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    return read_outcome(child.returncode or 0, out, err, span=span, device=device, precision=precision)


def read_outcome(code: int, out: bytes, err: bytes, *, span: LayerRange, device: str, precision: str) -> SelfTest:
    """Convert the child's exit code and output. Raises as `self_test` does."""
    last_line = ([line.strip() for line in err.decode(errors="replace").splitlines() if line.strip()] or [""])[-1]
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        if name == "SIGKILL":
            advice = "probably out of memory; serve fewer layers or lower --max-memory"
        elif precision != "accuracy":
            advice = "try --precision accuracy"
        else:
            advice = "try another --device, or --threads 1"
        raise EngineError(f"{device} died of {name} in the self-test of layers {span}: {advice}")
    if code == PackageError.exit_code:
        raise PackageError(last_line)
    if code != 0:
        raise EngineError(f"the self-test of layers {span} on {device} failed: {last_line or f'exit code {code}'}")
    try:
        return SelfTest(**json.loads(out.splitlines()[-1]))
    except (ValueError, IndexError, TypeError) as error:
        raise EngineError(f"the self-test of layers {span} ended without a result: {out[-200:]!r}") from error


def run_self_test(engine: Engine, manifest: Manifest, *, max_tokens: int) -> SelfTest:
    """Time prefill and decode, then compare a step before and after a rewind. Takes at most `max_tokens` positions.

    Raises EngineError if a step fails or the results differ.
    """
    span = engine.span
    prefill = max(min(_PREFILL_TOKENS, max_tokens - _DECODE_STEPS), 1)
    feed = _Feeder(engine, manifest, max_tokens=min(_PREFILL_TOKENS + _DECODE_STEPS, max_tokens))
    feed(0, prefill)
    prefill_s = statistics.median([_timed(feed, 0, prefill) for _ in range(3)])
    decodes = min(_DECODE_STEPS, max_tokens - prefill)
    decode_s = statistics.median([_timed(feed, prefill + i, 1) for i in range(decodes)] or [prefill_s / prefill])

    start = max(prefill - _REWIND_TOKENS, 0)
    first = feed(start, prefill - start)
    again = feed(start, prefill - start)
    tolerance = _TOLERANCE.get(engine.numerics.kv, _LOOSE_TOLERANCE)
    difference, scale = float(np.abs(first - again).max()), float(np.abs(first).max())
    if difference > tolerance * max(scale, 1e-6):
        raise EngineError(
            f"layers {span} computed different values after a rewind: they differ by {difference:.3g}, "
            f"and the largest is {scale:.3g}"
        )
    return SelfTest(
        numerics=str(engine.numerics),
        layer_time_s=decode_s / len(span),
        prefill_time_s=prefill_s / prefill / len(span),
    )


class _Feeder:
    """Feeds one session with random tokens and hidden states, always the same ones at the same position."""

    def __init__(self, engine: Engine, manifest: Manifest, *, max_tokens: int) -> None:
        random = np.random.default_rng(0)
        self._engine = engine
        self._tokens = random.integers(0, manifest.vocab_size, max_tokens).astype(np.int32)
        self._hidden = random.normal(size=(max_tokens, manifest.hidden_size)).astype(np.float32)
        self._entry = engine.span.first == 0
        self._head = engine.span.last == len(manifest.layers)
        engine.open(SESSION, max_tokens)

    def __call__(self, start: int, n: int) -> NDArray[np.float32]:
        step = Step(
            session=SESSION,
            start=start,
            tokens=self._tokens[start : start + n],
            hidden=None if self._entry else self._hidden[start : start + n],
            rows=1 if self._head else 0,
        )
        (result,) = self._engine.forward([step])
        if isinstance(result, SwarmError):
            raise result
        return result


def _timed(feed: _Feeder, start: int, n: int) -> float:
    start_time = time.perf_counter()
    feed(start, n)
    return time.perf_counter() - start_time


def main(arguments: Sequence[str] | None = None) -> int:
    """The child process. Writes the result as a line of JSON, or an error to stderr; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m peer.loading.self_test")
    parser.add_argument("package", type=Path)
    parser.add_argument("span", type=LayerRange.parse)
    parser.add_argument("--parent", type=int)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--precision", default="accuracy")
    parser.add_argument("--engine", default="stateful", choices=get_args(EngineKind))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cache-dir", type=Path)
    options = parser.parse_args(arguments)
    if options.parent is not None:
        _exit_with_parent(options.parent)
    try:
        manifest = load_manifest(options.package)
        kind: EngineKind = options.engine
        engine = open_chosen_engine(
            kind,
            options.package,
            manifest,
            options.span,
            kv_tokens=_KV_TOKENS,
            device=options.device,
            precision=options.precision,
            threads=options.threads,
            cache_dir=options.cache_dir,
        )
        result = replace(run_self_test(engine, manifest, max_tokens=max_tokens_of(kind, manifest)), engine=kind)
    except UnsupportedModel as error:
        sys.stderr.write(f"{error}\n")  # Not a fault of the files: another engine may run them.
        return EngineError.exit_code
    except SwarmError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(json.dumps(asdict(result)) + "\n")
    return 0


def _exit_with_parent(parent: int) -> None:
    """Have Linux kill this process when the peer that started it ends, even by a crash."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # The parent ended during the imports.
        sys.exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())

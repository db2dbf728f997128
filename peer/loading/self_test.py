"""A span's first run, in a process of its own, so that a plugin that crashes becomes a message.

`python -m peer.loading.self_test PACKAGE A:B [options]` composes and compiles (which fills the cache for the peer
itself, where the engine has one), runs made-up input, and writes one line of JSON. `self_test` runs that and reads the
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

_PREFILL, _DECODES, _AGAIN = 64, 16, 4
_KV_TOKENS = 256
SESSION = "self-test"
# How far the same step may differ after a rewind, as a share of the largest number in it.
_TOLERANCE = {"f32": 1e-3}
_LOOSE_TOLERANCE = 0.1  # bf16 and a cache of 8 bits
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """What a span does here. Times are seconds a layer: for one decoded token, for one token of a prompt.

    `instead` says why `engine` is not the one that was to be tried first; empty where it is. `remembered`: an earlier
    start passed it, and this one has not tested anything yet.
    """

    numerics: str
    layer_time_s: float
    prefill_time_s: float
    engine: EngineKind = "stateful"
    instead: str = ""
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
    """Run the test in a child process, another one for another engine where `engine` leaves the choice.

    The child never outlives this call, cancelled or not. Raises EngineError that says how the test failed and what
    to try, PackageError for the files, ConfigError for a choice that the device cannot have.
    """
    instead = ""
    *others, last = engines_to_try(engine, device)
    for kind in others:
        try:
            return await _test(package, span, kind, device, precision, threads, cache_dir, timeout)
        except EngineError as error:
            instead = str(error)
    tested = await _test(package, span, last, device, precision, threads, cache_dir, timeout)
    return replace(tested, instead=instead)


async def _test(
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
    # A session of its own: Ctrl-C in a terminal is the peer's to handle.
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
            "or look whether this machine is busy"
        ) from error
    finally:
        if child.returncode is None:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    return read_outcome(child.returncode or 0, out, err, span=span, device=device, precision=precision)


def read_outcome(code: int, out: bytes, err: bytes, *, span: LayerRange, device: str, precision: str) -> SelfTest:
    """The child's exit code and output as a result. Raises as `self_test` does."""
    last = ([line.strip() for line in err.decode(errors="replace").splitlines() if line.strip()] or [""])[-1]
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        if name == "SIGKILL":
            advice = "most likely for want of memory; serve fewer layers or lower --max-memory"
        elif precision != "accuracy":
            advice = "try --precision accuracy"
        else:
            advice = "try another --device, or --threads 1"
        raise EngineError(f"{device} died of {name} in the self-test of layers {span}: {advice}")
    if code == PackageError.exit_code:
        raise PackageError(last)
    if code != 0:
        raise EngineError(f"the self-test of layers {span} on {device} failed: {last or f'exit code {code}'}")
    try:
        return SelfTest(**json.loads(out.splitlines()[-1]))
    except (ValueError, IndexError, TypeError) as error:
        raise EngineError(f"the self-test of layers {span} ended without a result: {out[-200:]!r}") from error


def run_here(engine: Engine, manifest: Manifest, *, room: int) -> SelfTest:
    """Prefill, decode, rewind and decode again, within `room` tokens. Raises EngineError where the numbers are not
    right."""
    span = engine.span
    prefill = max(min(_PREFILL, room - _DECODES), 1)
    feed = _Feeder(engine, manifest, max_tokens=min(_PREFILL + _DECODES, room))
    feed(0, prefill)
    prefill_s = statistics.median([_timed(feed, 0, prefill) for _ in range(3)])
    decodes = min(_DECODES, room - prefill)
    decode_s = statistics.median([_timed(feed, prefill + i, 1) for i in range(decodes)] or [prefill_s / prefill])

    start = max(prefill - _AGAIN, 0)
    first = feed(start, prefill - start)
    again = feed(start, prefill - start)
    tolerance = _TOLERANCE.get(engine.numerics.kv, _LOOSE_TOLERANCE)
    difference, scale = float(np.abs(first - again).max()), float(np.abs(first).max())
    if difference > tolerance * max(scale, 1e-6):
        raise EngineError(
            f"layers {span} gave other numbers after a rewind: {difference:.3g} apart at a size of {scale:.3g}"
        )
    return SelfTest(
        numerics=str(engine.numerics),
        layer_time_s=decode_s / len(span),
        prefill_time_s=prefill_s / prefill / len(span),
    )


class _Feeder:
    """Made-up tokens and hidden states, the same at the same position, into one session."""

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
    began = time.perf_counter()
    feed(start, n)
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> int:
    """The child. Writes a line of JSON and returns 0, or an error's sentence on stderr and its exit code."""
    parser = argparse.ArgumentParser(prog="python -m peer.loading.self_test")
    parser.add_argument("package", type=Path)
    parser.add_argument("span", type=LayerRange.parse)
    parser.add_argument("--parent", type=int)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--precision", default="accuracy")
    parser.add_argument("--engine", default="stateful", choices=get_args(EngineKind))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cache-dir", type=Path)
    given = parser.parse_args(arguments)
    if given.parent is not None:
        _die_with(given.parent)
    try:
        manifest = load_manifest(given.package)
        kind: EngineKind = given.engine
        engine = open_chosen_engine(
            kind,
            given.package,
            manifest,
            given.span,
            kv_tokens=_KV_TOKENS,
            device=given.device,
            precision=given.precision,
            threads=given.threads,
            cache_dir=given.cache_dir,
        )
        result = replace(run_here(engine, manifest, room=max_tokens_of(kind, manifest)), engine=kind)
    except UnsupportedModel as error:
        sys.stderr.write(f"{error}\n")  # the model's files are all right: another engine may run them
        return EngineError.exit_code
    except SwarmError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(json.dumps(asdict(result)) + "\n")
    return 0


def _die_with(parent: int) -> None:
    """Linux ends this process when the peer that started it is gone, however that ended."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended while this process was still importing
        sys.exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())

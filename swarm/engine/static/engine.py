"""The engine over static graphs: the KV caches are arrays of this process, the graphs have no state.

It exists for NPUs, which support neither state nor dynamic shapes, and runs on any device. Two compiled graphs, one
for one token and one for a chunk, read the same cache of a fixed number of slots. The host computes their attention
masks (`swarm.engine.static.ring_cache`). A text longer than the slots attends to its first and last tokens only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from swarm.engine.base import Step, StepResult
from swarm.engine.device import CompiledSpan, compile_span
from swarm.engine.memory import release_memory
from swarm.engine.static.graph import MAX_ROWS, bias_name, cache_shapes, compose_static, windows_of
from swarm.engine.static.ring_cache import RingCache
from swarm.engine.steps import Sessions, StepRules, all_finite, run_one_by_one, run_warm_up
from swarm.errors import EngineError
from swarm.model.manifest import DECODE, PREFILL, Manifest
from swarm.model.numerics import Numerics
from swarm.model.spans import LayerRange

_KV = "f32"  # the type of the host's caches
# The CPU plugin's generated kernels lose three digits if a mask hides some of the last keys and the number of keys is
# not a multiple of 8 (width 4 over 52 keys: 4e-4 of 0.6; without these kernels 1e-7). OpenVINO 2026.4.1.
_PLAIN_KERNELS = {"SNIPPETS_MODE": "DISABLE"}


def open_static_engine(
    package: Path,
    manifest: Manifest,
    span: LayerRange,
    *,
    device: str = "CPU",
    precision: str = "accuracy",
    threads: int = 0,
    cache_dir: Path | None = None,
) -> StaticEngine:
    """Compose and compile both graphs of `span`, create their engine, warm it up. The caller checks the files' hashes.

    Raises PackageError for the files (or if there are no static ones), EngineError for the device, ConfigError
    for the settings.
    """
    compiled = {
        kind: compile_span(
            compose_static(package, manifest, span, kind),
            attention_layers=0,
            device=device,
            precision=precision,
            threads=threads,
            cache_dir=cache_dir,
            cache_key=(manifest.digest, str(span), kind),
            fused=False,
            settings=_PLAIN_KERNELS if device.startswith("CPU") and precision == "accuracy" else None,
        )
        for kind in (DECODE, PREFILL)
    }
    engine = StaticEngine(compiled[DECODE], compiled[PREFILL], manifest, span)
    engine.warm_up()
    release_memory(package, *([cache_dir] if cache_dir else []))
    return engine


@dataclass(slots=True, eq=False)
class _Session:
    ring: RingCache
    caches: dict[str, NDArray[np.float32]]  # "key.LAYER" -> [1, heads, slots, size]


class StaticEngine:
    """`Engine` over the two graphs of `swarm.engine.static.graph.compose_static`."""

    def __init__(self, decode: CompiledSpan, prefill: CompiledSpan, manifest: Manifest, span: LayerRange) -> None:
        manifest.static_parts(span)
        assert manifest.static is not None
        self._spec = manifest.static
        self._numerics = Numerics(inference=decode.numerics.inference, kv=_KV)
        self._span = span
        self._rules = StepRules(manifest, span)
        self._windows = windows_of(manifest, span)
        self._shapes = list(cache_shapes(manifest, span, self._spec))
        self._decode = _Graph(decode.model, 1)
        self._prefill = _Graph(prefill.model, self._spec.chunk)
        self._sessions: Sessions[_Session] = Sessions()

    @property
    def span(self) -> LayerRange:
        return self._span

    @property
    def numerics(self) -> Numerics:
        return self._numerics

    def open(self, session: str, max_tokens: int) -> None:
        """Raises EngineError if it exists, ContextExceeded beyond the model's context, BadStep below 1.

        `max_tokens` may exceed the context of the graphs, which then slides over the text.
        """
        self._sessions.check_unused(session)
        self._rules.check_length(max_tokens)
        ring = RingCache(self._spec, max_tokens)
        try:
            caches = {name: np.zeros(shape, np.float32) for name, shape in self._shapes}
        except MemoryError as error:
            raise EngineError(f"there is no room for another session: {error}") from error
        self._sessions[session] = _Session(ring, caches)

    def length(self, session: str) -> int:
        return self._sessions.find(session).ring.length

    def close(self, session: str) -> None:
        closed = self._sessions.pop(session, None)
        if closed is not None:
            for graph in (self._decode, self._prefill):
                graph.unbind(closed.caches)

    def forward(self, steps: Sequence[Step]) -> list[StepResult]:
        """As `Engine` says; see `run_one_by_one`."""
        return run_one_by_one(steps, self._step)

    def warm_up(self) -> None:
        """See `run_warm_up`."""
        run_warm_up(self, self._rules, self._spec.chunk)

    def _step(self, step: Step) -> NDArray[np.float32]:
        session = self._sessions.find(step.session)
        self._rules.check(step)
        session.ring.check(step.start, len(step.tokens))
        try:
            session.ring.rewind(step.start)
            outputs = [self._run(session, step, begin, end) for begin, end in self._pieces(step)]
        except (RuntimeError, MemoryError, EngineError) as error:
            # The ring may now hold part of the step.
            self.close(step.session)
            raise EngineError(
                f"session {step.session!r} failed at position {step.start} and was closed ({error}): "
                "open it again and feed its known tokens"
            ) from error
        return outputs[0] if len(outputs) == 1 else np.concatenate(outputs)

    def _pieces(self, step: Step) -> Iterator[tuple[int, int]]:
        """Begin and end of each inference of a step: at most a chunk, with at most `MAX_ROWS` rows of logits."""
        n = len(step.tokens)
        end, first_row = 0, n - step.rows
        while end < n:
            begin = end
            end = min(begin + self._spec.chunk, max(begin, first_row) + min(MAX_ROWS, self._spec.chunk), n)
            yield begin, end

    def _run(self, session: _Session, step: Step, begin: int, end: int) -> NDArray[np.float32]:
        """Run one inference. Returns a copy of its hidden states [n, hidden], or of its logits [m, vocab]."""
        n, ring = end - begin, session.ring
        rows = max(0, end - max(begin, len(step.tokens) - step.rows))
        graph = self._decode if n == 1 else self._prefill
        if step.hidden is None:
            graph.feed("input_ids", step.tokens[begin:end])
        else:
            graph.feed("hidden_states", step.hidden[begin:end])
        graph.feed("position_ids", np.arange(ring.length, ring.length + n))
        graph.feed("logit_rows", np.arange(n - rows, n))
        for window in self._windows:
            graph.feed_all(bias_name(window), ring.bias(graph.width, window))
        output = graph.run(session.caches)
        slots = ring.slots(n)
        for name, cache in session.caches.items():
            cache[0][:, slots] = graph.present(name)[0, :, :n]
        ring.commit(n)
        result: NDArray[np.float32] = output[0, : rows if self._rules.gives_logits else n].copy()
        if result.size and not all_finite(result):
            raise EngineError(f"numbers that are not finite came out in {self._numerics}; try --precision accuracy")
        return result


class _Graph:
    """One compiled graph of one width, with its request and the arrays that the request reads and writes."""

    def __init__(self, compiled: ov.CompiledModel, width: int) -> None:
        self.width = width
        try:
            self._request = compiled.create_infer_request()
        except (RuntimeError, MemoryError) as error:
            raise EngineError(f"the device has no room for a request: {error}") from error
        self._ports = {name: i for i, port in enumerate(compiled.inputs) for name in port.get_names()}
        self._inputs = {
            name: np.zeros(list(compiled.inputs[i].shape), compiled.inputs[i].element_type.to_dtype())
            for name, i in self._ports.items()
            if not name.startswith("past_")
        }
        for name, array in self._inputs.items():
            self._request.set_input_tensor(self._ports[name], ov.Tensor(array, shared_memory=True))
        self._outputs = [np.zeros(list(port.shape), np.float32) for port in compiled.outputs]
        for i, array in enumerate(self._outputs):
            self._request.set_output_tensor(i, ov.Tensor(array, shared_memory=True))
        names = [name for port in compiled.outputs for name in port.get_names()]
        self._presents = {
            name.removeprefix("present_"): self._outputs[i]
            for i, name in enumerate(names)
            if name.startswith("present_")
        }
        # The caches that the request reads, held here because the request has only pointers to them.
        self._caches: dict[str, NDArray[np.float32]] | None = None

    def feed(self, name: str, values: NDArray[np.generic]) -> None:
        """Set an input for the first n positions, [n] or [n, ...], and pad the others with zeros."""
        buffer = self._inputs.get(name)
        if buffer is not None:
            padded = buffer if buffer.ndim == 1 else buffer[0]
            padded[: len(values)] = values
            padded[len(values) :] = 0

    def feed_all(self, name: str, values: NDArray[np.generic]) -> None:
        buffer = self._inputs.get(name)
        if buffer is not None:
            buffer[...] = values

    def run(self, caches: dict[str, NDArray[np.float32]]) -> NDArray[np.float32]:
        """Run the graph. Returns its main output, which the next run overwrites."""
        if self._caches is not caches:
            for name, cache in caches.items():
                self._request.set_input_tensor(self._ports[f"past_{name}"], ov.Tensor(cache, shared_memory=True))
            self._caches = caches
        self._request.infer()
        return self._outputs[0]

    def present(self, name: str) -> NDArray[np.float32]:
        """[1, heads, width, size]: the new keys or values for the cache `name`."""
        return self._presents[name]

    def unbind(self, caches: dict[str, NDArray[np.float32]]) -> None:
        if self._caches is caches:
            self._caches = None

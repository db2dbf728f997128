"""The engine that runs steps of many sessions in one inference, with KV caches in shared blocks.

::

    steps     A: 1 token at 70      B: 40 tokens at 0      C: 1 token at 12
                 │                     │                      │
    rows      [  a  │  b b b b ... b b b b b b b b b b  │  c  ]      one graph, one pass over the weights
                 │                     │                      │
    blocks    4 1 7                 2 5                    8          attention reads each session's own blocks

A rewind only reduces the length; no data moves. The other sessions in a call affect a session's numbers only through
the order of float32 sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from swarm.engine.base import Step, StepResult
from swarm.engine.compose import compose
from swarm.engine.device import PAGED_ATTENTION, CompiledSpan, compile_span
from swarm.engine.memory import release_memory
from swarm.engine.paged.blocks import BlockTable
from swarm.engine.paged.graph import to_paged
from swarm.engine.paged.store import KvStore
from swarm.engine.steps import WARM_UP_TOKENS, StepRules, all_finite, check_unique, run_warm_up
from swarm.errors import ContextExceeded, EngineError, SwarmError
from swarm.model.manifest import Manifest
from swarm.model.numerics import Numerics
from swarm.model.spans import LayerRange


class PagedEngine:
    """`Engine` over a compiled paged graph. Its inputs: see `swarm.engine.paged.graph`."""

    def __init__(self, compiled: CompiledSpan, manifest: Manifest, span: LayerRange, store: KvStore) -> None:
        """Raises EngineError if `store` does not fit this graph."""
        self._numerics = compiled.numerics
        self._span = span
        self._rules = StepRules(manifest, span)
        self._store = store
        self._tables = store.tables
        self._ports = {name: i for i, port in enumerate(compiled.model.inputs) for name in port.get_names()}
        self._list_inputs: dict[str, list[int]] = {}  # the current values of the inputs that are set from lists
        self._main_input = "input_ids" if self._rules.takes_tokens else "hidden_states"
        try:
            self._request = compiled.model.create_infer_request()
            store.bind(self._request, compiled.model, span)
        except (RuntimeError, MemoryError) as error:
            raise EngineError(f"the device has no room for the span: {error}") from error

    @property
    def span(self) -> LayerRange:
        return self._span

    @property
    def numerics(self) -> Numerics:
        return self._numerics

    @property
    def store(self) -> KvStore:
        return self._store

    def open(self, session: str, max_tokens: int) -> None:
        """See `Engine`. Blocks are allocated as steps need them.

        Raises EngineError if the session exists, ContextExceeded beyond the model's context or the whole cache.
        """
        limit = min(self._rules.context, self._tables.tokens)
        if max_tokens > limit:
            raise ContextExceeded(f"{max_tokens} positions requested, at most {limit} are possible: request fewer")
        self._tables.open(session, max_tokens)

    def length(self, session: str) -> int:
        return self._tables.find(session).length

    def close(self, session: str) -> None:
        self._tables.close(session)

    def forward(self, steps: Sequence[Step]) -> list[StepResult]:
        """See `Engine`. A step for which too few blocks are free gets PeerBusy and changes nothing.

        If the device fails, all sessions of the call are closed and EngineError is raised. If the numbers of some steps
        are not finite, only the sessions of these steps are closed.
        """
        results: dict[int, StepResult] = {}
        accepted: list[tuple[Step, BlockTable]] = []
        seen: set[str] = set()
        for index, step in enumerate(steps):
            try:
                check_unique(step, seen)
                accepted.append((step, self._prepare(step)))
            except SwarmError as error:
                results[index] = error
        if accepted:
            try:
                outputs = self._run(accepted)
            except (RuntimeError, MemoryError, EngineError) as error:
                for step, _ in accepted:
                    self.close(step.session)
                raise EngineError(
                    f"{len(accepted)} sessions failed together and were closed ({error}): open them again and feed "
                    "their known tokens"
                ) from error
            for (step, table), output in zip(accepted, outputs, strict=True):
                if isinstance(output, EngineError):
                    self.close(step.session)
                else:
                    table.commit(step.tokens)
            remaining = iter(outputs)
            return [results[index] if index in results else next(remaining) for index in range(len(steps))]
        return [results[index] for index in range(len(steps))]

    def warm_up(self) -> None:
        """See `run_warm_up`."""
        run_warm_up(self, self._rules, min(WARM_UP_TOKENS, self._tables.tokens - 1))

    def _prepare(self, step: Step) -> BlockTable:
        self._rules.check(step)
        table = self._tables.check(step.session, step.start, len(step.tokens))
        copy = table.prepare(step.start, len(step.tokens))
        if copy is not None:
            self._store.copy(*copy)
        return table

    def _run(self, accepted: Sequence[tuple[Step, BlockTable]]) -> list[StepResult]:
        # Lists instead of numpy: between two steps other processes evict this code from the processor's caches, and
        # each numpy call then takes about a hundred microseconds instead of one.
        steps = [step for step, _ in accepted]
        counts = [len(step.tokens) for step in steps]
        begins = _offsets(counts)
        self._feed_main(steps)
        self._feed_list("subsequence_begins", begins)
        self._feed_list("past_lens", [step.start for step in steps])
        self._feed_list("position_ids", [p for step in steps for p in range(step.start, step.end)], np.int64)
        blocks = [table.blocks for _, table in accepted]
        self._feed_list("block_indices_begins", _offsets([len(each) for each in blocks]))
        self._feed_list("block_indices", [block for each in blocks for block in each])
        self._feed("max_context_len", np.array(max(step.end for step in steps), np.int32))
        if not self._rules.gives_logits:
            self._request.infer(share_outputs=True)
            return self._split(self._output(), counts)
        row_counts = [step.rows for step in steps]
        rows = [row for end, n in zip(begins[1:], row_counts, strict=True) for row in range(end - n, end)]
        # At least one row: graphs need not accept an empty tensor.
        self._feed_list("logit_rows", rows or [0], np.int64)
        self._request.infer(share_outputs=True)
        return self._split(self._output()[: len(rows)], row_counts)

    def _feed_main(self, steps: Sequence[Step]) -> None:
        if self._rules.takes_tokens:
            self._feed(self._main_input, np.concatenate([step.tokens for step in steps], dtype=np.int64))
        else:
            hidden = [step.hidden for step in steps if step.hidden is not None]
            self._feed(self._main_input, np.concatenate(hidden) if len(hidden) > 1 else np.ascontiguousarray(hidden[0]))

    def _feed_list(self, name: str, values: list[int], dtype: type[np.integer[Any]] = np.int32) -> None:
        """Set an input from a list. Unchanged values are not set again, because a batch's layout changes seldom."""
        if self._list_inputs.get(name) != values:
            self._feed(name, np.array(values, dtype))
            self._list_inputs[name] = values

    def _feed(self, name: str, values: NDArray[np.generic]) -> None:
        index = self._ports.get(name)
        if index is not None:  # A span's graph has only the inputs that some of its layers read.
            self._request.set_input_tensor(index, ov.Tensor(values))

    def _output(self) -> NDArray[np.float32]:
        """A copy of the output, [t, hidden] or [m, vocab]: the next inference overwrites the request's own."""
        output: NDArray[np.float32] = self._request.get_output_tensor(0).data[:, 0].copy()
        return output

    def _split(self, output: NDArray[np.float32], counts: Sequence[int]) -> list[StepResult]:
        """Each step's output, or EngineError if its numbers are not finite. Raises EngineError if none's are."""
        parts = [output[begin:end] for begin, end in itertools.pairwise(_offsets(counts))]
        if all_finite(output):
            return list(parts)
        error = EngineError(f"numbers that are not finite came out in {self._numerics}; try --precision accuracy")
        results: list[StepResult] = [part if all_finite(part) else error for part in parts]
        if all(result is error for result in results):
            raise error
        return results


def _offsets(counts: Sequence[int]) -> list[int]:
    """The offset of each part, and the end of the last."""
    return list(itertools.accumulate(counts, initial=0))


def open_paged_engine(
    package: Path,
    manifest: Manifest,
    span: LayerRange,
    *,
    kv_tokens: int,
    store: KvStore | None = None,
    device: str = "CPU",
    precision: str = "accuracy",
    threads: int = 0,
) -> PagedEngine:
    """Compose and compile `span` with paged attention, create its engine and warm it up.

    It holds `kv_tokens` positions over all sessions, or shares `store`. Its graph is compiled anew each time: the CPU
    plugin (OpenVINO 2026.4.1) leaves an attention's head counts out of a blob and then cannot read the blob back. With
    a cache every graph would be compiled twice.

    Raises PackageError for the files, EngineError for the device, ConfigError for the settings, UnsupportedModel for a
    graph that cannot be paged.
    """
    compiled = compile_span(
        to_paged(compose(package, manifest, span, rows_axis=0), manifest.hidden_size),
        attention_layers=len(span),
        attention=PAGED_ATTENTION,
        device=device,
        precision=precision,
        threads=threads,
    )
    try:
        store = store or KvStore(compiled.model, span, tokens=kv_tokens)
        engine = PagedEngine(compiled, manifest, span, store)
    except RuntimeError as error:
        raise EngineError(f"{device} has no paged cache for layers {span}: {error}") from error
    engine.warm_up()
    release_memory(package)
    return engine

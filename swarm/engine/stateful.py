"""The engine whose KV caches are the graph's own state: one InferRequest for each session.

Steps of several sessions run one after another. A session changes only when its step has run. If the device
fails during a step, the session is closed and the step's result is an EngineError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from swarm.engine.base import Step, StepResult
from swarm.engine.device import CompiledSpan
from swarm.engine.ledger import Ledger, Plan
from swarm.engine.steps import WARM_UP_TOKENS, Sessions, StepRules, all_finite, run_one_by_one, run_warm_up
from swarm.errors import EngineError
from swarm.model.manifest import Manifest
from swarm.model.numerics import Numerics
from swarm.model.spans import LayerRange

# A reused request saves some ms at the start of a session, and keeps the memory of the session before.
_SPARE_REQUESTS = 1


@dataclass(slots=True)
class _Session:
    request: ov.InferRequest
    ledger: Ledger
    # The arrays that the request reads, held here because the request has only pointers to them.
    inputs: dict[str, NDArray[np.generic]] = field(default_factory=dict)


class StatefulEngine:
    """`Engine` over a compiled span. Its inputs: see `swarm.engine.compose.compose`."""

    def __init__(self, compiled: CompiledSpan, manifest: Manifest, span: LayerRange) -> None:
        self._compiled = compiled.model
        self._numerics = compiled.numerics
        self._span = span
        self._rules = StepRules(manifest, span)
        windows = [w for layer in span if (w := manifest.layers[layer].window) is not None]
        self._window = min(windows, default=None)
        self._ports = {name: i for i, port in enumerate(self._compiled.inputs) for name in port.get_names()}
        self._beam = np.zeros(1, np.int32)
        self._sessions: Sessions[_Session] = Sessions()
        self._spare: list[ov.InferRequest] = []

    @property
    def span(self) -> LayerRange:
        return self._span

    @property
    def numerics(self) -> Numerics:
        return self._numerics

    def open(self, session: str, max_tokens: int) -> None:
        """Raises EngineError if it exists, ContextExceeded beyond the model's context, BadStep below 1."""
        self._sessions.check_unused(session)
        self._rules.check_length(max_tokens)
        ledger = Ledger(max_tokens, window=self._window)
        self._sessions[session] = _Session(self._new_request(), ledger)

    def length(self, session: str) -> int:
        return self._sessions.find(session).ledger.length

    def close(self, session: str) -> None:
        closed = self._sessions.pop(session, None)
        if closed is None or len(self._spare) >= _SPARE_REQUESTS:
            return
        try:
            closed.request.reset_state()
        except RuntimeError:
            return  # A request that cannot be reset is not reused; dropping it frees it.
        self._spare.append(closed.request)

    def forward(self, steps: Sequence[Step]) -> list[StepResult]:
        """As `Engine` says; see `run_one_by_one`."""
        return run_one_by_one(steps, self._step)

    def warm_up(self) -> None:
        """See `run_warm_up`."""
        run_warm_up(self, self._rules, WARM_UP_TOKENS)

    def _step(self, step: Step) -> NDArray[np.float32]:
        session = self._sessions.find(step.session)
        self._rules.check(step)
        plan = session.ledger.plan(step.start, len(step.tokens))
        try:
            output = self._run(session, step, plan)
        except (RuntimeError, MemoryError, EngineError) as error:
            # The cache may now hold part of the step, and the request may still be running it.
            del self._sessions[step.session]
            raise EngineError(
                f"session {step.session!r} failed at position {step.start} and was closed ({error}): "
                "open it again and feed its known tokens"
            ) from error
        session.ledger.commit(plan)
        return output

    def _run(self, session: _Session, step: Step, plan: Plan) -> NDArray[np.float32]:
        if plan.keep is not None:
            _keep_slots(session.request, plan.keep, slots=session.ledger.slots)
        n = len(step.tokens)
        if step.hidden is None:
            self._feed(session, "input_ids", step.tokens[None], np.int64)
        else:
            self._feed(session, "hidden_states", step.hidden[None], np.float32)
        self._feed(session, "attention_mask", plan.attention_mask, np.int64)
        self._feed(session, "position_ids", plan.position_ids, np.int64)
        if self._rules.gives_logits:
            # At least one row: graphs need not accept an empty tensor.
            self._feed(session, "logit_rows", np.arange(n - max(step.rows, 1), n), np.int64)
        session.request.infer(share_outputs=True)
        if self._rules.gives_logits and step.rows == 0:
            return np.empty((0, self._rules.vocab_size), np.float32)
        # The next step overwrites the request's own output.
        output: NDArray[np.float32] = session.request.get_output_tensor(0).data[0].copy()
        if not all_finite(output):
            raise EngineError(f"numbers that are not finite came out in {self._numerics}; try --precision accuracy")
        return output

    def _feed(self, session: _Session, name: str, values: NDArray[np.generic], dtype: type[np.generic]) -> None:
        """Copy `values` to the array that the request reads as `name`; set a new one if the shape changed."""
        index = self._ports.get(name)
        if index is None:
            return  # A span's graph has only the inputs that some of its layers read.
        buffer = session.inputs.get(name)
        if buffer is not None and buffer.shape == values.shape:
            buffer[...] = values
        else:
            buffer = session.inputs[name] = np.array(values, dtype, order="C")
            session.request.set_input_tensor(index, ov.Tensor(buffer, shared_memory=True))

    def _new_request(self) -> ov.InferRequest:
        if self._spare:
            return self._spare.pop()
        try:
            request = self._compiled.create_infer_request()
            if "beam_idx" in self._ports:
                request.set_input_tensor(self._ports["beam_idx"], ov.Tensor(self._beam, shared_memory=True))
        except (RuntimeError, MemoryError) as error:
            raise EngineError(f"the device has no room for another session: {error}") from error
        return request


def _keep_slots(request: ov.InferRequest, keep: NDArray[np.int64], *, slots: int) -> None:
    """Compact every cached tensor [1, heads, slots, size] to the slots `keep`."""
    if len(keep) == 0:
        request.reset_state()
        return
    for variable in request.query_state():
        cached = variable.state.data
        if cached.ndim != 4 or cached.shape[2] != slots:
            raise EngineError(f"state {variable.name} is {list(cached.shape)} where {slots} slots were expected")
        variable.state = ov.Tensor(np.ascontiguousarray(cached[:, :, keep]))

"""The engine whose KV caches are the graph's own state: one InferRequest for each session.

Steps of several sessions run one after another. A session is as it was until its step has run; the
one exception is a failure of the device in the middle, which closes the session and says so.
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
from swarm.engine.steps import WARM_UP_TOKENS, Sessions, StepRules, all_finite, run_in_turn, run_warm_up
from swarm.errors import EngineError
from swarm.model.manifest import Manifest
from swarm.model.numerics import Numerics
from swarm.model.spans import LayerRange

# A kept request starts the next session some ms faster, and keeps the memory of the last one.
_SPARE_REQUESTS = 1


@dataclass(slots=True)
class _Session:
    request: ov.InferRequest
    ledger: Ledger
    # What the request reads. It keeps a pointer into each array, not a reference.
    inputs: dict[str, NDArray[np.generic]] = field(default_factory=dict)


class StatefulEngine:
    """`Engine` over a compiled span (`swarm.engine.compose.compose` says what its inputs are)."""

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
        self._sessions.claim(session)
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
            return  # a request that cannot be emptied is not for another session; dropping it frees it
        self._spare.append(closed.request)

    def forward(self, steps: Sequence[Step]) -> list[StepResult]:
        """As `Engine` says; see `run_in_turn`."""
        return run_in_turn(steps, self._step)

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
            # The cache may hold half a step now, and the request may be stuck in it.
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
            # One row at least: a graph need not cope with an empty tensor.
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
        """Copy `values` to where the request reads `name`; the request hears of it where the shape changed."""
        index = self._ports.get(name)
        if index is None:
            return  # a span leaves out the inputs that none of its layers reads
        held = session.inputs.get(name)
        if held is not None and held.shape == values.shape:
            held[...] = values
        else:
            held = session.inputs[name] = np.array(values, dtype, order="C")
            session.request.set_input_tensor(index, ov.Tensor(held, shared_memory=True))

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
    """Let every cached tensor [1, heads, slots, size] go on with the slots `keep` alone."""
    if len(keep) == 0:
        request.reset_state()
        return
    for variable in request.query_state():
        cached = variable.state.data
        if cached.ndim != 4 or cached.shape[2] != slots:
            raise EngineError(f"state {variable.name} is {list(cached.shape)} where {slots} slots were expected")
        variable.state = ov.Tensor(np.ascontiguousarray(cached[:, :, keep]))

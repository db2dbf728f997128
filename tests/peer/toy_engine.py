"""An Engine in a few lines of Python: every layer is integer arithmetic, the cache is a list of ids.

A layer mixes a position's vector with a sum over the ids cached before it, all modulo small primes. float32 is exact
then, and all cuts into spans, chunks and rewinds give the same numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from swarm.engine.base import Step, StepResult
from swarm.errors import BadStep, ContextExceeded, EngineError, SwarmError, UnknownSession
from swarm.model.manifest import EMBED, HEAD, TOKENIZER, FileEntry, LayerSpec, Manifest, even_grid, layer_part
from swarm.model.numerics import Numerics
from swarm.model.spans import LayerRange

HIDDEN, VOCAB, LAYERS, CONTEXT = 8, 64, 6, 256


def toy_manifest(layers: int = LAYERS, *, name: str = "toy") -> Manifest:
    parts = [EMBED, HEAD, TOKENIZER, *map(layer_part, range(layers))]
    return Manifest(
        name=name,
        architecture="toy",
        source="tests",
        licence="Apache-2.0",
        weights="none",
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        context_length=CONTEXT,
        eos_token_ids=(0,),
        layers=(LayerSpec(kv_heads=1, key_size=4, value_size=4),) * layers,
        grid=even_grid(layers, layers),
        parts={part: (FileEntry(path=f"{part}.bin", size=1, sha256=f"{i:064x}"),) for i, part in enumerate(parts)},
    )


class ToyEngine:
    """`Engine` over `span` of a toy model. Each `forward` waits until `gate` is set, if there is one."""

    def __init__(self, span: LayerRange, *, layers: int = LAYERS, gate: threading.Event | None = None) -> None:
        self.span = span
        self.numerics = Numerics(inference="f32", kv="f32")
        self.sessions: dict[str, list[list[int]]] = {}
        self.limits: dict[str, int] = {}
        self.threads: set[int] = set()
        self.calls: list[int] = []
        self.broken: Exception | None = None
        self._layers = layers
        self._gate = gate

    def open(self, session: str, max_tokens: int) -> None:
        self.threads.add(threading.get_ident())
        if session in self.sessions:
            raise EngineError(f"session {session} exists")
        self.sessions[session] = []
        self.limits[session] = max_tokens

    def length(self, session: str) -> int:
        return len(self._cache(session))

    def close(self, session: str) -> None:
        self.threads.add(threading.get_ident())
        self.sessions.pop(session, None)
        self.limits.pop(session, None)

    def forward(self, steps: Sequence[Step]) -> list[StepResult]:
        self.threads.add(threading.get_ident())
        self.calls.append(len(steps))
        if self._gate is not None:
            self._gate.wait(20)
        if self.broken is not None:
            raise self.broken
        results: list[StepResult] = []
        for step in steps:
            try:
                results.append(self._step(step))
            except SwarmError as error:
                results.append(error)
        return results

    def _cache(self, session: str) -> list[list[int]]:
        try:
            return self.sessions[session]
        except KeyError:
            raise UnknownSession(f"{session} is not open") from None

    def _check(self, step: Step) -> None:
        for token in step.tokens:
            if not 0 <= token < VOCAB:
                raise BadStep(f"token id {token} is outside the vocabulary of {VOCAB}")
        if self.span.first == 0:
            if step.hidden is not None:
                raise BadStep(f"layers {self.span} take token ids, not hidden states")
        elif step.hidden is None:
            raise BadStep(f"layers {self.span} take hidden states, and the step has none")
        elif step.hidden.shape != (len(step.tokens), HIDDEN):
            raise BadStep(f"hidden states are {step.hidden.shape}, not {(len(step.tokens), HIDDEN)}")
        elif not np.isfinite(step.hidden).all():
            raise BadStep("hidden states are not finite")

    def _step(self, step: Step) -> NDArray[np.float32]:
        cache = self._cache(step.session)
        if step.start > len(cache):
            raise BadStep(f"start {step.start} is beyond {len(cache)}")
        if step.end > self.limits[step.session]:
            raise ContextExceeded(f"{step.end} is over {self.limits[step.session]}")
        self._check(step)
        del cache[step.start :]
        rows = []
        for i, token in enumerate(step.tokens):
            vector = embed(int(token)) if step.hidden is None else [round(float(x)) for x in step.hidden[i]]
            for layer in self.span:
                # the cache enters as a sum, which no rewind, chunk or cut changes
                cached = sum(past[0] for past in cache) % 13
                vector = [(x * 3 + (layer + 1) * (cached + k)) % 101 for k, x in enumerate(vector)]
            cache.append([int(token)])
            rows.append(vector)
        if self.span.last < self._layers:
            return np.array(rows, np.float32)
        picked = rows[len(rows) - step.rows :] if step.rows else []
        return np.array([unembed(vector) for vector in picked], np.float32).reshape(step.rows, VOCAB)


def embed(token: int) -> list[int]:
    return [(token * 7 + k) % 101 for k in range(HIDDEN)]


def unembed(vector: list[int]) -> list[int]:
    return [sum(x * ((v * 5 + k * 11) % 17) for k, x in enumerate(vector)) % 997 for v in range(VOCAB)]


def toy_text(prompt: Sequence[int], count: int, *, layers: int = LAYERS) -> list[int]:
    """The greedy continuation by one engine over all layers, computed token by token."""
    engine = ToyEngine(LayerRange(0, layers), layers=layers)
    engine.open("reference", CONTEXT)
    known = list(prompt)
    for position in range(len(prompt) + count - 1):
        step = Step(session="reference", start=position, tokens=np.array([known[position]], np.int32), rows=1)
        (logits,) = engine.forward([step])
        assert not isinstance(logits, SwarmError)
        if position >= len(prompt) - 1:
            known.append(int(logits[0].argmax()))
    return known[len(prompt) :]

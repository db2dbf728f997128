"""The reference: runs one layer, or embedding and head, with transformers, and measures a graph's deviation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.checkpoint.decoder import Decoder
from export.checkpoint.torch_stack import quiet
from export.verify.runner import Runner, Step

_SEED = 1
Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class LayerRun:
    """A run of one layer by transformers: its input and output [1, n, hidden] f32."""

    before: Floats
    after: Floats

    def deviation(self, found: Floats) -> float:
        """The deviation of `found` from `after`, as a share of what the layer adds to its input (root mean squares)."""
        added = float(np.sqrt(np.mean((self.after - self.before) ** 2)))
        return float(np.sqrt(np.mean((self.after - found) ** 2))) / max(added, 1e-30)


def random_hidden(size: int, tokens: int) -> Floats:
    """Random hidden states [1, tokens, size], normally distributed."""
    numbers: Floats = np.random.default_rng(_SEED).normal(0, 1, (1, tokens, size)).astype(np.float32)
    return numbers


def run_reference_layer(decoder: Decoder, layer: int, texts: Sequence[Floats]) -> list[LayerRun]:
    """Run layer `layer` of the checkpoint on each of `texts`, hidden states [1, n, size]."""
    model = decoder.load_layer(layer, exact=True)
    found = []
    for before in texts:
        with _hooked(_layer_of(decoder, model), before=before) as captured:
            _run(model.base_model, inputs_embeds=_tensor(before))
        found.append(LayerRun(before=before, after=captured[1]))
    return found


class EmbedAndHead:
    """A model of layer 0 alone with the real embedding, last norm and head."""

    def __init__(self, decoder: Decoder, *, vocabulary: int | None = None) -> None:
        """`vocabulary` limits the model to the first tokens.

        Raises DamagedFile or PackageError if the checkpoint's weights do not fit its config.
        """
        tokens = int(decoder.config.vocab_size) if vocabulary is None else vocabulary
        self._model = decoder.load_layer(0, exact=True, with_ends=True, vocabulary=tokens)
        self._layer = _layer_of(decoder, self._model)

    def embed(self, tokens: NDArray[np.int64]) -> Floats:
        """The input of layer 0, [1, n, hidden], for `tokens` [n]."""
        with _hooked(self._layer) as captured:
            _run(self._model.base_model, input_ids=_tensor(tokens[None]))
        return captured[0]

    def logits(self, after: Floats) -> Floats:
        """The logits [1, n, vocabulary] for `after`, the last layer's output [1, n, hidden]."""
        tokens = np.zeros(after.shape[:2], np.int64)
        with _hooked(self._layer, after=after):
            output = _run(self._model, input_ids=_tensor(tokens)).logits.numpy()
        return np.asarray(output, np.float32)


def _layer_of(decoder: Decoder, model: Any) -> Any:
    return model.get_submodule(f"{decoder.stack}.0")


def _tensor(numbers: NDArray[Any]) -> Any:
    import torch

    return torch.from_numpy(numbers.copy())


def _numbers(hidden: Any) -> Floats:
    """[1, n, size], a copy."""
    numbers: Floats = hidden.reshape(1, *hidden.shape[-2:]).numpy().copy()
    return numbers


def _run(model: Any, **inputs: Any) -> Any:
    import torch

    with quiet(), torch.no_grad():
        return model(**inputs, use_cache=False)


@contextmanager
def _hooked(layer: Any, *, before: Floats | None = None, after: Floats | None = None) -> Iterator[list[Floats]]:
    """Capture the input and the output of a module when it runs; `before` and `after` replace them.

    Replacing the input skips what a model does to an embedding before its first layer (granite multiplies it).
    """
    captured: list[Floats] = []

    def enter(_module: Any, arguments: Any, keywords: Any) -> Any:
        hidden = arguments[0] if arguments else keywords["hidden_states"]
        captured.append(_numbers(hidden))
        if before is None:
            return None
        new = _tensor(before).reshape(hidden.shape)
        return ((new, *arguments[1:]), keywords) if arguments else ((), keywords | {"hidden_states": new})

    def leave(_module: Any, _arguments: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        captured.append(_numbers(hidden))
        if after is None:
            return None
        new = _tensor(after).reshape(hidden.shape)
        return (new, *output[1:]) if isinstance(output, tuple) else new

    handles = [layer.register_forward_pre_hook(enter, with_kwargs=True), layer.register_forward_hook(leave)]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def deviation(true: Floats, found: Floats) -> float:
    """The deviation of `found` from `true`, as a share of `true` (root mean squares)."""
    return float(np.sqrt(np.mean((true - found) ** 2))) / max(float(np.sqrt(np.mean(true**2))), 1e-30)


def run_layer(runner: Runner, hidden: Floats, *, prefill: int, step: int = 1) -> Floats:
    """The graph's output for `hidden`: `prefill` positions first, then `step` positions at a time."""
    count = hidden.shape[1]
    bounds = [(0, prefill), *((at, min(at + step, count)) for at in range(prefill, count, step))]
    return np.concatenate([runner.run(Step.of(begin, end), hidden[:, begin:end]) for begin, end in bounds], axis=1)

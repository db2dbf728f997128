"""What transformers computes, one layer or the two ends at a time, and how far a graph of ours is from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.checkpoint.one_layer import Decoder
from export.checkpoint.torch_stack import quiet
from export.verify.runner import Runner, Step

_SEED = 1
Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Passage:
    """One layer's work on a text: its input and output [1, n, hidden], in f32 by transformers."""

    before: Floats
    after: Floats

    def deviation(self, found: Floats) -> float:
        """How far `found` is from `after`, as a share of what the layer adds to its input (root mean squares)."""
        added = float(np.sqrt(np.mean((self.after - self.before) ** 2)))
        return float(np.sqrt(np.mean((self.after - found) ** 2))) / max(added, 1e-30)


def random_hidden(size: int, tokens: int) -> Floats:
    """Random hidden states [1, tokens, size] of the size that embeddings have."""
    numbers: Floats = np.random.default_rng(_SEED).normal(0, 1, (1, tokens, size)).astype(np.float32)
    return numbers


def passages(decoder: Decoder, layer: int, texts: Sequence[Floats]) -> list[Passage]:
    """Run layer `layer` of the checkpoint on each of `texts` [1, n, size] in one go."""
    model = decoder.load_layer(layer, exact=True)
    found = []
    for before in texts:
        with _put(_layer_of(decoder, model), before=before) as seen:
            _run(model.base_model, inputs_embeds=_tensor(before))
        found.append(Passage(before=before, after=seen[1]))
    return found


class EmbedAndHead:
    """A model of layer 0 alone with the true embedding, last norm and head."""

    def __init__(self, decoder: Decoder, *, vocabulary: int | None = None) -> None:
        """`vocabulary` leaves only so many tokens in it.

        Raises DamagedFile, PackageError where the checkpoint's weights do not fit its config.
        """
        tokens = int(decoder.config.vocab_size) if vocabulary is None else vocabulary
        self._model = decoder.load_layer(0, exact=True, ends=True, vocabulary=tokens)
        self._layer = _layer_of(decoder, self._model)

    def embed(self, tokens: NDArray[np.int64]) -> Floats:
        """What layer 0 gets [1, n, hidden] for `tokens` [n]."""
        with _put(self._layer) as seen:
            _run(self._model.base_model, input_ids=_tensor(tokens[None]))
        return seen[0]

    def logits(self, after: Floats) -> Floats:
        """[1, n, vocabulary] for what the last layer gives, [1, n, hidden]."""
        tokens = np.zeros(after.shape[:2], np.int64)
        with _put(self._layer, after=after):
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
def _put(layer: Any, *, before: Floats | None = None, after: Floats | None = None) -> Iterator[list[Floats]]:
    """Gives the input and the output of a module once it has run; `before` and `after` stand in for them.

    So what a model does to an embedding on its way to the first layer (granite multiplies it) stays away from others.
    """
    seen: list[Floats] = []

    def enter(_module: Any, arguments: Any, keywords: Any) -> Any:
        given = arguments[0] if arguments else keywords["hidden_states"]
        seen.append(_numbers(given))
        if before is None:
            return None
        stand_in = _tensor(before).reshape(given.shape)
        return ((stand_in, *arguments[1:]), keywords) if arguments else ((), keywords | {"hidden_states": stand_in})

    def leave(_module: Any, _arguments: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        seen.append(_numbers(first))
        if after is None:
            return None
        stand_in = _tensor(after).reshape(first.shape)
        return (stand_in, *output[1:]) if isinstance(output, tuple) else stand_in

    handles = [layer.register_forward_pre_hook(enter, with_kwargs=True), layer.register_forward_hook(leave)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def deviation(true: Floats, found: Floats) -> float:
    """How far `found` is from `true`, as a share of it (root mean squares)."""
    return float(np.sqrt(np.mean((true - found) ** 2))) / max(float(np.sqrt(np.mean(true**2))), 1e-30)


def run_layer(runner: Runner, hidden: Floats, *, prefill: int, step: int = 1) -> Floats:
    """The graph's output for `hidden`: `prefill` positions at once, the others `step` by `step`."""
    count = hidden.shape[1]
    bounds = [(0, prefill), *((at, min(at + step, count)) for at in range(prefill, count, step))]
    return np.concatenate([runner.run(Step.of(begin, end), hidden[:, begin:end]) for begin, end in bounds], axis=1)

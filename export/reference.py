"""What transformers computes for one layer, and how far a graph of ours is from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.onelayer import Decoder
from export.runner import Runner, Step
from export.torch_stack import quiet

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


def passage(decoder: Decoder, layer: int, hidden: Floats) -> Passage:
    """Run layer `layer` of the checkpoint on `hidden` [1, n, size] in one go."""
    import torch

    model = decoder.load_layer(layer, exact=True)
    with quiet(), torch.no_grad(), _watched(model.get_submodule(f"{decoder.stack}.0")) as seen:
        model.base_model(inputs_embeds=torch.from_numpy(hidden), use_cache=False)
    before, after = (tensor.reshape(hidden.shape).numpy() for tensor in seen)
    return Passage(before=before, after=after)


@dataclass(frozen=True, kw_only=True)
class Ends:
    """The embedding of tokens 0, 1, 2 ... [1, n, hidden]; what layer 0 makes of it, and the head of that, in f32."""

    embedded: Floats
    after: Floats
    logits: Floats


def ends(decoder: Decoder, tokens: int) -> Ends:
    """Run a model of layer 0 alone with the true embedding, last norm and head on the first `tokens` tokens."""
    import torch

    vocabulary = int(decoder.config.vocab_size)
    model = decoder.load_layer(0, exact=True, vocabulary=vocabulary)
    ids = torch.arange(tokens)[None] % vocabulary
    with quiet(), torch.no_grad(), _watched(model.get_submodule(f"{decoder.stack}.0")) as seen:
        logits = model(input_ids=ids, use_cache=False).logits
    before, after = (tensor.reshape(1, tokens, -1).numpy() for tensor in seen)
    return Ends(embedded=before, after=after, logits=logits.numpy())


@contextmanager
def _watched(module: Any) -> Iterator[list[Any]]:
    """The input and the output of a module, once it has run."""
    seen: list[Any] = []

    def remember(_module: Any, arguments: Any, keywords: Any, output: Any) -> None:
        before = arguments[0] if arguments else keywords["hidden_states"]
        seen.extend((before, output[0] if isinstance(output, tuple) else output))

    handle = module.register_forward_hook(remember, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def run_layer(runner: Runner, hidden: Floats, *, prefill: int, step: int = 1) -> Floats:
    """The graph's output for `hidden`: `prefill` positions at once, the others `step` by `step`."""
    count = hidden.shape[1]
    bounds = [(0, prefill), *((at, min(at + step, count)) for at in range(prefill, count, step))]
    return np.concatenate([runner.run(Step.of(begin, end), hidden[:, begin:end]) for begin, end in bounds], axis=1)

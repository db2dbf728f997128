"""Do static graphs compute what the graphs that they were made of compute, wherever a text may end?

Both engines run one layer over a whole context. That finds what the structure of a graph does not show: a mask that
holds more than who may see whom, a sliding window that the manifest does not know, or one that is none.
"""

from __future__ import annotations

import hashlib
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from export.graph.part_file import structure
from export.sources.source import Progress, silent
from swarm.engine.base import Engine, Step
from swarm.engine.compose import open_engine
from swarm.engine.static.engine import open_static_engine
from swarm.errors import SwarmError, UnsupportedModel
from swarm.model.manifest import Manifest, layer_part
from swarm.model.spans import LayerRange

_TOLERANCE = 1e-3  # of the largest number in the result; both compute in f32
_DECODED = 2  # tokens at the end that come one by one
_ROWS = 8  # of logits in a chunk, where a layer is only to be had with the head
_SMALL = 64  # bytes of a constant that is a setting, such as a window, and no table
_INTEGERS = re.compile(rb'element_type="i\d\d" shape="[^"]*" offset="(\d+)" size="(\d+)"')


def check_static_layers(package: Path, manifest: Manifest, progress: Progress = silent) -> None:
    """Run one layer of each kind. Raises UnsupportedModel naming the one that differs, and by how much."""
    kinds: dict[str, int] = {}
    # From the middle on, for what is at an end is run with the embedding or the head.
    for layer in (*list(manifest.span)[1:], 0):
        kinds.setdefault(_kind(package, manifest, layer), layer)
    for done, layer in enumerate(kinds.values()):
        progress("checking static graphs", done, len(kinds))
        _check(package, manifest, layer)
    progress("checking static graphs", len(kinds), len(kinds))


def _kind(package: Path, manifest: Manifest, layer: int) -> str:
    """Equal for layers that differ in their weights alone."""
    part = package / layer_part(layer)
    graph, weights = part.with_suffix(".xml").read_bytes(), part.with_suffix(".bin").read_bytes()
    digest = hashlib.sha256(repr(manifest.layers[layer]).encode())
    digest.update(structure(part.with_suffix(".xml")))
    for found in _INTEGERS.finditer(graph):
        at, size = int(found[1]), int(found[2])
        if size <= _SMALL:
            digest.update(weights[at : at + size])
    return digest.hexdigest()


def _check(package: Path, manifest: Manifest, layer: int) -> None:
    alone = LayerRange(layer, layer + 1)
    expected = _run(open_engine(package, manifest, alone), manifest)
    found = _run(open_static_engine(package, manifest, alone), manifest)
    apart = np.abs(found - expected).max(axis=1)
    if not float(apart.max()) <= _TOLERANCE * max(float(np.abs(expected).max()), 1e-6):
        window = manifest.layers[layer].window
        attention = "full attention" if window is None else f"a sliding window of {window}"
        raise UnsupportedModel(
            f"{layer_part(layer)} without state differs from itself with it by up to {float(apart.max()):.3g}: it does "
            f"not attend as {attention} does, or adds more than a mask; export the model without --static"
        )


def _run(engine: Engine, manifest: Manifest) -> NDArray[np.float32]:
    """Made-up input over the whole context, in chunks and then token by token: hidden states, or some logits."""
    assert manifest.static is not None
    span, context, chunk = engine.span, manifest.static.context, manifest.static.chunk
    random = np.random.default_rng(0)
    tokens = random.integers(0, manifest.vocab_size, context).astype(np.int32)
    hidden = random.normal(size=(context, manifest.hidden_size)).astype(np.float32)
    edges = [*range(0, context - _DECODED, chunk), *range(context - _DECODED, context + 1)]
    engine.open("check", context)
    results = []
    for start, end in pairwise(edges):
        step = Step(
            session="check",
            start=start,
            tokens=tokens[start:end],
            hidden=None if span.first == 0 else hidden[start:end],
            rows=min(_ROWS, end - start) if span.last == len(manifest.layers) else 0,
        )
        (result,) = engine.forward([step])
        if isinstance(result, SwarmError):
            raise result
        results.append(result)
    return np.concatenate(results)

"""Compares static graphs with the stateful graphs that they were made of, at every position of the context.

Both engines run one layer over a whole context. This detects errors that the structure of a graph does not show: a mask
with more than the visibility of keys, or a sliding window that the manifest does not have, or has without reason.
"""

from __future__ import annotations

import hashlib
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from export.graph.part_file import structure
from export.sources.source import Progress, no_progress
from swarm.engine.base import Engine, Step
from swarm.engine.compose import open_engine
from swarm.engine.static.engine import open_static_engine
from swarm.errors import SwarmError, UnsupportedModel
from swarm.model.manifest import Manifest, layer_part
from swarm.model.spans import LayerRange

_TOLERANCE = 1e-3  # of the largest number in the result; both compute in f32
_DECODED = 2  # tokens at the end that run one by one
_ROWS = 8  # rows of logits per chunk, for a last layer, which runs with the head
_SMALL = 64  # largest size in bytes of a constant that is a setting, such as a window, and not a table
_INTEGERS = re.compile(rb'element_type="i\d\d" shape="[^"]*" offset="(\d+)" size="(\d+)"')


def check_static_layers(package: Path, manifest: Manifest, progress: Progress = no_progress) -> None:
    """Compare one layer of each kind. Raises UnsupportedModel naming a layer that differs, and by how much."""
    kinds: dict[str, int] = {}
    # Layer 0 comes last: it runs with the embedding, and a middle layer of its kind runs alone.
    for layer in (*list(manifest.span)[1:], 0):
        kinds.setdefault(_kind(package, manifest, layer), layer)
    for done, layer in enumerate(kinds.values()):
        progress("checking static graphs", done, len(kinds))
        _check(package, manifest, layer)
    progress("checking static graphs", len(kinds), len(kinds))


def _kind(package: Path, manifest: Manifest, layer: int) -> str:
    """A key that is equal for layers that differ only in their weights."""
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
    span = LayerRange(layer, layer + 1)
    expected = _run(open_engine(package, manifest, span), manifest)
    found = _run(open_static_engine(package, manifest, span), manifest)
    difference = float(np.abs(found - expected).max())
    if not difference <= _TOLERANCE * max(float(np.abs(expected).max()), 1e-6):
        window = manifest.layers[layer].window
        attention = "full attention" if window is None else f"a sliding window of {window}"
        raise UnsupportedModel(
            f"the static graph of {layer_part(layer)} differs from the stateful one by up to {difference:.3g}: its "
            f"attention is not {attention}, or adds more than a mask; export the model without --static"
        )


def _run(engine: Engine, manifest: Manifest) -> NDArray[np.float32]:
    """Run random input over the whole context, in chunks and then token by token: hidden states, or some logits."""
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

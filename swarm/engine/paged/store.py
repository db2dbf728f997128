"""The memory of the blocks: for each layer, the keys and values of all blocks.

Engines over parts of one span share a store, and each uses its own layers of it. All sessions of a peer
therefore share one pool. The system allocates the memory when blocks are first written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from swarm.engine.paged.block_tables import BlockTables
from swarm.engine.paged.blocks import BlockPool
from swarm.engine.paged.spill import Spill
from swarm.errors import EngineError
from swarm.model.spans import LayerRange

# Blocks that were never written take no memory. Without a limit, unused cached blocks would grow to the whole pool.
_MAX_CACHED_TOKENS = 32768
_CACHE = re.compile(r"(key|value)_cache\.(\d+)")
CacheKey = tuple[int, str]
"""(layer of the model, `key` or `value`)."""


class KvStore:
    """Keys and values of `span`'s layers in the blocks of `pool`."""

    def __init__(self, compiled: ov.CompiledModel, span: LayerRange, *, tokens: int) -> None:
        """Room for `tokens` positions, in the shapes that `compiled`, the paged graph of `span`, declares.

        Raises EngineError if it declares none, or there is no memory for one block.
        """
        layouts = dict(_layouts(compiled, span))
        # Axis 1 of the values is the block size. A quantized cache stores scales too, but not along this axis.
        sizes = {shape[1] for (_, kind), (shape, _) in layouts.items() if kind == "value"}
        if len(layouts) != 2 * len(span) or len(sizes) != 1:
            raise EngineError(f"the device has {len(layouts)} paged caches for layers {span}: use --engine stateful")
        (size,) = sizes
        self.span = span
        self.pool = BlockPool(-(-tokens // size), size, max_cached=_MAX_CACHED_TOKENS // size)
        self.tables = BlockTables(self.pool)
        block_bytes = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in layouts.values())
        self._layouts = layouts
        self._spill: Spill | None = None
        try:
            self._arrays = {key: np.zeros((self.pool.count, *shape), dtype) for key, (shape, dtype) in layouts.items()}
        except MemoryError as error:
            raise EngineError(
                f"{self.pool.count} blocks of {block_bytes} bytes are more than this machine has: lower --kv-memory"
            ) from error

    def bind(self, request: ov.InferRequest, compiled: ov.CompiledModel, span: LayerRange) -> None:
        """Connect a request of `compiled`, a graph of `span`, to the store. Raises EngineError if the shapes differ."""
        for key, layout in _layouts(compiled, span):
            if self._layouts.get(key) != layout:
                raise EngineError(
                    f"the cache of layer {key[0]} is {layout} alone and {self._layouts.get(key)} in {self.span}"
                )
        for port in compiled.inputs:
            for name in port.get_names():
                if found := _CACHE.fullmatch(name):
                    array = self._arrays[span.first + int(found[2]), found[1]]
                    request.set_tensor(name, ov.Tensor(array, shared_memory=True))

    def copy(self, source: int, target: int) -> None:
        """Copy a block, in all layers."""
        for array in self._arrays.values():
            array[target] = array[source]

    def spill_to(self, spill: Spill) -> None:
        """From now on, save the blocks of evicted sessions to `spill`."""
        self._spill = spill
        self.tables.disk = self

    def save(self, session: str, blocks: Sequence[int]) -> bool:
        """See `Disk`."""
        return self._spill is not None and self._spill.save(session, self._parts(blocks))

    def load(self, session: str, blocks: Sequence[int]) -> None:
        """See `Disk`. Raises DamagedFile."""
        if self._spill is not None:
            self._spill.load(session, self._parts(blocks))

    def drop(self, session: str) -> None:
        if self._spill is not None:
            self._spill.drop(session)

    def _parts(self, blocks: Sequence[int]) -> list[NDArray[np.generic]]:
        """Views of all layers of each block, block by block."""
        return [array[block] for block in blocks for array in self._arrays.values()]


def _layouts(
    compiled: ov.CompiledModel, span: LayerRange
) -> Iterator[tuple[CacheKey, tuple[tuple[int, ...], np.dtype[np.generic]]]]:
    """Each cache of the graph: the shape of one block, and its dtype."""
    for port in compiled.inputs:
        for name in port.get_names():
            if found := _CACHE.fullmatch(name):
                shape = port.get_partial_shape()
                if any(shape[axis].is_dynamic for axis in range(1, len(shape))):
                    raise EngineError(f"the device gives {name} a dynamic shape, {shape}: use --engine stateful")
                sizes = tuple(shape[axis].get_length() for axis in range(1, len(shape)))
                yield (span.first + int(found[2]), found[1]), (sizes, np.dtype(port.get_element_type().to_dtype()))

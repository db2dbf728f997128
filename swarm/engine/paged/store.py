"""The memory behind the blocks: for each layer, keys and values of all of them.

Engines over parts of one span share a store: each uses its own layers of it, so that all sessions of a peer
draw on one pool. The system gives the memory as blocks are first written.
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

# The pages of a block that was never written cost nothing; what is kept for nobody in particular should not grow
# to all that a peer may take.
_MAX_KEPT_TOKENS = 32768
_CACHE = re.compile(r"(key|value)_cache\.(\d+)")
Place = tuple[int, str]
"""(layer of the model, `key` or `value`)."""


class KvStore:
    """Keys and values of `span`'s layers in the blocks of `pool`."""

    def __init__(self, compiled: ov.CompiledModel, span: LayerRange, *, tokens: int) -> None:
        """Room for `tokens` positions, in the shapes that `compiled`, the paged graph of `span`, states.

        Raises EngineError where it states none, or there is no room for one block.
        """
        layouts = dict(_layouts(compiled, span))
        # a quantised cache keeps scales beside the numbers; along this axis of the values it has none
        sizes = {shape[1] for (_, kind), (shape, _) in layouts.items() if kind == "value"}
        if len(layouts) != 2 * len(span) or len(sizes) != 1:
            raise EngineError(f"the device states {len(layouts)} caches for layers {span}: --engine stateful has none")
        (size,) = sizes
        self.span = span
        self.pool = BlockPool(-(-tokens // size), size, max_kept=_MAX_KEPT_TOKENS // size)
        self.tables = BlockTables(self.pool)
        self.block_bytes = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in layouts.values())
        self._layouts = layouts
        self._spill: Spill | None = None
        try:
            self._arrays = {
                place: np.zeros((self.pool.count, *shape), dtype) for place, (shape, dtype) in layouts.items()
            }
        except MemoryError as error:
            raise EngineError(
                f"{self.pool.count} blocks of {self.block_bytes} bytes are more than this machine has: "
                "lower --kv-memory"
            ) from error

    def bind(self, request: ov.InferRequest, compiled: ov.CompiledModel, span: LayerRange) -> None:
        """Let a request of `compiled`, a graph of `span`, use the store. Raises EngineError where it does not fit."""
        wanted = dict(_layouts(compiled, span))
        for place, layout in wanted.items():
            if self._layouts.get(place) != layout:
                raise EngineError(
                    f"the cache of layer {place[0]} is {layout} alone and {self._layouts.get(place)} in {self.span}"
                )
        for port in compiled.inputs:
            for name in port.get_names():
                if found := _CACHE.fullmatch(name):
                    array = self._arrays[span.first + int(found[2]), found[1]]
                    request.set_tensor(name, ov.Tensor(array, shared_memory=True))

    def copy(self, source: int, target: int) -> None:
        """All layers of a block."""
        for array in self._arrays.values():
            array[target] = array[source]

    def spill_to(self, spill: Spill) -> None:
        """Let blocks of pausing sessions go to disk from now on, when others need the room."""
        self._spill = spill
        self.tables.disk = self

    def save(self, session: str, blocks: Sequence[int]) -> bool:
        """As `tables.Disk` says."""
        return self._spill is not None and self._spill.put(session, self._parts(blocks))

    def load(self, session: str, blocks: Sequence[int]) -> None:
        """As `tables.Disk` says. Raises DamagedFile."""
        if self._spill is not None:
            self._spill.take(session, self._parts(blocks))

    def drop(self, session: str) -> None:
        if self._spill is not None:
            self._spill.drop(session)

    def _parts(self, blocks: Sequence[int]) -> list[NDArray[np.generic]]:
        """Views: all layers of a block, block after block."""
        return [array[block] for block in blocks for array in self._arrays.values()]


def _layouts(
    compiled: ov.CompiledModel, span: LayerRange
) -> Iterator[tuple[Place, tuple[tuple[int, ...], np.dtype[np.generic]]]]:
    """Each cache of the graph: the shape of one block, and the type of its numbers."""
    for port in compiled.inputs:
        for name in port.get_names():
            if found := _CACHE.fullmatch(name):
                shape = port.get_partial_shape()
                if any(shape[axis].is_dynamic for axis in range(1, len(shape))):
                    raise EngineError(f"the device leaves the shape of {name} open, {shape}: use --engine stateful")
                sizes = tuple(shape[axis].get_length() for axis in range(1, len(shape)))
                yield (span.first + int(found[2]), found[1]), (sizes, np.dtype(port.get_element_type().to_dtype()))

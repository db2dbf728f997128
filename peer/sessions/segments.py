"""The engines of a peer: one for its whole span, and more for parts of it that a route asked for.

A route may enter or leave inside the span, at a boundary of the manifest's grid. That needs a graph of
just those layers. It is compiled when the first session asks for it, and given up when none uses it and
the place is wanted, or after a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.engine.base import Engine
from swarm.errors import EngineError, PeerBusy, PeerFailed
from swarm.model.spans import LayerRange

_UNUSED_S = 300.0
_RETRY_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Builder:
    """How a part of the span becomes an engine. Both functions run in the executor.

    `build` compiles it (seconds); `refuse` says why there is no memory for it, or nothing.
    """

    build: Callable[[LayerRange], Engine]
    refuse: Callable[[LayerRange], str]
    most: int = 2


@dataclass(eq=False)
class _Segment:
    engine: Engine
    users: int = 0
    idle_since: float = field(default=0.0)


class Segments:
    """Leases of engines. Each lease is released once; releasing more often is a bug of the caller."""

    def __init__(
        self,
        whole: Engine,
        *,
        entries: tuple[int, ...] = (),
        builder: Builder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._whole = whole
        self._builder = builder
        self._clock = clock
        self.entries = entries if builder is not None else ()
        self._segments: dict[LayerRange, _Segment] = {}
        self._building: dict[LayerRange, asyncio.Task[_Segment]] = {}

    @property
    def whole(self) -> Engine:
        return self._whole

    def check(self, layers: LayerRange) -> None:
        """Raises PeerFailed where this peer never serves these layers: the record that said so is old."""
        span = self._whole.span
        edges = {span.first, span.last, *self.entries}
        if not (span.covers(layers) and {layers.first, layers.last} <= edges):
            inside = f", with entries at {', '.join(map(str, self.entries))}" if self.entries else ""
            raise PeerFailed(f"this peer serves layers {span}{inside}, not {layers}; look up its record again")

    async def lease(self, layers: LayerRange) -> Engine:
        """The engine for `layers`, compiled if need be. Raises PeerBusy with the reason, PeerFailed."""
        self.check(layers)
        if layers == self._whole.span:
            return self._whole
        segment = self._segments.get(layers)
        if segment is None:
            task = self._building.get(layers)
            if task is None:
                task = self._building[layers] = asyncio.create_task(self._build(layers), name=f"compile {layers}")
                task.add_done_callback(lambda done: self._built(layers, done))
            # others may wait for the same graph: who gives up leaves it to them
            segment = await asyncio.shield(task)
        segment.users += 1
        return segment.engine

    def release(self, engine: Engine) -> None:
        for segment in self._segments.values():
            if segment.engine is engine:
                segment.users -= 1
                segment.idle_since = self._clock()

    def sweep(self) -> list[Engine]:
        """Give up what nobody used for a while; the engines, for the caller to let go of off the loop."""
        now = self._clock()
        old = [layers for layers, s in self._segments.items() if not s.users and now - s.idle_since > _UNUSED_S]
        return [self._segments.pop(layers).engine for layers in old]

    async def close(self) -> None:
        for task in list(self._building.values()):
            task.cancel()
        await asyncio.gather(*self._building.values(), return_exceptions=True)
        self._segments.clear()

    async def _build(self, layers: LayerRange) -> _Segment:
        assert self._builder is not None  # without one there are no entries to ask for
        loop = asyncio.get_running_loop()
        if len(self._segments) + len(self._building) > self._builder.most:
            await loop.run_in_executor(None, self._make_place(layers).clear)  # freeing a graph takes its time
        reason = await loop.run_in_executor(None, self._builder.refuse, layers)
        if reason:
            raise PeerBusy(f"layers {layers} need a graph of their own: {reason}", retry_after=_RETRY_S)
        try:
            engine = await loop.run_in_executor(None, self._builder.build, layers)
        except EngineError as error:
            raise PeerFailed(f"layers {layers} cannot be compiled on their own here: {error}") from error
        segment = self._segments[layers] = _Segment(engine, idle_since=self._clock())
        return segment

    def _make_place(self, layers: LayerRange) -> list[Engine]:
        """The engine that is given up for it, for the caller to let go of off the loop. Raises PeerBusy."""
        unused = [(segment.idle_since, part) for part, segment in self._segments.items() if not segment.users]
        if not unused:
            raise PeerBusy(
                f"layers {layers} need a graph of their own, and all places for such graphs are in use",
                retry_after=_RETRY_S,
            )
        return [self._segments.pop(min(unused)[1]).engine]

    def _built(self, layers: LayerRange, task: asyncio.Task[_Segment]) -> None:
        self._building.pop(layers, None)
        if not task.cancelled():
            task.exception()  # whoever waited has it; if nobody does any more it is no news

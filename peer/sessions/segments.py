"""The engines of a peer: one for its whole span, and one for each segment that a route asked for.

A route may enter or leave inside the span, at a boundary of the manifest's grid. That needs a graph of just those
layers. It is compiled when the first session asks for it. An unused segment is given up after five minutes, or when
another needs its place.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from swarm.engine.base import Engine
from swarm.errors import EngineError, PeerBusy, PeerFailed
from swarm.model.spans import LayerRange

_MAX_UNUSED_S = 300.0
_RETRY_S = 60.0


@dataclass(frozen=True, kw_only=True)
class SegmentBuilder:
    """Makes segments, at most `max_segments` at once. Both functions run in a thread of the default executor.

    `build` compiles an engine (seconds); `refuse` returns why there is too little memory for it, or "".
    """

    build: Callable[[LayerRange], Engine]
    refuse: Callable[[LayerRange], str]
    max_segments: int


@dataclass(eq=False)
class _Segment:
    engine: Engine
    idle_since: float
    users: int = 0


class Segments:
    """Leases engines to sessions. The caller releases each lease exactly once."""

    def __init__(
        self,
        whole: Engine,
        *,
        entries: tuple[int, ...] = (),
        builder: SegmentBuilder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.whole = whole
        self._builder = builder
        self._clock = clock
        self._entries = entries if builder is not None else ()
        self._segments: dict[LayerRange, _Segment] = {}
        self._building: dict[LayerRange, asyncio.Task[_Segment]] = {}

    def check(self, layers: LayerRange) -> None:
        """Raises PeerFailed if this peer does not serve these layers: the client has an outdated record."""
        span = self.whole.span
        edges = {span.first, span.last, *self._entries}
        if not (span.covers(layers) and {layers.first, layers.last} <= edges):
            inside = f", with entries at {', '.join(map(str, self._entries))}" if self._entries else ""
            raise PeerFailed(f"this peer serves layers {span}{inside}, not {layers}; look up its record again")

    async def lease(self, layers: LayerRange) -> Engine:
        """The engine for `layers`, compiled if necessary. Raises PeerBusy with the reason, PeerFailed."""
        self.check(layers)
        if layers == self.whole.span:
            return self.whole
        segment = self._segments.get(layers)
        if segment is None:
            task = self._building.get(layers)
            if task is None:
                task = self._building[layers] = asyncio.create_task(self._build(layers), name=f"compile {layers}")
                task.add_done_callback(lambda done: self._on_built(layers, done))
            # Shielded: cancelling one session must not cancel a compilation that others wait for.
            segment = await asyncio.shield(task)
        segment.users += 1
        return segment.engine

    def release(self, engine: Engine) -> None:
        for segment in self._segments.values():
            if segment.engine is engine:
                segment.users -= 1
                segment.idle_since = self._clock()

    def sweep(self) -> list[Engine]:
        """Give up long unused segments. Returns their engines, for the caller to free in a thread: that takes long."""
        now = self._clock()
        unused = [layers for layers, s in self._segments.items() if not s.users and now - s.idle_since > _MAX_UNUSED_S]
        return [self._segments.pop(layers).engine for layers in unused]

    async def close(self) -> None:
        for task in list(self._building.values()):
            task.cancel()
        await asyncio.gather(*self._building.values(), return_exceptions=True)
        self._segments.clear()

    async def _build(self, layers: LayerRange) -> _Segment:
        assert self._builder is not None  # without one there are no entries to ask for
        loop = asyncio.get_running_loop()
        if len(self._segments) + len(self._building) > self._builder.max_segments:
            await loop.run_in_executor(None, self._give_up_one(layers).clear)  # freeing a graph takes long
        reason = await loop.run_in_executor(None, self._builder.refuse, layers)
        if reason:
            raise PeerBusy(f"layers {layers} need a graph of their own: {reason}", retry_after=_RETRY_S)
        try:
            engine = await loop.run_in_executor(None, self._builder.build, layers)
        except EngineError as error:
            raise PeerFailed(f"layers {layers} cannot be compiled on their own here: {error}") from error
        segment = self._segments[layers] = _Segment(engine, idle_since=self._clock())
        return segment

    def _give_up_one(self, layers: LayerRange) -> list[Engine]:
        """Make a place for `layers`. Returns the engine that had it, as `sweep` does. Raises PeerBusy."""
        unused = [(segment.idle_since, span) for span, segment in self._segments.items() if not segment.users]
        if not unused:
            raise PeerBusy(
                f"layers {layers} need a graph of their own, and all places for such graphs are in use",
                retry_after=_RETRY_S,
            )
        return [self._segments.pop(min(unused)[1]).engine]

    def _on_built(self, layers: LayerRange, task: asyncio.Task[_Segment]) -> None:
        self._building.pop(layers, None)
        if not task.cancelled():
            task.exception()  # marked as retrieved: the sessions that waited have it

"""Draws an inspection for terminals: coverage by layer, tables of peers and hops, and why other routes lost.

Readable without colour: the shape of a bar shows the role of a peer, and `×` a gap.

::

    layers     0              11        17   20        30
    copies     2──────────────3─────────×××××1─────────
    1 anna     ██████████████████████░░░░░░░░░░░░░░░░░░   0:11
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from client.inspector.report import Inspection, ModelView, PeerView
from swarm.discovery.records import PeerRecord
from swarm.model.memory_footprint import format_bytes
from swarm.model.spans import LayerRange
from swarm.routing.plan import Alternative, HopPlan, Route

_ANY_WIDTH = 1000
_NAME_CELLS = 16
_ON_ROUTE, _SPARE, _UNUSABLE, _NOT_SERVED, _GAP = "█", "▒", "░", "·", "×"
_GAP_STYLE, _ROUTE_STYLE = "bold red", "bold green"


class Scale:
    """Maps layers to terminal cells: several cells for a layer, or several layers for a cell."""

    def __init__(self, layers: int, max_cells: int) -> None:
        self._layers = layers
        self.cells = max_cells // layers * layers if layers <= max_cells else max(1, max_cells)

    def cell(self, boundary: int) -> int:
        """The cell at which layer `boundary` begins."""
        return boundary * self.cells // self._layers

    def layers(self, cell: int) -> range:
        """The layers in a cell; never empty."""
        first = cell * self._layers // self.cells
        return range(first, max(first + 1, -(-(cell + 1) * self._layers // self.cells)))

    def covers(self, span: LayerRange, cell: int) -> bool:
        return any(layer in span for layer in self.layers(cell))


class Picture:
    """Renders an `Inspection` at any width from about 60 cells."""

    def __init__(self, inspection: Inspection) -> None:
        self._inspection = inspection

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._title()
        yield Text()
        yield from self._coverage(options.max_width)
        yield Text()
        wide_table = self._peers(wide=True)
        if Measurement.get(console, options.update(max_width=_ANY_WIDTH), wide_table).maximum <= options.max_width:
            yield wide_table
        else:
            yield self._peers(wide=False)
            yield Text()
            yield self._peer_details()
        yield Text()
        if self._inspection.route is not None:
            yield from self._route(self._inspection.route)
        else:
            yield Text(self._inspection.problem, _GAP_STYLE)
        yield from self._notes()

    def _title(self) -> Text:
        inspection = self._inspection
        peers = len(inspection.peers)
        facts = f"  {inspection.digest[:12]}  {inspection.request.layers} layers, {peers} peer{'s' * (peers != 1)}  "
        state = Text("covered", "green") if inspection.covered else Text("NOT COVERED", _GAP_STYLE)
        return Text.assemble((inspection.name, "bold"), facts, state)

    # -- which peers serve which layers ----------------------------------------------------------------------------

    def _coverage(self, width: int) -> Iterator[RenderableType]:
        names = [self._inspection.name_of(view.record.peer_id) for view in self._inspection.peers]
        name_cells = min(_NAME_CELLS, max([len("layers"), *map(len, names)])) + 2
        span_cells = len(f"  {self._inspection.request.layers}:{self._inspection.request.layers}")
        scale = Scale(self._inspection.request.layers, max(10, width - name_cells - 2 - span_cells))
        table = Table.grid(padding=(0, 1))
        table.add_column(width=name_cells, no_wrap=True, overflow="ellipsis")
        table.add_column(width=scale.cells, no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_row(Text("  layers", "dim"), self._axis(scale))
        table.add_row(Text("  copies", "dim"), self._copies(scale))
        for view, name in zip(self._inspection.peers, names, strict=True):
            mark = f"{view.hop + 1} " if view.hop is not None else "  "
            style = _ROUTE_STYLE if view.hop is not None else "dim" if view.left_out else ""
            table.add_row(Text(mark + name, style), self._bar(view, scale), Text(str(view.record.span), style))
        yield table
        yield Padding(self._legend(), (0, 0, 0, 2))

    def _axis(self, scale: Scale) -> Text:
        """Labels the first layer of each span, as far as there is room, and the end of the model."""
        layers = self._inspection.request.layers
        line = [" "] * scale.cells
        end = str(layers)
        starts = {0, *(view.record.span.first for view in self._inspection.peers)}
        free_from, limit = 0, scale.cells - len(end) - 1
        for start in sorted(start for start in starts if start < layers):
            label, cell = str(start), scale.cell(start)
            if free_from <= cell and cell + len(label) <= limit:
                line[cell : cell + len(label)] = label
                free_from = cell + len(label) + 1
        line[scale.cells - len(end) :] = end
        return Text("".join(line), "dim")

    def _copies(self, scale: Scale) -> Text:
        """The number of usable peers at each layer, printed where it changes; gaps in red."""
        line = Text()
        previous = -1
        for cell in range(scale.cells):
            layers = scale.layers(cell)
            count = min(self._inspection.coverage[layer] for layer in layers)
            if any(scale.covers(span, cell) for span in self._inspection.missing) or count == 0:
                count = 0
                line.append(_GAP, _GAP_STYLE)
            elif count != previous:
                line.append(str(count) if count < 10 else "+")
            else:
                line.append("─", "dim")
            previous = count
        return line

    def _bar(self, view: PeerView, scale: Scale) -> Text:
        on_route = self._route_spans(view)
        bar = Text()
        for cell in range(scale.cells):
            if any(scale.covers(span, cell) for span in on_route):
                bar.append(_ON_ROUTE, "green")
            elif scale.covers(view.record.span, cell):
                bar.append(_UNUSABLE if view.left_out else _SPARE, "dim" if view.left_out else "cyan")
            else:
                bar.append(_NOT_SERVED, "dim")
        return bar

    def _route_spans(self, view: PeerView) -> list[LayerRange]:
        route = self._inspection.route
        return [route.hops[view.hop].span] if route is not None and view.hop is not None else []

    def _legend(self) -> Text:
        parts = [(_ON_ROUTE, "green", "on the route"), (_SPARE, "cyan", "spare"), (_UNUSABLE, "dim", "not usable")]
        if self._inspection.missing:
            parts.append((_GAP, _GAP_STYLE, "missing"))
        legend = Text(style="dim")
        for mark, style, meaning in parts:
            legend.append(mark, style).append(f" {meaning}   ")
        return legend

    # -- the peers -------------------------------------------------------------------------------------------------

    def _peers(self, *, wide: bool) -> Table:
        """One row for each peer. `ms/layer` is for one decoded token, `prefill` for one prompt token."""
        table = _table("peer", "span", "device", "numerics", gap=2 if wide else 1)
        for title in ("ms/layer", *(["prefill"] * wide), "queue", "sess.", "KV free", "RTT ms", "age"):
            table.add_column(title, justify="right", no_wrap=True)
        if wide:
            for title in _LOAD_COLUMNS:
                table.add_column(title, justify="right", no_wrap=True)
            for title in ("state", "id", "version", "address"):
                table.add_column(title, no_wrap=True, overflow="ellipsis")
        for view in self._inspection.peers:
            record = view.record
            cells = [
                _short(self._inspection.name_of(record.peer_id), _NAME_CELLS if wide else _NAME_CELLS - 2),
                str(record.span),
                _short(record.device, 8),
                _short(str(record.numerics), 8),
                _ms(record.layer_time_s),
                *([_ms(record.prefill_time_s)] * wide),
                str(record.queue),
                str(record.sessions),
                f"{_count(record.kv_free)}/{_count(record.kv_total)}",
                _rtt(view),
                f"{view.age_s:.0f} s",
            ]
            if wide:
                cells += [
                    *_load_cells(record),
                    record.state,
                    record.peer_id[:8],
                    _short(record.software, 12),
                    _address(view),
                ]
            table.add_row(*map(Text, cells), style=_style(view))
        return table

    def _peer_details(self) -> Table:
        """The columns that do not fit into `_peers` on a narrow terminal."""
        table = _table("peer", "id", "state", "version", gap=1)
        for title in ("prefill", *_LOAD_COLUMNS):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("address", no_wrap=True, overflow="ellipsis")
        for view in self._inspection.peers:
            record = view.record
            cells = (
                _short(self._inspection.name_of(record.peer_id), _NAME_CELLS - 2),
                record.peer_id[:8],
                record.state,
                _short(record.software, 12),
                _ms(record.prefill_time_s),
                *_load_cells(record),
                _address(view),
            )
            table.add_row(*map(Text, cells), style=_style(view))
        return table

    # -- the route -------------------------------------------------------------------------------------------------

    def _route(self, route: Route) -> Iterator[RenderableType]:
        request = self._inspection.request
        per_second = request.tokens / max(route.step_s, 1e-9)
        title = Text.assemble(("route", "bold"), f"  for {request.kv_tokens} tokens of cache, ")
        title.append(f"{route.numerics or 'mixed numerics'}, best {request.objective}: ")
        if request.objective == "throughput":
            title.append(f"slowest stage {_ms(route.slowest_s)} ms, {request.tokens / max(route.slowest_s, 1e-9):.1f}")
            title.append(f" tokens/s in all; a step takes {_ms(route.step_s)} ms")
        else:
            of = f" of {request.tokens} tokens" if request.tokens > 1 else ""
            title.append(f"a step{of} takes {_ms(route.step_s)} ms, {per_second:.1f} tokens/s")
        yield title
        table = _table("hop", "peer", "layers")
        for column in ("way there", "transfer", "queue", "compute", "entry", "ms"):
            table.add_column(column, justify="right", no_wrap=True)
        for i, hop in enumerate(route.hops):
            table.add_row(*map(Text, self._hop_cells(i, hop)))
        table.add_row(*map(Text, ("", "back to here", "", _ms(route.return_s), "", "", "", "", _ms(route.return_s))))
        yield table

    def _hop_cells(self, i: int, hop: HopPlan) -> Sequence[str]:
        cost = hop.cost
        relayed = " (relayed)" if hop.relayed else ""
        times = (cost.latency_s, cost.transfer_s, cost.queue_s, cost.compute_s, cost.entry_s, cost.total_s)
        name = _short(self._inspection.name_of(hop.record.peer_id), _NAME_CELLS)
        return str(i + 1), name + relayed, str(hop.span), *map(_ms, times)

    def _notes(self) -> Iterator[RenderableType]:
        """The alternatives that lost, and the peers that cannot be used, with reasons."""
        left_out = [view for view in self._inspection.peers if view.left_out]
        if self._inspection.alternatives:
            yield Text()
            yield Text("runners-up", "bold")
            yield self._runners_up()
        if left_out:
            yield Text()
            yield Text("left out", "bold")
            table = Table.grid(padding=(0, 2))
            for view in left_out:
                problem = f": {view.link.problem}" if view.link and view.link.problem else ""
                name = _short(self._inspection.name_of(view.record.peer_id), _NAME_CELLS)
                table.add_row(Text(f"  {name}"), Text(str(view.record.span)), Text(view.left_out + problem))
            yield table

    def _runners_up(self) -> Table:
        """One row for each alternative route, with all constraints that lead to it."""
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column()
        rows: dict[str, tuple[list[str], Alternative]] = {}
        for other in self._inspection.alternatives:
            name = _short(self._inspection.name_of(other.peer_id), _NAME_CELLS) if other.peer_id else ""
            constraint = {"without": f"without {name}", "through": f"with {name}", "numerics": "other numerics"}[
                other.kind
            ]
            key = self._describe(other.route) if other.route else constraint
            rows.setdefault(key, ([], other))[0].append(constraint)
        for constraints, other in rows.values():
            is_needed = other.kind == "without" and other.route is None
            reason = Text(other.reason, _GAP_STYLE if is_needed else "")
            if other.route is not None:
                reason.append(f"\n{self._describe(other.route)}", "dim")
            table.add_row(Text("\n".join(f"  {constraint}" for constraint in constraints)), reason)
        return table

    def _describe(self, route: Route) -> str:
        return " → ".join(f"{self._inspection.name_of(hop.record.peer_id)} {hop.span}" for hop in route.hops)


_LOAD_COLUMNS = ("batch", "tok/s", "blocks")


def picture_models(models: Sequence[ModelView]) -> RenderableType:
    """A table of models, then their licences, sources and missing layers."""
    table = _table()
    table.add_column("model", overflow="ellipsis")  # only the name may be cut
    for title, cells in (("digest", 12), ("weights", 7)):
        table.add_column(title, no_wrap=True, overflow="ellipsis", min_width=cells)
    for title in ("layers", "peers", "a layer", "a token"):
        table.add_column(title, justify="right", no_wrap=True, min_width=len(title))
    notes = Table.grid(padding=(0, 2))
    for view in models:
        model = view.model
        name = _short(model.name, 28)
        facts = (model.digest[:12], _short(model.weights, 10))
        layers = Text(f"{view.layers_covered}/{model.layers}", _GAP_STYLE if view.missing else "green")
        row = (
            layers,
            Text(str(view.peers)),
            Text(format_bytes(view.layer_memory)),
            Text(format_bytes(view.kv_token_memory)),
        )
        table.add_row(Text(name, "bold"), *map(Text, facts), *row)
        notes.add_row(Text(name), Text(f"licence {_short(model.licence, 30)}, from {model.source}", "dim"))
        if view.missing:
            notes.add_row("", Text(f"no peer serves layers {', '.join(map(str, view.missing))}", _GAP_STYLE))
    legend = Text("a layer, a token: memory of one layer, and of one token in its KV cache, in accuracy mode", "dim")
    return Group(table, legend, Text(), notes)


def _table(*columns: str, gap: int = 2) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    return table


def _short(text: str, cells: int) -> str:
    """Cut a text to `cells`: peers choose their own names, and a long one must not push out other columns."""
    line = Text(text)
    line.truncate(cells, overflow="ellipsis")
    return line.plain


def _style(view: PeerView) -> str:
    return _ROUTE_STYLE if view.hop is not None else "dim" if view.left_out else ""


def _ms(seconds: float) -> str:
    """Milliseconds with three significant digits."""
    value = seconds * 1e3
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _rtt(view: PeerView) -> str:
    if view.link is None:
        return "?"
    return _ms(view.link.rtt_s) if view.link.reachable else "none"


def _count(tokens: int) -> str:
    return str(tokens) if tokens < 10_000 else f"{tokens / 1000:.0f}k"


def _load_cells(record: PeerRecord) -> tuple[str, str, str]:
    """Steps in a batch, tokens per second over all sessions, blocks of KV cache in use."""
    work = record.work
    if work is None:
        return "?", "?", "?"
    blocks = f"{_count(work.blocks_used)}/{_count(work.blocks)}" if work.blocks else "-"
    return f"{work.batch:.1f}", f"{work.tokens_per_s:.0f}", blocks


def _address(view: PeerView) -> str:
    addresses = view.record.addresses
    more = f" +{len(addresses) - 1}" if len(addresses) > 1 else ""
    return addresses[0].partition("#")[0] + more if addresses else "none"

// The view of the swarm: one column for each layer, one row for each peer, routes drawn over them.

import { byId, draw, make, setText } from "./dom.js";
import { PeerHistory, nameOf, routesInUse } from "./peer_history.js";
import { line } from "./lines.js";
import { clock, compact, count, duration, milliseconds, span } from "./format.js";

const MAX_EVENTS = 50;
const MAX_ROUTES = 6;
const CONDITION_LABELS = { serving: "serving", leaving: "leaving", lost: "silent", unusable: "not usable", gone: "gone" };
const COLUMNS = [
  ["Device", ({ device }) => device],
  ["ms/layer", ({ layer_time_s }) => milliseconds(layer_time_s)],
  ["Queue", ({ queue }) => String(queue)],
  ["Sessions", ({ sessions }) => String(sessions)],
  ["KV free", ({ kv_free, kv_total }) => `${compact(kv_free)} / ${compact(kv_total)}`],
  ["RTT", ({ rtt_s }) => duration(rtt_s)],
];

export class SwarmView {
  #models = new Map();
  #noModels = make("p", { class: "muted" }, "No model is offered yet.");

  /** Show a state from /api/swarm. */
  show(state) {
    const date = new Date();
    const present = new Set(state.models.map((model) => model.model.digest));
    for (const [digest, view] of this.#models) {
      if (!present.has(digest)) {
        view.element.remove();
        this.#models.delete(digest);
      }
    }
    for (const model of state.models) {
      let view = this.#models.get(model.model.digest);
      if (!view) {
        view = new ModelView(model);
        this.#models.set(model.model.digest, view);
        byId("models").append(view.element);
      }
      for (const text of view.show(model, date.getTime() / 1e3)) this.#addEvent(text, date);
    }
    if (state.models.length) this.#noModels.remove();
    else if (!this.#noModels.isConnected) byId("models").append(this.#noModels);
  }

  #addEvent(text, date) {
    const list = byId("events");
    byId("no-events").hidden = true;
    list.prepend(make("li", {}, make("time", {}, clock(date)), make("bdi", {}, text)));
    while (list.children.length > MAX_EVENTS) list.lastElementChild.remove();
  }
}

class ModelView {
  #history = new PeerHistory();
  #rows = new Map();
  #model = null;
  #verdict = make("span", { class: "verdict" });
  #facts = make("span", { class: "muted" });
  #problem = make("p", { class: "error", hidden: true });
  #coverage = make("div", { class: "coverage" });
  #scale = make("div", { class: "scale", "aria-hidden": "true" });
  #body = make("tbody", { role: "rowgroup" });
  #drawing = draw("svg", { class: "routes", "aria-hidden": "true" });
  #legend = make("ul", { class: "legend", "aria-label": "Routes" });

  constructor(model) {
    const head = ["Peer", "Layers", ...COLUMNS.map(([name]) => name)].map((name) =>
      make("th", { scope: "col", role: "columnheader", class: name === "Layers" ? "lane-head" : null },
        name === "Layers" ? make("div", {}, make("span", { class: "visually-hidden" }, "Layers"), this.#coverage, this.#scale) : name));
    const table = make("table", { class: "peers", role: "table", "aria-label": `Peers of ${model.id}` },
      make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...head)), this.#body);
    this.frame = make("div", { class: "frame" }, table, this.#drawing);
    this.element = make("section", { class: "model" },
      make("header", {}, make("h1", {}, make("bdi", {}, model.id)), this.#verdict, this.#facts),
      this.#problem, this.frame, this.#legend);
    new ResizeObserver(() => this.#drawRoutes()).observe(this.frame);
  }

  /** Show a model of /api/swarm. Returns the changes since the last call, as texts. */
  show(model, now) {
    const changes = this.#history.update(model, now);
    this.#model = model;
    const { layers } = model.model;
    const known = this.#history.sorted;
    const present = known.filter(({ condition }) => condition !== "gone" && condition !== "lost").length;
    setText(this.#verdict, model.covered ? "covered" : "not covered");
    this.#verdict.classList.toggle("bad", !model.covered);
    setText(this.#facts, `${layers} layers · ${count(present, "peer")} · ${model.model.digest.slice(0, 12)}`);
    const problem = model.look_problem ? `Out of date: ${model.look_problem}` : model.problem;
    setText(this.#problem, problem);
    this.#problem.hidden = !problem;
    this.#showCoverage(model);
    const onRoute = new Set(drawnRoutes(model).flatMap(({ hops }) => hops.map((hop) => hop.peer_id)));
    this.#showRows(known, onRoute, layers, now);
    this.#showLegend(model);
    this.#drawRoutes();
    return changes;
  }

  #showCoverage({ coverage, model: { layers }, missing }) {
    if (this.#coverage.children.length !== layers) this.#coverage.replaceChildren(...coverage.map(() => make("i")));
    coverage.forEach((copies, layer) => {
      const cell = this.#coverage.children[layer];
      cell.dataset.copies = Math.min(copies, 3);
      cell.title = `layer ${layer}: ${copies ? count(copies, "copy", "copies") : "no peer"}`;
    });
    this.#coverage.setAttribute("role", "img");
    this.#coverage.setAttribute("aria-label", missing.length ? `No peer serves the layers ${missing.join(", ")}` : "Every layer is served");
    const boundaries = [...new Set([0, layers, ...this.#history.sorted.flatMap(({ peer }) => span(peer.span))])].sort((a, b) => a - b);
    const labelled = boundaries.filter((boundary, index) =>
      boundary === 0 || boundary === layers || (boundary - boundaries[index - 1] >= layers / 16 && layers - boundary >= layers / 16));
    if (this.#scale.dataset.boundaries === labelled.join()) return;
    this.#scale.dataset.boundaries = labelled.join();
    this.#scale.replaceChildren(...labelled.map((layer) => position(make("span", {}, String(layer)), layer / layers)));
  }

  #showRows(known, onRoute, layers, now) {
    const ids = known.map(({ peer }) => peer.peer_id);
    for (const [id, row] of this.#rows) {
      if (ids.includes(id)) continue;
      row.element.remove();
      this.#rows.delete(id);
    }
    known.forEach((entry, index) => {
      const id = entry.peer.peer_id;
      if (!this.#rows.has(id)) this.#rows.set(id, new PeerRow());
      const row = this.#rows.get(id);
      row.show(entry, onRoute.has(id), layers, now);
      // Moved only where necessary: a moved element loses the focus.
      if (this.#body.children[index] !== row.element) this.#body.insertBefore(row.element, this.#body.children[index] ?? null);
    });
  }

  #showLegend(model) {
    const used = routesInUse(model);
    const names = (hops) => hops.map((hop) => `${nameOf(hop)} ${hop.span}`).join(" → ");
    const items = used.map((route) => ["used", `${names(route.hops)}: ${count(route.answers, "answer")} now, ${count(route.tokens, "token")}`]);
    if (!used.length && model.route) items.push(["next", `${names(model.route.hops)}: the next answer's route, about ${duration(model.route.step_s)} a token`]);
    const shown = items.slice(0, MAX_ROUTES);
    if (items.length > MAX_ROUTES) shown.push(["", `and ${items.length - MAX_ROUTES} other routes`]);
    const text = JSON.stringify(shown);
    if (this.#legend.dataset.text === text) return;
    this.#legend.dataset.text = text;
    this.#legend.replaceChildren(...shown.map(([kind, text]) => make("li", { class: kind }, make("bdi", {}, text))));
  }

  #drawRoutes() {
    if (!this.#model) return;
    const frame = this.frame.getBoundingClientRect();
    const lanes = new Map();
    for (const [id, row] of this.#rows) {
      const box = row.lane.getBoundingClientRect();
      lanes.set(id, { left: box.left - frame.left, width: box.width, middle: box.top - frame.top + box.height / 2 });
    }
    const routes = drawnRoutes(this.#model);
    const drawn = routes.flatMap(({ kind, hops }, index) => {
      const d = line(hops, lanes, this.#model.model.layers, (index - (routes.length - 1) / 2) * 4);
      return [draw("path", { class: `halo ${kind}`, d }), draw("path", { class: kind, d })];
    });
    this.#drawing.replaceChildren(...drawn);
  }
}

/** The routes in use, or the one that the next answer would take. */
function drawnRoutes(model) {
  const used = routesInUse(model).slice(0, MAX_ROUTES);
  if (used.length || !model.route) return used.map(({ hops }) => ({ kind: "used", hops }));
  return [{ kind: "next", hops: model.route.hops }];
}

class PeerRow {
  #name = make("bdi", { class: "name" });
  #status = make("span", { class: "status" });
  #bar = make("div", { class: "bar" });
  #reason = make("div", { class: "reason" });
  #cells = COLUMNS.map(([name]) => make("td", { role: "cell", "data-label": name }));

  constructor() {
    this.lane = make("div", { class: "lane" }, this.#bar);
    this.element = make("tr", { role: "row" },
      make("th", { scope: "row", role: "rowheader" }, this.#name, this.#status),
      make("td", { role: "cell", class: "lane-cell" }, this.lane, this.#reason),
      ...this.#cells);
  }

  show({ peer, condition, since }, onRoute, layers, now) {
    this.element.dataset.condition = condition;
    this.element.classList.toggle("on-route", onRoute);
    this.element.dataset.peer = peer.peer_id;
    setText(this.#name, nameOf(peer));
    this.#name.title = `${peer.peer_id}\n${peer.addresses.join(" ")}\n${peer.software} · ${peer.numerics}`;
    const seconds = Math.round(now - since);
    const ago = (condition === "lost" || condition === "gone") && seconds > 0 ? ` for ${seconds} s` : "";
    setText(this.#status, `${peer.span} · ${CONDITION_LABELS[condition]}${ago}`);
    setText(this.#reason, condition === "gone" ? "" : peer.unreachable || peer.left_out);
    this.#reason.title = this.#reason.textContent;
    const [first, last] = span(peer.span);
    position(this.#bar, first / layers, (last - first) / layers);
    this.#bar.replaceChildren(...peer.entries.map((entry) => position(make("i"), (entry - first) / (last - first))));
    COLUMNS.forEach(([, text], index) => setText(this.#cells[index], condition === "gone" ? "–" : text(peer)));
  }
}

/** Position an element; `left` and `width` are shares of its parent's width. */
function position(element, left, width = null) {
  element.style.left = `${left * 100}%`;
  if (width !== null) element.style.width = `${width * 100}%`;
  return element;
}

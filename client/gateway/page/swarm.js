// The swarm's state: layers across, peers down, routes drawn over them.

import { byId, draw, make, setText } from "./dom.js";
import { Followed, nameOf, routesInUse } from "./follow.js";
import { line } from "./lines.js";
import { clock, count, duration, many, milliseconds, span } from "./words.js";

const MOST_EVENTS = 50;
const MOST_ROUTES = 6;
const TOLD = { serving: "serving", leaving: "leaving", lost: "silent", unusable: "not usable", gone: "gone" };
const COLUMNS = [
  ["Device", ({ device }) => device],
  ["ms/layer", ({ layer_time_s }) => milliseconds(layer_time_s)],
  ["Queue", ({ queue }) => String(queue)],
  ["Sessions", ({ sessions }) => String(sessions)],
  ["KV free", ({ kv_free, kv_total }) => `${many(kv_free)} / ${many(kv_total)}`],
  ["RTT", ({ rtt_s }) => duration(rtt_s)],
];

export class SwarmView {
  #models = new Map();
  #none = make("p", { class: "muted" }, "No model is offered yet.");

  /** Show what /api/swarm says. */
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
      for (const text of view.show(model, date.getTime() / 1e3)) this.#tell(text, date);
    }
    if (state.models.length) this.#none.remove();
    else if (!this.#none.isConnected) byId("models").append(this.#none);
  }

  #tell(text, date) {
    const list = byId("events");
    byId("no-events").hidden = true;
    list.prepend(make("li", {}, make("time", {}, clock(date)), make("bdi", {}, text)));
    while (list.children.length > MOST_EVENTS) list.lastElementChild.remove();
  }
}

class ModelView {
  #followed = new Followed();
  #rows = new Map();
  #model = null;
  #verdict = make("span", { class: "verdict" });
  #facts = make("span", { class: "muted" });
  #problem = make("p", { class: "wrong", hidden: true });
  #cover = make("div", { class: "cover" });
  #scale = make("div", { class: "scale", "aria-hidden": "true" });
  #body = make("tbody", { role: "rowgroup" });
  #drawing = draw("svg", { class: "routes", "aria-hidden": "true" });
  #legend = make("ul", { class: "legend", "aria-label": "Routes" });

  constructor(model) {
    const head = ["Peer", "Layers", ...COLUMNS.map(([name]) => name)].map((name) =>
      make("th", { scope: "col", role: "columnheader", class: name === "Layers" ? "lane-head" : null },
        name === "Layers" ? make("div", {}, make("span", { class: "unseen" }, "Layers"), this.#cover, this.#scale) : name));
    const table = make("table", { class: "peers", role: "table", "aria-label": `Peers of ${model.id}` },
      make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...head)), this.#body);
    this.frame = make("div", { class: "frame" }, table, this.#drawing);
    this.element = make("section", { class: "model" },
      make("header", {}, make("h1", {}, make("bdi", {}, model.id)), this.#verdict, this.#facts),
      this.#problem, this.frame, this.#legend);
    new ResizeObserver(() => this.#drawRoutes()).observe(this.frame);
  }

  /** Returns what happened since the last time, as texts. */
  show(model, now) {
    const happened = this.#followed.take(model, now);
    this.#model = model;
    const { layers } = model.model;
    const known = this.#followed.inOrder;
    const there = known.filter(({ condition }) => condition !== "gone" && condition !== "lost").length;
    setText(this.#verdict, model.covered ? "covered" : "not covered");
    this.#verdict.classList.toggle("bad", !model.covered);
    setText(this.#facts, `${layers} layers · ${count(there, "peer")} · ${model.model.digest.slice(0, 12)}`);
    const problem = model.look_problem ? `This is not fresh: ${model.look_problem}` : model.problem;
    setText(this.#problem, problem);
    this.#problem.hidden = !problem;
    this.#showCover(model);
    const onRoute = new Set(drawnRoutes(model).flatMap(({ hops }) => hops.map((hop) => hop.peer_id)));
    this.#showRows(known, onRoute, layers, now);
    this.#showLegend(model);
    this.#drawRoutes();
    return happened;
  }

  #showCover({ coverage, model: { layers }, missing }) {
    if (this.#cover.children.length !== layers) this.#cover.replaceChildren(...coverage.map(() => make("i")));
    coverage.forEach((copies, layer) => {
      const cell = this.#cover.children[layer];
      cell.dataset.copies = Math.min(copies, 3);
      cell.title = `layer ${layer}: ${copies ? count(copies, "copy", "copies") : "nobody"}`;
    });
    this.#cover.setAttribute("role", "img");
    this.#cover.setAttribute("aria-label", missing.length ? `Nobody serves the layers ${missing.join(", ")}` : "Every layer is served");
    const ends = [...new Set([0, layers, ...this.#followed.inOrder.flatMap(({ peer }) => span(peer.span))])].sort((a, b) => a - b);
    const apart = ends.filter((end, place) => end === 0 || end === layers || (end - ends[place - 1] >= layers / 16 && layers - end >= layers / 16));
    if (this.#scale.dataset.ends === apart.join()) return;
    this.#scale.dataset.ends = apart.join();
    this.#scale.replaceChildren(...apart.map((end) => at(make("span", {}, String(end)), end / layers)));
  }

  #showRows(known, onRoute, layers, now) {
    const ids = known.map(({ peer }) => peer.peer_id);
    for (const [id, row] of this.#rows) {
      if (ids.includes(id)) continue;
      row.element.remove();
      this.#rows.delete(id);
    }
    known.forEach((each, place) => {
      const id = each.peer.peer_id;
      if (!this.#rows.has(id)) this.#rows.set(id, new Row());
      const row = this.#rows.get(id);
      row.show(each, onRoute.has(id), layers, now);
      // moved only where it must be: a moved element loses the focus
      if (this.#body.children[place] !== row.element) this.#body.insertBefore(row.element, this.#body.children[place] ?? null);
    });
  }

  #showLegend(model) {
    const used = routesInUse(model);
    const names = (hops) => hops.map((hop) => `${nameOf(hop)} ${hop.span}`).join(" → ");
    const items = used.map((route) => ["used", `${names(route.hops)}: ${count(route.answers, "answer")} now, ${count(route.tokens, "token")}`]);
    if (!used.length && model.route) items.push(["next", `${names(model.route.hops)}: the next answer's way, about ${duration(model.route.step_s)} a token`]);
    const shown = items.slice(0, MOST_ROUTES);
    if (items.length > MOST_ROUTES) shown.push(["", `and ${items.length - MOST_ROUTES} other routes`]);
    const text = JSON.stringify(shown);
    if (this.#legend.dataset.text === text) return;
    this.#legend.dataset.text = text;
    this.#legend.replaceChildren(...shown.map(([kind, told]) => make("li", { class: kind }, make("bdi", {}, told))));
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
    const drawn = routes.flatMap(({ kind, hops }, place) => {
      const d = line(hops, lanes, this.#model.model.layers, (place - (routes.length - 1) / 2) * 4);
      return [draw("path", { class: `halo ${kind}`, d }), draw("path", { class: kind, d })];
    });
    this.#drawing.replaceChildren(...drawn);
  }
}

/** The routes in use, or the one that the next answer would take. */
function drawnRoutes(model) {
  const used = routesInUse(model).slice(0, MOST_ROUTES);
  if (used.length || !model.route) return used.map(({ hops }) => ({ kind: "used", hops }));
  return [{ kind: "next", hops: model.route.hops }];
}

class Row {
  #name = make("bdi", { class: "name" });
  #told = make("span", { class: "told" });
  #bar = make("div", { class: "bar" });
  #why = make("div", { class: "why" });
  #cells = COLUMNS.map(([name]) => make("td", { role: "cell", "data-label": name }));

  constructor() {
    this.lane = make("div", { class: "lane" }, this.#bar);
    this.element = make("tr", { role: "row" },
      make("th", { scope: "row", role: "rowheader" }, this.#name, this.#told),
      make("td", { role: "cell", class: "lane-cell" }, this.lane, this.#why),
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
    setText(this.#told, `${peer.span} · ${TOLD[condition]}${ago}`);
    setText(this.#why, condition === "gone" ? "" : peer.unreachable || peer.left_out);
    this.#why.title = this.#why.textContent;
    const [first, last] = span(peer.span);
    at(this.#bar, first / layers, (last - first) / layers);
    this.#bar.replaceChildren(...peer.entries.map((entry) => at(make("i"), (entry - first) / (last - first))));
    COLUMNS.forEach(([, text], place) => setText(this.#cells[place], condition === "gone" ? "–" : text(peer)));
  }
}

/** Place an element by shares of its parent's width. */
function at(element, left, width = null) {
  element.style.left = `${left * 100}%`;
  if (width !== null) element.style.width = `${width * 100}%`;
  return element;
}

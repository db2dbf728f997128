// One answer on the page: its streamed text, then the hops that computed it and their times.

import { copy, make, setText } from "./dom.js";
import { count, duration, milliseconds } from "./format.js";

const TIMES = [
  ["network_s", "way there"],
  ["queue_s", "queue"],
  ["compute_s", "compute"],
  ["codec_s", "codec"],
  ["other_s", "other"],
];

export class Answer {
  text = "";
  #textNode = new Text("");
  #body = make("div", { class: "message" }, this.#textNode);
  #stats = make("p", { class: "stats" });
  #details = make("div", { class: "details" });
  #startedAt = performance.now();
  #firstAt = null;
  #lastAt = null;
  #pieces = 0;

  /** `request` is the body that was sent; `retry` sends the question again. */
  constructor(request, retry) {
    this.request = request;
    this.retry = retry;
    this.element = make("article", { class: "turn answer", "aria-label": "Answer", "aria-busy": "true" }, this.#body, this.#stats, this.#details);
    setText(this.#stats, "waiting for the first token");
  }

  get rate() {
    return this.#pieces > 1 ? ((this.#pieces - 1) * 1e3) / (this.#lastAt - this.#firstAt) : null;
  }

  add(text) {
    this.#lastAt = performance.now();
    this.#firstAt ??= this.#lastAt;
    this.#pieces += 1;
    this.text += text;
    this.#textNode.appendData(text);
    const rate = this.rate;
    setText(this.#stats, `${duration((this.#lastAt - this.#startedAt) / 1e3)}${rate ? ` · ${rate.toFixed(1)} pieces/s` : ""}`);
  }

  /** Show a complete answer; `metrics` is null where the gateway sent none. */
  finish(reason, metrics) {
    this.#setDone();
    const stats = metrics
      ? [
          count(metrics.new_tokens, "token"),
          metrics.tokens_per_second > 0 ? `${metrics.tokens_per_second.toFixed(1)} tokens/s` : null,
          `first after ${duration(metrics.ttft_s)}`,
          metrics.reused_tokens ? `${metrics.reused_tokens} of ${metrics.prompt_tokens} prompt tokens reused` : null,
          metrics.repairs ? `route repaired ${count(metrics.repairs, "time")}` : null,
        ]
      : [`done in ${duration((performance.now() - this.#startedAt) / 1e3)}`];
    if (reason === "length") stats.push("stopped at the token limit");
    setText(this.#stats, stats.filter(Boolean).join(" · "));
    if (metrics?.hops?.length) this.#details.append(hopDetails(metrics));
    this.#addActions();
  }

  showStopped() {
    this.#setDone();
    setText(this.#stats, `stopped after ${duration((performance.now() - this.#startedAt) / 1e3)}`);
    this.#addActions();
  }

  showError(error) {
    this.#setDone();
    setText(this.#stats, "");
    const wait = error.retryAfter ? ` Try again in ${duration(error.retryAfter)}.` : "";
    this.#details.append(make("p", { class: "error", role: "alert" }, `${error.message}${wait}`));
    this.#addActions(true);
  }

  #setDone() {
    this.element.setAttribute("aria-busy", "false");
  }

  #addActions(failed = false) {
    const actionButton = (name, action) => make("button", { type: "button", class: "quiet", on: { click: (e) => action(e.target) } }, name);
    this.#details.append(
      make("div", { class: "actions" },
        failed ? actionButton("Try again", () => this.retry()) : null,
        this.text ? actionButton("Copy", (button) => copy(this.text, button)) : null,
        actionButton("Copy as curl", (button) => copy(curl(this.request), button))),
    );
  }
}

/** The curl command of a request. The key comes from the environment. */
export function curl(request) {
  const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
  return [
    `curl -N ${location.origin}/v1/chat/completions`,
    `-H 'content-type: application/json'`,
    `-H "authorization: Bearer $SWARM_API_KEY"`,
    `-d ${quoted(JSON.stringify(request))}`,
  ].join(" \\\n  ");
}

/** A strip with each hop's share of the time of a token, and a table of all times. */
function hopDetails({ hops, token_s, return_s, client_s }) {
  const totals = hops.map((hop) => TIMES.reduce((sum, [name]) => sum + hop[name], 0));
  const hasTimes = token_s > 0;
  const strip = make("ol", { class: "strip", "aria-label": "Hops of this answer" });
  hops.forEach((hop, index) => {
    const item = make("li", {}, make("bdi", { class: "name" }, hop.name || hop.peer_id.slice(0, 8)), make("span", {}, hop.layers),
      hasTimes ? make("span", { class: "number" }, `${milliseconds(totals[index])} ms`) : null);
    item.style.setProperty("--share", hasTimes ? totals[index] * 1e6 : 1);
    strip.append(item);
  });
  if (!hasTimes) return strip;
  const cells = (values) => values.map((value) => make("td", {}, value === null ? "" : milliseconds(value)));
  const row = (name, layers, values, sum) => make("tr", {}, make("th", { scope: "row" }, make("bdi", {}, name)), make("td", {}, layers), ...cells(values), ...cells([sum]));
  const head = ["hop", "layers", ...TIMES.map(([, name]) => name), "sum"].map((name) => make("th", { scope: "col" }, name));
  const empty = TIMES.map(() => null);
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...head)),
    make("tbody", {},
      ...hops.map((hop, index) => row(hop.name || hop.peer_id.slice(0, 8), hop.layers, TIMES.map(([name]) => hop[name]), totals[index])),
      row("way back", "", empty, return_s),
      row("gateway", "", empty, client_s),
      row("a token", "", empty, token_s)));
  return make("div", {}, strip,
    make("details", { on: { toggle: (event) => event.target.scrollIntoView({ block: "nearest" }) } }, make("summary", {}, "Where the time of a token went"),
      make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Times in ms" }, table)));
}

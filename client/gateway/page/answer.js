// One answer on the page: its text as it comes, then which hops made it and how fast.

import { copy, make, setText } from "./dom.js";
import { count, duration, milliseconds } from "./words.js";

const SHARES = [
  ["network_s", "way there"],
  ["queue_s", "queue"],
  ["compute_s", "compute"],
  ["codec_s", "codec"],
  ["other_s", "other"],
];

export class Answer {
  text = "";
  #shown = new Text("");
  #body = make("div", { class: "said" }, this.#shown);
  #facts = make("p", { class: "facts" });
  #more = make("div", { class: "more" });
  #began = performance.now();
  #first = null;
  #last = null;
  #pieces = 0;

  /** `request` is the body that was sent; `again` asks once more. */
  constructor(request, again) {
    this.request = request;
    this.again = again;
    this.element = make("article", { class: "turn answer", "aria-label": "Answer", "aria-busy": "true" }, this.#body, this.#facts, this.#more);
    setText(this.#facts, "waiting for the first token");
  }

  get rate() {
    return this.#pieces > 1 ? ((this.#pieces - 1) * 1e3) / (this.#last - this.#first) : null;
  }

  add(text) {
    this.#last = performance.now();
    this.#first ??= this.#last;
    this.#pieces += 1;
    this.text += text;
    this.#shown.appendData(text);
    const rate = this.rate;
    setText(this.#facts, `${duration((this.#last - this.#began) / 1e3)}${rate ? ` · ${rate.toFixed(1)} pieces/s` : ""}`);
  }

  /** The end as the gateway tells it; `metrics` is null where it told nothing. */
  finish(reason, metrics) {
    this.#done();
    const facts = metrics
      ? [
          count(metrics.new_tokens, "token"),
          metrics.tokens_per_second > 0 ? `${metrics.tokens_per_second.toFixed(1)} tokens/s` : null,
          `first after ${duration(metrics.ttft_s)}`,
          metrics.reused_tokens ? `${metrics.reused_tokens} of ${metrics.prompt_tokens} prompt tokens reused` : null,
          metrics.repairs ? `route mended ${count(metrics.repairs, "time")}` : null,
        ]
      : [`done in ${duration((performance.now() - this.#began) / 1e3)}`];
    if (reason === "length") facts.push("cut off at the limit of tokens");
    setText(this.#facts, facts.filter(Boolean).join(" · "));
    if (metrics?.hops?.length) this.#more.append(hops(metrics));
    this.#actions();
  }

  stopped() {
    this.#done();
    setText(this.#facts, `stopped after ${duration((performance.now() - this.#began) / 1e3)}`);
    this.#actions();
  }

  fail(error) {
    this.#done();
    setText(this.#facts, "");
    const wait = error.retryAfter ? ` Try again in ${duration(error.retryAfter)}.` : "";
    this.#more.append(make("p", { class: "wrong", role: "alert" }, `${error.message}${wait}`));
    this.#actions(true);
  }

  #done() {
    this.element.setAttribute("aria-busy", "false");
  }

  #actions(failed = false) {
    const button = (name, action) => make("button", { type: "button", class: "quiet", on: { click: (e) => action(e.target) } }, name);
    this.#more.append(
      make("div", { class: "actions" },
        failed ? button("Try again", () => this.again()) : null,
        this.text ? button("Copy", (at) => copy(this.text, at)) : null,
        button("Copy as curl", (at) => copy(curl(this.request), at))),
    );
  }
}

/** The command that asks the same. The key is left to the environment. */
export function curl(request) {
  const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
  return [
    `curl -N ${location.origin}/v1/chat/completions`,
    `-H 'content-type: application/json'`,
    `-H "authorization: Bearer $SWARM_API_KEY"`,
    `-d ${quoted(JSON.stringify(request))}`,
  ].join(" \\\n  ");
}

/** A strip with each hop's share of a token, and a table of where its time went. */
function hops({ hops, token_s, return_s, client_s }) {
  const own = hops.map((hop) => SHARES.reduce((sum, [name]) => sum + hop[name], 0));
  const timed = token_s > 0;
  const strip = make("ol", { class: "strip", "aria-label": "Hops of this answer" });
  hops.forEach((hop, place) => {
    const item = make("li", {}, make("bdi", { class: "name" }, hop.name || hop.peer_id.slice(0, 8)), make("span", {}, hop.layers),
      timed ? make("span", { class: "number" }, `${milliseconds(own[place])} ms`) : null);
    item.style.setProperty("--share", timed ? own[place] * 1e6 : 1);
    strip.append(item);
  });
  if (!timed) return strip;
  const cells = (values) => values.map((value) => make("td", {}, value === null ? "" : milliseconds(value)));
  const row = (name, layers, values, sum) => make("tr", {}, make("th", { scope: "row" }, make("bdi", {}, name)), make("td", {}, layers), ...cells(values), ...cells([sum]));
  const head = ["hop", "layers", ...SHARES.map(([, name]) => name), "sum"].map((name) => make("th", { scope: "col" }, name));
  const none = SHARES.map(() => null);
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...head)),
    make("tbody", {},
      ...hops.map((hop, place) => row(hop.name || hop.peer_id.slice(0, 8), hop.layers, SHARES.map(([name]) => hop[name]), own[place])),
      row("way back", "", none, return_s),
      row("gateway", "", none, client_s),
      row("a token", "", none, token_s)));
  return make("div", {}, strip,
    make("details", { on: { toggle: (event) => event.target.scrollIntoView({ block: "nearest" }) } }, make("summary", {}, "Where the time of a token went"),
      make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Times in ms" }, table)));
}

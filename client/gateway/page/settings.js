// Settings of generation. An empty field leaves the choice to the gateway.

import { byId, make } from "./dom.js";

const STORE = "swarm.settings";
const FIELDS = [
  { name: "system", label: "System prompt", kind: "text", hint: "How it should answer" },
  { name: "max_tokens", label: "Max tokens", kind: "number", min: 1, step: 1 },
  { name: "temperature", label: "Temperature", kind: "number", min: 0, max: 2, step: "any" },
  { name: "top_p", label: "Top p", kind: "number", min: 0.01, max: 1, step: "any" },
  { name: "top_k", label: "Top k", kind: "number", min: 0, step: 1 },
  { name: "min_p", label: "Min p", kind: "number", min: 0, max: 1, step: "any" },
  { name: "presence_penalty", label: "Presence penalty", kind: "number", min: -2, max: 2, step: "any" },
  { name: "frequency_penalty", label: "Frequency penalty", kind: "number", min: -2, max: 2, step: "any" },
  { name: "seed", label: "Seed", kind: "number", step: 1 },
  { name: "stop", label: "Stop at", kind: "text", hint: "One text per line" },
];

export class Settings {
  #form = byId("settings");
  #button = byId("settings-button");
  #model = make("select", { id: "model", name: "model" });

  constructor() {
    this.#form.append(
      make("div", { class: "title" }, make("h2", {}, "Settings"),
        make("button", { type: "button", class: "quiet", id: "settings-close", on: { click: () => this.#show(false) } }, "Close")),
      make("label", { class: "row wide" }, make("span", {}, "Model"), this.#model),
      ...FIELDS.map(field),
      make("p", { class: "muted" }, "Empty: the gateway's default."),
      make("button", { type: "button", class: "quiet", id: "settings-reset", on: { click: () => this.#reset() } }, "Reset"),
    );
    this.#load();
    this.#form.addEventListener("input", () => this.#save());
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    this.#form.addEventListener("keydown", (event) => event.key === "Escape" && this.#show(false));
    this.#button.addEventListener("click", () => this.#show(!this.#form.classList.contains("open")));
  }

  get model() {
    return this.#model.value;
  }

  /** Offer the models that /v1/models lists; keeps the selection. */
  setModels(names) {
    if (names.join("\n") === [...this.#model.options].map((option) => option.value).join("\n")) return;
    const chosen = this.#model.value || this.#stored().model;
    this.#model.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    if (names.includes(chosen)) this.#model.value = chosen;
  }

  /** Whether every field is valid. Shows the first invalid one. */
  validate() {
    if (this.#form.checkValidity()) return true;
    this.#show(true);
    this.#form.reportValidity();
    return false;
  }

  /** The body of a request to /v1/chat/completions that continues `turns`. */
  request(turns) {
    const values = new Map(FIELDS.map(({ name }) => [name, this.#form.elements[name].value]).filter(([, value]) => value.trim()));
    const system = values.get("system");
    const body = { model: this.model, messages: system ? [{ role: "system", content: system }, ...turns] : turns };
    for (const { name, kind } of FIELDS) {
      if (kind === "number" && values.has(name)) body[name] = Number(values.get(name));
    }
    if (values.has("stop")) body.stop = values.get("stop").split("\n").filter(Boolean);
    return body;
  }

  #show(open) {
    this.#form.classList.toggle("open", open);
    this.#button.setAttribute("aria-expanded", String(open));
    if (open) this.#model.focus();
    else this.#button.focus();
  }

  #reset() {
    for (const { name } of FIELDS) this.#form.elements[name].value = "";
    this.#save();
  }

  #stored() {
    try {
      return Object(JSON.parse(localStorage.getItem(STORE) ?? "{}"));
    } catch {
      return {}; // storage is forbidden, or holds something else
    }
  }

  #load() {
    const stored = this.#stored();
    for (const { name } of FIELDS) this.#form.elements[name].value = stored[name] ?? "";
  }

  #save() {
    const values = ["model", ...FIELDS.map(({ name }) => name)].map((name) => [name, this.#form.elements[name].value]);
    try {
      localStorage.setItem(STORE, JSON.stringify(Object.fromEntries(values)));
    } catch {
      // storage may be forbidden: the settings then last as long as the page
    }
  }
}

function field({ name, label, kind, hint, ...limits }) {
  const input =
    kind === "text"
      ? make("textarea", { name, rows: 2, placeholder: hint })
      : make("input", { name, type: "number", placeholder: "auto", inputmode: "decimal", ...limits });
  return make("label", { class: kind === "text" ? "row wide" : "row" }, make("span", {}, label), input);
}

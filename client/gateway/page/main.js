// Which view is shown, whether the gateway wants a key, and the stream of the swarm's state.

import { ApiError, events, getJson, hasKey, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { nameOf } from "./follow.js";
import { Settings } from "./settings.js";
import { SwarmView } from "./swarm.js";
import { clock, count } from "./words.js";

const AGAIN_MS = 2000;
const views = { chat: "Chat", swarm: "Swarm" };
const settings = new Settings();
const swarm = new SwarmView();
// found now: an answer may have taken its place before there is something to say
const emptyRoute = byId("empty-route");
let watching = null;

function navigate() {
  const chosen = location.hash === "#swarm" ? "swarm" : "chat";
  for (const name of Object.keys(views)) {
    byId(name).hidden = name !== chosen;
    if (name === chosen) byId(`to-${name}`).setAttribute("aria-current", "page");
    else byId(`to-${name}`).removeAttribute("aria-current");
  }
  document.title = `${views[chosen]} · swarm`;
  watchOrRest();
}

// -- the key

/** Resolves to whether a key was given. */
function wantKey() {
  const dialog = byId("key-dialog");
  byId("key-button").hidden = false;
  const told = hasKey() ? "The gateway does not take this key." : "This gateway asks for a key.";
  setText(byId("key-told"), `${told} It stays in this tab and is forgotten with it.`);
  byId("key-forget").hidden = !hasKey();
  dialog.returnValue = ""; // Esc leaves there what it was the last time
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "given"), { once: true });
  });
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  byId("key-dialog").close("given");
  begin();
});
byId("key-forget").addEventListener("click", () => {
  setKey("");
  byId("key").value = "";
  byId("key-dialog").close("");
});
byId("key-button").addEventListener("click", () => {
  setText(byId("key-told"), "The key stays in this tab and is forgotten with it.");
  byId("key-forget").hidden = !hasKey();
  byId("key-dialog").showModal();
});
byId("copy-close").addEventListener("click", () => byId("copy-dialog").close());

// -- what there is to talk to

async function begin() {
  byId("key-button").hidden = !hasKey();
  try {
    settings.offer((await getJson("/v1/models")).data.map((model) => model.id));
    if (!byId("chat").hidden) describe(await getJson("/api/swarm"));
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    setText(emptyRoute, error.status === 401 ? "This gateway asks for a key." : error.message);
    if (error.status === 401) wantKey();
  }
  watchOrRest();
}

function describe({ models }) {
  const model = models.find(({ id }) => id === settings.model);
  if (!model) return;
  const told = model.route
    ? `${model.id}: ${model.model.layers} layers on ${count(model.route.hops.length, "machine")}, ${model.route.hops.map(nameOf).join(" → ")}`
    : `${model.id} cannot answer now: ${model.problem}`;
  setText(emptyRoute, told);
}

// -- the swarm, live while it is looked at

function watchOrRest() {
  const wanted = !byId("swarm").hidden && document.visibilityState === "visible";
  if (wanted && !watching) {
    watching = new AbortController();
    watch(watching.signal);
  } else if (!wanted && watching) {
    watching.abort();
    watching = null;
  }
}

async function watch(signal) {
  while (!signal.aborted) {
    try {
      for await (const data of events("/api/swarm/events", { signal })) {
        const state = JSON.parse(data);
        swarm.show(state);
        settings.offer(state.models.map((model) => model.id));
        live(true, "Live");
      }
      live(false, "The gateway ended the connection; asking again");
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof ApiError)) throw error;
      live(false, error.message);
      if (error.status === 401) {
        watching = null;
        wantKey();
        return;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

function live(isLive, text) {
  byId("live-dot").classList.toggle("on", isLive);
  setText(byId("live"), text);
  // beside the text, which is read out: this changes with every state
  if (isLive) setText(byId("live-at"), clock(new Date()));
}

new Chat(settings, wantKey);
addEventListener("hashchange", navigate);
document.addEventListener("visibilitychange", watchOrRest);
navigate();
begin();

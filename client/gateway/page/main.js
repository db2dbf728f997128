// Views, the API key, and the stream of the swarm's state.

import { ApiError, events, getJson, hasKey, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { nameOf } from "./peer_history.js";
import { Settings } from "./settings.js";
import { SwarmView } from "./swarm.js";
import { clock, count } from "./format.js";

const RETRY_MS = 2000;
const views = { chat: "Chat", swarm: "Swarm" };
const settings = new Settings();
const swarm = new SwarmView();
// looked up now: the first question removes it from the document
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
  updateWatching();
}

// -- the key

/** Resolves to whether a key was given. */
function requestKey() {
  const dialog = byId("key-dialog");
  byId("key-button").hidden = false;
  const problem = hasKey() ? "The gateway does not accept this key." : "This gateway asks for a key.";
  setText(byId("key-message"), `${problem} It is kept in this tab only.`);
  byId("key-forget").hidden = !hasKey();
  dialog.returnValue = ""; // Esc does not reset it
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "given"), { once: true });
  });
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  byId("key-dialog").close("given");
  loadModels();
});
byId("key-forget").addEventListener("click", () => {
  setKey("");
  byId("key").value = "";
  byId("key-dialog").close("");
});
byId("key-button").addEventListener("click", () => {
  setText(byId("key-message"), "The key is kept in this tab only.");
  byId("key-forget").hidden = !hasKey();
  byId("key-dialog").showModal();
});
byId("copy-close").addEventListener("click", () => byId("copy-dialog").close());

// -- the models

async function loadModels() {
  byId("key-button").hidden = !hasKey();
  try {
    settings.setModels((await getJson("/v1/models")).data.map((model) => model.id));
    if (!byId("chat").hidden) showRoute(await getJson("/api/swarm"));
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    setText(emptyRoute, error.status === 401 ? "This gateway asks for a key." : error.message);
    if (error.status === 401) requestKey();
  }
  updateWatching();
}

function showRoute({ models }) {
  const model = models.find(({ id }) => id === settings.model);
  if (!model) return;
  const text = model.route
    ? `${model.id}: ${model.model.layers} layers on ${count(model.route.hops.length, "machine")}, ${model.route.hops.map(nameOf).join(" → ")}`
    : `${model.id} cannot answer now: ${model.problem}`;
  setText(emptyRoute, text);
}

// -- the swarm, streamed while its view is visible

function updateWatching() {
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
        settings.setModels(state.models.map((model) => model.id));
        showConnection(true, "Live");
      }
      showConnection(false, "The gateway ended the connection; reconnecting");
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof ApiError)) throw error;
      showConnection(false, error.message);
      if (error.status === 401) {
        watching = null;
        requestKey();
        return;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function showConnection(isLive, text) {
  byId("live-dot").classList.toggle("on", isLive);
  setText(byId("live"), text);
  // Apart from the text, which screen readers read: the time changes with every state.
  if (isLive) setText(byId("live-at"), clock(new Date()));
}

new Chat(settings, requestKey);
addEventListener("hashchange", navigate);
document.addEventListener("visibilitychange", updateWatching);
navigate();
loadModels();

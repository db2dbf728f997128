// The history of each peer, from one state of the swarm to the next. Without access to the document.

const GONE_SHOWN_S = 120;

/** The peers of one model. `now` is the browser's clock in seconds; the gateway's may differ. */
export class PeerHistory {
  /** peer id -> {peer, condition, since}; a peer that is gone stays for `GONE_SHOWN_S`. */
  peers = new Map();
  missing = null;

  /** Compare with a model of /api/swarm. Returns the changes as texts. */
  update(model, now) {
    const first = this.missing === null;
    const changes = [];
    const present = new Set();
    for (const peer of model.peers) {
      present.add(peer.peer_id);
      const before = this.peers.get(peer.peer_id);
      const condition = conditionOf(peer);
      const change = first ? "" : changeOf(before, peer, condition);
      if (change) changes.push(`${nameOf(peer)} ${change}`);
      const since = before?.condition === condition ? before.since : now;
      this.peers.set(peer.peer_id, { peer, condition, since });
    }
    for (const [id, known] of this.peers) {
      if (present.has(id)) continue;
      if (known.condition !== "gone") {
        if (known.condition !== "lost") changes.push(`${nameOf(known.peer)} is gone`);
        this.peers.set(id, { ...known, condition: "gone", since: known.condition === "lost" ? known.since : now });
      } else if (now - known.since > GONE_SHOWN_S) this.peers.delete(id);
    }
    const missing = model.missing.join(", ");
    if (!first && missing !== this.missing) {
      changes.push(missing ? `${model.id}: no peer serves the layers ${missing}` : `${model.id}: all layers are served again`);
    } else if (first && missing) changes.push(`${model.id}: no peer serves the layers ${missing}`);
    this.missing = missing;
    return changes;
  }

  /** All peers by their first layer. */
  get sorted() {
    const first = ({ peer }) => Number(peer.span.split(":")[0]);
    return [...this.peers.values()].sort((a, b) => first(a) - first(b) || (a.peer.name + a.peer.peer_id < b.peer.name + b.peer.peer_id ? -1 : 1));
  }
}

/** "serving", "leaving", "lost" (does not answer), "unusable", or later "gone". */
function conditionOf(peer) {
  if (peer.unreachable) return "lost";
  if (peer.state !== "serving") return "leaving";
  return peer.left_out ? "unusable" : "serving";
}

function changeOf(before, peer, condition) {
  if (!before) return `serves ${peer.span}`;
  if (before.condition !== condition) {
    if (condition === "lost") return "does not answer";
    if (condition === "leaving") return "is leaving";
    if (condition === "unusable") return `cannot be used: ${peer.left_out}`;
    return `serves ${peer.span} again`;
  }
  if (before.peer.incarnation !== peer.incarnation) return "was restarted";
  return before.peer.span === peer.span ? "" : `now serves ${peer.span}`;
}

export const nameOf = (peer) => peer.name || peer.peer_id.slice(0, 8);

/** Sessions grouped by route: [{hops, answers, tokens}]. */
export function routesInUse(model) {
  const routes = new Map();
  for (const { hops, tokens } of model.routes_in_use) {
    const key = hops.map((hop) => `${hop.peer_id} ${hop.span}`).join(" ");
    const route = routes.get(key) ?? { hops, answers: 0, tokens: 0 };
    route.answers += 1;
    route.tokens += tokens;
    routes.set(key, route);
  }
  return [...routes.values()];
}

// Requests to the gateway. The API key is kept for this tab only.

const KEY = "swarm.key";
let key = "";
try {
  key = sessionStorage.getItem(KEY) ?? "";
} catch {
  // storage may be forbidden
}

export const hasKey = () => key !== "";

export function setKey(text) {
  key = text.trim();
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // storage may be forbidden
  }
}

/** An error of the gateway. `status` is 0 where the gateway was not reached. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = "", retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

/** A response with a good status. Throws ApiError, and AbortError when `signal` aborts. */
async function send(path, { body, signal } = {}) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (body) headers["content-type"] = "application/json";
  const options = { method: body ? "POST" : "GET", headers, signal, cache: "no-store" };
  if (body) options.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The gateway does not answer. Is it still running?");
  }
  if (response.ok) return response;
  throw await errorFrom(response);
}

async function errorFrom(response) {
  const retryAfter = Number(response.headers.get("retry-after")) || null;
  const { status } = response;
  try {
    const { error } = await response.json();
    return new ApiError(String(error.message), { status, code: String(error.code), retryAfter });
  } catch {
    return new ApiError(`The gateway answered with status ${status}.`, { status, retryAfter });
  }
}

export async function getJson(path, options) {
  return (await send(path, options)).json();
}

/** The `data` of each event of a stream, until it ends. */
export async function* events(path, options) {
  const response = await send(path, options);
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(value);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection to the gateway broke off.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Parses server-sent events from pieces of text. Returns complete events only. */
export class EventParser {
  #rest = "";
  #data = [];

  push(text) {
    const found = [];
    const lines = (this.#rest + text).split(/\r\n|\n/);
    this.#rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) found.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      } // comments keep the connection alive; other fields are not used
    }
    return found;
  }
}

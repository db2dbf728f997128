// The conversation: from what is typed to what is streamed.

import { Answer } from "./answer.js";
import { ApiError, events } from "./api.js";
import { byId, make, say } from "./dom.js";

const EXAMPLES = ["Name three things that bees do.", "What is the capital of France?", "Explain a heat pump to a child."];
const NEAR_END = 60; // pixels: who has scrolled further up is reading, and is left there

export class Chat {
  #log = byId("log");
  #empty = byId("empty");
  #question = byId("question");
  #send = byId("send");
  #turns = [];
  #running = null;

  /** `wantKey` is called where the gateway asks for a key; it resolves when there is one. */
  constructor(settings, wantKey) {
    this.settings = settings;
    this.wantKey = wantKey;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#running) this.stop();
      else this.#sendTyped();
    });
    this.#question.addEventListener("input", () => this.#fit());
    this.#question.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.#running) this.#sendTyped();
    });
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#running && !document.querySelector("dialog[open]")) this.stop();
    });
    byId("new-chat").addEventListener("click", () => this.#clear());
    byId("examples").append(
      ...EXAMPLES.map((text) => make("li", {}, make("button", { type: "button", on: { click: () => this.#ask(text) } }, text))),
    );
  }

  stop() {
    this.#running?.abort();
  }

  #sendTyped() {
    const text = this.#question.value.trim();
    if (text && this.settings.check()) {
      this.#question.value = "";
      this.#fit();
      this.#ask(text);
    }
  }

  #clear() {
    this.stop();
    this.#turns = [];
    this.#log.replaceChildren(this.#empty);
    byId("new-chat").disabled = true;
    this.#question.focus();
  }

  #ask(question) {
    this.#empty.remove();
    byId("new-chat").disabled = false;
    this.#log.append(make("article", { class: "turn question", "aria-label": "You" }, make("div", { class: "said" }, question)));
    const turn = { question, answer: null };
    this.#turns.push(turn);
    this.#answer(turn);
  }

  async #answer(turn) {
    if (this.#running) return;
    turn.answer = null;
    const request = { ...this.settings.request(this.#messages(turn)), stream: true };
    const answer = new Answer(request, () => this.#retry(turn, answer));
    this.#log.append(answer.element);
    this.#log.scrollTop = this.#log.scrollHeight;
    const running = this.#begin();
    turn.answer = answer;
    try {
      await this.#stream(request, answer, running.signal);
      say("The answer is complete.");
    } catch (error) {
      if (running.signal.aborted) {
        answer.stopped();
        say("Stopped.");
      } else {
        // anything but a refusal is a bug of this page: shown all the same
        answer.fail(error instanceof ApiError ? error : new ApiError(`This page failed: ${error.message}`));
        if (error.status === 401) this.wantKey().then((given) => given && answer.again());
      }
    } finally {
      if (this.#running === running) this.#end();
      this.#keepInView();
    }
  }

  async #stream(request, answer, signal) {
    let reason = null;
    let metrics = null;
    for await (const data of events("/v1/chat/completions", { body: { ...request, swarm_metrics: true }, signal })) {
      if (data === "[DONE]") {
        answer.finish(reason, metrics);
        return;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(String(chunk.error.message), { code: String(chunk.error.code) });
      metrics = chunk.swarm ?? metrics;
      for (const { delta, finish_reason } of chunk.choices) {
        reason = finish_reason ?? reason;
        if (!delta.content) continue;
        const following = this.#isAtEnd();
        answer.add(delta.content);
        if (following) this.#log.scrollTop = this.#log.scrollHeight;
      }
    }
    throw new ApiError("The answer ended before it was complete.");
  }

  #retry(turn, answer) {
    if (this.#running || !this.settings.check()) return;
    answer.element.remove();
    this.#question.focus();
    this.#answer(turn);
  }

  /** What was said up to this turn; turns that got no answer are left out. */
  #messages(turn) {
    const before = this.#turns.slice(0, this.#turns.indexOf(turn)).filter(({ answer }) => answer?.text);
    return [
      ...before.flatMap(({ question, answer }) => [
        { role: "user", content: question },
        { role: "assistant", content: answer.text },
      ]),
      { role: "user", content: turn.question },
    ];
  }

  #begin() {
    this.#running = new AbortController();
    this.#send.textContent = "Stop";
    this.#send.classList.add("stop");
    say("Answering.");
    return this.#running;
  }

  #end() {
    this.#running = null;
    this.#send.textContent = "Send";
    this.#send.classList.remove("stop");
  }

  #isAtEnd() {
    return this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < NEAR_END;
  }

  /** The facts below an answer come after its last piece. */
  #keepInView() {
    const { scrollHeight, scrollTop, clientHeight } = this.#log;
    if (scrollHeight - scrollTop - clientHeight < 4 * NEAR_END) this.#log.scrollTop = scrollHeight;
  }

  #fit() {
    this.#question.style.height = "auto";
    this.#question.style.height = `${Math.min(this.#question.scrollHeight, 200)}px`;
  }
}

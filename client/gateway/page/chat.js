// The conversation: input, requests, streamed answers.

import { Answer } from "./answer.js";
import { ApiError, events } from "./api.js";
import { announce, byId, make } from "./dom.js";

const EXAMPLES = ["Name three things that bees do.", "What is the capital of France?", "Explain a heat pump to a child."];
const NEAR_END = 60; // pixels: a reader who has scrolled further up is not scrolled down

export class Chat {
  #log = byId("log");
  #empty = byId("empty");
  #question = byId("question");
  #send = byId("send");
  #turns = [];
  #running = null;

  /** `requestKey` asks the user for an API key; it resolves to whether there is one. */
  constructor(settings, requestKey) {
    this.settings = settings;
    this.requestKey = requestKey;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#running) this.stop();
      else this.#sendTyped();
    });
    this.#question.addEventListener("input", () => this.#resizeInput());
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
    if (text && this.settings.validate()) {
      this.#question.value = "";
      this.#resizeInput();
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
    this.#log.append(make("article", { class: "turn question", "aria-label": "You" }, make("div", { class: "message" }, question)));
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
    const running = this.#start();
    turn.answer = answer;
    try {
      await this.#stream(request, answer, running.signal);
      announce("The answer is complete.");
    } catch (error) {
      if (running.signal.aborted) {
        answer.showStopped();
        announce("Stopped.");
      } else {
        // Any other error is a bug of this page; it is shown too.
        answer.showError(error instanceof ApiError ? error : new ApiError(`This page failed: ${error.message}`));
        if (error.status === 401) this.requestKey().then((hasKey) => hasKey && answer.retry());
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
        const atEnd = this.#isAtEnd();
        answer.add(delta.content);
        if (atEnd) this.#log.scrollTop = this.#log.scrollHeight;
      }
    }
    throw new ApiError("The answer ended before it was complete.");
  }

  #retry(turn, answer) {
    if (this.#running || !this.settings.validate()) return;
    answer.element.remove();
    this.#question.focus();
    this.#answer(turn);
  }

  /** The messages up to this turn, without turns that got no answer. */
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

  #start() {
    this.#running = new AbortController();
    this.#send.textContent = "Stop";
    this.#send.classList.add("stop");
    announce("Answering.");
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

  /** Scroll to the stats and actions, which are added below a finished answer. */
  #keepInView() {
    const { scrollHeight, scrollTop, clientHeight } = this.#log;
    if (scrollHeight - scrollTop - clientHeight < 4 * NEAR_END) this.#log.scrollTop = scrollHeight;
  }

  #resizeInput() {
    this.#question.style.height = "auto";
    this.#question.style.height = `${Math.min(this.#question.scrollHeight, 200)}px`;
  }
}

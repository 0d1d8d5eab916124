// The chat box. Several answers may run at once; under each stands where its time went.

import { call, events } from "./api.js";
import { milliseconds } from "./drawing.js";

const PHASES = ["queue", "prefill", "transfer", "decode"];
const MOST_TURNS = 50;
const LONG_SHARE = 0.75;
const LONG_OUTPUT = 16;
const SHOWN_LETTERS = 200;
const SENTENCES = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen jugs of wine. ";

export class Chat {
  constructor(answers, onError) {
    [this.answers, this.onError] = [answers, onError];
    this.model = null;
    this.clear();
  }

  clear() {
    this.answers.replaceChildren();
    this.history = [];
    this.session = [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  }

  // Sends a prompt and shows the answer as it comes; resolves when it has ended.
  async ask(prompt, sampling, isLong = false) {
    const turn = new Turn(this.answers, prompt);
    while (this.answers.children.length > MOST_TURNS) this.answers.firstChild.remove();
    const history = this.history;
    try {
      const [path, body] = this.request(prompt, sampling, isLong);
      const response = await call(path, { body, signal: turn.stopper.signal });
      for await (const data of events(response)) if (data !== "[DONE]") turn.take(JSON.parse(data));
      if (!turn.isFailed && !isLong) history.push([prompt, turn.text]);
    } catch (error) {
      turn.fail(error.name === "AbortError" ? "stopped" : error.message);
      this.onError(error);
    }
    turn.end();
  }

  request(prompt, sampling, isLong) {
    const body = {
      model: this.model.name, stream: true, stream_options: { include_usage: true }, include_details: true, ...sampling,
    };
    if (!isLong) body.session_id = this.session;
    if (!this.model.chats || isLong) return ["/v1/completions", { ...body, prompt }];
    const turns = this.history.flatMap(([asked, answered]) => [
      { role: "user", content: asked },
      { role: "assistant", content: answered },
    ]);
    return ["/v1/chat/completions", { ...body, messages: [...turns, { role: "user", content: prompt }] }];
  }

  // A prompt of most of the context that no prefix cache knows, for a few tokens.
  async askLong(sampling) {
    try {
      const response = await call("/tokenize", { body: { prompt: SENTENCES } });
      const { count, max_model_len: most } = await response.json();
      const sentences = SENTENCES.repeat(Math.max(1, Math.floor((most * LONG_SHARE - LONG_OUTPUT - 16) / count)));
      await this.ask(`${Date.now()} ${sentences}`, { ...sampling, max_tokens: LONG_OUTPUT }, true);
    } catch (error) {
      this.onError(error);
    }
  }
}

// One question and its answer.
class Turn {
  constructor(answers, prompt) {
    this.answers = answers;
    this.root = add(answers, "div", "turn");
    const shown = prompt.length > SHOWN_LETTERS ? `${prompt.slice(0, SHOWN_LETTERS)} … (${prompt.length} characters)` : prompt;
    add(this.root, "div", "asked").textContent = shown;
    this.answer = add(this.root, "div", "answer").appendChild(document.createTextNode(""));
    this.stop = add(this.root, "button");
    this.stop.textContent = "Stop";
    this.stopper = new AbortController();
    this.stop.addEventListener("click", () => this.stopper.abort());
    this.isFailed = false;
    this.details = this.usage = null;
    this.follow(true);
  }

  get text() {
    return this.answer.data;
  }

  take(chunk) {
    if (chunk.error) return this.fail(chunk.error.message);
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    const wasAtEnd = this.isAtEnd();
    this.answer.appendData(choice.text ?? choice.delta?.content ?? "");
    this.details = choice.details ?? this.details;
    this.follow(wasAtEnd);
  }

  fail(message) {
    this.isFailed = true;
    add(this.root, "div", "note bad").textContent = message;
  }

  end() {
    const wasAtEnd = this.isAtEnd();
    this.stop.remove();
    if (this.details) this.showPhases(this.details);
    this.follow(wasAtEnd);
  }

  showPhases(details) {
    const seconds = PHASES.map((phase) => details[`${phase}_seconds`]);
    const total = seconds.reduce((sum, value) => sum + value, 0) || 1;
    const bar = add(this.root, "div", "bar phases");
    PHASES.forEach((phase, index) => (add(bar, "i", phase).style.width = `${(100 * seconds[index]) / total}%`));
    const parts = PHASES.map((phase, index) => `${phase} ${milliseconds(seconds[index])}`);
    if (this.usage) parts.push(`${this.usage.prompt_tokens} → ${this.usage.completion_tokens} tokens`);
    parts.push(`TTFT ${milliseconds(details.ttft_seconds)}`, `TPOT ${milliseconds(details.tpot_seconds)}`);
    if (details.prefill_worker) parts.push(`${details.prefill_worker} → ${details.decode_worker}`);
    add(this.root, "div", "note").textContent = parts.join(" · ");
  }

  isAtEnd() {
    const box = this.answers;
    return box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  }

  follow(wasAtEnd) {
    if (wasAtEnd) this.answers.scrollTop = this.answers.scrollHeight;
  }
}

function add(parent, tag, name) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  return parent.appendChild(element);
}

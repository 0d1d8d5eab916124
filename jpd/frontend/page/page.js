// The page: follows /activity while it can be seen, and draws; the chat box is `chat.js`.

import { call, events, hasKey, keepKey, KeyNeeded } from "./api.js";
import { Chat } from "./chat.js";
import { Gauges } from "./gauges.js";
import { Lanes } from "./lanes.js";
import { Plot } from "./plots.js";

const RETRY_MS = 1000;
const FRAME_MS = 50;
const $ = (id) => document.getElementById(id);

const lanes = new Lanes($("lanes"), $("pointed"));
const gauges = new Gauges($("gauges"));
const ttft = new Plot($("ttft"), $("ttft-summary"), "prefill");
const tpot = new Plot($("tpot"), $("tpot-summary"), "decode");
const chat = new Chat($("answers"), (error) => {
  if (error instanceof KeyNeeded) $("key-form").hidden = false;
});

let offset = null; // the server's clock less ours, in seconds
let watching = new AbortController();

function show(look) {
  offset = look.now - performance.now() / 1e3;
  chat.model = look.model;
  $("key-form").hidden = true;
  for (const link of document.querySelectorAll("nav .guarded")) link.hidden = hasKey(); // links send none
  $("model").textContent = look.model.name;
  document.title = `${look.model.name} · jpd`;
  showHealth(look.health.status, look.health.reasons.join("; "));
  $("waiting").textContent = `${look.waiting} waiting · ${look.running.length} running`;
  $("chat-title").textContent = look.model.chats ? "Chat" : "Completion";
  for (const id of ["send", "long"]) $(id).disabled = !look.model.reads_text;
  if (!look.model.reads_text) $("prompt").placeholder = "This model has no tokenizer: it takes token ids only.";
  lanes.update(look);
  gauges.update(look.workers);
  const ended = look.ended.filter((request) => request.output_tokens > 0);
  ttft.add(ended.map((request) => [request.end, request.ttft]), look.now);
  tpot.add(ended.filter((request) => request.output_tokens > 1).map((request) => [request.end, request.tpot]), look.now);
}

function showHealth(status, reasons) {
  $("health").textContent = status;
  $("health").title = reasons;
  $("health").className = status === "ok" ? "ok" : "bad";
}

// Follows the stream; comes back when it ends. A hidden page follows nothing.
async function follow() {
  watching = new AbortController();
  const response = await call("/activity", { signal: watching.signal });
  ttft.points = [];
  tpot.points = [];
  for await (const data of events(response)) show(JSON.parse(data));
}

async function watch() {
  for (;;) {
    try {
      if (!document.hidden) await follow();
    } catch (error) {
      if (error instanceof KeyNeeded) $("key-form").hidden = false;
    }
    if (!$("key-form").hidden) {
      await keyGiven();
      continue;
    }
    if (!document.hidden) showHealth("no connection", "");
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function keyGiven() {
  showHealth("needs the API key", "");
  return new Promise((resolve) => $("key-form").addEventListener("submit", resolve, { once: true }));
}

let drawn = 0;
function draw(time) {
  if (offset !== null && time - drawn >= FRAME_MS) {
    drawn = time;
    const now = time / 1e3 + offset;
    for (const picture of [lanes, ttft, tpot]) picture.draw(now);
  }
  requestAnimationFrame(draw);
}

function sampling() {
  return { max_tokens: Number($("max-tokens").value), temperature: Number($("temperature").value) };
}

function send(event) {
  event.preventDefault();
  const prompt = $("prompt").value;
  if (!prompt.trim() || !chat.model?.reads_text) return;
  $("prompt").value = "";
  chat.ask(prompt, sampling());
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) watching.abort();
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey($("key").value);
});
$("ask").addEventListener("submit", send);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
$("long").addEventListener("click", () => chat.askLong(sampling()));
$("clear").addEventListener("click", () => chat.clear());
watch();
requestAnimationFrame(draw);

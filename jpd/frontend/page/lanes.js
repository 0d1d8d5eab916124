// Lanes: what each worker did in the last half minute, a row for each request that overlaps others.

import { colours, milliseconds, prepare } from "./drawing.js";

const WINDOW_SECONDS = 30;
const TICK_SECONDS = 5;
const LABEL_WIDTH = 96;
const ROW_HEIGHT = 12;
const LANE_GAP = 10;
const AXIS_HEIGHT = 16;
const LEAST_ROWS = 2;
const MOST_ROWS = 12;
const QUEUE = "queue";

export class Lanes {
  constructor(canvas, pointed) {
    this.canvas = canvas;
    this.requests = new Map();
    this.lanes = [];
    this.boxes = [];
    canvas.addEventListener("pointermove", (event) => {
      const box = this.boxAt(event.offsetX, event.offsetY);
      pointed.textContent = box ? describe(box) : "";
    });
  }

  // Takes one look: who runs replaces what was known of it, who ended stays until it is out of sight.
  update(look) {
    const oldest = look.now - WINDOW_SECONDS;
    for (const [id, request] of this.requests) {
      const isGone = request.state !== "ended" || request.end < oldest;
      if (isGone) this.requests.delete(id);
    }
    for (const request of look.ended) {
      if (request.end >= oldest) this.requests.set(request.id, { ...request, state: "ended" });
    }
    for (const request of look.running) this.requests.set(request.id, request);
    this.place(look.workers, oldest);
  }

  // Gives each request a row in each lane it is in, and leaves it there.
  place(workers, oldest) {
    const known = new Map(this.lanes.map((lane) => [lane.name, lane]));
    const named = [{ name: QUEUE, role: "" }, ...workers];
    this.lanes = named.map(({ name, role }) => {
      const rows = known.get(name)?.rows ?? new Map();
      for (const id of rows.keys()) if (!this.requests.has(id)) rows.delete(id);
      return { name, role, rows };
    });
    const inOrder = [...this.requests.values()].sort((a, b) => start(a) - start(b));
    for (const lane of this.lanes) {
      for (const request of inOrder) {
        if (lane.rows.has(request.id) || !inLane(request, lane.name).length) continue;
        lane.rows.set(request.id, this.freeRow(lane, start(request), oldest));
      }
      lane.numRows = Math.min(MOST_ROWS, Math.max(LEAST_ROWS, ...[...lane.rows.values()].map((row) => row + 1)));
    }
  }

  // The first row whose requests had left the lane before `time`.
  freeRow(lane, time, oldest) {
    const until = [];
    for (const [id, row] of lane.rows) {
      const request = this.requests.get(id);
      const isRunning = request.state !== "ended";
      const spans = inLane(request, lane.name);
      const end = isRunning && spans.at(-1) === request.spans.at(-1) ? Infinity : spans.at(-1)[3];
      until[row] = Math.max(until[row] ?? oldest, end);
    }
    const free = until.findIndex((end) => end === undefined || end <= time);
    return free < 0 ? until.length : free;
  }

  draw(now) {
    const rows = this.lanes.reduce((sum, lane) => sum + lane.numRows, 0);
    const tall = rows * ROW_HEIGHT + this.lanes.length * LANE_GAP + AXIS_HEIGHT;
    const { context, width, height } = prepare(this.canvas, tall);
    const colour = colours();
    const x = (time) => width - ((now - time) / WINDOW_SECONDS) * (width - LABEL_WIDTH);
    this.boxes = [];
    drawAxis(context, colour, x, now, height);
    let top = 0;
    for (const lane of this.lanes) {
      const tallLane = lane.numRows * ROW_HEIGHT;
      context.fillStyle = colour.text;
      context.fillText(lane.name, 0, top + tallLane / 2 + 4, LABEL_WIDTH - 8);
      this.drawSpans(context, colour, lane, top, x, now, width);
      top += tallLane + LANE_GAP;
      context.fillStyle = colour.line;
      context.fillRect(0, top - LANE_GAP / 2, width, 1);
    }
  }

  drawSpans(context, colour, lane, top, x, now, width) {
    for (const [id, row] of lane.rows) {
      const request = this.requests.get(id);
      const y = top + Math.min(row, lane.numRows - 1) * ROW_HEIGHT;
      for (const span of inLane(request, lane.name)) {
        const isOpen = request.state !== "ended" && span === request.spans.at(-1);
        const left = Math.max(LABEL_WIDTH, x(span[2]));
        const right = Math.min(width, x(isOpen ? now : span[3]));
        if (right < LABEL_WIDTH) continue;
        context.fillStyle = colour[span[0]];
        context.fillRect(left, y, Math.max(1.5, right - left), ROW_HEIGHT - 2);
        this.boxes.push({ left, right, top: y, request, span });
      }
    }
  }

  boxAt(x, y) {
    return this.boxes.find((box) => x >= box.left - 2 && x <= box.right + 2 && y >= box.top && y < box.top + ROW_HEIGHT);
  }
}

function start(request) {
  return request.spans.length ? request.spans[0][2] : request.end;
}

function inLane(request, name) {
  return request.spans.filter((span) => (span[1] || QUEUE) === name);
}

function drawAxis(context, colour, x, now, height) {
  context.textAlign = "center";
  for (let ago = TICK_SECONDS; ago < WINDOW_SECONDS; ago += TICK_SECONDS) {
    context.fillStyle = colour.line;
    context.fillRect(x(now - ago), 0, 1, height - AXIS_HEIGHT);
    context.fillStyle = colour.dim;
    context.fillText(`−${ago} s`, x(now - ago), height - 3);
  }
  context.textAlign = "left";
}

function describe({ request, span }) {
  const [phase, worker, from, until] = span;
  const where = worker ? ` on ${worker}` : "";
  const size = `${request.prompt_tokens} → ${request.output_tokens} tokens`;
  return `${phase}${where}: ${milliseconds(until - from)} · request ${request.id} · ${size}`;
}

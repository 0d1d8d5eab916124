// A plot of one number of each request that ended in the last five minutes, over time.

import { colours, milliseconds, prepare } from "./drawing.js";

const WINDOW_SECONDS = 300;
const MOST_POINTS = 2000;
const LEFT = 52;
const BOTTOM = 16;
const TOP = 6;

export class Plot {
  constructor(canvas, summary, colour) {
    [this.canvas, this.summary, this.colour] = [canvas, summary, colour];
    this.points = [];
  }

  // `points` are [time, seconds]; old ones leave.
  add(points, now) {
    this.points = [...this.points, ...points].filter(([time]) => time > now - WINDOW_SECONDS).slice(-MOST_POINTS);
    const values = this.points.map(([, value]) => value).sort((a, b) => a - b);
    const at = (share) => milliseconds(values[Math.min(values.length - 1, Math.floor(share * values.length))]);
    this.summary.textContent = values.length ? `median ${at(0.5)} · p95 ${at(0.95)} · ${values.length} requests` : "no requests yet";
  }

  draw(now) {
    const { context, width, height } = prepare(this.canvas);
    const colour = colours();
    const most = niceCeiling(Math.max(0.001, ...this.points.map(([, value]) => value)));
    const x = (time) => width - ((now - time) / WINDOW_SECONDS) * (width - LEFT);
    const y = (value) => height - BOTTOM - (value / most) * (height - BOTTOM - TOP);
    context.textAlign = "right";
    for (const share of [0, 0.5, 1]) {
      context.fillStyle = colour.line;
      context.fillRect(LEFT, y(share * most), width - LEFT, 1);
      context.fillStyle = colour.dim;
      context.fillText(milliseconds(share * most), LEFT - 6, y(share * most) + 4);
    }
    context.textAlign = "left";
    context.fillText("−5 min", LEFT, height - 2);
    context.textAlign = "right";
    context.fillText("now", width, height - 2);
    context.textAlign = "left";
    context.fillStyle = colour[this.colour];
    for (const [time, value] of this.points) {
      context.beginPath();
      context.arc(Math.min(width - 3, x(time)), y(value), 3, 0, 2 * Math.PI);
      context.fill();
    }
  }
}

// The next of 1, 2, 5, 10, ... above a number.
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value) ?? 10 * power;
}

// What all canvases share: sharp pixels, the colours of the style sheet, and times as text.

const NAMES = ["panel", "line", "text", "dim", "queue", "prefill", "transfer", "decode"];

// The colours as they are now: light and dark differ.
export function colours() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

// A cleared context whose unit is a CSS pixel, and the size in those. `height` sets the canvas's.
export function prepare(canvas, height) {
  if (height && canvas.style.height !== `${height}px`) canvas.style.height = `${height}px`;
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const tall = canvas.clientHeight;
  const [pixelWidth, pixelHeight] = [Math.round(width * scale), Math.round(tall * scale)];
  if (canvas.width !== pixelWidth || canvas.height !== pixelHeight) {
    canvas.width = pixelWidth;
    canvas.height = pixelHeight;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, tall);
  context.font = "11px system-ui, sans-serif";
  return { context, width, height: tall };
}

export function milliseconds(seconds) {
  const value = seconds * 1e3;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} s`;
  return `${value >= 10 || value === 0 ? value.toFixed(0) : value.toFixed(1)} ms`;
}

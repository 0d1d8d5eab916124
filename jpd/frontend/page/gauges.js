// A gauge for each worker: its KV pages, and the work it has.

export class Gauges {
  constructor(box) {
    this.box = box;
    this.cards = new Map();
  }

  update(workers) {
    for (const [name, card] of this.cards) {
      if (workers.some((worker) => worker.name === name)) continue;
      card.root.remove();
      this.cards.delete(name);
    }
    for (const worker of workers) {
      if (!this.cards.has(worker.name)) this.cards.set(worker.name, this.makeCard(worker.name));
      show(this.cards.get(worker.name), worker);
    }
  }

  makeCard(name) {
    const root = add(this.box, "div", "gauge");
    const head = add(root, "div", "name");
    add(head, "span").textContent = name;
    const role = add(head, "span");
    const bar = add(root, "div", "bar");
    const [used, cached] = [add(bar, "i", "used"), add(bar, "i", "cached")];
    return { root, role, used, cached, pages: add(root, "div", "note"), work: add(root, "div", "note") };
  }
}

function show(card, worker) {
  const share = (pages) => `${(100 * pages) / Math.max(1, worker.pages)}%`;
  card.role.textContent = worker.role;
  card.used.style.width = share(worker.pages_used);
  card.cached.style.width = share(worker.pages_cached);
  card.pages.textContent = `KV pages: ${worker.pages_used} in use, ${worker.pages_cached} cached, of ${worker.pages}`;
  const rows = worker.slots ? `${worker.rows} of ${worker.slots} slots` : "";
  const prefills = worker.role === "decode" && !worker.prefills ? "" : `${worker.prefills} prompts`;
  card.work.textContent = [prefills, rows].filter(Boolean).join(", ");
}

function add(parent, tag, name) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  return parent.appendChild(element);
}

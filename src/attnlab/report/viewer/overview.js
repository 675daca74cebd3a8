// Every head of every layer as a small map, in order or sorted by a statistic.

import { ARMS, paint } from "./colour.js";
import { block, bytes } from "./decode.js";
import { element, menu, number } from "./dom.js";

const SIDE = 56; // pixels of a small map

export class Overview {
  constructor(store, onchoose) {
    this.store = store;
    this.onchoose = onchoose;
    this.sort = "place";
    this.down = true;
    this.grid = element("div", { class: "heads-grid", role: "group", ariaLabel: "layers and heads; arrow keys move" });
    this.grid.addEventListener("keydown", (event) => this.walk(event));
    this.tools = element("div", { class: "bar" });
    this.node = element(
      "details",
      { class: "overview", open: true },
      element("summary", {}, "Every layer and head"),
      this.tools,
      this.grid,
    );
    this.seen = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries) {
        if (isIntersecting) {
          this.seen.unobserve(target);
          this.paint(target);
        }
      }
    }, { rootMargin: "200px" });
  }

  // Heads of the state's run, frame, example and kind.
  update(state, theme) {
    const key = [state.run, state.frame, state.example, state.kind, theme, this.sort, this.down].join("/");
    this.state = state;
    if (key !== this.key) this.build(state, theme);
    this.key = key;
    const buttons = [...this.grid.querySelectorAll("button")];
    for (const button of buttons) {
      const here = Number(button.dataset.layer) === state.layer && state.heads.has(Number(button.dataset.head));
      button.setAttribute("aria-pressed", String(here));
    }
    const chosen = buttons.find((button) => button.ariaPressed === "true") || buttons[0];
    if (chosen && !this.grid.contains(document.activeElement)) this.stop(chosen);
  }

  // The Tab key reaches one small map; arrow keys move on from it.
  stop(button) {
    for (const other of this.grid.querySelectorAll("button")) other.tabIndex = other === button ? 0 : -1;
  }

  walk(event) {
    const all = [...this.grid.querySelectorAll("button")];
    const now = event.target;
    const at = all.indexOf(now);
    const ways = {
      ArrowLeft: () => all[at - 1],
      ArrowRight: () => all[at + 1],
      ArrowUp: () => nearest(all.filter((other) => other.offsetTop < now.offsetTop), now),
      ArrowDown: () => nearest(all.filter((other) => other.offsetTop > now.offsetTop), now),
      Home: () => all[0],
      End: () => all.at(-1),
    };
    const next = at >= 0 && ways[event.key]?.();
    if (!next) return;
    event.preventDefault();
    this.stop(next);
    next.focus();
  }

  build(state, theme) {
    this.theme = theme;
    this.seen.disconnect();
    const heads = [];
    const there = new Set();
    for (const layer of this.store.layers(state)) {
      const attention = this.store.attention(state, layer);
      Object.keys(attention.statistics).forEach((name) => there.add(name));
      attention.heads.forEach((head, place) => heads.push({ attention, layer, head, place }));
    }
    this.node.hidden = heads.length < 2;
    const known = Object.entries(this.store.view.statistics).filter(([name]) => there.has(name));
    if (!there.has(this.sort)) this.sort = "place";
    this.controls(known);
    const value = ({ attention, place }) => (attention.statistics[this.sort] || [])[place] ?? -Infinity;
    if (this.sort !== "place") heads.sort((a, b) => (this.down ? value(b) - value(a) : value(a) - value(b)));
    this.grid.classList.toggle("sorted", this.sort !== "place");
    const most = Math.max(...this.store.layers(state).map((layer) => this.store.attention(state, layer).heads.length));
    const placed = this.sort === "place";
    const columns = `max-content repeat(${most}, minmax(26px, ${SIDE + 8}px))`;
    this.grid.style.gridTemplateColumns = placed ? columns : "";
    const made = [];
    heads.forEach((head) => {
      if (placed && head.place === 0) made.push(element("span", { class: "row" }, `layer ${head.layer}`));
      made.push(this.small(head, known));
    });
    this.grid.replaceChildren(...made);
    this.grid.querySelectorAll("canvas").forEach((canvas) => this.seen.observe(canvas));
  }

  controls(known) {
    const again = () => this.update(this.state, this.theme);
    const options = [["place", "layer and head"], ...known];
    const sorted = menu("Sort by", options, this.sort, (name) => ((this.sort = name), again()));
    const turn = element("button", { type: "button", class: "small" });
    turn.addEventListener("click", () => ((this.down = !this.down), again()));
    turn.textContent = this.down ? "largest first" : "smallest first";
    turn.hidden = this.sort === "place";
    const focused = this.tools.contains(document.activeElement) && document.activeElement.tagName;
    this.tools.replaceChildren(sorted, turn);
    if (focused) this.tools.querySelector(focused).focus({ preventScroll: true });
  }

  small({ attention, layer, head, place }, known) {
    const canvas = element("canvas");
    canvas.source = { attention, place };
    const values = known.map(([name, label]) => `${label} ${number(attention.statistics[name]?.[place])}`);
    const isBest = this.store.isBest(this.state, layer, head);
    const why = isBest ? [this.store.view.runs[this.state.run].best.why] : [];
    const title = [`layer ${layer}, head ${head}`, ...why, ...values].join("; ");
    const button = element("button", { type: "button", title, ariaLabel: title, tabIndex: -1 }, canvas);
    button.classList.toggle("best", isBest);
    Object.assign(button.dataset, { layer, head });
    if (this.sort !== "place") {
      const shown = number(attention.statistics[this.sort]?.[place]);
      button.append(element("span", {}, `${layer}·${head}`), element("b", {}, shown));
    }
    button.addEventListener("click", () => this.onchoose(layer, head));
    return button;
  }

  async paint(canvas) {
    const { attention, place } = canvas.source;
    const found = await block(attention.maps.weight);
    const mask = attention.mask === null ? null : await bytes(this.store.view.masks[attention.mask].data);
    const small = poolMap(found, place, mask);
    canvas.width = small.columns;
    canvas.height = small.rows;
    const pixels = paint(small.values, small.mask, 1, true, this.theme);
    const image = new ImageData(new Uint8ClampedArray(pixels.buffer), small.columns, small.rows);
    canvas.getContext("2d").putImageData(image, 0, 0);
    canvas.style.background = ARMS[this.theme].hidden;
  }
}

// The small map in the nearest row, and the nearest one in that row. Maps of a row have the same top.
function nearest(some, now) {
  const far = (other) => 1e4 * Math.abs(other.offsetTop - now.offsetTop) + Math.abs(other.offsetLeft - now.offsetLeft);
  return some.reduce((best, other) => (best && far(best) <= far(other) ? best : other), null);
}

// Reduce a map to SIDE × SIDE numbers: the largest of each group of cells, divided by the largest of the map.
function poolMap({ rows, columns, codes, scales, worth }, head, mask) {
  const [h, w] = [Math.min(rows, SIDE), Math.min(columns, SIDE)];
  const values = new Float32Array(h * w);
  const seen = mask ? new Uint8Array(h * w) : null;
  let most = 0;
  for (let i = 0; i < rows; i++) {
    const scale = scales[head * rows + i];
    const to = Math.floor((i * h) / rows) * w;
    for (let j = 0; j < columns; j++) {
      const value = worth[codes[(head * rows + i) * columns + j]] * scale;
      const cell = to + Math.floor((j * w) / columns);
      if (seen) seen[cell] |= mask[i * columns + j];
      if (Math.abs(value) > Math.abs(values[cell])) values[cell] = value;
    }
  }
  for (const value of values) most = Math.max(most, Math.abs(value));
  if (most > 0) for (let k = 0; k < values.length; k++) values[k] /= most;
  return { rows: h, columns: w, values, mask: seen };
}

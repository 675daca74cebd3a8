// A map as a matrix: rows are queries, columns are keys. One canvas has the map, one above it the marks.

import { ARMS, paint } from "./colour.js";
import { element, short } from "./dom.js";
import { runs } from "./marks.js";

const FONT = "system-ui, sans-serif";
const LABEL = 8.5; // pixels of a cell that gets a label; among smaller cells, every second, third … gets one
const LINE = 12; // pixels of a label in that case
const CORNER = 58; // pixels for the names of the axes
const TALL = 620; // largest height of the map in pixels
const CELL = 30;

export class Matrix {
  constructor(events) {
    this.events = events;
    this.base = element("canvas");
    this.over = element("canvas", { class: "over", tabIndex: 0, role: "application" });
    this.node = element("div", { class: "plot" }, this.base, this.over);
    this.view = { zoom: 1, x: 0, y: 0 };
    this.bitmap = document.createElement("canvas");
    this.listen();
  }

  // data: rows, columns, colours (numbers to paint), mask, most, root, theme, labels, gold, width, ink
  update(data) {
    if (!this.data || data.rows !== this.data.rows || data.columns !== this.data.columns) this.reset();
    this.data = data;
    const { rows, columns } = data;
    this.bitmap.width = columns;
    this.bitmap.height = rows;
    const pixels = paint(data.colours, data.mask, data.most, data.root, data.theme);
    const image = new ImageData(new Uint8ClampedArray(pixels.buffer), columns, rows);
    this.bitmap.getContext("2d").putImageData(image, 0, 0);
    this.over.setAttribute("aria-label", data.description);
    this.measure();
    this.draw();
  }

  reset() {
    this.view = { zoom: 1, x: 0, y: 0 };
  }

  measure() {
    const { rows, columns, labels, width } = this.data;
    const context = this.base.getContext("2d");
    context.font = `12px ${FONT}`;
    const longest = (texts) => Math.max(0, ...texts.slice(0, 600).map((t) => context.measureText(t).width));
    const [queries, keys] = [labels.queries.map((t) => short(t, 16)), labels.keys.map((t) => short(t, 16))];
    this.short = { queries, keys };
    this.left = Math.max(CORNER, Math.ceil(Math.min(112, longest(queries))) + 12);
    this.top = Math.max(36, Math.ceil(Math.min(112, longest(keys))) + 12);
    if (Math.min((width - this.left) / columns, TALL / rows) < LABEL) {
      this.left = Math.min(this.left, 84);
      this.top = Math.min(this.top, 64);
    }
    const room = Math.max(CELL, width - this.left - 2); // a panel can be narrower than its labels
    this.cell = Math.min(room / columns, TALL / rows, CELL);
    this.plotWidth = this.cell * columns;
    this.plotHeight = this.cell * rows;
    const ratio = globalThis.devicePixelRatio || 1;
    for (const canvas of [this.base, this.over]) {
      const [w, h] = [Math.ceil(this.left + this.plotWidth + 2), Math.ceil(this.top + this.plotHeight + 2)];
      canvas.width = w * ratio;
      canvas.height = h * ratio;
      canvas.style.width = `${w}px`;
      canvas.style.height = `${h}px`;
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    this.node.style.width = this.base.style.width;
    this.node.style.height = this.base.style.height;
  }

  get size() {
    return this.cell * this.view.zoom;
  }

  draw() {
    const { rows, columns, theme, ink } = this.data;
    const context = this.base.getContext("2d");
    const { left, top, size, plotWidth, plotHeight } = this;
    context.clearRect(0, 0, this.base.width, this.base.height);
    context.imageSmoothingEnabled = size < 1;
    context.imageSmoothingQuality = "high";
    const [w, h] = [columns / this.view.zoom, rows / this.view.zoom];
    context.drawImage(this.bitmap, this.view.x, this.view.y, w, h, left, top, plotWidth, plotHeight);
    if (size >= 7) this.grid(context, ARMS[theme].positive[0]);
    context.strokeStyle = ink.edge;
    context.lineWidth = 1;
    context.strokeRect(left - 0.5, top - 0.5, plotWidth + 1, plotHeight + 1);
    this.axes(context);
    this.labels(context);
    this.links(context);
    this.overlay(this.marks || {});
  }

  grid(context, colour) {
    context.save();
    this.clip(context);
    context.strokeStyle = colour;
    context.globalAlpha = 0.55;
    context.lineWidth = 1;
    context.beginPath();
    for (let i = 1; i < this.data.rows; i++) {
      const y = Math.round(this.y(i)) - 0.5;
      context.moveTo(this.left, y);
      context.lineTo(this.left + this.plotWidth, y);
    }
    for (let j = 1; j < this.data.columns; j++) {
      const x = Math.round(this.x(j)) - 0.5;
      context.moveTo(x, this.top);
      context.lineTo(x, this.top + this.plotHeight);
    }
    context.stroke();
    context.restore();
  }

  labels(context) {
    const { ink } = this.data;
    const every = this.size >= LABEL ? 1 : Math.ceil(LINE / this.size);
    context.font = `${every > 1 ? 10 : Math.min(12, Math.floor(this.size * 0.9))}px ${FONT}`;
    context.fillStyle = ink.text;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (let i = 0; i < this.data.rows; i += every) {
      const y = this.y(i + 0.5);
      if (y < this.top || y > this.top + this.plotHeight) continue;
      context.fillText(this.short.queries[i], this.left - 6, y, this.left - 8);
      if (every > 1) context.fillRect(this.left - 4, y, 3, 1);
    }
    context.textAlign = "left";
    for (let j = 0; j < this.data.columns; j += every) {
      const x = this.x(j + 0.5);
      if (x < this.left || x > this.left + this.plotWidth) continue;
      this.upright(context, this.short.keys[j], x, this.top - 6);
      if (every > 1) context.fillRect(x, this.top - 4, 1, 3);
    }
  }

  // The names of the axes, in the corner without labels.
  axes(context) {
    const { ink, axes } = this.data;
    context.font = `11px ${FONT}`;
    context.fillStyle = ink.soft;
    context.textAlign = "right";
    context.textBaseline = "bottom";
    context.fillText(axes[1], this.left - 6, this.top - 20, this.left - 8);
    context.fillText(axes[0], this.left - 6, this.top - 7, this.left - 8);
  }

  upright(context, text, x, y) {
    context.save();
    context.translate(x, y);
    context.rotate(-Math.PI / 2);
    context.textBaseline = "middle";
    context.fillText(text, 0, 0, this.top - 8);
    context.restore();
  }

  // The gold links: sure ones with a solid frame, possible ones with a dashed frame.
  links(context) {
    if (!this.data.gold) return;
    context.save();
    this.clip(context);
    context.strokeStyle = this.data.ink.gold;
    context.lineWidth = Math.max(1, Math.min(2, this.size / 6));
    for (const { i, j, sure } of this.data.gold) {
      context.setLineDash(sure ? [] : [2, 2]);
      context.strokeRect(this.x(j) + 1, this.y(i) + 1, Math.max(2, this.size - 2), Math.max(2, this.size - 2));
    }
    context.restore();
  }

  // marks: hover and lock {query, key}, either may be null; queries and keys, the selected indices
  overlay(marks) {
    this.marks = marks;
    if (!this.data) return;
    const context = this.over.getContext("2d");
    const { ink } = this.data;
    context.clearRect(0, 0, this.over.width, this.over.height);
    context.save();
    this.clip(context);
    if (marks.queries?.size || marks.keys?.size) this.selection(context, marks);
    for (const [at, strong] of [[marks.lock, true], [marks.hover, false]]) if (at) this.cross(context, at, strong);
    if (this.drag) {
      const { from, to } = this.drag;
      context.strokeStyle = ink.mark;
      const [i, j] = [Math.min(from.query, to.query), Math.min(from.key, to.key)];
      const [h, w] = [Math.abs(from.query - to.query) + 1, Math.abs(from.key - to.key) + 1];
      context.strokeRect(this.x(j), this.y(i), w * this.size, h * this.size);
    }
    context.restore();
    for (const at of [marks.lock, marks.hover]) if (at) this.drawPointedLabels(context, at);
  }

  // Fade the cells outside the selection, and frame the selection with dashes.
  selection(context, { queries, keys }) {
    const { ink, rows, columns } = this.data;
    const chosen = new Path2D();
    for (const [i, h] of runs(queries, rows)) {
      for (const [j, w] of runs(keys, columns)) {
        chosen.rect(this.x(j), this.y(i), w * this.size, h * this.size);
      }
    }
    const rest = new Path2D(chosen);
    rest.rect(this.left, this.top, this.plotWidth, this.plotHeight);
    context.save();
    context.fillStyle = ink.ground;
    context.globalAlpha = 0.72;
    context.fill(rest, "evenodd");
    context.globalAlpha = 1;
    context.strokeStyle = ink.text;
    context.setLineDash([4, 3]);
    context.stroke(chosen);
    context.restore();
  }

  cross(context, at, strong) {
    context.strokeStyle = this.data.ink.mark;
    context.globalAlpha = strong ? 1 : 0.55;
    context.lineWidth = strong ? 1.5 : 1;
    const pad = this.size < 3 ? 1.5 : 0.5;
    if (at.query !== null) {
      context.strokeRect(this.left - 2, this.y(at.query) - pad, this.plotWidth + 4, this.size + 2 * pad);
    }
    if (at.key !== null) {
      context.strokeRect(this.x(at.key) - pad, this.top - 2, this.size + 2 * pad, this.plotHeight + 4);
    }
    context.globalAlpha = 1;
  }

  // The labels of the pointed row and column, above the others.
  drawPointedLabels(context, at) {
    const { ink } = this.data;
    context.font = `600 12px ${FONT}`;
    const inside = (value, low, high) => Math.max(low, Math.min(high, value));
    if (at.query !== null) {
      const y = inside(this.y(at.query + 0.5), this.top + 8, this.top + this.plotHeight - 8);
      context.fillStyle = ink.ground;
      context.fillRect(0, y - 9, this.left - 1, 18);
      context.fillStyle = ink.mark;
      context.textAlign = "right";
      context.textBaseline = "middle";
      context.fillText(this.short.queries[at.query], this.left - 6, y, this.left - 8);
    }
    if (at.key !== null) {
      const x = inside(this.x(at.key + 0.5), this.left + 8, this.left + this.plotWidth - 8);
      context.fillStyle = ink.ground;
      context.fillRect(x - 9, 0, 18, this.top - 1);
      context.fillStyle = ink.mark;
      context.textAlign = "left";
      this.upright(context, this.short.keys[at.key], x, this.top - 6);
    }
  }

  clip(context) {
    context.beginPath();
    context.rect(this.left - 2, this.top - 2, this.plotWidth + 4, this.plotHeight + 4);
    context.clip();
  }

  x(j) {
    return this.left + (j - this.view.x) * this.size;
  }

  y(i) {
    return this.top + (i - this.view.y) * this.size;
  }

  // What is under the pointer: a cell, or in the margins only a row or a column.
  at(event) {
    const box = this.over.getBoundingClientRect();
    const j = Math.floor((event.clientX - box.left - this.left) / this.size + this.view.x);
    const i = Math.floor((event.clientY - box.top - this.top) / this.size + this.view.y);
    const query = event.clientY - box.top >= this.top && i >= 0 && i < this.data.rows ? i : null;
    const key = event.clientX - box.left >= this.left && j >= 0 && j < this.data.columns ? j : null;
    return query === null && key === null ? null : { query, key };
  }

  zoom(factor, event) {
    const { rows, columns } = this.data;
    const at = (event && this.at(event)) || { query: rows / 2, key: columns / 2 };
    const before = this.view.zoom;
    const zoom = Math.max(1, Math.min(Math.max(1, 40 / this.cell), before * factor));
    const { x, y } = this.view; // the cell under the pointer stays in place
    const moved = (at, from) => from + (at - from) * (1 - before / zoom);
    this.look({ zoom, x: moved(at.key ?? 0, x), y: moved(at.query ?? 0, y) });
    this.events.look(this.view);
  }

  look({ zoom, x, y }) {
    const { rows, columns } = this.data;
    const kept = (value, most) => Math.max(0, Math.min(most, value));
    this.view = { zoom, x: kept(x, columns * (1 - 1 / zoom)), y: kept(y, rows * (1 - 1 / zoom)) };
    this.draw();
  }

  focus() {
    this.over.focus({ preventScroll: true });
  }

  listen() {
    const { over, events } = this;
    let pan = null;
    over.addEventListener("pointerdown", (event) => {
      const at = this.at(event);
      if (event.shiftKey && at && at.query !== null && at.key !== null) {
        this.drag = { from: at, to: at };
        over.setPointerCapture(event.pointerId);
      } else if (this.view.zoom > 1) pan = { x: event.clientX, y: event.clientY, view: this.view, moved: false };
    });
    over.addEventListener("pointermove", (event) => {
      const at = this.at(event);
      if (this.drag && at && at.query !== null && at.key !== null) this.drag.to = at;
      if (pan && Math.hypot(event.clientX - pan.x, event.clientY - pan.y) > 4) {
        pan.moved = true;
        const { zoom, x, y } = pan.view;
        this.look({ zoom, x: x - (event.clientX - pan.x) / this.size, y: y - (event.clientY - pan.y) / this.size });
        events.look(this.view);
      }
      events.hover(at);
    });
    over.addEventListener("pointerup", (event) => {
      const done = this.drag;
      const moved = pan && pan.moved;
      this.drag = pan = null;
      if (done) events.select(done.from, done.to);
      else if (!moved && this.at(event)) events.lock(this.at(event), event.ctrlKey || event.metaKey);
    });
    over.addEventListener("pointerleave", () => {
      pan = null;
      events.hover(null);
    });
    over.addEventListener("dblclick", () => {
      this.look({ zoom: 1, x: 0, y: 0 });
      events.look(this.view);
    });
    over.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        this.zoom(event.deltaY < 0 ? 1.25 : 0.8, event);
      },
      { passive: false },
    );
  }
}

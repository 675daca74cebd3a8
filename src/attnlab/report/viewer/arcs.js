// A map as arcs: queries on the left, keys on the right, and an arc for each of the strongest pairs.

import { css, place } from "./colour.js";
import { element, short } from "./dom.js";

const FONT = "system-ui, sans-serif";
const LINE = 20; // pixels of a token
const TALL = 620;
const MOST = 1500; // arcs of a whole map; of one token all are drawn

export class Arcs {
  constructor(events) {
    this.events = events;
    this.canvas = element("canvas", { tabIndex: 0, role: "application" });
    this.spacer = element("div", { class: "spacer" });
    this.node = element("div", { class: "arcs" }, this.canvas, this.spacer);
    this.marks = {};
    this.listen();
  }

  update(data) {
    this.data = data;
    this.width = Math.max(260, Math.min(data.width, 520));
    const whole = Math.max(data.rows, data.columns) * LINE + 12;
    this.height = Math.min(TALL, whole);
    const ratio = globalThis.devicePixelRatio || 1;
    this.canvas.width = this.width * ratio;
    this.canvas.height = this.height * ratio;
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    this.canvas.setAttribute("aria-label", data.says);
    this.node.style.width = `${this.width + (whole > TALL ? 16 : 0)}px`;
    this.node.style.height = `${this.height}px`;
    this.spacer.style.height = `${Math.max(0, whole - this.height)}px`;
    this.margin = Math.min(140, this.width * 0.3);
    this.short = [data.labels.queries, data.labels.keys].map((texts) => texts.map((t) => short(t, 18)));
    this.strongest = strongest(data);
    this.draw();
  }

  overlay(marks) {
    this.marks = marks;
    if (this.data) this.draw();
  }

  look() {}

  y(place) {
    return place * LINE + 6 + LINE / 2 - this.node.scrollTop;
  }

  draw() {
    const { data, margin, width, height } = this;
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, width, height);
    const focus = this.marks.hover || this.marks.lock;
    const some = focus ? ofToken(data, focus) : this.strongest;
    context.lineCap = "round";
    for (const { i, j, value } of some) {
      const [from, to] = [this.y(i), this.y(j)];
      if (Math.max(from, to) < -LINE || Math.min(from, to) > height + LINE) continue;
      const share = place(value, data.most, data.root);
      if (Math.abs(share) < 0.01) continue;
      context.strokeStyle = css(data.theme, Math.sign(share) * (0.35 + 0.65 * Math.abs(share)));
      context.globalAlpha = 0.15 + 0.85 * Math.abs(share);
      context.lineWidth = 0.75 + 3.5 * Math.abs(share);
      context.beginPath();
      context.moveTo(margin, from);
      context.bezierCurveTo(width / 2, from, width / 2, to, width - margin, to);
      context.stroke();
    }
    context.globalAlpha = 1;
    this.names(context, 0, data.rows, focus && focus.query, this.marks.queries);
    this.names(context, 1, data.columns, focus && focus.key, this.marks.keys);
  }

  names(context, side, count, pointed, selected) {
    const { ink } = this.data;
    const x = side ? this.width - this.margin + 8 : this.margin - 8;
    context.textAlign = side ? "left" : "right";
    context.textBaseline = "middle";
    for (let n = 0; n < count; n++) {
      const y = this.y(n);
      if (y < -LINE || y > this.height + LINE) continue;
      if (selected && selected.has(n)) {
        context.fillStyle = ink.select;
        context.fillRect(side ? this.width - this.margin : 0, y - LINE / 2, this.margin, LINE);
      }
      context.font = `${n === pointed ? "600 " : ""}13px ${FONT}`;
      context.fillStyle = n === pointed ? ink.mark : ink.text;
      context.fillText(this.short[side][n], x, y, this.margin - 10);
    }
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const n = Math.floor((event.clientY - box.top + this.node.scrollTop - 6) / LINE);
    const left = event.clientX - box.left < this.width / 2;
    if (n < 0 || n >= (left ? this.data.rows : this.data.columns)) return null;
    return left ? { query: n, key: null } : { query: null, key: n };
  }

  listen() {
    const { canvas, events } = this;
    canvas.addEventListener("pointermove", (event) => events.hover(this.at(event)));
    canvas.addEventListener("pointerleave", () => events.hover(null));
    canvas.addEventListener("click", (event) => {
      const at = this.at(event);
      if (at) events.lock(at, event.ctrlKey || event.metaKey || event.shiftKey);
    });
    this.node.addEventListener("scroll", () => this.data && this.draw(), { passive: true });
  }
}

function strongest({ columns, colours, most }) {
  const all = [];
  for (let k = 0; k < colours.length; k++) if (Math.abs(colours[k]) > 0.02 * most) all.push(k);
  all.sort((a, b) => Math.abs(colours[b]) - Math.abs(colours[a]));
  const kept = all.slice(0, MOST).reverse(); // the strongest lie above
  return kept.map((k) => ({ i: Math.floor(k / columns), j: k % columns, value: colours[k] }));
}

function ofToken({ rows, columns, colours }, { query, key }) {
  const made = [];
  if (query !== null && key !== null) made.push({ i: query, j: key });
  else if (query !== null) for (let j = 0; j < columns; j++) made.push({ i: query, j });
  else for (let i = 0; i < rows; i++) made.push({ i, j: key });
  for (const arc of made) arc.value = colours[arc.i * columns + arc.j];
  return made.sort((a, b) => Math.abs(a.value) - Math.abs(b.value));
}

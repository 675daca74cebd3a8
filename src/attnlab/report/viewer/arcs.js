// A map as arcs: queries on the left, keys on the right, one arc for each of the strongest pairs.

import { css, place } from "./colour.js";
import { element, short } from "./dom.js";
import { getFocus } from "./marks.js";

const FONT = "system-ui, sans-serif";
const LINE = 20; // pixels of a line with a token
const TALL = 620;
const MOST = 1500; // arcs of a whole map; a single token shows all of its arcs
const LEAST = 0.02; // share of the largest number below which a whole map has no arc

export class Arcs {
  constructor(events) {
    this.events = events;
    this.canvas = element("canvas", { tabIndex: 0, role: "application" });
    this.spacer = element("div", { class: "spacer" });
    this.box = element("div", { class: "arcs" }, this.canvas, this.spacer);
    this.note = element("p", { class: "note" });
    this.node = element("div", {}, this.box, this.note);
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
    this.canvas.setAttribute("aria-label", data.description);
    this.box.style.width = `${this.width + (whole > TALL ? 16 : 0)}px`;
    this.box.style.height = `${this.height}px`;
    this.spacer.style.height = `${Math.max(0, whole - this.height)}px`;
    this.margin = Math.min(140, this.width * 0.3);
    this.short = [data.labels.queries, data.labels.keys].map((texts) => texts.map((t) => short(t, 18)));
    Object.assign(this, strongest(data));
    this.draw();
  }

  // Note which pairs have no arc.
  updateNote() {
    const { pairs, strongest, marks } = this;
    this.note.hidden = strongest.length === pairs;
    const some = `the ${strongest.length.toLocaleString("en")} strongest of ${pairs.toLocaleString("en")} pairs`;
    this.note.textContent =
      marks.queries?.size || marks.keys?.size
        ? `Arcs of the selection that are among ${some}. Point at a token to see all of its arcs in the selection.`
        : `Arcs of ${some}. Point at a token to see all of its arcs.`;
  }

  focus() {
    this.canvas.focus({ preventScroll: true });
  }

  overlay(marks) {
    this.marks = marks;
    if (this.data) this.draw();
  }

  look() {}

  y(place) {
    return place * LINE + 6 + LINE / 2 - this.box.scrollTop;
  }

  draw() {
    this.updateNote();
    const { data, width, height } = this;
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, width, height);
    const focus = getFocus(this.marks);
    const some = focus ? listArcs(data, focus) : this.strongest;
    context.lineCap = "round";
    for (const { i, j, value } of some.filter((arc) => this.isSelected(arc))) {
      const share = place(value, data.most, data.root);
      if (Math.abs(share) < 0.01) continue;
      context.strokeStyle = css(data.theme, Math.sign(share) * (0.35 + 0.65 * Math.abs(share)));
      context.globalAlpha = 0.15 + 0.85 * Math.abs(share);
      context.lineWidth = 0.75 + 3.5 * Math.abs(share);
      this.arc(context, i, j);
    }
    context.globalAlpha = 1;
    this.links(context, focus);
    if (focus && focus.query !== null && focus.key !== null) {
      context.strokeStyle = data.ink.mark;
      context.lineWidth = 1.5;
      this.arc(context, focus.query, focus.key);
    }
    this.names(context, 0, data.rows, focus && focus.query, this.marks.queries);
    this.names(context, 1, data.columns, focus && focus.key, this.marks.keys);
  }

  arc(context, i, j) {
    const { margin, width, height } = this;
    const [from, to] = [this.y(i), this.y(j)];
    if (Math.max(from, to) < -LINE || Math.min(from, to) > height + LINE) return;
    context.beginPath();
    context.moveTo(margin, from);
    context.bezierCurveTo(width / 2, from, width / 2, to, width - margin, to);
    context.stroke();
  }

  // Whether an arc is in the selection; without a selection, every arc is.
  isSelected({ i, j }) {
    const { queries, keys } = this.marks;
    return (!queries?.size || queries.has(i)) && (!keys?.size || keys.has(j));
  }

  // The gold links, thin lines above the arcs: sure ones solid, possible ones dashed.
  links(context, focus) {
    context.save();
    context.strokeStyle = this.data.ink.gold;
    context.lineWidth = 1.25;
    for (const { i, j, sure } of this.data.gold || []) {
      if (!this.isSelected({ i, j }) || (focus && !isOfToken(focus, i, j))) continue;
      context.setLineDash(sure ? [] : [3, 3]);
      this.arc(context, i, j);
    }
    context.restore();
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
        context.strokeStyle = ink.text;
        context.lineWidth = 1;
        context.strokeRect(side ? this.width - this.margin + 3 : 1, y - LINE / 2 + 1, this.margin - 4, LINE - 2);
      }
      context.font = `${n === pointed ? "600 " : ""}13px ${FONT}`;
      context.fillStyle = n === pointed ? ink.mark : ink.text;
      context.fillText(this.short[side][n], x, y, this.margin - 10);
    }
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const n = Math.floor((event.clientY - box.top + this.box.scrollTop - 6) / LINE);
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
    this.box.addEventListener("scroll", () => this.data && this.draw(), { passive: true });
  }
}

// The number of visible pairs, and the strongest of them.
function strongest({ columns, colours, most, mask }) {
  const all = [];
  let pairs = 0;
  for (let k = 0; k < colours.length; k++) {
    if (mask && !mask[k]) continue;
    pairs += 1;
    if (Math.abs(colours[k]) > LEAST * most) all.push(k);
  }
  all.sort((a, b) => Math.abs(colours[b]) - Math.abs(colours[a]));
  const kept = all.slice(0, MOST).reverse(); // the strongest on top
  return { pairs, strongest: kept.map((k) => ({ i: Math.floor(k / columns), j: k % columns, value: colours[k] })) };
}

// Whether a pair belongs to the pointed token; for a cell, to its query.
function isOfToken({ query, key }, i, j) {
  return query === null ? j === key : i === query;
}

function listArcs({ rows, columns, colours, mask }, { query, key }) {
  const made = [];
  if (query !== null) for (let j = 0; j < columns; j++) made.push({ i: query, j });
  else for (let i = 0; i < rows; i++) made.push({ i, j: key });
  for (const arc of made) arc.value = colours[arc.i * columns + arc.j];
  const seen = made.filter(({ i, j }) => !mask || mask[i * columns + j]);
  return seen.sort((a, b) => Math.abs(a.value) - Math.abs(b.value));
}

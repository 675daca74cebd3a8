// The viewer: its state, and everything that depends on it.

import { Arcs } from "./arcs.js";
import { theme } from "./colour.js";
import { Controls } from "./controls.js";
import { element, visible } from "./dom.js";
import { byWord, largest, maskByWord, shares, Store } from "./maps.js";
import { carryMarks, createMarks } from "./marks.js";
import { Matrix } from "./matrix.js";
import { Overview } from "./overview.js";
import { Readout, scaleBar } from "./readout.js";
import { Tokens } from "./tokens.js";
import { nearest, Training } from "./training.js";

const WIDEST = 3; // panels side by side
const [NARROW, ROOMY, EACH] = [250, 340, 17]; // pixels: smallest panel, smallest panel with many keys, a key
const MANY = 64; // keys; beyond this most numbers are small, and the square root scale is on by default
const HELP = [
  [["[", "]"], "layer"],
  [[",", "."], "head"],
  [["m"], "matrix or arcs"],
  [["w"], "tokens or words"],
  [["←", "↑", "→", "↓"], "move the locked cell"],
  [["+", "−", "0"], "zoom"],
  [["Esc"], "unlock, then clear"],
];
const ZOOM = [["−", 0.8, "zoom out"], ["fit", 0, "fit the whole map"], ["+", 1.25, "zoom in"]];
const START = { run: 0, sum: false, view: "matrix", level: "tokens", colour: "share" };

export class Viewer {
  constructor(host, view) {
    this.host = host;
    this.store = new Store(view);
    this.state = this.first();
    this.marks = createMarks();
    this.panels = [];
    this.build(view);
    this.render();
  }

  first() {
    const { view } = this.store;
    const state = { ...START, example: view.example || 0, frame: view.runs[0].frames.length - 1 };
    const kinds = this.store.kinds(state);
    state.kind = kinds.includes("cross") ? "cross" : kinds[0];
    const rich = (layer) => this.store.measures({ ...state, layer }).length; // probes are of one layer alone
    state.layer = this.store.layers(state).reduce((best, layer) => (rich(layer) > rich(best) ? layer : best));
    state.heads = new Set(this.store.attention(state).heads.slice(0, 1));
    Object.assign(state, this.best(state.run));
    state.measures = new Set(this.store.measures(state).slice(0, 2));
    state.root = this.store.sides(state)[1].tokens.length > MANY;
    return state;
  }

  // The best head of a run, as a change of state.
  best(run) {
    const { best } = this.store.view.runs[run];
    return best ? { kind: best.kind, layer: best.layer, heads: new Set([best.head]) } : {};
  }

  build(view) {
    this.controls = new Controls(this.store, (change) => this.change(change));
    this.training = new Training(view, (frame) => this.change({ frame }));
    this.overview = new Overview(this.store, (layer, head) => this.jump(layer, head));
    const pressed = (act) => () => {
      act();
      this.panels[0].plot.focus(); // the button disappears
    };
    this.readout = new Readout(pressed(() => this.lock(this.marks.lock)), pressed(() => this.clear()));
    this.tokens = new Tokens(this.events());
    this.stage = element("div", { class: "panels" });
    const buttons = ZOOM.map(([text, by, about]) => {
      const button = element("button", { type: "button", class: "small", title: about, ariaLabel: about }, text);
      button.addEventListener("click", () => this.zoomBy(by));
      return button;
    });
    this.zoom = element("div", { class: "zoom" }, ...buttons);
    const keys = HELP.flatMap(([own, what]) => [
      element("span", {}, ...own.map((key) => element("kbd", {}, key))),
      element("span", {}, what),
    ]);
    const help = element("details", { class: "help" }, element("summary", {}, "keyboard shortcuts"), element("div", {}, ...keys));
    const notes = view.notes.map((note) => element("p", { class: "note" }, note));
    const foot = element("div", { class: "bar foot" }, this.zoom, help);
    const main = element("div", { class: "main" }, this.stage, foot, this.tokens.node); // apart from the readout
    const middle = element("div", { class: "stage" }, main, this.readout.node);
    this.host.append(this.training.node, this.controls.node, middle, this.overview.node, ...notes);
    this.host.addEventListener("keydown", (event) => this.key(event));
    document.addEventListener("attnlab-theme", () => this.render());
    let wide = main.clientWidth;
    new ResizeObserver(([{ contentRect }]) => {
      if (Math.abs(contentRect.width - wide) > 1) this.render();
      wide = contentRect.width;
    }).observe(main);
    this.main = main;
  }

  events() {
    return {
      hover: (at) => this.point({ hover: at }),
      lock: (at, add) => (add ? this.pick(at) : this.lock(at)),
      token: (at, add) => (add ? this.pick(at) : this.lock(at)),
      select: (from, to) => this.select(from, to),
      look: (view) => this.panels.forEach(({ plot }) => plot.view !== view && plot.look(view)),
    };
  }

  // Apply a change, and adjust the parts of the state that no longer fit.
  change(change) {
    const before = this.state;
    const state = { ...before, ...change };
    const { view } = this.store;
    if (state.run !== before.run) {
      const step = view.runs[before.run].frames[before.frame].step;
      const { frames } = view.runs[state.run];
      state.frame = step === null ? frames.length - 1 : nearest(frames.map((frame) => frame.step), step);
      const [head, ...others] = before.heads;
      if (!others.length && this.store.isBest(before, before.layer, head)) Object.assign(state, this.best(state.run));
    }
    const kinds = this.store.kinds(state);
    if (!kinds.includes(state.kind)) state.kind = kinds[0];
    const layers = this.store.layers(state);
    if (!layers.includes(state.layer)) state.layer = layers[0];
    const { heads } = this.store.attention(state);
    state.heads = new Set([...state.heads].filter((head) => heads.includes(head)));
    if (!state.heads.size) state.heads = new Set(heads.slice(0, 1));
    if (state.example !== before.example || state.kind !== before.kind) this.marks = createMarks();
    else if (state.level !== before.level) this.marks = carryMarks(this.marks, this.store.sides(state), state.level);
    this.state = state;
    this.render();
  }

  // The chosen measures that this layer has, or else its first measure.
  names() {
    const available = this.store.measures(this.state);
    const chosen = available.filter((name) => this.state.measures.has(name));
    return chosen.length ? chosen : available.slice(0, 1);
  }

  jump(layer, head) {
    this.change({ layer, heads: new Set([head]) });
    if (this.stage.getBoundingClientRect().bottom < 120) this.controls.node.scrollIntoView({ block: "start" });
  }

  async render() {
    const turn = (this.turn = (this.turn || 0) + 1);
    const { state, store } = this;
    this.controls.update(state);
    this.training.update(state);
    const names = this.names();
    const [mask, ...maps] = await Promise.all([store.mask(state), ...names.map((name) => store.map(state, name))]);
    if (turn !== this.turn) return; // a newer render has started
    this.show(names, maps, mask);
    this.overview.update(state, theme());
    if (!this.host.dataset.ready) performance.mark("attnlab-ready");
    this.host.dataset.ready = String(turn);
  }

  show(names, maps, mask) {
    if (!this.main.clientWidth) return; // hidden; when it appears, the change of width renders it
    const { state, store } = this;
    const [query, key] = store.sides(state);
    const words = state.level === "words";
    this.texts = [query, key].map((side) => (words ? side.texts : side.tokens));
    const seen = mask && (words ? maskByWord(mask, key.tokens.length, query.words, key.words) : mask);
    const found = names.map((name, n) => {
      const map = words ? byWord(maps[n], query.words, key.words) : maps[n];
      const parts = shares(map);
      const colours = state.colour === "share" ? parts : map.values;
      const label = store.view.measures[name][0];
      return { name, label, raw: maps[n], map, shares: parts, colours, ...largest(colours) };
    });
    const most = Math.max(...found.map((panel) => panel.most));
    const signed = found.some((panel) => panel.signed);
    const own = state.colour === "own";
    const gold = words ? null : this.goldCells();
    const look = { theme: theme(), root: state.root, mask: seen, gold, ink: inks(this.host), most, signed };
    this.fill(
      found.map((panel) => ({ ...panel, look: own ? { ...look, most: panel.most, signed: panel.signed } : look })),
    );
    this.tokens.update(this.texts, this.titles());
    this.redraw();
    this.readout.showGold(this.panels, this.gold());
    this.say();
  }

  // For screen readers: what is shown, and the numbers of a locked cell.
  say() {
    this.readout.say(this.panels, this.texts, this.marks.lock, this.describeHeads(this.panels[0].name));
  }

  // The names of queries and keys: their sides if these differ. A decoder's rows are the words that it reads.
  nameSides() {
    const [{ name: query, tokens }, { name: key }] = this.store.sides(this.state);
    const reads = query === "target" && tokens.length > 1;
    if (query === key) return [reads ? "word read" : "query", "key"];
    return [reads ? `${query} word read` : query, key];
  }

  // The token that the decoder writes after it has read token n, or null.
  written(n) {
    const reads = this.store.sides(this.state)[0].name === "target" && this.state.level === "tokens" && n !== null;
    return reads && n + 1 < this.texts[0].length ? this.texts[0][n + 1] : null;
  }

  titles() {
    const [query, key] = this.nameSides();
    return [`${query} (attending)`, `${key} (attended to)`];
  }

  gold() {
    return this.state.kind === "cross" ? this.store.view.examples[this.state.example].gold : null;
  }

  goldCells() {
    const gold = this.gold();
    if (!gold) return null;
    const [sure, possible] = [new Set(gold.sure.map(String)), new Set(gold.possible.map(String))];
    const cells = [];
    gold.rows.forEach((target, i) =>
      gold.keys.forEach((source, j) => {
        const link = `${source},${target}`;
        if (sure.has(link) || possible.has(link)) cells.push({ i, j, sure: sure.has(link) });
      }),
    );
    return cells;
  }

  // One panel for each measure. Existing panels are kept.
  fill(found) {
    const { state } = this;
    const focused = this.panels.findIndex(({ node }) => node.contains(document.activeElement));
    if (this.panels.length !== found.length || this.drawn !== state.view) {
      this.panels = found.map(() => {
        const plot = state.view === "matrix" ? new Matrix(this.events()) : new Arcs(this.events());
        const head = element("figcaption");
        return { plot, head, node: element("figure", { class: "panel" }, head, plot.node) };
      });
      this.stage.replaceChildren(...this.panels.map(({ node }) => node));
      this.drawn = state.view;
    }
    const width = this.width(found.length);
    const labels = { queries: this.texts[0].map(visible), keys: this.texts[1].map(visible) };
    this.panels.forEach((panel, n) => {
      const { look, ...own } = found[n];
      const { rows, columns } = own.map;
      Object.assign(panel, own);
      const words = { labels, axes: this.axes(), description: this.describeMap(own) };
      panel.data = { rows, columns, colours: own.colours, width, ...words, ...look };
      panel.plot.update(panel.data);
      panel.node.style.width = `${width}px`;
      const unit = state.colour === "share" ? " of the row" : "";
      panel.head.replaceChildren(
        element("b", {}, own.label),
        element("span", { class: "of" }, this.describeHeads(own.name)),
        scaleBar(look.theme, look.most, look.signed, look.root, unit),
      );
    });
    this.zoom.hidden = state.view !== "matrix";
    if (focused >= 0) this.panels[Math.min(focused, this.panels.length - 1)].plot.focus();
  }

  // The width of each panel: as many as fit stand side by side.
  width(count) {
    const whole = this.main.clientWidth;
    const least = Math.max(NARROW, Math.min(ROOMY, 84 + EACH * this.texts[1].length));
    const beside = Math.min(count, WIDEST, Math.max(1, Math.floor((whole + 20) / (least + 20))));
    return Math.floor((whole - 20 * (beside - 1)) / beside) - 2;
  }

  axes() {
    const [query, key] = this.nameSides();
    return [`${query.endsWith(" read") ? "read" : query} ↓`, `${key} →`];
  }

  describeHeads(name) {
    const { state } = this;
    if (name === "rollout") return "whole model";
    if (!this.store.perHead(state, name)) return `layer ${state.layer}`;
    const heads = [...state.heads].sort((a, b) => a - b);
    if (heads.length === 1) return `layer ${state.layer}, head ${heads[0]}`;
    const some = this.store.attention(state).heads.length === heads.length ? "all heads" : `heads ${heads.join(", ")}`;
    return `layer ${state.layer}, ${state.sum ? "sum" : "mean"} of ${some}`;
  }

  describeMap({ label, name, map }) {
    const size = `${map.rows} queries by ${map.columns} keys`;
    return `${label}, ${this.describeHeads(name)}: ${size}. Arrow keys move the locked cell, Escape unlocks it.`;
  }

  point(change) {
    Object.assign(this.marks, change);
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.redraw();
    });
  }

  redraw() {
    if (!this.panels.length) return;
    for (const { plot } of this.panels) plot.overlay(this.marks);
    this.colourTokens();
    this.readout.show(this.panels, this.texts, this.marks, (n) => this.written(n));
    this.readout.showSums(this.panels, this.marks);
  }

  // For a long text, wait until the pointer rests: colouring a thousand elements on every move is slow.
  colourTokens() {
    clearTimeout(this.resting);
    const colour = () => this.tokens.colour(this.panels[0].data, this.marks);
    const long = this.texts[0].length + this.texts[1].length > 2 * MANY;
    if (this.marks.hover && !this.marks.lock && long) this.resting = setTimeout(colour, 80);
    else colour();
  }

  lock(at) {
    const now = this.marks.lock;
    const same = now && now.query === at.query && now.key === at.key;
    this.point({ lock: same ? null : at, hover: null });
    this.say();
  }

  pick({ query, key }) {
    for (const [set, n] of [[this.marks.queries, query], [this.marks.keys, key]]) {
      if (n !== null && !set.delete(n)) set.add(n);
    }
    this.point({});
  }

  select(from, to) {
    const range = (a, b) => new Set(Array.from({ length: Math.abs(a - b) + 1 }, (_, n) => Math.min(a, b) + n));
    this.point({ queries: range(from.query, to.query), keys: range(from.key, to.key) });
  }

  clear() {
    this.point({ queries: new Set(), keys: new Set() });
  }

  zoomBy(by) {
    if (this.state.view !== "matrix") return;
    const { plot } = this.panels[0];
    if (by) plot.zoom(by);
    else this.panels.forEach((panel) => panel.plot.look({ zoom: 1, x: 0, y: 0 }));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const writing = ["SELECT", "TEXTAREA"].includes(event.target.tagName);
    const done = !writing && (this.shortcut(event.key) || (event.target.tagName === "CANVAS" && this.move(event.key)));
    if (done) event.preventDefault();
  }

  shortcut(key) {
    const { state, store } = this;
    const layers = store.layers(state);
    const { heads } = store.attention(state);
    const step = (list, now, by) => list[Math.max(0, Math.min(list.length - 1, list.indexOf(now) + by))];
    const head = (by) => heads.length && this.change({ heads: new Set([step(heads, [...state.heads][0], by)]) });
    const actions = {
      "[": () => this.change({ layer: step(layers, state.layer, -1) }),
      "]": () => this.change({ layer: step(layers, state.layer, 1) }),
      ",": () => head(-1),
      ".": () => head(1),
      m: () => this.change({ view: state.view === "matrix" ? "arcs" : "matrix" }),
      w: () => this.change({ level: state.level === "tokens" ? "words" : "tokens" }),
      "+": () => this.zoomBy(1.25),
      "=": () => this.zoomBy(1.25),
      "-": () => this.zoomBy(0.8),
      0: () => this.zoomBy(0),
      Escape: () => (this.marks.lock ? this.lock(this.marks.lock) : this.clear()),
    };
    if (!(key in actions)) return false;
    actions[key]();
    return true;
  }

  move(key) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (!(key in steps) || !this.panels.length) return false;
    const { rows, columns } = this.panels[0].map;
    const now = this.marks.lock;
    const kept = (n, most) => Math.max(0, Math.min(most - 1, n));
    const at = now
      ? { query: kept((now.query ?? 0) + steps[key][0], rows), key: kept((now.key ?? 0) + steps[key][1], columns) }
      : { query: 0, key: 0 };
    this.point({ lock: at, hover: null });
    this.say();
    return true;
  }
}

function inks(host) {
  const style = getComputedStyle(host);
  const names = ["text", "soft", "edge", "mark", "ground", "gold"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

for (const host of document.querySelectorAll("div.viewer")) {
  host.viewer = new Viewer(host, JSON.parse(host.querySelector("script").textContent));
}

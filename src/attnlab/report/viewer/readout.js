// The readout: numbers of the pointed or locked pair, the strongest keys of a query, a selection, and the gold AER.

import { css } from "./colour.js";
import { element, number, visible } from "./dom.js";
import { alignmentError, sumOver } from "./maps.js";
import { getFocus } from "./marks.js";

const SHOWN = 7; // strongest keys in the list

// Each move of the pointer replaces the numbers but not the buttons, so that no click is lost.
export class Readout {
  constructor(unlock, clear) {
    const button = (text, onclick) => element("button", { type: "button", class: "small", onclick }, text);
    this.ends = element("span", { class: "ends" });
    this.locked = element("span", { class: "locked" }, element("em", {}, "locked"), button("unlock", unlock));
    this.pair = element("div", { class: "pair" }, this.ends, this.locked);
    this.values = element("table", { class: "values" });
    this.most = element("div", { class: "most" });
    this.sumOf = element("span");
    this.sumValues = element("table", { class: "values" });
    const title = element("h4", {}, this.sumOf, button("clear", clear));
    this.sums = element("div", { class: "sums" }, title, this.sumValues);
    this.gold = element("div", { class: "aer" });
    this.live = element("div", { class: "unseen", role: "status", ariaLive: "polite" });
    const parts = [this.pair, this.values, this.most, this.sums, this.gold, this.live];
    this.node = element("aside", { class: "readout", ariaLabel: "numbers" }, ...parts);
  }

  // panels: [{label, map, shares, data}], texts: [queries, keys], written: the token that a query writes, or null
  show(panels, texts, marks, written) {
    const at = getFocus(marks);
    this.showPair(texts, at, written);
    this.locked.hidden = !marks.lock;
    this.showValues(panels, at);
    this.showMost(panels[0], texts, at);
  }

  showPair(texts, at, written) {
    if (!at) {
      const hint = "Point at a cell to read its numbers. Click to lock it. Shift-drag or ctrl-click to select cells.";
      this.ends.replaceChildren(element("p", { class: "hint" }, hint));
      return;
    }
    const name = (side, n) => element("bdi", { class: "name", title: texts[side][n] }, visible(texts[side][n]));
    const ends = [];
    if (at.query !== null) ends.push(element("span", {}, name(0, at.query), element("small", {}, `${at.query}`)));
    if (at.key !== null) ends.push(element("span", {}, name(1, at.key), element("small", {}, `${at.key}`)));
    const arrow = element("span", { class: "arrow" }, at.query === null ? "→" : at.key === null ? "→ all" : "→");
    const order = at.query === null ? ["all", arrow, ends[0]] : [ends[0], arrow, ends[1]];
    const next = written(at.query);
    const token = (text) => element("bdi", {}, visible(text));
    const words = () => ["reads ", token(texts[0][at.query]), ", writes ", token(next)];
    const reads = next === null ? null : element("small", { class: "writes" }, ...words());
    this.ends.replaceChildren(...[...order, reads].filter(Boolean));
  }

  showValues(panels, at) {
    this.values.hidden = !at;
    if (!at) return;
    const { query, key } = at;
    const rows = panels.map(({ name, label, map, shares }) => {
      if (query === null || key === null) {
        const [queries, keys] = [query, key].map((n) => new Set(n === null ? [] : [n]));
        return row(name, label, number(sumOver(map, queries, keys).total), "Σ", "");
      }
      const k = query * map.columns + key;
      const error = map.error(query, key);
      const within = error ? `± ${number(error, 1)}` : "";
      return row(name, label, number(map.values[k]), within, percent(shares[k]));
    });
    this.values.replaceChildren(...rows);
  }

  showMost({ label, map, data }, texts, at) {
    this.most.hidden = !at || (at.query === null && at.key === null);
    if (this.most.hidden) return;
    const ofQuery = at.query !== null;
    const count = ofQuery ? map.columns : map.rows;
    const cell = (n) => (ofQuery ? at.query * map.columns + n : n * map.columns + at.key);
    const size = (n) => Math.abs(map.values[cell(n)]);
    const top = [...Array(count).keys()].sort((a, b) => size(b) - size(a)).slice(0, SHOWN);
    const most = size(top[0]) || 1;
    const signed = top.some((n) => map.values[cell(n)] < 0) ? ", by size" : "";
    const title = `${ofQuery ? "attends most to" : "is attended most by"}${signed}`;
    const lines = top.map((n) => {
      const bar = element("i");
      bar.style.width = `${(100 * size(n)) / most}%`;
      bar.style.backgroundColor = css(data.theme, Math.sign(map.values[cell(n)]) * 0.62);
      const text = element("bdi", {}, visible(texts[ofQuery ? 1 : 0][n]));
      const name = element("span", {}, text, element("small", {}, `${n}`));
      return element("li", {}, name, bar, element("b", {}, number(map.values[cell(n)])));
    });
    this.most.replaceChildren(element("h4", {}, title, element("small", {}, label)), element("ol", {}, ...lines));
  }

  // Σ over the selection, for every panel.
  showSums(panels, marks) {
    this.sums.hidden = !marks.queries.size && !marks.keys.size;
    if (this.sums.hidden) return;
    const found = panels.map(({ name, label, map }) => ({ name, label, ...sumOver(map, marks.queries, marks.keys) }));
    const side = (set, one, several) => (set.size ? `${set.size} ${set.size === 1 ? one : several}` : `all ${several}`);
    const title = `Σ ${side(marks.queries, "query", "queries")} × ${side(marks.keys, "key", "keys")}`;
    const rows = found.map(({ name, label, total, perQuery }) =>
      row(name, label, number(total), `${number(perQuery)} per query`),
    );
    this.sumOf.textContent = title;
    this.sumValues.replaceChildren(...rows);
  }

  showGold(panels, gold) {
    this.gold.hidden = !gold;
    if (!gold) return;
    const rows = panels.map(({ name, label, raw }) => row(name, label, number(alignmentError(raw, gold))));
    const title = element("h4", {}, "AER on this example", element("small", {}, "0 is best"));
    this.gold.replaceChildren(title, element("table", { class: "values" }, ...rows));
  }

  // at: the cell whose numbers to announce, or null; of: the layer and heads that are shown
  say(panels, texts, at, of) {
    let text = "";
    if (at && at.query !== null && at.key !== null) {
      const value = (map) => number(map.values[at.query * map.columns + at.key]);
      const values = panels.map(({ label, map }) => `${label} ${value(map)}`).join(", ");
      text = `${visible(texts[0][at.query])} to ${visible(texts[1][at.key])}: ${values}; `;
    }
    this.live.textContent = text + of;
  }
}

export function scaleBar(theme, most, signed, root, unit) {
  const canvas = element("canvas", { class: "scale", width: 120, height: 1 });
  const context = canvas.getContext("2d");
  for (let x = 0; x < 120; x++) {
    context.fillStyle = css(theme, signed ? (2 * x) / 119 - 1 : x / 119);
    context.fillRect(x, 0, 1, 1);
  }
  const ends = [signed ? number(-most) : "0", `${number(most)}${unit}`];
  if (root) ends[1] += ", square root";
  const title = `colour scale from ${ends[0]} to ${ends[1]}`;
  return element("span", { class: "scale-bar", role: "img", ariaLabel: title, title }, ends[0], canvas, ends[1]);
}

// A row of a table: a measure, its number, and remarks.
function row(name, label, value, ...beside) {
  const cells = [element("td", { class: "value" }, value), ...beside.map((text) => element("td", {}, text))];
  const made = element("tr", {}, element("th", { scope: "row" }, label), ...cells);
  made.dataset.measure = name;
  return made;
}

function percent(share) {
  return `${number(100 * share)} %`;
}

// The maps of a document: one map of the chosen heads, by tokens or words, with its sums and shares.

import { block, bytes, floats, halfStep } from "./decode.js";

export class Store {
  constructor(view) {
    this.view = view;
    this.found = new Map(); // "run/frame/example/kind/index" -> attention
    view.runs.forEach((run, r) =>
      run.frames.forEach((frame, f) =>
        frame.attentions.forEach((a) => this.found.set([r, f, a.example, a.kind, a.index].join("/"), a)),
      ),
    );
  }

  attention(state, index = state.layer) {
    return this.found.get([state.run, state.frame, state.example, state.kind, index].join("/"));
  }

  // The kinds of this run, frame and example that have layers.
  kinds(state) {
    return Object.keys(this.view.kinds).filter((kind) => this.layers({ ...state, kind }).length);
  }

  layers(state) {
    const { attentions } = this.view.runs[state.run].frames[state.frame];
    const own = attentions.filter((a) => a.example === state.example && a.kind === state.kind && a.index !== null);
    return own.map((a) => a.index);
  }

  // Whether a head is the best head of the run.
  isBest({ run, kind }, layer, head) {
    const { best } = this.view.runs[run];
    return Boolean(best) && best.kind === kind && best.layer === layer && best.head === head;
  }

  measures(state) {
    const own = this.attention(state);
    const whole = this.attention(state, null);
    const available = new Set(Object.keys(own ? own.maps : {}));
    if (own && own.vector) available.add("norm");
    if (whole) Object.keys(whole.maps).forEach((name) => available.add(name));
    return Object.keys(this.view.measures).filter((name) => available.has(name));
  }

  // Whether each head has its own map.
  perHead(state, measure) {
    const own = this.attention(state);
    if (!own || own.heads.length < 2) return false;
    if (measure === "norm" && own.vector) return true;
    return measure in own.maps && own.maps[measure].shape[0] === own.heads.length;
  }

  async map(state, measure) {
    const own = this.attention(state);
    const whole = this.attention(state, null);
    if (measure === "norm" && own.vector) {
      const [weights, vector] = await Promise.all([block(own.maps.weight), floats(own.vector.data)]);
      return combineHeads(weights, selectHeads(own, state), state.sum, vector);
    }
    const holder = own && measure in own.maps ? own : whole;
    const found = await block(holder.maps[measure]);
    const heads = found.heads > 1 ? selectHeads(holder, state) : [0];
    return combineHeads(found, heads, state.sum, null);
  }

  async mask(state) {
    const own = this.attention(state);
    return !own || own.mask === null ? null : bytes(this.view.masks[own.mask].data);
  }

  sides(state) {
    const example = this.view.examples[state.example];
    return this.view.kinds[state.kind].map((name) => ({ name, ...example.sides[name] }));
  }
}

function selectHeads(attention, state) {
  const places = attention.heads.map((head, place) => (state.heads.has(head) ? place : -1)).filter((p) => p >= 0);
  return places.length ? places : [0];
}

// The mean or sum of the chosen heads. Norms are |weight| times the norm of each key's vector.
function combineHeads(found, heads, sum, vector) {
  const { rows, columns, codes, scales, worth } = found;
  const values = new Float32Array(rows * columns);
  const factor = sum ? 1 : 1 / heads.length;
  for (const h of heads) {
    for (let i = 0; i < rows; i++) {
      const scale = scales[h * rows + i] * factor;
      const from = (h * rows + i) * columns;
      const to = i * columns;
      if (vector) {
        for (let j = 0; j < columns; j++) {
          values[to + j] += Math.abs(worth[codes[from + j]]) * scale * vector[h * columns + j];
        }
      } else {
        for (let j = 0; j < columns; j++) values[to + j] += worth[codes[from + j]] * scale;
      }
    }
  }
  const error = (i, j) => {
    if (heads.length > 1) return null;
    const long = vector ? vector[heads[0] * columns + j] : 1;
    return long === 0 ? 0 : long * halfStep(found.stored, values[i * columns + j] / long, scales[heads[0] * rows + i]);
  };
  return { rows, columns, values, error };
}

// Pool pieces to words: sum over the pieces of the key word, mean over the pieces of the query word.
export function byWord(map, queryWords, keyWords) {
  const rows = 1 + Math.max(...queryWords);
  const columns = 1 + Math.max(...keyWords);
  const pieces = new Float32Array(rows);
  for (const word of queryWords) pieces[word] += 1;
  const values = new Float32Array(rows * columns);
  for (let i = 0; i < map.rows; i++) {
    const to = queryWords[i] * columns;
    const share = 1 / pieces[queryWords[i]];
    for (let j = 0; j < map.columns; j++) values[to + keyWords[j]] += map.values[i * map.columns + j] * share;
  }
  return { rows, columns, values, error: () => null };
}

// A word sees another if one of its pieces does.
export function maskByWord(mask, columnsBefore, queryWords, keyWords) {
  const columns = 1 + Math.max(...keyWords);
  const made = new Uint8Array((1 + Math.max(...queryWords)) * columns);
  queryWords.forEach((row, i) =>
    keyWords.forEach((column, j) => (made[row * columns + column] |= mask[i * columnsBefore + j])),
  );
  return made;
}

// Rows as shares: each number divided by the sum of the row's absolute values.
export function shares(map) {
  const values = new Float32Array(map.values.length);
  for (let i = 0; i < map.rows; i++) {
    let total = 0;
    for (let j = 0; j < map.columns; j++) total += Math.abs(map.values[i * map.columns + j]);
    const factor = total > 0 ? 1 / total : 0;
    for (let j = 0; j < map.columns; j++) values[i * map.columns + j] = map.values[i * map.columns + j] * factor;
  }
  return values;
}

export function largest(values) {
  let most = 0;
  let least = 0;
  for (let k = 0; k < values.length; k++) {
    if (values[k] > most) most = values[k];
    if (values[k] < least) least = values[k];
  }
  return { most: Math.max(most, -least), signed: least < 0 };
}

// Σ over the chosen queries and keys; a side without a choice counts as a whole.
export function sumOver(map, queries, keys) {
  const rows = queries.size ? [...queries] : [...Array(map.rows).keys()];
  const columns = keys.size ? [...keys] : [...Array(map.columns).keys()];
  let total = 0;
  for (const i of rows) for (const j of columns) total += map.values[i * map.columns + j];
  return { total, perQuery: total / rows.length };
}

// The alignment error rate of a map of tokens, which links each target word to its strongest source word.
export function alignmentError(map, gold) {
  const words = 1 + Math.max(...gold.keys);
  const rows = new Map(); // target word -> its rows
  gold.rows.forEach((word, i) => word >= 0 && rows.set(word, [...(rows.get(word) || []), i]));
  const known = new Set(gold.keys);
  const links = [];
  for (const [target, own] of rows) {
    const totals = new Float64Array(words);
    for (const i of own) {
      gold.keys.forEach((word, j) => word >= 0 && (totals[word] += map.values[i * map.columns + j] / own.length));
    }
    let best = -1;
    for (let word = 0; word < words; word++) {
      if (known.has(word) && (best < 0 || totals[word] > totals[best])) best = word;
    }
    if (best >= 0 && best < gold.words) links.push(`${best},${target}`);
  }
  const sure = new Set(gold.sure.map(String));
  const possible = new Set([...sure, ...gold.possible.map(String)]);
  const right = links.filter((link) => sure.has(link)).length;
  const allowed = links.filter((link) => possible.has(link)).length;
  return 1 - (right + allowed) / (links.length + sure.size);
}

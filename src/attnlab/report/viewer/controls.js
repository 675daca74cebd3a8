// The controls: run, example, kind, layer, heads, measures, and how they are drawn.

import { choice, element, menu } from "./dom.js";

const COLOURS = [
  ["share", "row shares, one scale"],
  ["value", "values, one scale"],
  ["own", "values, own scales"],
];

let groups = 0; // makes the names of radio groups unique for each viewer

export class Controls {
  constructor(store, change) {
    this.store = store;
    this.change = change;
    this.group = `viewer-${groups++}`;
    this.where = element("div", { class: "bar where" });
    this.what = element("div", { class: "bar what" });
    this.node = element("div", { class: "controls" }, this.where, this.what);
  }

  update(state) {
    const focus = this.focused();
    this.where.replaceChildren(...this.places(state));
    this.what.replaceChildren(...this.ways(state));
    this.refocus(focus);
  }

  places(state) {
    const { store, change, group } = this;
    const { view } = store;
    const made = [];
    if (view.runs.length > 1) {
      made.push(menu("Run", view.runs.map((run, n) => [n, run.name]), state.run, (run) => change({ run })));
    }
    if (view.examples.length > 1) {
      const named = (example) => `${example.name}: ${Object.values(example.sides)[0].texts.join(" ").slice(0, 40)}`;
      const options = view.examples.map((example, n) => [n, named(example)]);
      made.push(menu("Example", options, state.example, (example) => change({ example })));
      if (options.length > 2) made.push(this.steps(state.example));
    }
    const kinds = store.kinds(state);
    if (kinds.length > 1) {
      made.push(choice("Kind", `${group}-kind`, kinds.map((k) => [k, view.kind_names[k]]), state.kind, (kind) => change({ kind })));
    }
    const layers = store.layers(state).map((n) => [n, String(n)]);
    made.push(choice("Layer", `${group}-layer`, layers, state.layer, (layer) => change({ layer })));
    const heads = store.attention(state)?.heads || [];
    if (heads.length > 1) made.push(this.heads(heads, state));
    return made;
  }

  // Buttons to the example before and after this one.
  steps(example) {
    const step = (label, sign, by) => {
      const disabled = !(example + by in this.store.view.examples);
      const button = element("button", { type: "button", ariaLabel: label, disabled }, sign);
      button.dataset.key = label;
      button.addEventListener("click", () => this.change({ example: example + by }));
      return button;
    };
    return element("div", { class: "choice steps" }, step("Previous", "‹", -1), step("Next", "›", 1));
  }

  heads(heads, state) {
    const box = element("fieldset", { class: "choice heads" }, element("legend", {}, "Head"));
    for (const head of heads) {
      const button = element("button", { type: "button", ariaPressed: String(state.heads.has(head)) }, String(head));
      button.dataset.key = `head-${head}`;
      button.title = `head ${head}; ctrl-click or shift-click to combine heads`;
      if (this.store.isBest(state, state.layer, head)) {
        button.classList.add("best");
        button.title = `head ${head}: ${this.store.view.runs[state.run].best.why}`;
      }
      button.addEventListener("click", (event) => {
        if (!(event.ctrlKey || event.metaKey || event.shiftKey)) return this.change({ heads: new Set([head]) });
        const some = new Set(state.heads);
        if (some.has(head) && some.size > 1) some.delete(head);
        else some.add(head);
        return this.change({ heads: some });
      });
      box.append(button);
    }
    const all = element("button", { type: "button", ariaPressed: String(state.heads.size === heads.length) }, "all");
    all.dataset.key = "head-all";
    all.addEventListener("click", () => this.change({ heads: new Set(heads) }));
    box.append(all);
    if (state.heads.size > 1) {
      for (const [name, sum] of [["mean", false], ["sum", true]]) {
        const way = element("button", { type: "button", class: "way", ariaPressed: String(state.sum === sum) }, name);
        way.title = `show the ${name} of the chosen heads`;
        way.dataset.key = `head-${name}`;
        way.addEventListener("click", () => this.change({ sum }));
        box.append(way);
      }
    }
    return box;
  }

  ways(state) {
    const { store, change, group } = this;
    const measures = element("fieldset", { class: "choice" }, element("legend", {}, "Measure"));
    for (const name of store.measures(state)) {
      const [label, about] = store.view.measures[name];
      const pressed = String(state.measures.has(name));
      const button = element("button", { type: "button", title: about, ariaPressed: pressed }, label);
      button.dataset.key = `measure-${name}`;
      button.addEventListener("click", () => {
        const some = new Set(state.measures);
        if (!some.delete(name)) some.add(name);
        if (some.size) change({ measures: some });
      });
      measures.append(button);
    }
    const made = [measures];
    const same = (...values) => values.map((value) => [value, value]);
    made.push(choice("View", `${group}-view`, same("matrix", "arcs"), state.view, (view) => change({ view })));
    if (store.sides(state).some((side) => side.texts.length < side.tokens.length)) {
      made.push(choice("Level", `${group}-level`, same("tokens", "words"), state.level, (level) => change({ level })));
    }
    made.push(menu("Colour", COLOURS, state.colour, (colour) => change({ colour })));
    const root = element("input", { type: "checkbox", checked: state.root });
    root.addEventListener("change", () => change({ root: root.checked }));
    const description = "square root colour scale: makes small numbers easier to see";
    made.push(element("label", { class: "check", title: description }, root, "lift small"));
    return made;
  }

  // Each change rebuilds the controls, so remember the keyboard focus.
  focused() {
    const now = document.activeElement;
    if (!this.node.contains(now)) return null;
    if (now.type === "radio") return { radio: now.name };
    return now.dataset.key ? { key: now.dataset.key } : { tag: now.tagName, label: now.parentNode.textContent };
  }

  refocus(focus) {
    if (!focus) return;
    const all = [...this.node.querySelectorAll("button, select, input")];
    const found = all.find(
      (x) =>
        (focus.radio && x.name === focus.radio && x.checked) ||
        (focus.key && x.dataset.key === focus.key) ||
        (focus.tag && x.tagName === focus.tag && x.parentNode.textContent === focus.label),
    );
    if (found) found.focus({ preventScroll: true });
  }
}

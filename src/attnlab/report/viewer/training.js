// The training: a slider over the recorded steps, below the training curves.

import { element, number, svg } from "./dom.js";

const [HEIGHT, LEFT, BOTTOM] = [150, 44, 22];

export class Training {
  constructor(view, onchoose) {
    this.view = view;
    this.onchoose = onchoose;
    this.slider = element("input", { type: "range", min: 0, step: 1, ariaLabel: "training step" });
    this.slider.addEventListener("input", () => this.onchoose(Number(this.slider.value)));
    this.play = element("button", { type: "button", class: "small", onclick: () => this.toggle() }, "▶ play");
    this.output = element("output", { class: "step" });
    this.curves = element("div", { class: "curves" });
    this.legend = element("div", { class: "legend" });
    const line = element("div", { class: "bar" }, this.play, this.slider, this.output);
    this.node = element("section", { class: "training", ariaLabel: "training" }, this.legend, this.curves, line);
  }

  update(state) {
    const run = this.view.runs[state.run];
    this.count = run.frames.length;
    const names = Object.keys(run.curves);
    this.node.hidden = this.count < 2 && !names.length;
    this.slider.parentNode.hidden = this.count < 2;
    this.slider.max = String(this.count - 1);
    this.slider.value = String(state.frame);
    const step = run.frames[state.frame].step;
    this.slider.setAttribute("aria-valuetext", `step ${step}`);
    this.output.textContent = step === null ? "" : `step ${step}`;
    if (names.length) this.draw(run, names, step);
    else {
      this.curves.replaceChildren();
      this.legend.replaceChildren();
    }
  }

  draw(run, names, step) {
    const width = this.curves.clientWidth || 720;
    const lines = names.map((name) => run.curves[name]);
    const steps = [...lines.flatMap(([xs]) => xs), ...run.frames.map((frame) => frame.step ?? 0)];
    const [first, last] = [Math.min(...steps), Math.max(...steps)];
    const heights = lines.flatMap(([, ys]) => ys);
    const [least, most] = [Math.min(0, ...heights), Math.max(0, ...heights)];
    const levels = ticks(least, most > least ? most : 1, 4);
    const [low, high] = [levels[0], levels.at(-1)];
    const x = (s) => LEFT + ((s - first) / Math.max(1e-9, last - first)) * (width - LEFT - 8);
    const y = (v) => HEIGHT - BOTTOM - ((v - low) / Math.max(1e-9, high - low)) * (HEIGHT - BOTTOM - 8);
    const description = names.map((name, n) => `${name} ends at ${number(lines[n][1].at(-1))}`).join(", ");
    const picture = svg("svg", { width, height: HEIGHT, role: "img", "aria-label": `Training: ${description}` });
    for (const v of levels) {
      picture.append(svg("line", { class: "rule", x1: LEFT, x2: width - 8, y1: y(v), y2: y(v) }));
      picture.append(svg("text", { x: LEFT - 6, y: y(v) + 4, "text-anchor": "end" }, number(v)));
    }
    const marks = new Set(ticks(first, last, Math.max(2, width / 130)).filter((s) => s >= first && s <= last));
    for (const s of marks) {
      const anchor = x(s) > width - 20 ? "end" : "middle";
      picture.append(svg("line", { class: "rule", x1: x(s), x2: x(s), y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 }));
      const place = { class: "at", x: x(s), y: HEIGHT - 5, "text-anchor": anchor };
      picture.append(svg("text", place, s.toLocaleString("en")));
    }
    lines.forEach(([xs, ys], n) => {
      const points = xs.map((s, k) => `${x(s)},${y(ys[k])}`).join(" ");
      picture.append(svg("polyline", { class: `line line-${n % 6}`, points }));
      const dot = { class: `dot line-${n % 6}`, cx: x(xs[0]), cy: y(ys[0]), r: 4 };
      if (xs.length === 1) picture.append(svg("circle", dot)); // a line of one point is invisible
    });
    if (step !== null) {
      picture.append(svg("line", { class: "now", x1: x(step), x2: x(step), y1: 4, y2: HEIGHT - BOTTOM }));
      lines.forEach(([xs, ys], n) => {
        const near = nearest(xs, step);
        picture.append(svg("circle", { class: `dot line-${n % 6}`, cx: x(xs[near]), cy: y(ys[near]), r: 4 }));
      });
    }
    this.curves.replaceChildren(picture);
    const entries = names.map((name, n) => {
      const [xs, ys] = lines[n];
      const near = step === null ? ys.length - 1 : nearest(xs, step);
      return element("span", { class: `line-${n % 6}` }, element("i"), `${name} `, element("b", {}, number(ys[near])));
    });
    this.legend.replaceChildren(...entries);
  }

  toggle() {
    if (this.timer) {
      clearInterval(this.timer);
      this.timer = null;
    } else {
      this.timer = setInterval(() => {
        const next = Number(this.slider.value) + 1;
        if (next >= this.count) this.toggle();
        else this.onchoose(next);
      }, 450);
      if (Number(this.slider.value) + 1 >= this.count) this.onchoose(0);
    }
    this.play.textContent = this.timer ? "❚❚ pause" : "▶ play";
  }
}

// About `count` round numbers that span first to last. Steps are 1, 2, 2.5 or 5 times a power of 10.
export function ticks(first, last, count) {
  const rough = Math.max(1e-12, last - first) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * (1 - 1e-9));
  const [from, to] = [Math.floor(first / step + 1e-9), Math.ceil(last / step - 1e-9)];
  return Array.from({ length: Math.max(2, to - from + 1) }, (_, n) => Number(((from + n) * step).toPrecision(12)));
}

// The index of the number that is nearest to `wanted`.
export function nearest(numbers, wanted) {
  return numbers.reduce((best, x, n) => (Math.abs(x - wanted) < Math.abs(numbers[best] - wanted) ? n : best), 0);
}

// The text as tokens: queries and keys as two lists, coloured by the row or column of the pointed or locked token.

import { css, ink, place } from "./colour.js";
import { element, visible } from "./dom.js";
import { getFocus } from "./marks.js";

export class Tokens {
  constructor(events) {
    this.events = events;
    this.lists = ["query", "key"].map((role) => this.list(role));
    this.node = element("div", { class: "texts" }, ...this.lists.map(({ node }) => node));
  }

  list(role) {
    const title = element("h4");
    const box = element("div", { class: "tokens", role: "listbox", ariaMultiselectable: "true" });
    const place = (target) => (target.dataset.n === undefined ? null : Number(target.dataset.n));
    const point = (n) => (role === "query" ? { query: n, key: null } : { query: null, key: n });
    box.addEventListener("pointerover", (event) => {
      if (place(event.target) !== null) this.events.hover(point(place(event.target)));
    });
    box.addEventListener("pointerleave", () => this.events.hover(null));
    box.addEventListener("click", (event) => {
      const n = place(event.target);
      if (n !== null) this.events.token(point(n), event.ctrlKey || event.metaKey || event.shiftKey);
    });
    box.addEventListener("keydown", (event) => this.walk(event, box, point));
    return { role, title, box, node: element("div", {}, title, box) };
  }

  walk(event, box, point) {
    const now = Number(event.target.dataset.n);
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -now, End: box.children.length - 1 - now };
    if (event.key in steps) {
      const next = box.children[Math.max(0, Math.min(box.children.length - 1, now + steps[event.key]))];
      box.querySelector("[tabindex='0']").tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    } else if (event.key === "Enter" || event.key === " ") {
      this.events.token(point(now), event.ctrlKey || event.metaKey || event.shiftKey);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // texts: the tokens or words of queries and keys; titles: of the two lists
  update(texts, titles) {
    this.lists.forEach((list, side) => {
      const { box, title } = list;
      if (list.texts === texts[side] && title.textContent === titles[side]) return; // already up to date
      list.texts = texts[side];
      title.textContent = titles[side];
      box.setAttribute("aria-label", titles[side]);
      const chips = texts[side].map((text, n) => {
        const chip = element("span", { class: "token", role: "option", dir: "auto" }, visible(text));
        chip.title = `${n}: ${text}`;
        chip.dataset.n = n;
        chip.tabIndex = n ? -1 : 0;
        return chip;
      });
      box.replaceChildren(...chips);
    });
  }

  // data: of the first panel; marks: as in the panels
  colour(data, marks) {
    const at = getFocus(marks) || { query: null, key: null };
    this.lists.forEach(({ role, box }) => {
      const other = role === "query" ? at.key : at.query;
      const picked = role === "query" ? marks.queries : marks.keys;
      const locked = marks.lock && marks.lock[role];
      [...box.children].forEach((chip, n) => {
        const k = role === "query" ? n * data.columns + other : other * data.columns + n;
        const share = other === null ? 0 : place(data.colours[k], data.most, data.root);
        const [ground, text] = other === null ? ["", ""] : [css(data.theme, share), ink(data.theme, share)];
        if (chip.ground !== ground) {
          chip.style.backgroundColor = chip.ground = ground;
          chip.style.color = text;
        }
        const state = n === at[role] ? "pointed" : "";
        if (chip.state !== state) chip.classList.toggle("pointed", Boolean((chip.state = state)));
        const chosen = String(picked.has(n) || n === locked);
        if (chip.ariaSelected !== chosen) chip.ariaSelected = chosen;
      });
    });
  }
}

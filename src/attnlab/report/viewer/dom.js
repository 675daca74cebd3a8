// Elements with text only: data is never parsed as HTML.

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.startsWith("aria") || name === "role" || name === "for") {
      made.setAttribute(name.replace(/[A-Z]/g, (c) => `-${c.toLowerCase()}`), value);
    } else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// A visible form of a token: spaces, line breaks and invisible characters get a symbol.
export function visible(token) {
  if (token === "") return "∅";
  const shown = token
    .replace(/[\n\r\u2028\u2029]/g, "⏎")
    .replace(/\t/g, "⇥")
    .replace(/[\u0000-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g, "·");
  return /^\s+$/u.test(shown) ? "␣".repeat(Math.min(8, shown.length)) : shown;
}

const parts = typeof Intl.Segmenter === "function" ? new Intl.Segmenter() : null;

// Shorten a text to at most `most` characters, counted as a reader does.
export function short(text, most) {
  if (text.length <= most) return text;
  const letters = parts ? Array.from(parts.segment(text.slice(0, 20 * most)), (s) => s.segment) : Array.from(text);
  return letters.length <= most ? text : `${letters.slice(0, most - 1).join("")}…`;
}

export function number(x, figures = 3) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  const text = size >= 1000 || size < 1e-4 ? x.toExponential(figures - 1) : String(Number(x.toPrecision(figures)));
  return text.replace("-", "−").replace("e+", "e");
}

// A group of radio buttons that look like one row of buttons.
export function choice(label, name, options, chosen, onchoose) {
  const group = element("fieldset", { class: "choice" }, element("legend", {}, label));
  for (const [value, text, about] of options) {
    const input = element("input", { type: "radio", name, value: String(value), checked: value === chosen });
    input.addEventListener("change", () => onchoose(value));
    group.append(element("label", { title: about || "" }, input, element("span", {}, text)));
  }
  return group;
}

export function menu(label, options, chosen, onchoose) {
  const select = element("select", { ariaLabel: label, onchange: () => onchoose(options[select.selectedIndex][0]) });
  for (const [value, text] of options) select.append(element("option", { selected: value === chosen }, text));
  return element("label", { class: "menu" }, element("span", {}, label), select);
}

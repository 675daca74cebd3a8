// Tables: a click on a column sorts by it; buttons copy the table as CSV or LaTeX.

import { isNumeric, parseNumber, splitColumn } from "./cells.js";
import { element } from "./dom.js";
import { tabular } from "./latex.js";

function start() {
  for (const holder of document.querySelectorAll("div.table")) prepare(holder, holder.querySelector("table"));
}

function prepare(holder, table) {
  const heads = [...table.tHead.rows[0].cells];
  const cells = (row) => [...row.cells].map((cell) => cell.textContent);
  const rows = () => [...table.tBodies[0].rows];
  const texts = (column) => rows().map((row) => row.cells[column].textContent);
  heads.forEach((head, column) => {
    if (isNumeric(texts(column))) {
      head.classList.add("number");
      rows().forEach((row) => row.cells[column].classList.add("number"));
    }
    const button = element("button", { type: "button", title: "sort by this column" }, ...head.childNodes);
    button.addEventListener("click", () => {
      const down = head.ariaSort === "ascending";
      heads.forEach((other) => (other.ariaSort = null));
      head.ariaSort = down ? "descending" : "ascending";
      const text = (row) => row.cells[column].textContent;
      table.tBodies[0].append(...rows().sort((a, b) => compareCells(text(a), text(b), down)));
    });
    head.replaceChildren(button);
  });
  const titles = () => heads.map((head) => head.textContent);
  const tools = element("div", { class: "tools" });
  const forms = {
    "copy CSV": () => csv(titles().flatMap((title, column) => splitColumn(title, texts(column)))),
    "copy LaTeX": () => tabular(titles(), rows().map(cells), heads.map((_, column) => isNumeric(texts(column)))),
  };
  for (const [label, make] of Object.entries(forms)) {
    const button = element("button", { type: "button" }, label);
    button.addEventListener("click", async () => {
      button.textContent = (await copyText(make())) ? "copied" : "copying is blocked";
      setTimeout(() => (button.textContent = label), 1500);
    });
    tools.append(button);
  }
  holder.append(tools);
}

function compareCells(a, b, down) {
  const [x, y] = [parseNumber(a), parseNumber(b)];
  if (x === null && y === null) return (down ? -1 : 1) * a.localeCompare(b);
  if (x === null || y === null) return x === null ? 1 : -1; // text comes after numbers
  return down ? y - x : x - y;
}

// Columns, each with its title, as CSV.
function csv(made) {
  const quoted = (text) => (/[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text);
  const lines = made[0].map((_, n) => made.map((column) => quoted(column[n])).join(","));
  return `${lines.join("\n")}\n`;
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element("textarea", { value: text });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

start();

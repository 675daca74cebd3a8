// Tables: a click on a column sorts by it; buttons copy them as CSV or LaTeX.

import { element } from "./dom.js";

function start() {
  for (const holder of document.querySelectorAll("div.table")) prepare(holder, holder.querySelector("table"));
}

function prepare(holder, table) {
  const heads = [...table.tHead.rows[0].cells];
  const cells = (row) => [...row.cells].map((cell) => cell.textContent);
  const rows = () => [...table.tBodies[0].rows];
  heads.forEach((head, column) => {
    const texts = rows().map((row) => row.cells[column].textContent);
    if (texts.every((text) => numeric(text) !== null || blank(text))) {
      head.classList.add("number");
      rows().forEach((row) => row.cells[column].classList.add("number"));
    }
    const button = element("button", { type: "button", title: "sort by this column" }, ...head.childNodes);
    button.addEventListener("click", () => {
      const down = head.ariaSort === "ascending";
      heads.forEach((other) => (other.ariaSort = null));
      head.ariaSort = down ? "descending" : "ascending";
      const sorted = rows().sort((a, b) => compared(a.cells[column].textContent, b.cells[column].textContent, down));
      table.tBodies[0].append(...sorted);
    });
    head.replaceChildren(button);
  });
  const titles = () => heads.map((head) => head.textContent);
  const tools = element("div", { class: "tools" });
  const forms = {
    "copy CSV": () => csv([titles(), ...rows().map(cells)]),
    "copy LaTeX": () => latex(titles(), rows().map(cells)),
  };
  for (const [label, make] of Object.entries(forms)) {
    const button = element("button", { type: "button" }, label);
    button.addEventListener("click", async () => {
      button.textContent = (await copied(make())) ? "copied" : "not allowed here";
      setTimeout(() => (button.textContent = label), 1500);
    });
    tools.append(button);
  }
  holder.append(tools);
}

function blank(text) {
  return ["", "–", "-", "nan"].includes(text.trim());
}

// The number that a cell is, or null: 1,234  −0.5  12 %  0.3 ± 0.1  0.3 [0.1, 0.5]
function numeric(text) {
  const plain = text.replace(/\s*(±.*|\[.*\])$/, "").trim().replace(/,/g, "").replace("−", "-").replace(/\s*%$/, "");
  return /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(plain) ? Number(plain) : null;
}

function compared(a, b, down) {
  const [x, y] = [numeric(a), numeric(b)];
  if (x === null && y === null) return (down ? -1 : 1) * a.localeCompare(b);
  if (x === null || y === null) return x === null ? 1 : -1; // what is no number comes last
  return down ? y - x : x - y;
}

function csv(lines) {
  const quoted = (text) => (/[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text);
  return lines.map((line) => line.map(quoted).join(",")).join("\n") + "\n";
}

function latex(titles, lines) {
  const signs = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "−": "$-$" };
  const safe = (text) => text.replace(/[\\~^−&%$#_{}]/g, (c) => signs[c] || `\\${c}`);
  const row = (line) => `${line.map(safe).join(" & ")} \\\\`;
  const columns = titles.map((_, k) => (lines.every((line) => numeric(line[k]) !== null) ? "r" : "l")).join("");
  const body = [`\\begin{tabular}{${columns}}`, "\\toprule", row(titles), "\\midrule", ...lines.map(row)];
  return [...body, "\\bottomrule", "\\end{tabular}", ""].join("\n");
}

async function copied(text) {
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

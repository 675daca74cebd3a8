// Parse the cell of a table: a number with its spread, interval or note; or text.

const NUMBER = "[+−-]?(?:(?:\\d{1,3}(?:,\\d{3})+|\\d+)\\.?\\d*|\\.\\d+)(?:e[+−-]?\\d+)?";
const RANGE = `\\[\\s*(${NUMBER})\\s*,\\s*(${NUMBER})\\s*\\]`;
const SPREAD = `(?:\\s*±\\s*(${NUMBER})\\s*%?)?`;
const WHOLE = new RegExp(`^(${NUMBER})\\s*(%?)${SPREAD}(?:\\s*${RANGE})?(?:\\s*\\((.*)\\))?$`, "i");
const ALONE = new RegExp(`^${RANGE}$`, "i");
const PARTS = [["value", ""], ["spread", " ±"], ["low", " low"], ["high", " high"], ["note", " note"]];

// 1,234   −0.5   12 %   0.3 ± 0.1   0.3 [0.1, 0.5]   0.3 (2 of 3 seeds)   [0.1, 0.5]; null for other texts
export function parseCell(text) {
  const plain = (digits) => digits && digits.replace(/,/g, "").replace(/−/g, "-");
  const alone = ALONE.exec(text.trim());
  if (alone) return { low: plain(alone[1]), high: plain(alone[2]) };
  const found = WHOLE.exec(text.trim());
  if (!found) return null;
  const [value, spread, low, high] = [found[1], found[3], found[4], found[5]].map(plain);
  return { value, percent: Boolean(found[2]), spread, low, high, note: found[6] };
}

// The number to sort a cell by; the lower end of an interval without a number.
export function parseNumber(text) {
  const found = parseCell(text);
  return found && Number(found.value ?? found.low);
}

// Whether every cell of a column is a number or blank.
export function isNumeric(texts) {
  return texts.some((text) => parseCell(text)) && texts.every((text) => parseCell(text) || blank(text));
}

// A column for CSV: its numbers, and spreads, intervals and notes in separate columns.
export function splitColumn(title, texts) {
  const cells = texts.map(parseCell);
  const units = new Set(cells.filter(Boolean).map((cell) => (cell.percent ? " (%)" : "")));
  if (!isNumeric(texts) || units.size > 1) return [[title, ...texts]]; // a title has at most one unit
  const unit = title.includes("%") ? "" : [...units][0];
  const there = PARTS.filter(([part]) => cells.some((cell) => cell?.[part]));
  return there.map(([part, name]) => [`${title}${unit}${name}`, ...cells.map((cell) => cell?.[part] ?? "")]);
}

function blank(text) {
  return ["", "–", "-", "nan"].includes(text.trim());
}

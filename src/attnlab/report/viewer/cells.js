// What a cell of a table is: a number with what stands beside it, or text.

const NUMBER = "[+−-]?(?:(?:\\d{1,3}(?:,\\d{3})+|\\d+)\\.?\\d*|\\.\\d+)(?:e[+−-]?\\d+)?";
const RANGE = `\\[\\s*(${NUMBER})\\s*,\\s*(${NUMBER})\\s*\\]`;
const SPREAD = `(?:\\s*±\\s*(${NUMBER})\\s*%?)?`;
const WHOLE = new RegExp(`^(${NUMBER})\\s*(%?)${SPREAD}(?:\\s*${RANGE})?(?:\\s*\\((.*)\\))?$`, "i");
const ALONE = new RegExp(`^${RANGE}$`, "i");
const PARTS = [["value", ""], ["spread", " ±"], ["low", " low"], ["high", " high"], ["note", " note"]];

// 1,234   −0.5   12 %   0.3 ± 0.1   0.3 [0.1, 0.5]   0.3 (2 of 3 seeds)   [0.1, 0.5]; null where it is none of these
export function parsed(text) {
  const plain = (told) => told && told.replace(/,/g, "").replace(/−/g, "-");
  const alone = ALONE.exec(text.trim());
  if (alone) return { low: plain(alone[1]), high: plain(alone[2]) };
  const found = WHOLE.exec(text.trim());
  if (!found) return null;
  const [value, spread, low, high] = [found[1], found[3], found[4], found[5]].map(plain);
  return { value, percent: Boolean(found[2]), spread, low, high, note: found[6] };
}

// What a cell is sorted by: its number, of an interval alone the low end.
export function numeric(text) {
  const found = parsed(text);
  return found && Number(found.value ?? found.low);
}

// Whether all that is in a column are numbers.
export function isNumeric(texts) {
  return texts.some((text) => parsed(text)) && texts.every((text) => parsed(text) || blank(text));
}

// A column as CSV has it: its numbers as they are, and what stands beside them in columns of their own.
export function columns(title, texts) {
  const cells = texts.map(parsed);
  const units = new Set(cells.filter(Boolean).map((cell) => (cell.percent ? " (%)" : "")));
  if (!isNumeric(texts) || units.size > 1) return [[title, ...texts]]; // a title has one unit, or none
  const unit = title.includes("%") ? "" : [...units][0];
  const there = PARTS.filter(([part]) => cells.some((cell) => cell?.[part]));
  return there.map(([part, name]) => [`${title}${unit}${name}`, ...cells.map((cell) => cell?.[part] ?? "")]);
}

function blank(text) {
  return ["", "–", "-", "nan"].includes(text.trim());
}

// The marks on the maps: the pointed cell, the locked cell, and the selected queries and keys.

export function createMarks() {
  return { hover: null, lock: null, queries: new Set(), keys: new Set() };
}

// The cell whose numbers are shown: the locked one, else the pointed one.
export function getFocus(marks) {
  return marks.lock || marks.hover || null;
}

// Carry the marks of tokens over to their words (level "words"), or those of words to their tokens. A lock goes to the
// first token of a word. sides: of queries and keys, as in the document
export function carryMarks(marks, sides, level) {
  const place = ({ words }, n) => (n === null ? null : level === "words" ? words[n] : words.indexOf(n));
  const places = ({ words }, some) =>
    new Set(level === "words" ? [...some].map((n) => words[n]) : [...words.keys()].filter((n) => some.has(words[n])));
  const [query, key] = sides;
  const { lock } = marks;
  return {
    hover: null,
    lock: lock && { query: place(query, lock.query), key: place(key, lock.key) },
    queries: places(query, marks.queries),
    keys: places(key, marks.keys),
  };
}

// Runs of neighbours among some indices, [first, count]; without any, one run of all `count` indices.
export function runs(some, count) {
  if (!some.size) return [[0, count]];
  const made = [];
  for (const n of [...some].sort((a, b) => a - b)) {
    const last = made.at(-1);
    if (last && last[0] + last[1] === n) last[1] += 1;
    else made.push([n, 1]);
  }
  return made;
}

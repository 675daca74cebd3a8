// What is marked on the maps: the place that is pointed at, the one that is locked, and selected queries and keys.

export function unmarked() {
  return { hover: null, lock: null, queries: new Set(), keys: new Set() };
}

// The place whose numbers are told: a lock holds until it is undone.
export function told(marks) {
  return marks.lock || marks.hover || null;
}

// The marks of tokens on the words they are pieces of (level "words"); or those of words on their pieces, a lock on
// the first of them. sides: of queries and keys, as the document has them
export function carried(marks, sides, level) {
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

// Runs of neighbours among some places, [first, how many]; with none, all of them are one run.
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

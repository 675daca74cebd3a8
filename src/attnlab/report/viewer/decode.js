// Decode the document to numbers: base64, inflate, and a table of 256 numbers for each map.

const inflated = new Map(); // base64 text -> promise of bytes

export async function bytes(text) {
  if (!inflated.has(text)) inflated.set(text, inflate(fromBase64(text)));
  return inflated.get(text);
}

export async function floats(text) {
  return new Float32Array((await bytes(text)).slice().buffer);
}

// A stored map: codes, a scale for each row, and the number of each code for a scale of 1.
export async function block(stored) {
  const [heads, rows, columns] = stored.shape;
  const [raw, scales] = await Promise.all([bytes(stored.codes), floats(stored.scales)]);
  return { heads, rows, columns, codes: raw, scales, worth: worth(stored), stored };
}

// The largest difference between a shown and a true number: half a step at this value and scale.
export function halfStep(stored, value, scale) {
  if (scale === 0) return 0;
  const unit = 1 / stored.levels;
  if (stored.power === 1) return (scale * unit) / 2;
  return scale * (Math.sqrt(Math.abs(value) / scale) * unit + (unit * unit) / 4);
}

function worth(stored) {
  const table = new Float32Array(256);
  for (let code = 0; code < 256; code++) {
    const c = stored.signed && code > 127 ? code - 256 : code;
    table[code] = Math.sign(c) * Math.pow(Math.abs(c) / stored.levels, stored.power);
  }
  return table;
}

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text);
  const made = new Uint8Array(raw.length);
  for (let k = 0; k < raw.length; k++) made[k] = raw.charCodeAt(k);
  return made;
}

async function inflate(packed) {
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

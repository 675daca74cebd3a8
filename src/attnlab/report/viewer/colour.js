// Colours of numbers: positive ones go from the page's background to blue, negative ones to orange.

export const ARMS = {
  light: {
    positive: ["#fbfcfe", "#d6e6f4", "#9dc6e6", "#4f9bd0", "#1767ad", "#08306b"],
    negative: ["#fbfcfe", "#fde3cb", "#fbbd85", "#f08d3f", "#cf5a0b", "#7a2e02"],
    hidden: "#e9ecf1",
  },
  dark: {
    positive: ["#12171f", "#173252", "#1c5487", "#2f83c4", "#79b8ea", "#eaf5ff"],
    negative: ["#12171f", "#43260f", "#77400f", "#b5651d", "#ec9a4b", "#fff1e0"],
    hidden: "#232a35",
  },
};

export function theme() {
  const asked = document.documentElement.dataset.theme;
  if (asked) return asked;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

// 511 colours as 32-bit pixels: 0 … 255 for −most … 0, 255 … 510 for 0 … most.
export function palette(name) {
  const pixels = new Uint32Array(511);
  for (let k = 0; k <= 255; k++) {
    pixels[255 + k] = pixel(mixStops(ARMS[name].positive, k / 255));
    pixels[255 - k] = pixel(mixStops(ARMS[name].negative, k / 255));
  }
  return pixels;
}

export function css(name, value) {
  const [r, g, b] = mixStops(value < 0 ? ARMS[name].negative : ARMS[name].positive, Math.min(1, Math.abs(value)));
  return `rgb(${r} ${g} ${b})`;
}

// Black or white, whichever has more contrast with this colour.
export function ink(name, value) {
  const [r, g, b] = mixStops(value < 0 ? ARMS[name].negative : ARMS[name].positive, Math.min(1, Math.abs(value)));
  const light = (c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b) > 0.18 ? "#000" : "#fff";
}

// The position of a number on the scale, −1 … 1; `root` is the square root scale.
export function place(value, most, root) {
  const share = most > 0 ? Math.min(1, Math.abs(value) / most) : 0;
  return Math.sign(value) * (root ? Math.sqrt(share) : share);
}

export function paint(values, mask, most, root, name) {
  const pixels = palette(name);
  const hidden = pixel(parseHex(ARMS[name].hidden));
  const made = new Uint32Array(values.length);
  const factor = most > 0 ? 1 / most : 0;
  for (let k = 0; k < values.length; k++) {
    if (mask && !mask[k]) {
      made[k] = hidden;
      continue;
    }
    let share = Math.min(1, Math.abs(values[k]) * factor);
    if (root) share = Math.sqrt(share);
    made[k] = pixels[255 + (values[k] < 0 ? -1 : 1) * Math.round(255 * share)];
  }
  return made;
}

function mixStops(stops, share) {
  const at = share * (stops.length - 1);
  const below = Math.min(stops.length - 2, Math.floor(at));
  const [a, b] = [parseHex(stops[below]), parseHex(stops[below + 1])];
  return a.map((c, k) => Math.round(c + (b[k] - c) * (at - below)));
}

function parseHex(hex) {
  return [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
}

function pixel([r, g, b]) {
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0; // assumes a little-endian machine, as browsers do
}

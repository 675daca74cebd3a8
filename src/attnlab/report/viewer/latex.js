// Text as LaTeX for pdflatex, which needs commands for Greek letters and mathematical signs.

const SMALL =
  "alpha beta gamma delta varepsilon zeta eta theta iota kappa lambda mu nu xi o pi rho varsigma sigma tau upsilon " +
  "varphi chi psi omega"; // from U+03B1 on
const SIGNS = {
  "−": "-", "±": "\\pm", "×": "\\times", "·": "\\cdot", "≤": "\\leq", "≥": "\\geq", "≠": "\\neq", "≈": "\\approx",
  "∝": "\\propto", "∂": "\\partial", "∇": "\\nabla", "√": "\\surd", "∞": "\\infty", "∈": "\\in", "∑": "\\sum",
  "∏": "\\prod", "‖": "\\|", "∥": "\\|", "|": "|", "<": "<", ">": ">", "→": "\\rightarrow", "←": "\\leftarrow",
  "↑": "\\uparrow", "↓": "\\downarrow", "↦": "\\mapsto", "⊙": "\\odot", "⊤": "\\top", "ᵀ": "{}^{\\top}", "′": "'",
  "ℓ": "\\ell", "∅": "\\emptyset", "°": "{}^{\\circ}", "∩": "\\cap", "∪": "\\cup", "µ": "\\mu", "ϕ": "\\phi",
  "ϵ": "\\epsilon", "⁺": "{}^{+}", "⁻": "{}^{-}", "ᵢ": "{}_{i}", "ⱼ": "{}_{j}", "ₙ": "{}_{n}", "Γ": "\\Gamma",
  "Δ": "\\Delta", "Θ": "\\Theta", "Λ": "\\Lambda", "Ξ": "\\Xi", "Π": "\\Pi", "Σ": "\\Sigma", "Υ": "\\Upsilon",
  "Φ": "\\Phi", "Ψ": "\\Psi", "Ω": "\\Omega",
};
SMALL.split(" ").forEach((name, n) => (SIGNS[String.fromCharCode(0x3b1 + n)] = name === "o" ? "o" : `\\${name}`));
[..."⁰¹²³⁴⁵⁶⁷⁸⁹"].forEach((sign, n) => (SIGNS[sign] = `{}^{${n}}`));
[..."₀₁₂₃₄₅₆₇₈₉"].forEach((sign, n) => (SIGNS[sign] = `{}_{${n}}`));
const TEXT = {
  "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "–": "--", "—": "---",
  "…": "\\ldots{}", "“": "``", "”": "''", "‘": "`", "’": "'", "\u00a0": "~", "\u2009": "\\,", "\u202f": "\\,",
  "\n": " ",
};
for (const sign of "&%$#_{}") TEXT[sign] = `\\${sign}`;
const ACCENTS = {
  "\u0300": "grave", "\u0301": "acute", "\u0302": "hat", "\u0303": "tilde", "\u0304": "bar", "\u0305": "bar",
  "\u0307": "dot", "\u0308": "ddot", "\u030c": "check", "\u20d7": "vec",
};
const COMBINING = /[\u0300-\u036f\u20d0-\u20ff]/u;

export function latexText(text) {
  const parts = []; // [is it mathematics, its text]; neighbours of the same kind are merged
  const add = (maths, written) => {
    const last = parts.at(-1);
    if (!last || last[0] !== maths) parts.push([maths, written]);
    else last[1] = maths ? beside(last[1], written) : last[1] + written;
  };
  const signs = Array.from(text.normalize("NFC"));
  for (let n = 0; n < signs.length; n++) {
    const base = signs[n];
    let written = SIGNS[base];
    for (; n + 1 < signs.length && COMBINING.test(signs[n + 1]); n++) {
      const accent = base in TEXT ? undefined : ACCENTS[signs[n + 1]];
      if (accent) written = `\\${accent}{${written ?? base}}`;
    }
    if (written !== undefined) add(true, written);
    else add(false, TEXT[base] ?? base);
  }
  return parts.map(([maths, written]) => (maths ? `$${written}$` : written)).join("");
}

// Join two formulas: 10⁻³ has one exponent of two signs, and a space ends a command before a letter.
function beside(first, second) {
  const [, raised] = /\{\}([\^_])\{[^{}]*\}$/.exec(first) || [];
  if (raised && second.startsWith(`{}${raised}{`)) return first.slice(0, -1) + second.slice(4);
  return /[a-z]$/i.test(first) ? `${first} ${second}` : first + second;
}

// The characters that pdflatex cannot set: letters beyond Latin ones.
export function unknown(text) {
  const known = (sign) => sign < "\u0180" || sign in SIGNS || sign in TEXT || sign in ACCENTS;
  return [...new Set(Array.from(text.normalize("NFC")).filter((sign) => !known(sign)))];
}

// rows: of texts; right: which columns are numbers. {} guards a first [ or *, an option of the line above otherwise.
export function tabular(titles, rows, right) {
  const line = (cells) => `${cells.map(latexText).join(" & ").replace(/^(?=\s*[[*])/, "{}")} \\\\`;
  const strange = unknown([titles, ...rows].flat().join(""));
  const needs = ["% \\usepackage{booktabs}"];
  if (strange.length) needs.push(`% use xelatex or lualatex with a font that has ${strange.join(" ")}`);
  const form = titles.map((_, k) => (right[k] ? "r" : "l")).join("");
  const body = [`\\begin{tabular}{${form}}`, "\\toprule", line(titles), "\\midrule", ...rows.map(line)];
  return [...needs, ...body, "\\bottomrule", "\\end{tabular}", ""].join("\n");
}

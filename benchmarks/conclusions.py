"""docs/conclusions.md from results/: which claims of Zheng et al. 2021 and Heo & Choi 2024 held here.

python benchmarks/conclusions.py [--results FOLDER] [--out FILE]
"""

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path

from results import markdown

ROOT = Path(__file__).parent.parent
STUDIES = {"zheng2021": "CODA (Zheng et al. 2021)", "heo2024": "daGPAM (Heo & Choi 2024)"}
HELD = {1: "held", -1: "the opposite", 0: "open"}


@dataclass(frozen=True)
class Claim:
    """What a paper says, and the cells that speak of it: contrasts of an item and column whose row ends like this."""

    says: str
    item: str
    column: str  # a regular expression, as row is
    row: str


BLEU, JSD, PERPLEXITY = ".*BLEU", r"average JSD \(nats\)", "test perplexity"
EITHER = ".*BLEU|validation perplexity"
TRAINED, AT_ONE = "daGPAM, λ trained − softmax", "daGPAM, λ⁺ = 1, λ⁻ = 1"
CLAIMS = {
    "zheng2021": (
        Claim("Language models: CODA has a lower perplexity (Table 1)", "table1", PERPLEXITY, "CODA − Transformer"),
        Claim("Language models: CODA's heads differ more (Figure 2)", "fig2", JSD, "CODA − Transformer"),
        Claim("CODA translates better (Table 2)", "table2", BLEU, "CODA − Transformer"),
        Claim("More heads make the Transformer worse (Table 3)", "table3", EITHER, "Transformer, .* heads"),
        Claim("More heads make CODA better (Table 3)", "table3", EITHER, "CODA, .* heads"),
        Claim("CODA is better at every number of heads (Table 3)", "table3", EITHER, "CODA − Transformer"),
        Claim("Noise alone helps (Table 4)", "table4", BLEU, "CODA-CS − Transformer"),
        Claim("The cascade alone helps (Table 4)", "table4", BLEU, "RealFormer − Transformer"),
        Claim("The cascade helps beside the noise (Table 4)", "table4", BLEU, "CODA − CODA-CS"),
        Claim("CODA is better than RealFormer (Table 4)", "table4", BLEU, "CODA − RealFormer"),
        Claim("CODA's heads differ more (Table 4)", "table4", JSD, "CODA − Transformer"),
        Claim("Noise makes heads differ more (Table 4)", "table4", JSD, "CODA-CS − Transformer"),
        Claim("The cascade makes heads differ more (Table 4)", "table4", JSD, "RealFormer − Transformer"),
        Claim("Models whose heads differ more translate better (§5.4)", "section54", ".*", "r over the four models.*"),
    ),
    "heo2024": (
        Claim("15 layers: daGPAM has a lower perplexity (Table 1)", "ptb", PERPLEXITY, TRAINED),
        Claim("15 layers: NON, NAP and de-attention are worse", "ptb", PERPLEXITY, "(NON|NAP|de-attention) − softmax"),
        Claim("daGPAM keeps more of the residual (Figure 4)", "ptb", "relative residual, mean over layers", TRAINED),
        Claim("Its tokens are less alike (Figure 4)", "ptb", "mean cosine, mean over layers", TRAINED),
        Claim("Its query gradients are larger (Figure 4)", "gradients", ".*mean over steps.*", TRAINED),
        Claim("At initialisation too it keeps more (Figure 5)", "faithfulness", "relative.*", f"{AT_ONE} − softmax"),
        Claim("Its outputs leave the convex hull (Figure 1)", "convex", "outputs outside.*", AT_ONE),
        Claim("8 layers: it has a lower perplexity", "language", PERPLEXITY, TRAINED),
        Claim("It translates better, Pre-LN", "translation", BLEU, TRAINED),
    ),
}


def page(results: Path) -> str:
    parts = [
        "# Which claims held here",
        "Made by `python benchmarks/conclusions.py` from `results/`; no number is typed. A line is a difference within "
        "each seed (or a correlation), its mean and 95 % t-interval over seeds. **held**: the whole interval is on the "
        "side that the paper says. **the opposite**: on the other side. **open**: it holds 0, so these seeds do not "
        "tell. With fewer than three seeds nothing is said. The models of a line were trained by one recipe.",
    ]
    for study, title in STUDIES.items():
        parts += [f"## {title}", *section(study, results / study / "full" / "results.json")]
    parts += ["## Combinations that no paper has", *combinations(sorted((results / "compare").glob("*/results.json")))]
    return "\n\n".join(parts) + "\n"


def section(study: str, path: Path) -> list[str]:
    """The claims of a study in a table, and where it was measured."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"items": []}
    items = {item["config"]["item"]: item for item in content["items"]}
    table = [
        ["claim", "where", "mean", "95 % interval", "seeds", "here", "what differs"],
        ["---"] * 2 + ["---:"] * 3 + ["---"] * 2,
    ]
    for claim in CLAIMS[study]:
        table += lines(claim, items.get(claim.item))
    places: dict[str, list[str]] = {}
    for name, item in items.items():
        about = item["about"]
        places.setdefault(f"{about['hardware']}, torch {about['torch']}, commit {about['commit']}", []).append(name)
    made = "; ".join(f"{', '.join(names)} on {place}" for place, names in places.items())
    command = f"`attnlab reproduce {study} --scale full` makes it again; [what is measured]({study}.md)."
    return [markdown(table), f"{command} {made or 'Nothing of it has been run at full scale yet'}."]


def combinations(paths: list[Path]) -> list[str]:
    """How much better or worse than softmax, each from the comparison that has most seeds of it."""
    head = ["attention", "where", "− softmax", "95 % interval", "seeds", "here"]
    most: dict[str, list[str]] = {}
    notes = []
    for path in paths:
        content = json.loads(path.read_text(encoding="utf-8"))
        by, about, name = content["judged_by"], content["about"], path.parent.name
        for row in content["rows"][1:]:
            found = row["measures"][by]["against_first"]
            low, high = found["interval"] or (None, None)
            shown = "–" if low is None else f"{low:.3g} … {high:.3g}"
            told = "too few seeds" if low is None else "better" if low > 0 else "worse" if high < 0 else "open"
            told_of = [row["row"], f"{name}, {by}", f"{found['mean']:.3g}", shown, str(len(found["differences"])), told]
            most[row["row"]] = max(most.get(row["row"], told_of), told_of, key=lambda line: int(line[4]))
        notes.append(f"{name}: `{about['command']}`, trained on {about['trained on']}.")
    rule = ["---"] * 2 + ["---:"] * 3 + ["---"]
    return [markdown([head, rule, *most.values()]), *notes] if notes else ["Nothing of it has been compared yet."]


def lines(claim: Claim, item: dict | None) -> list[list[str]]:
    """A line a cell that was run; else one that says why not."""
    cells = [cell for cell in item["cells"] if speaks(cell, claim)] if item else []
    if run := [cell for cell in cells if cell["values"]]:
        return [[claim.says if cell is run[0] else "", *line(cell)] for cell in run]
    reasons = dict.fromkeys(f"{cell['row'].split(':')[0]}: {cell['not_run']}" for cell in cells)
    return [[claim.says, "; ".join(reasons) or "–", "–", "–", "–", "not run", ""]]


def speaks(cell: dict, claim: Claim) -> bool:
    label = cell["row"].rpartition(": ")[2]
    return bool(cell["sign"] and re.fullmatch(claim.column, cell["column"]) and re.fullmatch(claim.row, label))


def line(cell: dict) -> list[str]:
    interval = " … ".join(f"{x:.3g}" for x in cell["interval"]) if cell["interval"] else "–"
    where = f"{cell['row']}, {cell['column']}"
    return [where, f"{cell['mean']:.3g}", interval, str(len(cell["values"])), held(cell), ", ".join(cell["tags"])]


def held(cell: dict) -> str:
    """Whether the interval is on the side that the paper says."""
    if cell["interval"] is None:
        return "too few seeds"
    low, high = (cell["sign"] * x for x in cell["interval"])
    return HELD[1 if min(low, high) > 0 else -1 if max(low, high) < 0 else 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "conclusions.md")
    given = parser.parse_args()
    given.out.write_text(page(given.results), encoding="utf-8")


if __name__ == "__main__":
    main()

"""docs/conclusions.md from results/: which claims of Zheng et al. 2021 and Heo & Choi 2024 held here.

python benchmarks/conclusions.py [--results FOLDER] [--out FILE]
"""

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path

from attnlab.studies.claims import Cell
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


BLEU, JSD, PERPLEXITY = ".*BLEU", r"average JSD \(nats\)", "(test|validation) perplexity"
EITHER = ".*BLEU|validation perplexity"
TRAINED, AT_ONE = "daGPAM, λ trained − softmax", "daGPAM, λ⁺ = 1, λ⁻ = 1"
OTHERS = "(NON|NAP|de-attention) − softmax"
BEST = ", each at its best rate"
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
        Claim("Both help (Table 4)", "table4", BLEU, "CODA − Transformer"),
        Claim("The cascade helps beside the noise (Table 4)", "table4", BLEU, "CODA − CODA-CS"),
        Claim("CODA is better than RealFormer (Table 4)", "table4", BLEU, "CODA − RealFormer"),
        Claim("CODA's heads differ more (Table 4)", "table4", JSD, "CODA − (Transformer|RealFormer)"),
        Claim("Noise makes heads differ more (Table 4)", "table4", JSD, "CODA-CS − Transformer"),
        Claim("The cascade makes heads differ more (Table 4)", "table4", JSD, "RealFormer − Transformer"),
        Claim("It does so beside the noise (Table 4)", "table4", JSD, "CODA − CODA-CS"),
        Claim("At the rates found on validation CODA translates better", "rates", EITHER, f"CODA − Transformer{BEST}"),
        Claim("So does noise alone", "rates", EITHER, f"CODA-CS − Transformer{BEST}"),
        Claim("So does the cascade alone", "rates", EITHER, f"RealFormer − Transformer{BEST}"),
        Claim("Models whose heads differ more translate better (§5.4)", "section54", ".*", "r over the four models.*"),
    ),
    "heo2024": (
        Claim("15 layers: daGPAM has a lower perplexity (Table 1)", "ptb", PERPLEXITY, TRAINED),
        Claim("15 layers: NON, NAP and de-attention are worse", "ptb", "test perplexity", OTHERS),
        Claim("At the rates found on validation daGPAM's is lower too", "rates", PERPLEXITY, TRAINED + BEST),
        Claim("There too NON, NAP and de-attention are worse", "rates", "test perplexity", OTHERS + BEST),
        Claim("daGPAM keeps more of the residual (Figure 4)", "ptb", "(relative residual|residual norm).*", TRAINED),
        Claim("Its tokens are less alike (Figure 4)", "ptb", "mean cosine.*", TRAINED),
        Claim("Its query gradients are larger (Figure 4)", "gradients", "query gradient.*", TRAINED),
        Claim("At initialisation too it keeps more (Figure 5)", "faithfulness", "relative.*", f"{AT_ONE} − softmax"),
        Claim("Its tokens are less alike there too (Figure 5)", "faithfulness", "mean cosine.*", f"{AT_ONE} − softmax"),
        Claim("Its outputs leave the convex hull (Figure 1)", "convex", "outputs outside.*", AT_ONE),
        Claim("8 layers: it has a lower perplexity", "language", PERPLEXITY, TRAINED),
        Claim("It translates better, Pre-LN", "translation", BLEU, TRAINED),
    ),
}
CONDITIONS = {
    "zheng2021": "The recipe on Multi30k (3 layers, width 256, rate 0.001) was searched on validation with softmax and "
    "is used for every attention. In the lines of the item rates each has the best of 0.0005, 0.001 and 0.002, found "
    "on validation with the first seed: 0.002, the highest tried, for all but CODA-CS, so a higher one may be better "
    "still. More updates are not shown to bring nothing.",
    "heo2024": "With 15 layers the rate was looked for on validation with the first seed, of 0.0005, 0.001 and 0.002: "
    "softmax, daGPAM and NAP are all best at 0.001, the recipe's, so the lines of the item rates are of the same runs. "
    "Softmax has 84 where the paper has 108, so that this is another regime than the paper's. Leaving the convex hull "
    "is geometry, not a difference within seeds; with λ⁻ = 0, without a negative weight, outputs leave it nearly as "
    "often (docs/results.md).",
}
LEARNT = {"multi30k": ("BLEU", "bleu", 1), "ptb": ("test perplexity", "test_perplexity", -1)}


def page(results: Path) -> str:
    parts = [
        "# Which claims held here",
        "Made by `python benchmarks/conclusions.py` from `results/`; no number is typed. A line is a difference within "
        "each seed (or a correlation), its mean and 95 % t-interval over seeds. **held**: the whole interval is on the "
        "side that the paper says. **the opposite**: on the other side. **open**: it holds 0, so these seeds do not "
        "tell. With fewer than three seeds nothing is said. The models of a line were trained by one recipe.",
        "Read it with care. There are some fifty lines, and one in twenty leaves out 0 by chance: none is corrected "
        "for that, but for Holm's p in the last table. A seed fixes the batches, not the run: on a GPU sums round "
        "differently from run to run, and code has changed between sets of runs, so the same seed ends up to 1 BLEU "
        "apart. Where a comparison was made more than once, all of them are here; where they disagree, it is open.",
    ]
    for study, title in STUDIES.items():
        parts += [f"## {title}", *section(study, results / study / "full" / "results.json")]
    parts += ["## The same questions, asked of other runs", *learnt(results)]
    compared = combinations(sorted((results / "compare").glob("*/results.json")))
    parts += ["## Combinations that no paper has, beside their parts", *compared]
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
    made: dict[str, list[str]] = {}
    for name, item in items.items():
        about = item["about"]
        where = f"{about['hardware']}, torch {about['torch']}, commit {about['commit']}"
        command = about.get("command") or f"attnlab reproduce {study} --scale full"
        made.setdefault(f"`{command}` on {where}", []).append(name)
    told = "; ".join(f"{', '.join(names)} by {how}" for how, names in made.items())
    told = told or "Nothing of it has been run at full scale yet"
    cells = [cell for item in items.values() for cell in item["cells"] if ": " in cell["row"]]
    without = {data(cell) for cell in cells} - {data(cell) for cell in cells if cell["values"]}
    never = f" Not run on {', '.join(sorted(without))}." if without else ""
    return [CONDITIONS[study], markdown(table), f"{told}.{never} [What is measured]({study}.md)."]


def learnt(results: Path) -> list[str]:
    """Of `benchmarks/learning.py`, each attention against softmax."""
    table = [
        ["attention", "where", "− softmax", "95 % interval", "seeds", "here"],
        ["---"] * 2 + ["---:"] * 3 + ["---"],
    ]
    notes = []
    for name, (label, key, better) in LEARNT.items():
        path = results / name / "gpu.json"
        if not path.exists():
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        found: dict[str, dict[int, float]] = {}
        for row in content["rows"]:
            found.setdefault(row["attention"], {})[row["seed"]] = row[key]
        first = found.pop("softmax")
        for attention, scores in found.items():
            values = tuple(score - first[seed] for seed, score in sorted(scores.items()) if seed in first)
            cell = Cell(item=name, row=attention, column=label, values=values, sign=better).as_json()
            shown = " … ".join(f"{x:.3g}" for x in cell["interval"]) if cell["interval"] else "–"
            told = {"held": "better", "the opposite": "worse"}.get(held(cell), held(cell))
            table.append([attention, f"{name}, {label}", f"{cell['mean']:.3g}", shown, str(len(values)), told])
        about = content["about"]
        command = f"`python benchmarks/learning.py {name}`"
        notes.append(f"{name}: {command} on {about['hardware']}, commit {about['commit']}.")
    return [markdown(table), *notes] if notes else ["There are none yet."]


def combinations(paths: list[Path]) -> list[str]:
    """Of each comparison how much better or worse than its first row; by Holm's p where that is known."""
    table = [
        ["attention", "where", "difference", "95 % interval", "Holm's p", "seeds", "here"],
        ["---"] * 2 + ["---:"] * 4 + ["---"],
    ]
    notes = []
    for path in paths:
        content = json.loads(path.read_text(encoding="utf-8"))
        by, name, first = content["judged_by"], path.parent.name, content["rows"][0]["row"]
        for row in content["rows"][1:]:
            measure = row["measures"].get(by, {})
            if found := measure.get("against_first"):
                low, high = found["interval"] or (None, None)
                shown = ["–", "–"] if low is None else [f"{low:.3g} … {high:.3g}", f"{found['holm']:.2g}"]
                where = f"{name}, {by}, − {first}"
                told = judged(found, measure["better"])
                table.append([row["row"], where, f"{found['mean']:.3g}", *shown, str(len(found["differences"])), told])
            else:
                table.append([row["row"], f"{name}, {by}", "–", "–", "–", "0", "; ".join(row["failed"]) or "not run"])
        about = content["about"]
        trained = f", trained on {about['trained on']}" if "trained on" in about else ""
        controlled = "" if any(row.get("control") for row in content["rows"]) else ", without controls for size"
        notes.append(f"{name}: `{about['command']}`{trained}{controlled}.")
    return [markdown(table), *notes] if notes else ["Nothing of it has been compared yet."]


def judged(found: dict, better: str) -> str:
    if found["interval"] is None:
        return "too few seeds"
    if found["holm"] >= 0.05:
        return "open"
    return "better" if (found["mean"] > 0) == (better == "higher") else "worse"


def lines(claim: Claim, item: dict | None) -> list[list[str]]:
    """A line a cell that was run, and one that says which contrasts were run on no data, and why."""
    cells = [cell for cell in item["cells"] if speaks(cell, claim)] if item else []
    made = [line(cell) for cell in cells if cell["values"]]
    answered = {contrast(cell) for cell in cells if cell["values"]}
    missing = [cell for cell in cells if contrast(cell) not in answered]
    if missing or not made:
        reasons = dict.fromkeys(f"{cell['row']}: {cell['not_run']}" for cell in missing)
        made.append(["; ".join(reasons) or "–", "–", "–", "–", "not run", ""])
    return [[claim.says if number == 0 else "", *each] for number, each in enumerate(made)]


def speaks(cell: dict, claim: Claim) -> bool:
    return bool(cell["sign"] and re.fullmatch(claim.column, cell["column"]) and re.fullmatch(claim.row, contrast(cell)))


def contrast(cell: dict) -> str:
    """A row without its data."""
    return cell["row"].rpartition(": ")[2]


def data(cell: dict) -> str:
    return cell["row"].rpartition(": ")[0].split(",")[0]


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

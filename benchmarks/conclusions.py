"""docs/conclusions.md from results/: which claims of Zheng et al. 2021 and Heo & Choi 2024 held here.

python benchmarks/conclusions.py [--results FOLDER] [--out FILE]
"""

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path

from attnlab.experiments.verdicts import Cell
from attnlab.studies.zheng2021.variants_of_paper import LABELS
from results import markdown

ROOT = Path(__file__).parent.parent
STUDIES = {"zheng2021": "CODA (Zheng et al. 2021)", "heo2024": "daGPAM (Heo & Choi 2024)"}
AS_QUALITY = {"held": "better", "the opposite": "worse"}
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
BEST = ", each at the best rate tried"
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
        Claim(
            "Each at the rate found on validation: CODA translates better", "rates", BLEU, f"CODA − Transformer{BEST}"
        ),
        Claim("So does noise alone", "rates", BLEU, f"CODA-CS − Transformer{BEST}"),
        Claim("So does the cascade alone", "rates", BLEU, f"RealFormer − Transformer{BEST}"),
        Claim("Models whose heads differ more translate better (§5.4)", "section54", ".*", "r over the four models.*"),
    ),
    "heo2024": (
        Claim("15 layers: daGPAM has a lower perplexity (Table 1)", "ptb", PERPLEXITY, TRAINED),
        Claim("15 layers: NON, NAP and de-attention are worse", "ptb", "test perplexity", OTHERS),
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
    "zheng2021": "All models of Multi30k (3 layers, width 256) have one recipe, but for the rate in the lines of the "
    "item rates. More updates are not shown to bring nothing: some models are at their best at the very end.",
    "heo2024": "All models of 15 layers have one recipe. Leaving the convex hull is geometry, not a difference within "
    "seeds; with λ⁻ = 0, without a negative weight, outputs leave it nearly as often (docs/results.md).",
}
TRAINED_ON = "Trained on "  # a remark of an item whose runs were trained elsewhere than it was put together
LEARNT = {"multi30k": ("BLEU", "bleu", 1), "ptb": ("test perplexity", "test_perplexity", -1)}


def page(results: Path) -> str:
    studies = [(title, section(study, results / study / "full" / "results.json")) for study, title in STUDIES.items()]
    compared = {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in _comparisons(results)}
    others, together = learnt(results), combinations(compared)
    answers: dict[tuple[str, str], set[str]] = {}
    for told in (others.told, together.told, ablated(results / "zheng2021" / "full" / "results.json")):
        for asked, here in told.items():
            answers.setdefault(asked, set()).add(here)
    disagree = {asked for asked, here in answers.items() if len(here) > 1}
    body = []
    for title, parts in studies:
        body += [f"## {title}", *parts]
    body += ["## The same questions, asked of other runs", *others.shown(disagree)]
    body += ["## Combinations that no paper has, beside their parts", *together.shown(disagree)]
    count = sum(" … " in line for part in body for line in part.splitlines() if line.startswith("|"))
    apart = _apart(results, compared)
    parts = [
        "# Which claims held here",
        "Made by `python benchmarks/conclusions.py` from `results/`. A line is a difference within each seed (or a "
        "correlation), its mean and 95 % t-interval over seeds. **held**: the whole interval is on the side that the "
        "paper says. **the opposite**: on the other side. **open**: it holds 0, so these seeds do not tell. With fewer "
        "than three seeds nothing is said.",
        f"Read it with care. There are {count} lines with an interval, and one in twenty leaves out 0 by chance: none "
        "is corrected for that, but for Holm's p in the last section. A seed fixes the batches, not the run: on a GPU "
        "sums round differently from run to run, and code has changed between sets of runs"
        + (f", so the same attention with the same seed ends up to {apart:.1f} BLEU apart" if apart else "")
        + ". Where a comparison was made more than once, all of them are here; where they disagree, it is open.",
        *body,
    ]
    return "\n\n".join(parts) + "\n"


def ablated(path: Path) -> dict[tuple[str, str], str]:
    """What Table 4 made here says of questions that other runs ask too."""
    items = json.loads(path.read_text(encoding="utf-8"))["items"] if path.exists() else []
    cells = [cell for item in items if item["config"]["item"] == "table4" for cell in item["cells"] if cell["values"]]
    asked = {f"Multi30k de→en: {label} − Transformer": name for name, label in LABELS.items()}
    return {
        (asked[cell["row"]], "multi30k"): AS_QUALITY.get(held(cell), held(cell))
        for cell in cells
        if cell["row"] in asked and cell["column"] == "BLEU"
    }


def _comparisons(results: Path) -> list[Path]:
    return sorted((results / "compare").glob("*/results.json"))


def _apart(results: Path, compared: dict[str, dict]) -> float | None:
    """By how much BLEU of the same attention and seed differs between `benchmarks/learning.py` and comparisons."""
    label, key, _ = LEARNT["multi30k"]
    path, gaps = results / "multi30k" / "gpu.json", []
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []:
        for other in compared.get("multi30k", {"rows": []})["rows"]:
            seeds = other.get("measures", {}).get(label, {}).get("seeds", {})
            if other["row"] == row["attention"] and str(row["seed"]) in seeds:
                gaps.append(abs(row[key] - seeds[str(row["seed"])]))
    return max(gaps, default=None)


@dataclass(frozen=True)
class Asked:
    """A table of differences; what its last column says of each question, an attention and where; notes below it."""

    head: list[str]
    lines: list[tuple[tuple[str, str], list[str]]]
    notes: list[str]

    @property
    def told(self) -> dict[tuple[str, str], str]:
        return {asked: line[-1] for asked, line in self.lines}

    def shown(self, disagree: set[tuple[str, str]]) -> list[str]:
        """As Markdown; disagree: the questions that other runs answer otherwise."""
        if not self.lines:
            return ["There is nothing yet."]
        table = [self.head, ["---"] * 2 + ["---:"] * (len(self.head) - 3) + ["---"]]
        for asked, line in self.lines:
            other = " in these runs, open over all" if asked in disagree and line[-1] != "open" else ""
            table.append([*line[:-1], f"{line[-1]}{other}"])
        return [markdown(table), *self.notes]


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
        said = [text for text in item.get("remarks", ()) if text.startswith(TRAINED_ON)]
        hardware = (
            said[0].removeprefix(TRAINED_ON).rstrip(".") if said else f"{about['hardware']}, torch {about['torch']}"
        )
        where = f"{hardware}, commit {about['commit']}"
        command = about.get("command") or f"attnlab reproduce {study} --scale full"
        made.setdefault(f"`{command}` on {where}", []).append(name)
    told = "; ".join(f"{', '.join(names)} by {how}" for how, names in made.items())
    told = told or "Nothing of it has been run at full scale yet"
    cells = [cell for item in items.values() for cell in item["cells"] if ": " in cell["row"]]
    without = {data(cell) for cell in cells} - {data(cell) for cell in cells if cell["values"]}
    never = f" Not run on {', '.join(sorted(without))}." if without else ""
    conditions = " ".join(filter(None, (CONDITIONS[study], found_rates(items.get("rates")), regime(items.get("ptb")))))
    return [conditions, markdown(table), f"{told}.{never} [What is measured]({study}.md)."]


def found_rates(item: dict | None) -> str:
    """What the search on validation came to."""
    suffix, found = ", at the best rate tried", {}
    for cell in item["cells"] if item else []:
        if cell["row"].endswith(suffix) and cell["values"]:
            found[contrast(cell).removesuffix(suffix)] = cell["note"].split(";")[0].removeprefix("lr ")
    if not found:
        return ""
    each = "; ".join(f"{name} {rate}" for name, rate in found.items())
    return f"The best rate of learning by validation perplexity, looked for with the first seed (item rates): {each}."


def regime(item: dict | None) -> str:
    """How far softmax itself is from the paper's."""
    for cell in item["cells"] if item else []:
        if contrast(cell) == "softmax" and cell["column"] == "test perplexity" and cell["values"] and cell["published"]:
            return (
                f"Softmax has a test perplexity of {cell['mean']:.0f} where the paper has {cell['published']:.0f}, so "
                "this is another regime than the paper's."
            )
    return ""


def learnt(results: Path) -> Asked:
    """Of `benchmarks/learning.py`, each attention against softmax."""
    lines, notes = [], []
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
            lines.append(((attention, name), [attention, f"{name}, {label}", *within_seeds(values, better)]))
        about = content["about"]
        notes.append(
            f"{name}: `python benchmarks/learning.py {name}` on {about['hardware']}, commit {about['commit']}."
        )
    return Asked(["attention", "where", "− softmax", "95 % interval", "seeds", "here"], lines, notes)


def within_seeds(values: tuple[float, ...], better: int) -> list[str]:
    """Mean, interval, seeds and what they say of differences; better: the side of 0 that is."""
    cell = Cell(item="", row="", column="", values=values, sign=better).as_json()
    shown = " … ".join(f"{x:.3g}" for x in cell["interval"]) if cell["interval"] else "–"
    told = AS_QUALITY.get(held(cell), held(cell))
    return [f"{cell['mean']:.3g}", shown, str(len(values)), told]


def combinations(compared: dict[str, dict]) -> Asked:
    """Of each comparison, rows less the first by Holm's p where that is known; combinations also less their parts."""
    lines, notes = [], []
    for name, content in compared.items():
        by, first = content["judged_by"], content["rows"][0]["row"]
        measures = {row["row"]: row.get("measures", {}).get(by, {}) for row in content["rows"]}
        for row in content["rows"][1:]:
            label, measure = row["row"], measures[row["row"]]
            if found := measure.get("against_first"):
                low, high = found["interval"] or (None, None)
                shown = ["–", "–"] if low is None else [f"{low:.3g} … {high:.3g}", f"{found['holm']:.2g}"]
                numbers = [f"{found['mean']:.3g}", *shown, str(len(found["differences"]))]
                where = f"{name}, {by}, − {first}"
                lines.append(((label, name), [label, where, *numbers, judged(found, measure["better"])]))
            else:
                reason = "; ".join(row["failed"]) or "not run"
                lines.append(((label, name), [label, f"{name}, {by}", "–", "–", "–", "0", reason]))
        for label, part in [(each, part) for each in measures if "+" in each for part in each.split("+")]:
            whole, own = measures[label].get("seeds", {}), measures.get(part, {}).get("seeds", {})
            gaps = tuple(score - own[seed] for seed, score in sorted(whole.items()) if seed in own)
            if gaps:
                mean, shown, seeds, told = within_seeds(gaps, 1 if measures[label]["better"] == "higher" else -1)
                lines.append(
                    ((f"{label} − {part}", name), [label, f"{name}, {by}, − {part}", mean, shown, "–", seeds, told])
                )
            else:
                where = f"{name}, {by}, − {part}"
                lines.append(((f"{label} − {part}", name), [label, where, "–", "–", "–", "0", f"{part} is not in it"]))
        about = content["about"]
        trained = f", trained on {about['trained on']}" if "trained on" in about else ""
        controlled = "" if any(row.get("control") for row in content["rows"]) else ", without controls for size"
        notes.append(f"{name}: `{about['command']}`{trained}{controlled}.")
    return Asked(["attention", "where", "difference", "95 % interval", "Holm's p", "seeds", "here"], lines, notes)


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

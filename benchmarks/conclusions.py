"""Write docs/conclusions.md from results/: which claims of Zheng et al. 2021 and Heo & Choi 2024 our runs support.

python benchmarks/conclusions.py [--results FOLDER] [--out FILE]
"""

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path

from attnlab.experiments.reproduction import ItemResult
from attnlab.experiments.verdicts import Cell
from attnlab.studies.zheng2021.coda_models import LABELS
from results import format_table, read_items

ROOT = Path(__file__).parent.parent
STUDIES = {"zheng2021": "CODA (Zheng et al. 2021)", "heo2024": "daGPAM (Heo & Choi 2024)"}
AS_QUALITY = {"held": "better", "the opposite": "worse"}
HELD = {1: "held", -1: "the opposite", 0: "open"}


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, and the cells that test it: the contrasts of an item by column and end of the row."""

    text: str
    item: str
    column: str  # a regular expression
    row: str  # a regular expression


BLEU, JSD, PERPLEXITY = ".*BLEU", r"average JSD \(nats\)", "(test|validation) perplexity"
EITHER = ".*BLEU|validation perplexity"
TRAINED, AT_ONE = "daGPAM, λ trained − softmax", "daGPAM, λ⁺ = 1, λ⁻ = 1"
UNTRAINED = f"{AT_ONE} − softmax"
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
        Claim("The cascade helps in addition to the noise (Table 4)", "table4", BLEU, "CODA − CODA-CS"),
        Claim("CODA is better than RealFormer (Table 4)", "table4", BLEU, "CODA − RealFormer"),
        Claim("CODA's heads differ more (Table 4)", "table4", JSD, "CODA − (Transformer|RealFormer)"),
        Claim("Noise makes heads differ more (Table 4)", "table4", JSD, "CODA-CS − Transformer"),
        Claim("The cascade makes heads differ more (Table 4)", "table4", JSD, "RealFormer − Transformer"),
        Claim("The cascade adds to the noise: heads differ more (Table 4)", "table4", JSD, "CODA − CODA-CS"),
        Claim("At its best learning rate, CODA translates better", "rates", BLEU, f"CODA − Transformer{BEST}"),
        Claim("At its best learning rate, noise alone helps", "rates", BLEU, f"CODA-CS − Transformer{BEST}"),
        Claim("At its best learning rate, the cascade alone helps", "rates", BLEU, f"RealFormer − Transformer{BEST}"),
        Claim("Models whose heads differ more translate better (§5.4)", "section54", ".*", "r over the four models.*"),
    ),
    "heo2024": (
        Claim("15 layers: daGPAM has a lower perplexity (Table 1)", "ptb", PERPLEXITY, TRAINED),
        Claim("15 layers: NON, NAP and de-attention are worse", "ptb", "test perplexity", OTHERS),
        Claim("daGPAM keeps more of the residual (Figure 4)", "ptb", "(relative residual|residual norm).*", TRAINED),
        Claim("Its tokens are less similar (Figure 4)", "ptb", "mean cosine.*", TRAINED),
        Claim("Its query gradients are larger (Figure 4)", "gradients", "query gradient.*", TRAINED),
        Claim("It keeps more of the residual at initialization (Figure 5)", "faithfulness", "relative.*", UNTRAINED),
        Claim("Its tokens are less similar at initialization (Figure 5)", "faithfulness", "mean cosine.*", UNTRAINED),
        Claim("Its outputs leave the convex hull (Figure 1)", "convex", "outputs outside.*", AT_ONE),
        Claim("8 layers: daGPAM has a lower perplexity", "language", PERPLEXITY, TRAINED),
        Claim("daGPAM translates better, Pre-LN", "translation", BLEU, TRAINED),
    ),
}
CONDITIONS = {
    "zheng2021": "All models of Multi30k (3 layers, width 256) share one recipe, except the learning rate in the rows "
    "of the item rates. Longer training might still help: some models are best at the very end.",
    "heo2024": "All models of 15 layers share one recipe. Leaving the convex hull is a geometric property, not a "
    "difference within seeds. With λ⁻ = 0, without negative weights, outputs leave it nearly as often "
    "(docs/results.md).",
}
TRAINED_ON = "Trained on "  # starts the remark of an item whose runs were trained on another machine
LEARNING = {"multi30k": ("BLEU", "bleu", 1), "ptb": ("test perplexity", "test_perplexity", -1)}


def render_page(results: Path) -> str:
    """Return the page as Markdown."""
    compared = {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in _list_comparisons(results)}
    learning, combinations = read_learning(results), read_combinations(compared)
    answers: dict[tuple[str, str], set[str]] = {}
    items = {study: read_items(study, results) for study in STUDIES}
    for verdicts in (learning.verdicts, combinations.verdicts, read_ablation(items["zheng2021"])):
        for question, verdict in verdicts.items():
            answers.setdefault(question, set()).add(verdict)
    disagree = {question for question, verdicts in answers.items() if len(verdicts) > 1}
    body = []
    for study, title in STUDIES.items():
        body += [f"## {title}", *render_study(study, items[study])]
    body += ["## The same questions in other runs", *learning.render(disagree)]
    body += ["## Combinations that no paper has, and their parts", *combinations.render(disagree)]
    count = sum(" … " in row for part in body for row in part.splitlines() if row.startswith("|"))
    gap = _find_largest_gap(results, compared)
    parts = [
        "# Which claims our runs support",
        "Written by `python benchmarks/conclusions.py` from `results/`. A row is a difference within each seed (or a "
        "correlation): its mean and 95 % t-interval over seeds. **held**: the whole interval is on the paper's side "
        "of 0. **the opposite**: the whole interval is on the other side. **open**: the interval contains 0, so these "
        "seeds do not decide. With fewer than three seeds there is no verdict.",
        f"Read it with care. {count} rows have an interval, and one in twenty excludes 0 by chance. Only Holm's p in "
        "the last section is corrected for that. A seed fixes the batches but not the run: on a GPU, sums round "
        "differently from run to run, and the code has changed between sets of runs"
        + (f". The same attention with the same seed differs by up to {gap:.1f} BLEU" if gap else "")
        + ". If a comparison was run more than once, all runs are listed; if they disagree, the question is open.",
        *body,
    ]
    return "\n\n".join(parts) + "\n"


def read_ablation(items: dict[str, ItemResult]) -> dict[tuple[str, str], str]:
    """Return the verdicts of our Table 4 on questions that other runs ask too."""
    item = items.get("table4")
    questions = {f"Multi30k de→en: {label} − Transformer": name for name, label in LABELS.items()}
    return {
        (questions[cell.row], "multi30k"): AS_QUALITY.get(judge_cell(cell), judge_cell(cell))
        for cell in (item.cells if item else ())
        if cell.values and cell.row in questions and cell.column == "BLEU"
    }


def _list_comparisons(results: Path) -> list[Path]:
    return sorted((results / "compare").glob("*/results.json"))


def _find_largest_gap(results: Path, compared: dict[str, dict]) -> float | None:
    """Return the largest BLEU difference of one attention and seed between `benchmarks/learning.py` and comparisons."""
    label, key, _ = LEARNING["multi30k"]
    path, gaps = results / "multi30k" / "gpu.json", []
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []:
        for other in compared.get("multi30k", {"rows": []})["rows"]:
            seeds = other.get("measures", {}).get(label, {}).get("seeds", {})
            if other["row"] == row["attention"] and str(row["seed"]) in seeds:
                gaps.append(abs(row[key] - seeds[str(row["seed"])]))
    return max(gaps, default=None)


@dataclass(frozen=True)
class Differences:
    """A table of differences with a verdict per row. A question is an attention and a data set."""

    head: list[str]
    rows: list[tuple[tuple[str, str], list[str]]]
    notes: list[str]

    @property
    def verdicts(self) -> dict[tuple[str, str], str]:
        return {question: row[-1] for question, row in self.rows}

    def render(self, disagree: set[tuple[str, str]]) -> list[str]:
        """Return Markdown; disagree holds the questions that other runs answer differently."""
        if not self.rows:
            return ["No results yet."]
        table = [self.head, ["---"] * 2 + ["---:"] * (len(self.head) - 3) + ["---"]]
        for question, row in self.rows:
            other = " in these runs, open over all" if question in disagree and row[-1] != "open" else ""
            table.append([*row[:-1], f"{row[-1]}{other}"])
        return [format_table(table), *self.notes]


def render_study(study: str, items: dict[str, ItemResult]) -> list[str]:
    """Return the claims of a study as a table, and where they were measured."""
    table = [
        ["claim", "where", "mean", "95 % interval", "seeds", "verdict", "differs in"],
        ["---"] * 2 + ["---:"] * 3 + ["---"] * 2,
    ]
    for claim in CLAIMS[study]:
        table += list_rows(claim, items.get(claim.item))
    made: dict[str, list[str]] = {}
    for name, item in items.items():
        about = item.about
        elsewhere = [text for text in item.remarks if text.startswith(TRAINED_ON)]
        hardware = f"{about['hardware']}, torch {about['torch']}"
        if elsewhere:
            hardware = elsewhere[0].removeprefix(TRAINED_ON).rstrip(".")
        where = f"{hardware}, commit {about['commit']}"
        command = about.get("command") or f"attnlab reproduce {study} --scale full"
        made.setdefault(f"`{command}` on {where}", []).append(name)
    sources = "; ".join(f"{', '.join(names)} by {how}" for how, names in made.items())
    sources = sources or "Nothing has been run at full scale yet"
    cells = [cell for item in items.values() for cell in item.cells if ": " in cell.row]
    without = {name_data(cell) for cell in cells} - {name_data(cell) for cell in cells if cell.values}
    never = f" Not run on {', '.join(sorted(without))}." if without else ""
    more = describe_rates(items.get("rates")), describe_regime(items.get("ptb"))
    conditions = " ".join(filter(None, (CONDITIONS[study], *more)))
    return [conditions, format_table(table), f"{sources}.{never} [What is measured]({study}.md)."]


def describe_rates(item: ItemResult | None) -> str:
    """Say which learning rates the search on validation found."""
    suffix, found = ", at the best rate tried", {}
    for cell in item.cells if item else []:
        if cell.row.endswith(suffix) and cell.values:
            found[name_contrast(cell).removesuffix(suffix)] = cell.note.split(";")[0].removeprefix("lr ")
    if not found:
        return ""
    each = "; ".join(f"{name} {rate}" for name, rate in found.items())
    return f"The best learning rates by validation perplexity, searched with the first seed (item rates): {each}."


def describe_regime(item: ItemResult | None) -> str:
    """Say how far our softmax is from the paper's."""
    for cell in item.cells if item else []:
        same = (name_contrast(cell), cell.column) == ("softmax", "test perplexity")
        if same and cell.values and cell.published:
            ours, published = f"{cell.mean:.0f}", f"{cell.published:.0f}"
            return f"Our softmax has a test perplexity of {ours}, the paper's {published}, so the two regimes differ."
    return ""


def read_learning(results: Path) -> Differences:
    """Return the difference of each attention to softmax in `benchmarks/learning.py`."""
    rows, notes = [], []
    for name, (label, key, better) in LEARNING.items():
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
            rows.append(((attention, name), [attention, f"{name}, {label}", *summarise_seeds(values, better)]))
        about = content["about"]
        notes.append(
            f"{name}: `python benchmarks/learning.py {name}` on {about['hardware']}, commit {about['commit']}."
        )
    return Differences(["attention", "where", "− softmax", "95 % interval", "seeds", "verdict"], rows, notes)


def summarise_seeds(values: tuple[float, ...], better: int) -> list[str]:
    """Return mean, interval, number of seeds and verdict of differences; better is the better side of 0, 1 or -1."""
    cell = Cell(item="", row="", column="", values=values, sign=better)
    shown = " … ".join(f"{x:.3g}" for x in cell.interval) if cell.interval else "–"
    verdict = AS_QUALITY.get(judge_cell(cell), judge_cell(cell))
    return [f"{cell.mean:.3g}", shown, str(len(values)), verdict]


def read_combinations(compared: dict[str, dict]) -> Differences:
    """Return for each comparison the rows minus the first, judged by Holm's p; combinations also minus their parts."""
    rows, notes = [], []
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
                rows.append(((label, name), [label, where, *numbers, judge_difference(found, measure["better"])]))
            else:
                reason = "; ".join(row["failed"]) or "not run"
                rows.append(((label, name), [label, f"{name}, {by}", "–", "–", "–", "0", reason]))
        for label, part in [(each, part) for each in measures if "+" in each for part in each.split("+")]:
            whole, own = measures[label].get("seeds", {}), measures.get(part, {}).get("seeds", {})
            gaps = tuple(score - own[seed] for seed, score in sorted(whole.items()) if seed in own)
            where = f"{name}, {by}, − {part}"
            if gaps:
                better = 1 if measures[label]["better"] == "higher" else -1
                mean, shown, seeds, verdict = summarise_seeds(gaps, better)
                rows.append(((f"{label} − {part}", name), [label, where, mean, shown, "–", seeds, verdict]))
            else:
                rows.append(((f"{label} − {part}", name), [label, where, "–", "–", "–", "0", f"{part} was not run"]))
        about = content["about"]
        trained = f", trained on {about['trained on']}" if "trained on" in about else ""
        controlled = "" if any(row.get("control") for row in content["rows"]) else ", without controls for size"
        notes.append(f"{name}: `{about['command']}`{trained}{controlled}.")
    return Differences(
        ["attention", "where", "difference", "95 % interval", "Holm's p", "seeds", "verdict"], rows, notes
    )


def judge_difference(found: dict, better: str) -> str:
    if found["interval"] is None:
        return "too few seeds"
    if found["holm"] >= 0.05:
        return "open"
    return "better" if (found["mean"] > 0) == (better == "higher") else "worse"


def list_rows(claim: Claim, item: ItemResult | None) -> list[list[str]]:
    """Return a row per measured cell, and one row with the reasons of contrasts that were not run."""
    cells = [cell for cell in item.cells if is_about(cell, claim)] if item else []
    rows = [format_cell(cell) for cell in cells if cell.values]
    answered = {name_contrast(cell) for cell in cells if cell.values}
    missing = [cell for cell in cells if name_contrast(cell) not in answered]
    if missing or not rows:
        reasons = dict.fromkeys(f"{cell.row}: {cell.not_run}" for cell in missing)
        rows.append(["; ".join(reasons) or "–", "–", "–", "–", "not run", ""])
    return [[claim.text if number == 0 else "", *each] for number, each in enumerate(rows)]


def is_about(cell: Cell, claim: Claim) -> bool:
    """Return whether a cell tests a claim."""
    matches = re.fullmatch(claim.column, cell.column) and re.fullmatch(claim.row, name_contrast(cell))
    return bool(cell.sign and matches)


def name_contrast(cell: Cell) -> str:
    """Return the name of a row without its data set."""
    return cell.row.rpartition(": ")[2]


def name_data(cell: Cell) -> str:
    return cell.row.rpartition(": ")[0].split(",")[0]


def format_cell(cell: Cell) -> list[str]:
    interval = " … ".join(f"{x:.3g}" for x in cell.interval) if cell.interval else "–"
    where = f"{cell.row}, {cell.column}"
    return [where, f"{cell.mean:.3g}", interval, str(len(cell.values)), judge_cell(cell), ", ".join(cell.tags)]


def judge_cell(cell: Cell) -> str:
    """Say whether the interval is on the paper's side of 0."""
    if cell.interval is None:
        return "too few seeds"
    low, high = (cell.sign * x for x in cell.interval)
    return HELD[1 if min(low, high) > 0 else -1 if max(low, high) < 0 else 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "conclusions.md")
    given = parser.parse_args()
    given.out.write_text(render_page(given.results), encoding="utf-8")


if __name__ == "__main__":
    main()

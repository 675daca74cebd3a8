"""Write docs/conclusions.md from results/: which claims of the four papers our runs support.

python benchmarks/conclusions.py [--results FOLDER] [--out FILE]
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from claims import CLAIMS, CONDITIONS, MAIN, STUDIES, Claim
from page_tables import fold_table, fold_text

from attnlab.experiments.power import is_pairing_better
from attnlab.experiments.reproduction import ItemResult
from attnlab.experiments.significance import contrast_seeds, correct_by_holm
from attnlab.experiments.study_page import format_published
from attnlab.experiments.verdicts import VERDICTS, Cell, correct_claims
from attnlab.studies.zheng2021.coda_models import LABELS
from results import read_items

ROOT = Path(__file__).parent.parent
AS_QUALITY = {"reproduced": "better", "same direction": "better", "opposite": "worse"}
HELD = ("reproduced", "same direction")
PARTLY = "Held in some rows, open in others"
HEADINGS = ("Held", PARTLY, "Rows disagree", "Did not hold", "Open", "No verdict", "Not run")

COUNTED = {
    "Held": "{} held", PARTLY: "{} held in some rows", "Rows disagree": "rows disagree on {}", "Open": "{} open",
    "Did not hold": "{} did not hold", "No verdict": "{} without a verdict", "Not run": "{} not run",
}  # fmt: skip
TRAINED_ON = "Trained on "  # starts the remark of an item whose runs were trained on another machine
Line = tuple[tuple[str, str], list[str]]  # a question, and the row of the table that answers it
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
    gap = _find_largest_gap(results, compared)
    parts = [
        "# Which claims held here",
        "What became of the main claims of four papers, and of all their claims that we tested:",
        "\n".join(summarise_paper(study, items[study]) for study in STUDIES),
        "Each section lists the claims by their answer. Its folded table has the numbers. "
        "`python benchmarks/conclusions.py` writes this page from `results/`.",
        "## How to read an answer",
        "- A row of a table is a difference within each seed, a correlation or a published number. It shows the mean "
        "and the 95 % interval over seeds.\n"
        "- p is corrected by Holm's method for all contrasts of the paper that were run. The last table has the "
        "[tests of comparisons](compare.md#paired-or-unpaired).\n"
        "- *Same direction*: p is below 0.05 on the paper's side of 0. *Opposite*: it is below 0.05 on the other "
        "side.\n"
        "- *Open*: these seeds cannot tell. The number beside it is how many seeds it would take.\n"
        "- [How to read a verdict](reproduce.md#how-to-read-a-verdict) has the other words.",
        "A seed fixes the batches but not the run: on a GPU, sums round differently from run to run. The code has also "
        "changed between sets of runs."
        + (f" The same attention with the same seed differs by up to {gap:.1f} BLEU." if gap else "")
        + " If a comparison was run more than once, all runs are listed. If they disagree, the question is open.",
        *body,
    ]
    return "\n\n".join(parts) + "\n"


def summarise_paper(study: str, items: Mapping[str, ItemResult]) -> str:
    """Return a line on a paper: the answers of its main claims, and how many claims have each answer."""
    answers = {claim: answer_claim(list_cells(claim, items.get(claim.item))) for claim in CLAIMS[study]}
    main = "; ".join(f"*{c.text}*: {answers[c].lower()}" for c in answers if c.text in MAIN[study])
    counts = Counter(answers.values())
    every = ", ".join(COUNTED[heading].format(counts[heading]) for heading in HEADINGS if counts[heading])
    return f"- **{STUDIES[study]}.** {main}. All {len(answers)} claims: {every}."


def read_ablation(items: dict[str, ItemResult]) -> dict[tuple[str, str], str]:
    """Return the verdicts of our Table 4 on questions that other runs ask too."""
    item = items.get("table4")
    questions = {f"Multi30k de→en: {label} − Transformer": name for name, label in LABELS.items()}
    return {
        (questions[cell.row], "multi30k, BLEU"): name_quality(cell)
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
    """A table of differences with a verdict per row. A question is an attention, and a data set with a measure."""

    head: list[str]
    rows: list[Line]
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
        return [fold_table(table), *self.notes]


def render_study(study: str, items: dict[str, ItemResult]) -> list[str]:
    """Return the claims of a study as a table, and where they were measured."""
    table = [
        ["claim", "where", "mean", "95 % interval", "seeds", "Holm's p", "verdict", "differs in"],
        ["---"] * 2 + ["---:"] * 4 + ["---"] * 2,
    ]
    for claim in CLAIMS[study]:
        table += list_rows(claim, items.get(claim.item))
    made: dict[str, list[str]] = {}
    for name, item in items.items():
        about = item.about
        elsewhere = [text for text in item.remarks if text.startswith(TRAINED_ON) and ", torch " in text]
        hardware = f"{about['hardware']}, torch {about['torch']}"
        if elsewhere:
            hardware = elsewhere[0].removeprefix(TRAINED_ON).rstrip(".")
        where = f"{hardware}, commit {about['commit']}"
        command = re.sub(r" --out=\S+", "", about.get("command") or f"attnlab reproduce {study} --scale full")
        made.setdefault(f"`{command}` on {where}", []).append(name)
    sources = "; ".join(f"{', '.join(names)} by {how}" for how, names in made.items())
    sources = sources or "Nothing has been run at full scale yet"
    cells = [cell for item in items.values() for cell in item.cells if ": " in cell.row]
    without = {name_data(cell) for cell in cells} - {name_data(cell) for cell in cells if cell.values}
    never = f" Not run on {', '.join(sorted(without))}." if without else ""
    more = describe_rates(items.get("rates")), describe_regime(items.get("ptb"))
    conditions = " ".join(filter(None, (CONDITIONS[study], *more)))
    answers = [summarise_claims(CLAIMS[study], items), describe_numbers(items.values())]
    measured = fold_table(table) + f"\n\n[What is measured, and how]({study}.md).{never}"
    return [*answers, conditions, measured, fold_text("Commands and machines", f"{sources}.")]


def summarise_claims(claims: Sequence[Claim], items: Mapping[str, ItemResult]) -> str:
    """Return the claims under what became of them, as a list."""
    found: dict[str, list[str]] = {heading: [] for heading in HEADINGS}
    for claim in claims:
        cells = list_cells(claim, items.get(claim.item))
        ran, every = ({name_contrast(cell) for cell in some} for some in ([c for c in cells if c.values], cells))
        partly = f" ({len(ran)} of {len(every)} rows run)" if ran and ran != every else ""
        found[answer_claim(cells)].append(claim.text + partly)
    lines = []
    for heading, texts in found.items():
        lines += [f"- **{heading}**", *(f"    - {text}" for text in texts)] if texts else []
    return "\n".join(lines)


def answer_claim(cells: Sequence[Cell]) -> str:
    """Return one of HEADINGS for the cells that test a claim."""
    verdicts = {cell.verdict for cell in cells} - {"not run"}
    sides = {"Held" if verdict in HELD else "Did not hold" for verdict in verdicts - {"open", "no verdict"}}
    if len(sides) == 2:
        return "Rows disagree"
    if sides:
        (side,) = sides
        return PARTLY if side == "Held" and "open" in verdicts else side
    return "Open" if "open" in verdicts else "No verdict" if verdicts else "Not run"


def describe_numbers(items: Iterable[ItemResult]) -> str:
    """Say how many published numbers that are no contrasts were reproduced."""
    verdicts = [cell.verdict for item in items for cell in item.cells if cell.has_claim and not cell.sign]
    counts = {verdict: verdicts.count(verdict) for verdict in VERDICTS[:-1] if verdict in verdicts}
    if not counts:
        return "No cell with a published number was run."
    each = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"Of the cells with a published number that were run: {each}."


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
        first, gaps = found.pop("softmax"), dict[str, Cell]()
        for attention, scores in found.items():
            values = tuple(score - first[seed] for seed, score in sorted(scores.items()) if seed in first)
            gaps[attention] = Cell(item=name, row=attention, column=label, values=values, sign=better)
        for attention, cell in zip(gaps, correct_claims(gaps.values()), strict=True):
            where = f"{name}, {label}"
            rows.append(((attention, where), [attention, where, *summarise_cell(cell)]))
        about = content["about"]
        notes.append(
            f"{name}: `python benchmarks/learning.py {name}` on {about['hardware']}, commit {about['commit']}."
        )
    head = ["attention", "where", "− softmax", "95 % interval", "Holm's p", "seeds", "verdict"]
    return Differences(head, rows, notes)


def summarise_cell(cell: Cell) -> list[str]:
    """Return mean, interval, Holm's p, number of seeds and verdict of a difference."""
    return [f"{cell.mean:.3g}", format_interval(cell), format_p(cell), str(len(cell.values)), name_quality(cell)]


def name_quality(cell: Cell) -> str:
    """Return better, worse or open; the sign of the cell is the better side of 0."""
    if cell.interval is None:
        return "too few seeds"
    return AS_QUALITY.get(cell.verdict, cell.verdict)


def format_interval(cell: Cell) -> str:
    return " … ".join(f"{x:.3g}" for x in cell.interval) if cell.interval else "–"


def format_p(cell: Cell) -> str:
    return "–" if cell.holm is None else f"{cell.holm:.2g}"


def read_combinations(compared: dict[str, dict]) -> Differences:
    """Return for each comparison the rows minus the first, judged by Holm's p; combinations also minus their parts.

    Each measure that judges has its rows: the one that the comparison names, and BLEU.
    """
    rows, notes = [], []
    for name, content in compared.items():
        for by in dict.fromkeys((content["judged_by"], "BLEU")):
            measures = {row["row"]: row.get("measures", {}).get(by, {}) for row in content["rows"]}
            if by == content["judged_by"] or any(measures.values()):
                rows += compare_with_first(f"{name}, {by}", content["rows"], measures)
                rows += compare_with_parts(f"{name}, {by}", measures)
        about = content["about"]
        trained = f", trained on {about['trained on']}" if "trained on" in about else ""
        controlled = "" if any(row.get("control") for row in content["rows"]) else ", without controls for size"
        notes.append(f"{name}: `{about['command']}`{trained}{controlled}.")
    return Differences(
        ["attention", "where", "difference", "95 % interval", "Holm's p", "seeds", "verdict"], rows, notes
    )


def compare_with_first(where: str, rows: list[dict], measures: dict[str, dict]) -> list[Line]:
    """Return the rows of a comparison minus its first one, as they were tested."""
    lines = []
    for row in rows[1:]:
        label, measure = row["row"], measures[row["row"]]
        if found := measure.get("against_first"):
            shown = summarise_difference(found, measure["better"])
            lines.append(((label, where), [label, f"{where}, − {rows[0]['row']}", *shown]))
        else:
            reason = "; ".join(row["failed"]) or "not run"
            lines.append(((label, where), [label, where, "–", "–", "–", "0", reason]))
    return lines


def compare_with_parts(where: str, measures: dict[str, dict]) -> list[Line]:
    """Return the rows of combinations minus their parts; those of one comparison are one family of tests."""
    found, missing = {}, []
    for label, part in [(each, part) for each in measures if "+" in each for part in each.split("+")]:
        whole, own = measures[label].get("seeds", {}), measures.get(part, {}).get("seeds", {})
        if contrast := contrast_seeds(whole, own, paired=is_pairing_better(len(whole))):
            found[label, part] = contrast
        else:
            line = [label, f"{where}, − {part}", "–", "–", "–", "0", f"{part} was not run"]
            missing.append(((f"{label} − {part}", where), line))
    corrected = correct_by_holm({key: contrast.p for key, contrast in found.items()})
    judged = []
    for (label, part), contrast in found.items():
        shown = summarise_difference(vars(contrast) | {"holm": corrected[label, part]}, measures[label]["better"])
        judged.append(((f"{label} − {part}", where), [label, f"{where}, − {part}", *shown]))
    return [*judged, *missing]


def summarise_difference(found: Mapping, better: str) -> list[str]:
    """Return mean, interval, Holm's p, number of seeds and verdict of a difference as a comparison stores it."""
    low, high = found["interval"] or (None, None)
    interval = "–" if low is None else f"{low:.3g} … {high:.3g}"
    p = "–" if found["holm"] is None else f"{found['holm']:.2g}"
    return [f"{found['mean']:.3g}", interval, p, str(len(found["differences"])), judge_difference(found, better)]


def judge_difference(found: Mapping, better: str) -> str:
    if found["interval"] is None:
        return "too few seeds"
    if found["holm"] is None or found["holm"] >= 0.05:
        return "open"
    return "better" if (found["mean"] > 0) == (better == "higher") else "worse"


def list_cells(claim: Claim, item: ItemResult | None) -> list[Cell]:
    """Return the cells that test a claim."""
    return [cell for cell in item.cells if is_about(cell, claim)] if item else []


def list_rows(claim: Claim, item: ItemResult | None) -> list[list[str]]:
    """Return a row per measured cell, and one row with the reasons of contrasts that were not run."""
    cells = list_cells(claim, item)
    rows = [format_cell(cell) for cell in cells if cell.values]
    answered = {name_contrast(cell) for cell in cells if cell.values}
    missing = [cell for cell in cells if name_contrast(cell) not in answered]
    if missing or not rows:
        reasons: dict[str, dict[str, None]] = {}
        for cell in missing:
            reasons.setdefault(cell.not_run, {})[cell.row] = None
        why = ". ".join(f"{'; '.join(names)}: {reason}" for reason, names in reasons.items())
        rows.append([why or "–", "–", "–", "–", "–", "not run", ""])
    return [[claim.text if number == 0 else "", *each] for number, each in enumerate(rows)]


def is_about(cell: Cell, claim: Claim) -> bool:
    """Return whether a cell tests a claim."""
    matches = re.fullmatch(claim.column, cell.column) and re.fullmatch(claim.row, name_contrast(cell))
    return bool(cell.has_claim and matches)


def name_contrast(cell: Cell) -> str:
    """Return the name of a row without its data set."""
    return cell.row.rpartition(": ")[2]


def name_data(cell: Cell) -> str:
    return cell.row.rpartition(": ")[0].split(",")[0]


def format_cell(cell: Cell) -> list[str]:
    shown = "" if cell.sign else f" (published ± margin: {format_published(cell)})"
    numbers = [f"{cell.mean:.3g}", format_interval(cell), str(len(cell.values)), format_p(cell)]
    return [f"{cell.row}, {cell.column}{shown}", *numbers, cell.outcome, ", ".join(cell.tags)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "conclusions.md")
    given = parser.parse_args()
    given.out.write_text(render_page(given.results), encoding="utf-8")


if __name__ == "__main__":
    main()

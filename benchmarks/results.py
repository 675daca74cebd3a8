"""Write docs/results.md from results/*.json; no number in it is typed by hand.

python benchmarks/results.py
"""

import json
import re
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import reading_tables
import speed_tables
from page_tables import fold_table, format_number, format_spread, format_table, quote_tokens, read_results, render_head

from attnlab.experiments.ledger import FILE
from attnlab.experiments.reproduction import ItemResult, draw_study, list_scales
from attnlab.experiments.status import tabulate_status
from attnlab.experiments.study import SCALES, Scale
from attnlab.experiments.study_page import format_published, tabulate_wide
from attnlab.experiments.verdicts import VERDICTS, Cell
from attnlab.studies import STUDIES, open_study

ROOT = Path(__file__).parent.parent


def render_page() -> str:
    """Return the page as Markdown: its contents, then the papers, comparisons of attention, and speed."""
    timed = speed_tables.SECTIONS | reading_tables.SECTIONS
    compared = [render_learning(name, path) for name in LEARNING for path in find_files(name)]
    compared += [render_comparison(path) for path in sorted((ROOT / "results" / "compare").glob("*/results.json"))]
    papers = [name for name in sorted(STUDIES) if open_study(name).from_paper]
    own = [name for name in sorted(STUDIES) if name not in papers and (ROOT / "results" / name / FILE).exists()]
    groups = {
        "Papers": [render_status(), *map(render_study, papers)],
        "Comparisons of attention": [*map(render_own_study, own), *compared],
        "Speed, memory and robustness": [show(path) for name, show in timed.items() for path in find_files(name)],
    }
    contents = []
    for group, sections in groups.items():
        contents += [f"- {group}", *(f"    - {link_section(section)}" for section in sections)]
    parts = [
        "# Results",
        "Every table names the command that measures it. Long tables are folded: click a line that starts with a "
        "number of rows. `python benchmarks/results.py` writes this page from `results/`.",
        "\n".join(contents),
        *(section for sections in groups.values() for section in sections),
    ]
    return "\n\n".join(parts) + "\n"


def find_files(name: str) -> list[Path]:
    """Return the files of results of a benchmark, in order."""
    return sorted((ROOT / "results" / name).glob("*.json"))


def link_section(section: str) -> str:
    """Return a link to a section by its heading, for readers of the site and of GitHub."""
    title = section.partition("\n")[0].removeprefix("## ")
    anchor = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())
    return f"[{title}](#{anchor})"


LEARNING = {
    "multi30k": (
        "multi30k, German to English",
        "Test part of 2016, raw cased text, beam 5, weights of the best validation loss.",
    ),
    "ptb": (
        "Penn Treebank, language model",
        "Test part, words, windows of `block` tokens whose first `context` are not scored, weights of the best "
        "validation loss.",
    ),
}


def render_learning(name: str, path: Path) -> str:
    about, rows = read_results(path)
    heading, scored = LEARNING[name]
    title = render_head(f"{heading},", about, f"learning.py {name}")
    recipe = ", ".join(f"{key}={value}" for key, value in about["recipe"].items())
    fewer = "± is a 95 % t-interval over the seeds; with fewer than three seeds, the values are listed."
    signature = f" {rows[0]['signature']}." if "signature" in rows[0] else ""
    measures = {"bleu": ("BLEU", 1), "test_perplexity": ("test perplexity", 2)}
    measures = {key: value for key, value in measures.items() if key in rows[0]}
    head = ["attention", "parameters", *(title for title, _ in measures.values()), "tokens/s in training"]
    table = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for name in dict.fromkeys(r["attention"] for r in rows):
        own = [r for r in rows if r["attention"] == name]
        values = [format_spread([r[key] for r in own], digits) for key, (_, digits) in measures.items()]
        speeds = [f"{r['tokens_per_second']:,.0f}" for r in own if r["tokens_per_second"]]
        table.append([name, f"{own[0]['parameters']:,}", *values, speeds[0] if speeds else "not timed"])
    return "\n\n".join([title, f"{scored} {fewer}{signature} Recipe: {recipe}.", fold_table(table)])


def render_status() -> str:
    """Return how much of each paper is measured, as `attnlab reproduce --status` counts it."""
    table, _ = tabulate_status([open_study(name) for name in STUDIES], ROOT / "results")
    rows = [list(table.columns), ["---"] + ["---:"] * (len(table.columns) - 1), *table.rows]
    note = (
        "`attnlab reproduce --status`. Numbers are those that the papers print, each counted once. A cell compares a "
        "number or a direction with ours; several cells may share a number. The columns from *reproduced* on count the "
        "cells that were run; [how to read a verdict](reproduce.md#how-to-read-a-verdict)."
    )
    return "\n\n".join(["## The papers", note, format_table([[str(x) for x in row] for row in rows])])


def render_study(name: str) -> str:
    """Return the measured cells of a study at full scale, and the remarks of every item."""
    study, items = open_study(name), read_items(name)
    parts = [f"## {study.title.replace(' & ', ' and ')}"]
    absent = ", ".join(each for each in study.items if each not in items)
    parts += [f"Not run at full scale yet: {absent}."] if absent else []
    for item in items.values():
        about = item.about
        options = "".join(f" {key}={value}" for key, value in item.config.options.items())
        command = f"`attnlab reproduce {name}{options} --only {item.config.item} --scale full`"
        on = f"{about['hardware']}, torch {about['torch']}, commit {about['commit']}, {about['wall_s']:.0f} s"
        rows = [
            ["", "", "published ± margin", "ours", "95 % interval", "Holm's p", "verdict", "differs in"],
            ["---", "---", "---:", "---:", "---:", "---:", "---", "---"],
        ]
        cells = [cell for cell in item.cells if cell.values]
        for cell in cells:
            interval = " … ".join(map(format_number, cell.interval)) if cell.interval else "–"
            ours = "–" if cell.mean is None else format_number(cell.mean)
            p = "–" if cell.holm is None else f"{cell.holm:.2g}"
            about_row = [cell.row, cell.column, format_published(cell), ours, interval, p]
            rows.append([*about_row, cell.outcome, ", ".join(cell.tags)])
        parts += [f"### {item.title}", f"{command}. {on}."]
        parts += [quote_tokens(" ".join(item.remarks))] if item.remarks else []
        parts += [fold_table(rows, count_verdicts(cells), short=0)] if cells else []
        missing = len(item.cells) - len(cells)
        parts += [f"{missing} more cells are not run."] if missing else []
    return "\n\n".join(parts)


def render_own_study(name: str) -> str:
    """Return what a study without a paper measured, at its largest scale so far."""
    study, ledger = open_study(name), ROOT / "results" / name / FILE
    scale = max(list_scales(study, ledger), key=SCALES.index)
    parts = [f"## {study.title}"]
    for item in read_items(name, scale=scale).values():
        about, table = item.about, tabulate_wide(item.cells)
        on = f"{about['hardware']}, torch {about['torch']}, commit {about['commit']}"
        parts += [f"`attnlab reproduce {name} --scale {scale}`. {on}.", " ".join(item.remarks)]
        rows = [list(table.columns), ["---"] + ["---:"] * (len(table.columns) - 1), *table.rows]
        parts.append(fold_table([[str(x) for x in row] for row in rows]))
    return "\n\n".join(parts)


def read_items(study: str, results: Path = ROOT / "results", scale: Scale = "full") -> dict[str, ItemResult]:
    """Return the items of a study at a scale by name, drawn from its ledger; nothing is written to results/."""
    ledger = results / study / FILE
    with TemporaryDirectory() as scratch:
        items = (
            draw_study(open_study(study), scale, Path(scratch), ledger=ledger, save=False) if ledger.exists() else []
        )
    return {item.config.item: item for item in items}


def render_comparison(path: Path) -> str:
    """Return a comparison: quality, the difference to its first row, and the divergence of heads."""
    content = json.loads(path.read_text(encoding="utf-8"))
    about, jsd = content["about"], "head JSD (nats a sentence)"
    known = {name for row in content["rows"] for name in row["measures"]}
    judges = [name for name in dict.fromkeys((content["judged_by"], "BLEU")) if name in known]
    head = [column for by in judges for column in (by, "− first row", "detectable", "Holm's p")]
    table = [["attention", *head, jsd, "parameters"], ["---"] + ["---:"] * (len(head) + 2)]
    for row in content["rows"]:
        shown = [text for by in judges for text in format_judged(row["measures"].get(by, {"seeds": {}}), by)]
        diverse = format_spread(list(row["measures"].get(jsd, {"seeds": {}})["seeds"].values()), 2) or "–"
        table.append([row["row"], *shown, diverse, f"{row['parameters']:,}"])
    note = (
        f"`{about['command']}`. Trained on {about.get('trained on', about['hardware'])}, analysed at commit "
        f"{about['commit']}, seeds {about['seeds']}; ± is half of the 95 % t-interval, for three seeds or more. "
        "Detectable: the smallest true difference that these seeds find with power 0.8."
    )
    return "\n\n".join([f"## Comparison: {path.parent.name}", note, fold_table(table)])


def format_judged(quality: dict, by: str) -> list[str]:
    """Return the mean of a row, its difference from the first one, the detectable one, and Holm's p."""
    digits = 4 if "log-perplexity" in by else 2
    against = quality.get("against_first") or {"differences": {}, "interval": None, "holm": None, "detectable": None}
    difference = format_spread(list(against["differences"].values()), digits, against["interval"])
    numbers = [("–" if x is None else f"{x:.2g}") for x in (against["detectable"], against["holm"])]
    return [format_spread(list(quality["seeds"].values()), digits) or "–", difference or "–", *numbers]


def count_verdicts(cells: list[Cell]) -> str:
    """Return how many cells have each verdict."""
    counts = Counter(cell.verdict for cell in cells)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if verdict in counts)


if __name__ == "__main__":
    (ROOT / "docs" / "results.md").write_text(render_page(), encoding="utf-8")

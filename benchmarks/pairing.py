"""Do rows of a comparison correlate over seeds? From the results that the repository holds; trains nothing.

    python benchmarks/pairing.py

A line for each table of rows × seeds: the correlation of its rows (experiments/power.py), and below it the mean of each
measure, weighted by pairs of rows times (seeds − 1). The mean over all measures of quality is CORRELATION, which
decides from how many seeds on `attnlab compare` pairs its t-test. Rows that two tables share count in the first one.
"""

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path

from attnlab.experiments.power import FEWEST_SEEDS, estimate_correlation
from attnlab.terminal import show_table

ROOT = Path(__file__).parent.parent / "results"
LOG, VALID, JSD, QUALITY = "log-perplexity", "validation log-perplexity", "head JSD", "quality, together"
COLUMNS = {"BLEU": "BLEU", "test perplexity": LOG, "validation perplexity": VALID, "average JSD (nats)": JSD}
STUDY_ITEMS = {"zheng2021": ("table1", "table3", "table4", "fig2"), "heo2024": ("ptb",)}
Values = dict[str, dict[int, float]]  # by row and seed


def read_comparisons() -> Iterator[tuple[str, str, Values]]:
    for path in sorted(ROOT.glob("compare/*/results.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        names = {"perplexity": LOG, "validation loss (nats)": VALID, "validation log-perplexity (nats)": VALID}
        names |= {"BLEU": "BLEU", "accuracy": "accuracy", "head JSD (nats a sentence)": JSD}
        for stored, measure in names.items():
            values = {row["row"]: row["measures"].get(stored, {}).get("seeds", {}) for row in rows}
            take = math.log if stored == "perplexity" else float
            yield f"compare {path.parent.name}", measure, _convert(values, take)


def read_benchmarks() -> Iterator[tuple[str, str, Values]]:
    for name, keys in (("multi30k", {"bleu": "BLEU"}), ("ptb", {})):
        rows = json.loads((ROOT / name / "gpu.json").read_text(encoding="utf-8"))["rows"]
        for key, measure in (keys | {"test_perplexity": LOG, "valid_loss": VALID}).items():
            values: dict = {}
            for row in rows:
                if row.get(key) is not None:
                    values.setdefault(row["attention"], {})[row["seed"]] = row[key]
            yield f"learning.py {name}", measure, _convert(values, math.log if "perplexity" in key else float)


def read_studies() -> Iterator[tuple[str, str, Values]]:
    for study, items in STUDY_ITEMS.items():
        groups: dict[tuple[str, str], dict] = {}
        with open(ROOT / study / "full" / "cells.csv", encoding="utf-8", newline="") as file:
            for cell in csv.DictReader(file):
                place, _, row = cell["row"].rpartition(": ")
                if cell["item"] in items and cell["column"] in COLUMNS and "−" not in row and cell["values"]:
                    values = dict(enumerate(map(float, cell["values"].split())))
                    groups.setdefault((place, cell["column"]), {})[row] = values
        for (place, column), rows in groups.items():
            yield f"{study}, {place}", COLUMNS[column], _convert(rows, math.log if "perplexity" in column else float)


def _convert(rows: dict, take) -> Values:
    return {row: {int(seed): take(x) for seed, x in seeds.items()} for row, seeds in rows.items() if seeds}


def main() -> None:
    lines, sums, used = [], {}, set()
    for read in (read_comparisons, read_benchmarks, read_studies):
        for place, measure, rows in read():
            seeds = sorted(set.intersection(*map(set, rows.values()))) if rows else []
            table = [tuple(row[seed] for seed in seeds) for row in rows.values()]
            table = [row for row in table if row not in used] if len(seeds) >= FEWEST_SEEDS else []
            if (correlation := estimate_correlation(table)) is None:
                continue
            used |= set(table)
            weight = len(table) * (len(table) - 1) // 2 * (len(seeds) - 1)
            lines.append([measure, place, str(len(table)), str(len(seeds)), f"{correlation:.2f}"])
            for name in (measure, QUALITY) if measure != JSD else (measure,):
                before = sums.get(name, (0.0, 0))
                sums[name] = before[0] + weight * correlation, before[1] + weight
    head = ["measure", "table", "rows", "seeds", "correlation over seeds"]
    show_table("correlation of rows over seeds", head, sorted(lines))
    means = [
        [name, f"{total / weight:.2f} ± {2 / math.sqrt(weight):.2f}", str(weight)]  # of independent rows: sd 1/√weight
        for name, (total, weight) in sorted(sums.items())
    ]
    show_table("weighted means ± 2 standard errors", ["measure", "correlation", "weight"], means)


if __name__ == "__main__":
    main()

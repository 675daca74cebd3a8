"""What a comparison leaves in its folder.

    report.html      what was found, the tables, the figures, what failed, how it was run
    results.json     every value of every seed, intervals, tests, trials of the grid, cost, runs, and where it ran
    table.csv        a line a row of the table          cells.csv    a line a row and measure
    figures/NAME.png, .svg, .pdf

Every file is written whole or not at all.
"""

import csv
import io
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.commands.compare import figures
from attnlab.commands.compare.cost import ModelCost
from attnlab.commands.compare.measures import BLEU, INSIDE, ComparisonMeasure
from attnlab.commands.compare.plan import said
from attnlab.commands.compare.rows import ComparisonResults, RowResult
from attnlab.commands.compare.summary import findings
from attnlab.experiments.significance import Contrast, compute_interval
from attnlab.experiments.study_page import format_number
from attnlab.experiments.verdicts import FEWEST_SEEDS
from attnlab.files import write_bytes
from attnlab.report.drawing import save_figure
from attnlab.report.page import Command, Facts, Part, Picture, Table, Text, render_page

FORMAT = "attnlab-comparison-1"
STEADY = 1.5  # fastest over slowest window, above which a timing is doubted
CELL_COLUMNS = (
    "row", "measure", "better", "mean", "low", "high", "difference", "difference_low", "difference_high", "p", "holm_p",
    "seeds", "values",
)  # fmt: skip


def write(results: ComparisonResults, out: Path, about: Mapping[str, Any]) -> Path:
    """All files; returns where the page is."""
    whole = {"format": FORMAT, "about": dict(about), "plan": _plan(results), **results.as_json()}
    text = json.dumps(_plain(whole), indent=1, ensure_ascii=False, allow_nan=False)
    write_bytes(out / "results.json", f"{text}\n".encode())
    shown = table(results)
    write_bytes(out / "table.csv", _csv([shown.columns, *shown.rows]))
    write_bytes(out / "cells.csv", _csv([CELL_COLUMNS, *_cells(results)]))
    pictures = [save_figure(out / "figures" / name, *drawn) for name, drawn in figures.all_of(results).items()]
    report = out / "report.html"
    write_bytes(report, _page(results, pictures, about).encode())
    return report


@dataclass(frozen=True)
class Column:
    group: str  # quality, cost or inside: the tables that a terminal is shown
    name: str
    cell: Callable[[RowResult], str]


def columns(results: ComparisonResults) -> list[Column]:
    """What the one table has beside the name of each row."""
    made = []
    if judged := results.judged:
        against = results.contrasts(judged)
        made = [
            Column("quality", judged.name, lambda o: _mean(o, judged) if o.found else "failed"),
            Column("quality", "− first row", lambda o: _signed(against.get(o.row.label))),
            Column("quality", "t-test p", lambda o: _probability(against.get(o.row.label))),
            Column("quality", "Holm's p", lambda o: _probability(against.get(o.row.label), holm=True)),
        ]
    if results.bootstrap:
        made.append(Column("quality", "bootstrap", lambda o: _bootstrap(o, results)))
    for measure in results.measures[1:]:
        group = "inside" if measure in INSIDE else "quality"
        made.append(Column(group, measure.name, lambda o, m=measure: _mean(o, m)))  # type: ignore[misc]
    return [
        *made,
        Column("cost", "parameters", lambda o: f"{o.size.parameters:,}" if o.size else "–"),
        Column("cost", "MFLOPs a token", lambda o: _flops(o.size)),
        Column("cost", "tokens/s", lambda o: f"{o.speed['tokens_per_second']:,.0f}" if o.speed else "–"),
        Column("cost", "of its windows", lambda o: _windows(o.speed)),
        Column("cost", "memory (MiB)", lambda o: f"{o.speed['memory']:,.0f}" if o.speed else "–"),
    ]


def table(results: ComparisonResults, group: str | None = None) -> Table:
    """A line for each attention and control; of one group of columns, or of all."""
    chosen = [column for column in columns(results) if group in (None, column.group)]
    lines = [[outcome.row.label, *(column.cell(outcome) for column in chosen)] for outcome in results.outcomes]
    return Table(["attention", *(column.name for column in chosen)], lines)


def remarks(results: ComparisonResults) -> list[str]:
    """What is to be said beside the table, a line each."""
    plan = results.plan
    first, count = plan.rows[0].label, len(plan.seeds)
    if count < FEWEST_SEEDS:
        lines = [f"Quality on the {results.part} part, of {count} seed(s): no interval and no test below 3."]
    else:
        lines = [
            f"Quality on the {results.part} part, mean ± half of the 95 % t-interval over {count} seeds; "
            f"t-test p: paired over seeds, against {first}."
        ]
    if results.part == "valid":
        lines.append(
            "There is no test part: the same examples chose the weights, and the grid's point; too good a number."
        )
    lines.append("All runs of a seed see the same batches in the same order.")
    if results.bootstrap:
        lines.append(
            "bootstrap: seeds in which sacrebleu's paired bootstrap over sentences gives p < 0.05, by the gain's sign."
        )
    if len(plan.points) > 1:
        lines.append(
            f"Every row was tried at the same {len(plan.points)} points of the grid with seed {plan.seeds[0]}; "
            "the one with the lowest validation loss was run with all seeds."
        )
        lines += [f"{o.row.label}: chosen {said(results.settings(o))}" for o in results.outcomes if o.found]
    lines.append("FLOPs: matrix products of a training step, by torch.utils.flop_counter.")
    uncounted = [(o.row.label, o.size.uncounted) for o in results.outcomes if o.size and o.size.uncounted]
    lines += [f"{label}: its FLOPs could not be counted: {why}" for label, why in uncounted]
    lines += [_speed_remark(results)] if any(outcome.speed for outcome in results.outcomes) else []
    lines += [f"{o.row.label}: {o.row.says}" for o in results.outcomes if o.row.says]
    lines += plan.notes
    lines += _inside_remarks(results)
    return lines + [f"{o.row.label} failed: {why}" for o in results.outcomes for why in o.failed]


def _inside_remarks(results: ComparisonResults) -> list[str]:
    """What the columns about the inside are, and of which rows there is none, and why."""
    found = [(o.row.label, one["inside"]) for o in results.outcomes for one in o.found.values() if "inside" in one]
    lines = [
        f"Inside, on {one['examples']} validation examples without noise: JSD of two heads over a sentence, mean over "
        f"pairs and layers, of signed weights over keys and signs, which is not quite the same quantity; residual and "
        f"cosine of what the last layer is given ({one['of']}); query gradients, mean over layers."
        for _, one in found
        if "failed" not in one
    ][:1]
    return lines + list(dict.fromkeys(f"{label}: {one['failed']}" for label, one in found if "failed" in one))


def _speed_remark(results: ComparisonResults) -> str:
    timed = [outcome.speed for outcome in results.outcomes if outcome.speed]
    machines = sorted({speed["about"]["hardware"] for speed in timed})
    device = "peak of the CUDA allocator" if timed[0]["device"] == "cuda" else "growth of the process's resident size"
    where = machines[0] if len(machines) == 1 else f"DIFFERENT MACHINES, not to be compared: {', '.join(machines)}"
    said = f"Speed in target tokens of training, one row after another, on {where}; MiB: {device}."
    worst = max(speed["fastest"] / speed["slowest"] for speed in timed)
    busy = f" The fastest window of a row was {worst:.1f} times its slowest: the machine was busy with something else."
    return said + (busy if worst > STEADY else "")


def _page(results: ComparisonResults, pictures: Sequence[Picture], about: Mapping[str, Any]) -> str:
    labels = ", ".join(row.label for row in results.plan.rows if not row.control)
    found: list[Part] = [Text(sentence) for sentence in findings(results)]
    sections: list[tuple[str, Sequence[Part]]] = [("In short", [*found, table(results, "quality")])]
    for heading, group in (("What is inside", "inside"), ("What it costs", "cost")):
        part = table(results, group)
        if len(part.columns) > 1:
            sections.append((heading, [part]))
    sections.append(("Figures", list(pictures)))
    if len(results.plan.points) > 1:
        says = Text(f"Validation loss (nats) of every trial, seed {results.plan.seeds[0]}.")
        sections.append(("The grid", [says, _trials(results)]))
    sections.append(("How to read it", [Text(line) for line in remarks(results)]))
    facts = {key: value for key, value in about.items() if key != "command"}
    sections.append(("Make it again", [Command(str(about["command"])), Facts(facts)]))
    return render_page(f"attnlab compare {results.plan.task}: {labels}", sections)


def _trials(results: ComparisonResults) -> Table:
    points = results.plan.points
    lines = [
        [o.row.label, *(format_number(o.trials[k]) if k in o.trials else "failed" for k in range(len(points)))]
        for o in results.outcomes
    ]
    return Table(["attention", *map(said, points)], lines)


def _cells(results: ComparisonResults) -> list[list[Any]]:
    rows = []
    for measure in results.measures:
        against = results.contrasts(measure)
        for outcome in results.outcomes:
            if not (values := outcome.values(measure)):
                continue
            low, high = compute_interval(list(values.values())) or ("", "")
            contrast = against.get(outcome.row.label)
            mean, (below, above) = (contrast.mean, contrast.interval or ("", "")) if contrast else ("", ("", ""))
            ps = [x if x is not None else "" for x in (contrast.p, contrast.holm)] if contrast else ["", ""]
            each = [" ".join(map(str, part)) for part in (values, values.values())]
            rows.append([outcome.row.label, measure.name, measure.better, statistics.fmean(values.values()), low, high,
                         mean, below, above, *ps, *each])  # fmt: skip
    return rows


def _plan(results: ComparisonResults) -> dict[str, Any]:
    plan = results.plan
    return {"task": plan.task, "settings": dict(plan.fixed), "grid": list(plan.points), "seeds": plan.seeds,
            "notes": plan.notes, "name": plan.name}  # fmt: skip


def _csv(rows: Sequence[Sequence[Any]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _mean(outcome: RowResult, measure: ComparisonMeasure) -> str:
    """With its interval; where not every finished seed has a value, of how many."""
    values = outcome.values(measure)
    if not values:
        return "–"
    mean, spread = statistics.fmean(values.values()), compute_interval(list(values.values()))
    told = format_number(mean) if spread is None else f"{format_number(mean)} ± {(spread[1] - spread[0]) / 2:.2g}"
    return told if len(values) == len(outcome.found) else f"{told} ({len(values)} of {len(outcome.found)} seeds)"


def _signed(contrast: Contrast | None) -> str:
    if contrast is None:
        return "–"
    spread = contrast.interval
    return f"{contrast.mean:+.3g}" + ("" if spread is None else f" ± {(spread[1] - spread[0]) / 2:.2g}")


def _bootstrap(outcome: RowResult, results: ComparisonResults) -> str:
    """In how many seeds the row is better, and in how many worse, than the first."""
    found, against = results.bootstrap.get(outcome.row.label, {}), results.contrasts(BLEU).get(outcome.row.label)
    if not found or against is None:
        return "–"
    sure = [against.differences[seed] for seed, p in found.items() if p < 0.05 and seed in against.differences]
    return f"{sum(d > 0 for d in sure)} better, {sum(d < 0 for d in sure)} worse, of {len(found)}"


def _flops(size: ModelCost | None) -> str:
    return "–" if size is None or size.flops is None else f"{size.flops / 1e6:,.4g}"


def _windows(speed: Mapping[str, Any] | None) -> str:
    return f"{speed['slowest']:,.0f}–{speed['fastest']:,.0f}" if speed else "–"


def _probability(contrast: Contrast | None, *, holm: bool = False) -> str:
    p = None if contrast is None else contrast.holm if holm else contrast.p
    return "–" if p is None else f"{p:.2g}"


def _plain(value: Any) -> Any:
    """As JSON has it: a number that is none is null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

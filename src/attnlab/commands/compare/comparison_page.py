"""The files of a comparison, each written atomically.

report.html      findings, tables, figures, failures, and how it was run
results.json     means, intervals, tests, trials of the grid, cost and folders of the runs; and where it ran
table.csv        the table        cells.csv    a line for each row and measure, with the value of each seed
figures/NAME.png, .svg, .pdf
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.commands.compare.figures import draw_figures
from attnlab.commands.compare.measures import BLEU, INSIDE
from attnlab.commands.compare.paper_verdicts import tabulate_claims
from attnlab.commands.compare.plan import format_settings
from attnlab.commands.compare.rows import ComparisonResults, RowResult
from attnlab.commands.compare.summary import list_findings, summarise_comparison
from attnlab.experiments.cell_text import format_number
from attnlab.experiments.power import CORRELATION, FEWEST_SEEDS, LEVEL, find_break_even
from attnlab.experiments.significance import Contrast, compute_interval
from attnlab.files import write_csv, write_text
from attnlab.report.figures import save_figure
from attnlab.report.numbers import format_real
from attnlab.report.page import Command, Facts, Part, Table, Text, render_page

FORMAT = "attnlab-comparison-1"
STEADY = 1.5  # fastest over slowest window, above which a timing is doubted
CELL_COLUMNS = (
    "row", "measure", "better", "mean", "low", "high", "difference", "difference_low", "difference_high",
    "detectable", "test", "p", "holm_p", "seeds", "values",
)  # fmt: skip


def write_comparison(results: ComparisonResults, out: Path, about: Mapping[str, Any]) -> Path:
    """Write all files; return the path of the page."""
    claims = tabulate_claims(results)
    stored = [dict(zip(claims.columns, row, strict=True)) for row in claims.rows]
    whole = _replace_nan({"format": FORMAT, "about": about, **results.as_json(), "claims": stored})
    write_text(out / "results.json", json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    table = tabulate(results)
    write_csv(out / "table.csv", [table.columns, *table.rows])
    write_csv(out / "cells.csv", [CELL_COLUMNS, *_list_cells(results)])
    pictures = {name: save_figure(out / "figures" / name, *drawn) for name, drawn in draw_figures(results).items()}
    first = [pictures.pop("quality")] if "quality" in pictures else []
    visible: list[tuple[str, list[Part]]] = [("Quality", [*first, tabulate(results, "quality")])]
    folded: list[tuple[str, list[Part]]] = []
    for heading, table in (
        ("Winners against softmax of their size, and with more heads", tabulate_controls(results)),
        ("What the papers claim", claims),
    ):
        if table.rows:
            visible.append((heading, [table]))
    if found := list_findings(results):
        parts: list[Part] = [*map(Text, found), tabulate_differences(results)]
        folded.append((f"Every row against {results.rows[0].label}", parts))
    for heading, group in (("What is inside", "inside"), ("What it costs", "cost")):
        if len((part := tabulate(results, group)).columns) > 1:
            folded.append((heading, [part]))
    if pictures:
        folded.append(("Figures", list(pictures.values())))
    if len(results.plan.points) > 1:
        caption = (
            f"Validation loss (nats) at every point of the grid with seed {results.plan.seeds[0]}. Lower is better."
        )
        folded.append(("The grid", [Text(caption), _tabulate_trials(results)]))
    folded.append(("How to read it", list(map(Text, list_remarks(results)))))
    facts = {key: value for key, value in about.items() if key != "command"}
    folded.append(("How to reproduce it", [Command(str(about["command"])), Facts(facts)]))
    labels = ", ".join(row.label for row in results.plan.rows if not row.is_control)
    report, findings = out / "report.html", summarise_comparison(results)
    title = f"attnlab compare {results.plan.task}: {labels}"
    write_text(report, render_page(title, visible, findings=findings, folded=folded))
    return report


@dataclass(frozen=True)
class Column:
    group: str  # quality, inside or cost: a table on the terminal and on the page
    name: str
    format: Callable[[RowResult], str]


def list_columns(results: ComparisonResults) -> list[Column]:
    """Return the columns of the table, after the label of each row."""
    columns = []
    if judge := results.main_measure:
        against = results.contrast_rows(judge)
        columns = [
            Column("quality", judge.name, lambda r: judge.format_mean(r.measured) if r.measured else "failed"),
            Column("quality", "difference from the first row", lambda r: _format_difference(against.get(r.label))),
            Column("quality", "detectable", lambda r: _format_detectable(against.get(r.label))),
            Column("quality", "p of the t-test", lambda r: _format_p(x.p if (x := against.get(r.label)) else None)),
            Column("quality", "Holm's p", lambda r: _format_p(x.holm if (x := against.get(r.label)) else None)),
        ]
    if results.bootstrap:
        columns.append(Column("quality", "seeds by bootstrap", lambda r: _count_significant(r, results)))
    for measure in results.measures[1:]:
        group = "inside" if measure in INSIDE else "quality"
        columns.append(Column(group, measure.name, lambda r, m=measure: m.format_mean(r.measured)))  # type: ignore[misc]
    return [
        *columns,
        Column("cost", "parameters", lambda r: f"{r.cost.parameters:,}" if r.cost else "–"),
        Column("cost", "MFLOPs a token", lambda r: f"{r.cost.flops / 1e6:,.4g}" if r.cost and r.cost.flops else "–"),
        Column("cost", "speed (tokens/s)", lambda r: f"{r.speed['tokens_per_second']:,.0f}" if r.speed else "–"),
        Column("cost", "slowest–fastest (tokens/s)",
               lambda r: f"{r.speed['slowest']:,.0f}–{r.speed['fastest']:,.0f}" if r.speed else "–"),
        Column("cost", "memory (MiB)", lambda r: f"{r.speed['memory']:,.0f}" if r.speed else "–"),
    ]  # fmt: skip


def tabulate(results: ComparisonResults, group: str | None = None) -> Table:
    """Return a line for each attention and control, with one group of columns or all of them."""
    columns = [column for column in list_columns(results) if group in (None, column.group)]
    lines = [[row.label, *(column.format(row) for column in columns)] for row in results.rows]
    return Table(["attention", *(column.name for column in columns)], lines)


def tabulate_differences(results: ComparisonResults) -> Table:
    """Return a line for each measure and row, with the difference from the first row, and what could be detected."""
    lines = []
    for measure in results.measures:
        correlation = results.correlate_rows(measure)
        shown = "–" if correlation is None else format_real(correlation, ".2f")
        for label, x in results.contrast_rows(measure).items():
            ps = _format_p(x.p), _format_p(x.holm)
            lines.append([measure.name, label, _format_difference(x), _format_detectable(x), *ps, x.test, shown])
    columns = ["measure", "attention", "difference", "detectable", "p", "Holm's p", "t-test", "correlation over seeds"]
    return Table(columns, lines)


def tabulate_controls(results: ComparisonResults) -> Table:
    """Return a line for each row that beats softmax and each of its controls."""
    columns = ["attention", "minus", "difference", "detectable", "p", "Holm's p"]
    lines = [
        [label, control, _format_difference(x), _format_detectable(x), _format_p(x.p), _format_p(x.holm)]
        for (label, control), x in results.contrast_controls().items()
    ]
    return Table(columns, lines)


def list_remarks(results: ComparisonResults) -> list[str]:
    """Return how to read the table, and what failed."""
    plan, rows = results.plan, results.rows
    count = len(plan.seeds)
    if count < FEWEST_SEEDS:
        lines = [f"Quality: on the {results.part} part, with {count} seed(s). Intervals and tests need 3 seeds."]
    else:
        lines = [
            f"Quality: on the {results.part} part, mean ± half of the 95 % t-interval over {count} seeds.",
            _explain_test(results),
            "Detectable: the smallest true difference that this test finds in 80 % of all repetitions (5 %, two-sided, "
            "before Holm's correction), if the spread over seeds is the one measured here.",
        ]
    if results.part == "valid":
        lines.append("There is no test part. The validation part also chose the weights, so its numbers are too good.")
    lines.append("All runs of a seed see the same batches in the same order.")
    if results.bootstrap:
        lines.append(
            f"Seeds by bootstrap: in how many seeds sacrebleu's paired bootstrap over sentences gives p < {LEVEL}."
        )
    if len(plan.points) > 1:
        lines.append(
            f"Every row was tried at the same {len(plan.points)} points of the grid with seed {plan.seeds[0]}. The "
            "point with the lowest validation loss was run with all seeds."
        )
        lines += [f"{row.label}: chosen {format_settings(results.get_settings(row))}" for row in rows if row.measured]
    lines.append("FLOPs: matrix products of a training step, counted by torch.utils.flop_counter.")
    for row in rows:
        if row.cost and row.cost.uncounted:
            lines.append(f"{row.label}: its FLOPs cannot be counted: {row.cost.uncounted}")
    lines += [_explain_speed(results)] if any(row.speed for row in rows) else []
    lines += [f"{row.label}: {row.row.description}" for row in rows if row.row.description]
    lines += [*plan.notes, *_explain_inside(results)]
    return lines + [f"{row.label} failed: {reason}" for row in rows for reason in row.failures]


def _explain_test(results: ComparisonResults) -> str:
    """Return which t-test was used, and why."""
    count, first = len(results.plan.seeds), results.plan.rows[0].label
    test = "paired over seeds" if results.is_paired else "unpaired (Welch's)"
    return (
        f"The t-test against {first} is {test}: with {count} seeds pairing pays if rows correlate over seeds by more "
        f"than {find_break_even(count):.2f}, and in earlier comparisons they did by {CORRELATION:g}. The number of "
        "seeds alone decides this."
    )


def _explain_inside(results: ComparisonResults) -> list[str]:
    """Explain the columns of the group inside, and why some rows lack them."""
    inside = [(row.label, x["inside"]) for row in results.rows for x in row.measured.values() if "inside" in x]
    lines = [
        f"Inside: on {values['examples']} validation examples without noise. Head JSD: divergence of two heads over a "
        "sentence, mean over pairs and layers. The JSD of signed weights is over keys and signs, which is not quite "
        f"the same quantity. Residual and cosine: of the states that the last layer reads ({values['of']}). Query "
        "gradient: mean over layers."
        for _, values in inside
        if "failed" not in values
    ]
    failed = [f"{label}: {values['failed']}" for label, values in inside if "failed" in values]
    return lines[:1] + list(dict.fromkeys(failed))


def _explain_speed(results: ComparisonResults) -> str:
    timed = [row.speed for row in results.rows if row.speed]
    machines = sorted({speed["hardware"] for speed in timed})
    memory = "peak of the CUDA allocator" if timed[0]["device"] == "cuda" else "growth of the process's resident size"
    where = machines[0] if len(machines) == 1 else f"DIFFERENT MACHINES, not comparable: {', '.join(machines)}"
    text = f"Speed: target tokens per second of training, one row after another, on {where}. Memory: {memory}."
    worst = max(speed["fastest"] / speed["slowest"] for speed in timed)
    if worst <= STEADY:
        return text
    return f"{text} The fastest window of a row was {worst:.1f} times its slowest: the machine was busy."


def _tabulate_trials(results: ComparisonResults) -> Table:
    points = results.plan.points
    lines = [
        [row.label, *(format_number(row.trials[k]) if k in row.trials else "failed" for k in range(len(points)))]
        for row in results.rows
    ]
    return Table(["attention", *map(format_settings, points)], lines)


def _list_cells(results: ComparisonResults) -> list[list[Any]]:
    """Return a row of CELL_COLUMNS for each row and measure."""
    cells = []
    for measure in results.measures:
        against = results.contrast_rows(measure)
        for row in results.rows:
            if not (values := measure.list_values(row.measured)):
                continue
            low, high = compute_interval(list(values.values())) or ("", "")
            tests: list[Any] = [""] * 7
            if x := against.get(row.label):
                tests = [x.mean, *(x.interval or ("", "")), x.detectable, x.test, x.p, x.holm]
            each = [" ".join(map(str, part)) for part in (values, values.values())]
            mean = measure.compute_mean(row.measured)
            cells.append([row.label, measure.name, measure.better, mean, low, high, *tests, *each])
    return cells


def _format_difference(contrast: Contrast | None) -> str:
    if contrast is None:
        return "–"
    spread = contrast.interval
    return f"{contrast.mean:+.3g}" + ("" if spread is None else f" ± {(spread[1] - spread[0]) / 2:.2g}")


def _format_detectable(contrast: Contrast | None) -> str:
    return "–" if contrast is None or contrast.detectable is None else f"{contrast.detectable:.2g}"


def _format_p(p: float | None) -> str:
    return "–" if p is None else f"{p:.2g}"


def _count_significant(row: RowResult, results: ComparisonResults) -> str:
    """Return in how many seeds the bootstrap finds the row better than the first, and worse."""
    ps, against = results.bootstrap.get(row.label, {}), results.contrast_rows(BLEU).get(row.label)
    if not ps or against is None:
        return "–"
    sure = [against.differences[seed] for seed, p in ps.items() if p < LEVEL and seed in against.differences]
    return f"{sum(d > 0 for d in sure)} better, {sum(d < 0 for d in sure)} worse, of {len(ps)}"


def _replace_nan(value: Any) -> Any:
    """Return nested values with null for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): _replace_nan(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nan(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

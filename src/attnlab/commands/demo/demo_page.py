"""The files of the demo, each written atomically, the page last.

report.html                    everything, in one file
results.json, table.csv        findings and every value of every seed; the table
figures/NAME.png, .svg, .pdf   for papers
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlab.commands.compare.plan import format_settings
from attnlab.commands.demo.figures import CURVES, draw_figures
from attnlab.commands.demo.findings import list_findings
from attnlab.commands.demo.learners import INSIDE, QUALITY, DemoResults, Learner
from attnlab.commands.demo.settings import DATA, MODEL
from attnlab.experiments.seed_values import SeedMeasure
from attnlab.experiments.study_page import tabulate_cells
from attnlab.files import write_csv, write_text
from attnlab.reading.maps import show
from attnlab.report.figures import render_png, save_figure
from attnlab.report.page import Command, Facts, Part, Picture, Table, Text, render_page
from attnlab.report.view import Best, ViewGold

FORMAT = "attnlab-demo-1"
WATCH = (
    "Press play to watch the training. A star marks the head that aligns best. Each row of the cross attention is "
    "named by the word that the decoder reads; the frame marks the true source of the word that it writes next. The "
    "curves are of the first seed, over all held-out sentences. The AER beside the maps is of the sentence shown."
)
READ = (
    "AER: alignment error rate of the head that aligns best, chosen on other sentences. On its source, below 0: weight "
    "of that head on the source of the next word, and its negative weight, mean over words. A(α, β): how often the "
    "largest weight is on the word from which the probe predicts best."
)
READ_INSIDE = (
    "JSD: how much two heads of a layer differ, over a sentence. Residual and cosine: of the states that the last "
    "decoder layer reads; 0 and 1 mean that all tokens are alike. Gradient: its norm at the query projections, mean "
    "over layers."
)
COPYING = (
    "An LSTM with one attention head copies sequences (Snell et al. 2021). If all sequences have the same words, only "
    "their order differs. The paper finds that attention is then harder to learn than if the words differ."
)


def write_demo(results: DemoResults, folder: Path, gold: Sequence[ViewGold], provenance: Mapping[str, Any]) -> Path:
    """Write all files; return the path of the page."""
    whole: dict[str, Any] = {"format": FORMAT, "about": {"command": results.config.command, **provenance}}
    whole |= {"findings": list_findings(results), "failed": results.failures}
    whole["attentions"] = {x.name: {"parameters": x.parameters, "seeds": x.measured} for x in results.learners}
    write_text(folder / "results.json", json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    table = tabulate(results.learners, (*QUALITY, *INSIDE))
    write_csv(folder / "table.csv", [table.columns, *table.rows])
    drawn = draw_figures(results, gold[0]).items()
    pictures = {name: save_figure(folder / "figures" / name, *figure) for name, figure in drawn}
    report = folder / "report.html"
    write_text(report, _render(results, gold, pictures, provenance))
    return report


def tabulate(learners: Sequence[Learner], measures: Sequence[SeedMeasure]) -> Table:
    """Return a line for each attention."""
    columns = ["attention", "parameters", *(measure.name for measure in measures)]
    rows = [[x.name, f"{x.parameters:,}", *(measure.format_mean(x.measured) for measure in measures)] for x in learners]
    return Table(columns, rows)


def _render(
    results: DemoResults, gold: Sequence[ViewGold], pictures: Mapping[str, Picture], provenance: Mapping[str, Any]
) -> str:
    config, learners = results.config, results.learners
    count = f"{len(learners)} attention{'s' * (len(learners) > 1)}"
    summary = (
        "Small Transformers learn to translate an artificial language with known word alignments: "
        f"{count}, {config.seeds} seed{'s' * (config.seeds > 1)} each, {config.steps} steps. All numbers are of "
        "sentences that were not trained on."
    )
    failures = [Text(f"{name} failed: {reason}") for name, reason in results.failures.items()]
    sections: list[tuple[str, Sequence[Part]]] = [
        ("Watch it learn", [Text(f"{summary} {WATCH}"), _render_viewer(learners, gold)]),
        ("Findings", [Facts(dict(list_findings(results))), *failures]),
        ("How it learns", [pictures["maps"], pictures["learning"], tabulate(learners, QUALITY), Text(READ)]),
        ("What is inside", [tabulate(learners, INSIDE), pictures["inside"], Text(READ_INSIDE)]),
    ]
    if results.copying is not None:
        sections.append(("Which sequences teach attention", render_copying(results)))
    facts: dict[str, Any] = {"attentions": ", ".join(x.name for x in learners), "seeds": config.all_seeds}
    facts |= {"steps": config.steps, "sentences a step": config.batch, "learning rate": config.lr}
    facts |= {"model": format_settings(MODEL), "task": format_settings(DATA), **provenance}
    sections.append(("How to reproduce it", [Command(config.command), Facts(facts)]))
    return render_page(f"attnlab: {count} learning to translate", sections)


def _render_viewer(learners: Sequence[Learner], gold: Sequence[ViewGold]) -> Part:
    """Render the first seed of each attention at every moment, with its own curves."""
    curves, best = {}, {}
    for learner in learners:
        layer, head = learner.first["head"]
        best[learner.name] = Best("cross", layer, head, "aligns best, on other sentences")
        lines = {name: [read(learner.first, n) for n in range(len(learner.moments))] for name, read in CURVES.items()}
        curves[learner.name] = {name: (learner.moments, line) for name, line in lines.items() if None not in line}
    shown = curves[learners[0].name] if len(learners) == 1 else curves
    records = {learner.name: dict(learner.records) for learner in learners}
    return show(records, gold=gold, curves=shown, best=best, title="attention, step by step")


def render_copying(results: DemoResults) -> list[Part]:
    """Render the findings of the item on copying, and the command that runs it."""
    findings = results.copying
    assert findings is not None
    pictures = [Picture(render_png(figure), caption) for figure, caption in findings.figures.values()]
    command = f"attnlab reproduce snell2021 --only=fig3 --scale=smoke --seeds={results.config.seeds}"
    table = tabulate_cells(list(findings.cells))
    return [Text(COPYING), *pictures, table, *map(Text, findings.remarks), Command(command)]

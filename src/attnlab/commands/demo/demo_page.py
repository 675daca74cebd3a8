"""What the demo leaves in its folder.

    report.html                    everything, in one file
    results.json, table.csv        every value of every seed; the table
    figures/NAME.png, .svg, .pdf   for papers
    ledger.jsonl, work/            what run_demo describes

Every file is written whole or not at all, the page last.
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attnlab.commands.demo import figures
from attnlab.commands.demo.figures import CURVES
from attnlab.commands.demo.findings import findings
from attnlab.commands.demo.learners import INSIDE, QUALITY, DemoMeasure, DemoResults, Learner
from attnlab.commands.demo.settings import DATA, MODEL
from attnlab.experiments.study_page import tabulate_cells
from attnlab.files import write_bytes
from attnlab.reading.maps import show
from attnlab.report.drawing import save_figure
from attnlab.report.figures import render_png
from attnlab.report.page import Command, Facts, Part, Picture, Table, Text, render_page
from attnlab.report.view import Best, ViewGold

FORMAT = "attnlab-demo-1"


def write(results: DemoResults, gold: Sequence[ViewGold], about: Mapping[str, Any]) -> Path:
    """All of it; returns where the page is."""
    folder = results.folder
    whole = {"format": FORMAT, "config": asdict(results.config), "about": dict(about), "findings": findings(results)}
    whole |= {"attentions": {o.name: _plain(o) for o in results.learners}, "failed": dict(results.failed)}
    text = json.dumps(whole, indent=1, ensure_ascii=False)
    write_bytes(folder / "results.json", f"{text}\n".encode())
    shown = table(results.learners, (*QUALITY, *INSIDE))
    lines = io.StringIO(newline="")
    csv.writer(lines, lineterminator="\n").writerows([shown.columns, *shown.rows])
    write_bytes(folder / "table.csv", lines.getvalue().encode())
    drawn = {
        name: save_figure(results.folder / "figures" / name, *made)
        for name, made in figures.all_of(results, gold[0]).items()
    }
    report = folder / "report.html"
    write_bytes(report, _page(results, gold, drawn, about).encode())
    return report


def table(learners: Sequence[Learner], measures: Sequence[DemoMeasure]) -> Table:
    """A line for each attention."""
    columns = ["attention", "parameters", *(measure.name for measure in measures)]
    rows = [[o.name, f"{o.parameters:,}", *(o.cell(measure) for measure in measures)] for o in learners]
    return Table(columns, rows)


def _page(
    results: DemoResults, gold: Sequence[ViewGold], drawn: Mapping[str, Picture], about: Mapping[str, Any]
) -> str:
    config, learners = results.config, results.learners
    names = ", ".join(learner.name for learner in learners)
    sections: list[tuple[str, Sequence[Part]]] = [
        ("Watch it being learnt", [Text(f"{_summary(results)} {WATCH}"), _viewer(results, gold)]),
        ("What was found", [Facts(dict(findings(results))), *_failures(results)]),
        ("How it was learnt", [drawn["maps"], drawn["learning"], table(learners, QUALITY), Text(READ)]),
        ("What is inside", [table(learners, INSIDE), drawn["inside"], Text(INSIDE_SAYS)]),
    ]
    if results.copying is not None:
        sections.append(("Which sequences teach attention", _render_copying(results)))
    facts = {"attentions": names, "seeds": config.all_seeds, "steps": config.steps, "sentences a step": config.batch}
    facts |= {"learning rate": config.lr, "model": _said(MODEL), "task": _said(DATA), **about}
    sections.append(("Make it again", [Command(str(facts.pop("command"))), Facts(facts)]))
    return render_page(f"attnlab: {_count(len(learners))} learning to translate", sections)


WATCH = (
    "Press play. The head that aligns best has a star. A row of the cross attention is named by the word that is read; "
    "the true source of the word to be written next is framed. Curves: the first seed, over all held-out sentences; "
    "the AER beside the maps: of the sentence that is shown."
)
READ = (
    "AER: alignment error rate of the head that aligns best, chosen on other sentences; on its source, below 0: how "
    "much weight that head has on the source of the word to write, and how much is negative, the mean over words; "
    "A(α, β): how often the largest weight is where the probe predicts best."
)
INSIDE_SAYS = (
    "JSD: how much two heads of a layer differ, over a sentence; residual and cosine: of the states that the last "
    "decoder layer is given (0 and 1 are collapse); gradient: its norm at the query projections, mean over layers."
)


def _summary(results: DemoResults) -> str:
    config = results.config
    return (
        f"Small Transformers learn to translate an artificial language whose true word alignments are known: "
        f"{_count(len(results.learners))}, {config.seeds} {'seed' if config.seeds == 1 else 'seeds'} each, "
        f"{config.steps} steps; measured on sentences that were not trained on."
    )


def _said(settings: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())


def _count(number: int) -> str:
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    return f"{words[number] if number < len(words) else number} attention{'' if number == 1 else 's'}"


def _failures(results: DemoResults) -> list[Part]:
    return [Text(f"{name} failed: {why}") for name, why in results.failed.items()]


def _viewer(results: DemoResults, gold: Sequence[ViewGold]) -> Part:
    """The first seed of each attention at every moment, with its own curves."""
    records = {learner.name: dict(learner.records) for learner in results.learners}
    curves, best = {}, {}
    for learner in results.learners:
        layer, head = learner.first["head"]
        best[learner.name] = Best("cross", layer, head, "aligns best, on other sentences")
        lines = {name: [of(learner.first, n) for n in range(len(learner.moments))] for name, of in CURVES.items()}
        curves[learner.name] = {name: (learner.moments, line) for name, line in lines.items() if None not in line}
    alone = curves[results.learners[0].name] if len(curves) == 1 else curves
    return show(records, gold=gold, curves=alone, best=best, title="attention, step by step")


def _render_copying(results: DemoResults) -> list[Part]:
    findings = results.copying
    assert findings is not None
    text = (
        "An LSTM with one attention head copies sequences (Snell et al. 2021). Where all have the same words only "
        "their order tells them apart; the paper finds that attention is then harder to learn than where words differ."
    )
    pictures = [Picture(render_png(figure), caption) for figure, caption in findings.figures.values()]
    body: list[Part] = [Text(text), *pictures, tabulate_cells(list(findings.cells)), *map(Text, findings.remarks)]
    return [*body, Command(f"attnlab reproduce snell2021 --only=fig3 --scale=smoke --seeds={results.config.seeds}")]


def _plain(learner: Learner) -> dict[str, Any]:
    return {"parameters": learner.parameters, "seeds": {str(seed): values for seed, values in learner.found.items()}}

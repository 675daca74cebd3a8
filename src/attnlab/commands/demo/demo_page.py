"""The files of the demo, each written atomically, the page last.

report.html                    everything, in one file
results.json, table.csv        findings and every value of every seed; the table
figures/NAME.png, .svg, .pdf   for papers
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlab.analysis.alignment import choose_words, compute_rate, count_links
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
SHORT = 3  # findings on top of the page
WATCH = (
    "Press play to watch the training. A star marks the head that aligns best. Each row of the cross attention is "
    "named by the word that the decoder reads; the frame marks the true source of the word that it writes next. The "
    "curves are of the first seed, over all held-out sentences. The AER beside the maps is of the sentence shown."
)
TYPICAL = (
    "The page opens at a typical sentence: of those with the median number of words, the one whose alignment error "
    "(mean over attentions) is the median."
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
    opened = choose_typical(results.learners, gold)
    drawn = draw_figures(results, gold[opened], opened).items()
    pictures = {name: save_figure(folder / "figures" / name, *figure) for name, figure in drawn}
    report = folder / "report.html"
    write_text(report, _render(results, gold, opened, pictures, provenance))
    return report


def tabulate(learners: Sequence[Learner], measures: Sequence[SeedMeasure]) -> Table:
    """Return a line for each attention."""
    columns = ["attention", "parameters", *(measure.name for measure in measures)]
    rows = [[x.name, f"{x.parameters:,}", *(measure.format_mean(x.measured) for measure in measures)] for x in learners]
    return Table(columns, rows)


def choose_typical(learners: Sequence[Learner], gold: Sequence[ViewGold]) -> int:
    """Return the sentence whose alignment error rate is the median: the mean over attentions, of their best heads."""
    rates: list[list[float]] = [[] for _ in gold]
    for learner in learners:
        layer, head = learner.first["head"]
        weights = learner.records[learner.moments[-1]].kind("cross")[layer].weights[:, head]
        for number, true in enumerate(gold):
            rates[number].append(compute_sentence_rate(weights[number], true))
    means = [statistics.fmean(some) for some in rates]
    return means.index(statistics.median_low(means))


def compute_sentence_rate(weights: Tensor, gold: ViewGold) -> float:
    """Return the AER of one map (i,j), if each target word is linked to the source word with the largest weight."""
    rows, keys = (torch.tensor(places)[None] for places in (gold.rows, gold.keys))
    sources, _ = choose_words(weights[None, : rows.shape[1], : keys.shape[1]], rows, keys, gold.words)
    links = {(source, target) for target, source in enumerate(sources[0].tolist()) if source >= 0}
    return compute_rate("aer", count_links([links], [gold.sure], [gold.possible]))


def _render(
    results: DemoResults, gold: Sequence[ViewGold], opened: int, pictures: Mapping[str, Picture],
    provenance: Mapping[str, Any],
) -> str:  # fmt: skip
    config, learners = results.config, results.learners
    count = f"{len(learners)} attention{'s' * (len(learners) > 1)}"
    summary = (
        "Small Transformers learn to translate an artificial language with known word alignments: "
        f"{count}, {config.seeds} seed{'s' * (config.seeds > 1)} each, {config.steps} steps. All numbers are of "
        "sentences that were not trained on."
    )
    failures = [Text(f"{name} failed: {reason}") for name, reason in results.failures.items()]
    viewer = [Text(f"{summary} {WATCH}"), Text(TYPICAL), _render_viewer(learners, gold, opened), *failures]
    found = list_findings(results)
    folded: list[tuple[str, Sequence[Part]]] = [
        ("More findings", [Facts(dict(found[SHORT:]))]),
        ("How it learns", [pictures["maps"], pictures["learning"], tabulate(learners, QUALITY), Text(READ)]),
        ("What is inside", [tabulate(learners, INSIDE), pictures["inside"], Text(READ_INSIDE)]),
    ]
    if results.copying is not None:
        folded.append(("Which sequences teach attention", render_copying(results)))
    facts: dict[str, Any] = {"attentions": ", ".join(x.name for x in learners), "seeds": config.all_seeds}
    facts |= {"steps": config.steps, "sentences a step": config.batch, "learning rate": config.lr}
    facts |= {"model": format_settings(MODEL), "task": format_settings(DATA), **provenance}
    folded.append(("How to reproduce it", [Command(config.command), Facts(facts)]))
    title, findings = f"attnlab: {count} learning to translate", [sentence for _, sentence in found[:SHORT]]
    return render_page(title, [("Watch it learn", viewer)], findings=findings, folded=folded)


def _render_viewer(learners: Sequence[Learner], gold: Sequence[ViewGold], opened: int) -> Part:
    """Render the first seed of each attention at every moment, with its own curves."""
    curves, best = {}, {}
    for learner in learners:
        layer, head = learner.first["head"]
        best[learner.name] = Best("cross", layer, head, "aligns best, on other sentences")
        lines = {name: [read(learner.first, n) for n in range(len(learner.moments))] for name, read in CURVES.items()}
        curves[learner.name] = {name: (learner.moments, line) for name, line in lines.items() if None not in line}
    shown = curves[learners[0].name] if len(learners) == 1 else curves
    records = {learner.name: dict(learner.records) for learner in learners}
    return show(records, gold=gold, curves=shown, best=best, title="attention, step by step", example=opened)


def render_copying(results: DemoResults) -> list[Part]:
    """Render the findings of the item on copying, and the command that runs it."""
    findings = results.copying
    assert findings is not None
    pictures = [Picture(render_png(figure), caption) for figure, caption in findings.figures.values()]
    command = f"attnlab reproduce snell2021 --only=fig3 --scale=smoke --seeds={results.config.seeds}"
    table = tabulate_cells(list(findings.cells))
    return [Text(COPYING), *pictures, table, *map(Text, findings.remarks), Command(command)]

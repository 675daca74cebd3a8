"""IBM Model 1 on the text of the alignment item: a baseline without attention.

It has or lacks a preference for the diagonal, and a prior on θ; with both it is fast_align's model. It learns from the
training pairs and, as is usual with such models, from the text of the gold pairs, but not from their links. It does not
depend on the seed.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attnlab.aligning.ibm1_aligner import FAST_ALIGN, FILE, WordModel, name_folder
from attnlab.analysis.alignment import compute_rate, count_links
from attnlab.analysis.symmetrise import SYMMETRISATIONS, Links
from attnlab.experiments.plan import Calculation, Workplace
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.verdicts import IMPOSSIBLE, Cell
from attnlab.studies.kobayashi2020.plan import load_europarl, load_lexicon, read_training_pairs

ITEM = "alignment-ibm1"
MODELS: dict[str, dict[str, Any]] = {
    "IBM Model 1": {"diagonal": False, "prior": 0.0},
    "IBM Model 1, prior": {"diagonal": False, "prior": FAST_ALIGN["prior"]},
    "IBM Model 1, diagonal": {"diagonal": True, "prior": 0.0},
    "IBM Model 1, diagonal, prior": {"diagonal": True, "prior": FAST_ALIGN["prior"]},
}
ELSEWHERE = {"fast_align": 28.4, "GIZA++": 21.0}  # German to English, as the paper quotes them
AHEAD, BACK = "source → target", "target → source"
REASON = f"{IMPOSSIBLE}another program; its published number, trained on all of Europarl v7, is given for comparison"


def ibm1(setting: Setting) -> Findings:
    """The item: AER in both directions, and of their symmetrisations."""
    limit = setting.at(smoke=None, small=20_000, full=None)
    corpus = setting.at(smoke="lexicon", small="europarl", full="europarl")
    text = {"corpus": corpus, "limit": limit}
    plan = {
        row: Calculation("ibm1 alignment", text | options, partial(measure_ibm1, row, corpus, limit))
        for row, options in MODELS.items()
    }
    measured = setting.rows.read_plan(plan)
    tags = ("other data", *setting.tags)
    cells = []
    for row in MODELS:
        if reason := measured.failures.get(row):
            cells.append(Cell(item=ITEM, row=row, column=AHEAD, not_run=reason, tags=tags))
            continue
        for column, error in measured.values[row]["errors"].items():
            cells.append(Cell(item=ITEM, row=row, column=column, values=(error,), exact=True, tags=tags))
    cells += [
        Cell(item=ITEM, row=name, column=AHEAD, published=published, not_run=REASON)
        for name, published in ELSEWHERE.items()
    ]
    remarks = dict.fromkeys(remark for values in measured.values.values() for remark in values["remarks"])
    return Findings(cells, remarks=tuple(remarks))


Text = tuple[list[list[str]], list[list[str]]]


def measure_ibm1(row: str, name: str, limit: int | None, place: Workplace, seed: int | None) -> dict[str, Any]:
    """Fit a model in both directions and return the AER of each and of their symmetrisations."""
    corpus = load_lexicon(5_000) if name == "lexicon" else load_europarl(place)
    text = read_training_pairs(corpus, limit)
    text = text[0] + corpus.source, text[1] + corpus.target
    ahead = _fit_model(row, text, place).align(corpus.source, corpus.target)[0].links()
    back = _fit_model(row, (text[1], text[0]), place).align(corpus.target, corpus.source)[0].links()
    turned = [frozenset((source, target) for target, source in links) for links in back]
    directions: dict[str, Sequence[Links]] = {AHEAD: ahead, BACK: turned}
    for method, join in SYMMETRISATIONS.items():
        directions[method] = [join(a, b) for a, b in zip(ahead, turned, strict=True)]
    gold, remarks = corpus.gold, [corpus.remark, f"Trained on {len(text[0]):,} pairs, including the gold pairs."]
    counts = {column: count_links(links, gold.sure, gold.possible) for column, links in directions.items()}
    return {"errors": {name: 100 * compute_rate("aer", each) for name, each in counts.items()}, "remarks": remarks}


def _fit_model(row: str, text: Text, place: Workplace) -> WordModel:
    """Train a model, or load it if an earlier attempt stored it."""
    folder: Path = place.folder / "runs" / name_folder(*text, **MODELS[row])
    if not (folder / FILE).is_file():
        WordModel.train(*text, **MODELS[row]).save(folder)
    return WordModel.load(folder)

"""IBM Model 1 on the text of the alignment item: no attention at all. With and without a preference for the diagonal,
with and without a prior on θ; both together are fast_align's model.

It learns from the training pairs and, as is usual with such models, from the gold pairs' text too; not from their
links. Seeds make no difference to it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attnlab.aligning.ibm1_aligner import FAST_ALIGN, FILE, WordModel, folder_name
from attnlab.analysis.alignment import count_links, compute_rate
from attnlab.analysis.symmetrise import SYMMETRISATIONS, Links
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.verdicts import Cell
from attnlab.studies.kobayashi2020.plan import GoldCorpus, europarl, lexicon, training_pairs

ITEM = "alignment-ibm1"
MODELS: dict[str, dict[str, Any]] = {
    "IBM Model 1": {"diagonal": False, "prior": 0.0},
    "IBM Model 1, prior": {"diagonal": False, "prior": FAST_ALIGN["prior"]},
    "IBM Model 1, diagonal": {"diagonal": True, "prior": 0.0},
    "IBM Model 1, diagonal, prior": {"diagonal": True, "prior": FAST_ALIGN["prior"]},
}
ELSEWHERE = {"fast_align": 28.4, "GIZA++": 21.0}  # German to English, as the paper quotes them
AHEAD, BACK = "source → target", "target → source"
REASON = "another program; its published figure, from the whole of Europarl v7, is here for comparison"


def ibm1(setting: Setting) -> Findings:
    """The item: AER in both directions, and of the two together."""
    try:
        corpus = lexicon(5_000) if setting.scale == "smoke" else europarl(setting)
    except OSError as error:
        reason = " ".join(str(error).split())
        return Findings([Cell(item=ITEM, row=row, column=AHEAD, not_run=reason) for row in MODELS])
    most = setting.at(smoke=None, small=20_000, full=None)
    text = training_pairs(corpus, most)
    text = text[0] + corpus.source, text[1] + corpus.target
    cells = [cell for row in MODELS for cell in _cells(row, text, corpus, setting)]
    cells += [
        Cell(item=ITEM, row=name, column=AHEAD, published=published, not_run=REASON)
        for name, published in ELSEWHERE.items()
    ]
    return Findings(cells, remarks=(corpus.remark, f"Trained on {len(text[0]):,} pairs, those of the gold set too."))


Text = tuple[list[list[str]], list[list[str]]]


def _cells(row: str, text: Text, corpus: GoldCorpus, setting: Setting) -> Iterator[Cell]:
    ahead = _fitted(row, text, setting).align(corpus.source, corpus.target).links()
    back = _fitted(row, (text[1], text[0]), setting).align(corpus.target, corpus.source).links()
    turned = [frozenset((source, target) for target, source in links) for links in back]
    directions: dict[str, Sequence[Links]] = {AHEAD: ahead, BACK: turned}
    for name, join in SYMMETRISATIONS.items():
        directions[name] = [join(a, b) for a, b in zip(ahead, turned, strict=True)]
    tags = ("other data",) if setting.scale == "full" else ("other data", "smaller scale")
    for column, links in directions.items():
        error = 100 * compute_rate("aer", count_links(links, corpus.gold.sure, corpus.gold.possible))
        yield Cell(item=ITEM, row=row, column=column, values=(error,), exact=True, tags=tags)


def _fitted(row: str, text: Text, setting: Setting) -> WordModel:
    """Trained, or read from where an earlier run of the item left it."""
    folder: Path = setting.folder.parent / "runs" / folder_name(*text, **MODELS[row])
    if not (folder / FILE).is_file():
        setting.progress(0, 1, f"{row} on {len(text[0]):,} pairs")
        WordModel.train(*text, **MODELS[row]).save(folder)
    return WordModel.load(folder)

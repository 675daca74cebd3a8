"""A.8: the number of parameters of the classifiers and of the translator, with the vocabularies of Table 9.

classifier   300 · words + 1,274,882        words have vectors of size 300
translator   256 · 8,000 + 6,132,544        source and target share their vectors
"""

from dataclasses import replace

from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.verdicts import Cell
from attnlab.models.presets import PRESETS, build_on_meta, parameter_table
from attnlab.studies.snell2021.datasets import AG_NEWS, AMAZON, IMDB, SST, YELP
from attnlab.studies.snell2021.sms import SIZES

WITH_WORDS = {  # the vocabulary, and the published number of parameters
    "IMDB": (IMDB.vocabulary, 19_376_282),
    "AG News": (AG_NEWS.vocabulary, 10_594_382),
    "20 Newsgroups": (12_488, 5_021_282),
    "SST": (SST.vocabulary, 4_581_482),
    "Yelp": (YELP.vocabulary, 13_685_282),
    "Amazon": (AMAZON.vocabulary, 12_407_882),
    "SMS": (SIZES["vocabulary"], 2_682_182),
}
SLIP = "with 12,488 words: the vocabulary that Table 9 prints for it is that of AG News"


def a8(setting: Setting) -> Findings:
    """The item: parameters with and without the vectors of words. No scale and no seed changes them."""
    cells = [_make_cell("all classifiers", "lstm-classifier", None, 1_274_882)]
    cells += [_make_cell(row, "lstm-classifier", *counts) for row, counts in WITH_WORDS.items()]
    cells += [_make_cell("translator", "lstm", 8000, 8_180_544), _make_cell("translator", "lstm", None, 6_132_544)]
    return Findings(cells)


def _make_cell(row: str, preset: str, words: int | None, published: int) -> Cell:
    """Return the cell of a model with a vocabulary of this size; None: without the vectors of words."""
    config = PRESETS[preset] if words is None else replace(PRESETS[preset], vocabulary=words)
    counts = dict(parameter_table(build_on_meta(config)))
    if words is None:
        del counts["encoder embedding: words"]
    return Cell(
        item="a8", row=row, column="parameters" if words else "parameters without words", published=published,
        values=(float(sum(counts.values())),), exact=True, note=SLIP if row == "20 Newsgroups" else "",
    )  # fmt: skip

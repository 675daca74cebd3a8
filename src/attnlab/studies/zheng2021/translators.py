"""Tables 2 and 3 and Figure 3: translation by CODA and the Transformer, and with more and more heads (§5.2, §5.3)."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from attnlab.config import parse_numbers
from attnlab.experiments.corpora import list_grounds
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.variants import VALIDATION, Value, Variant, Variants, read_perplexity
from attnlab.experiments.verdicts import Cell
from attnlab.studies.zheng2021.coda_models import CODA, LABELS, TRANSFORMER, choose_bleu, read_models, set_heads
from attnlab.studies.zheng2021.figures import draw_by_heads
from attnlab.studies.zheng2021.parameters import count_millions
from attnlab.studies.zheng2021.plan import LIKE_IWSLT14, NAMES, TRANSLATION
from attnlab.studies.zheng2021.published import TABLE2, TABLE3

PAIR = (TRANSFORMER, CODA)


def table2(setting: Setting) -> Findings:
    """The item: BLEU of the two models on every corpus."""
    cells = list(_sizes())
    for ground in list_grounds(TRANSLATION, setting, NAMES):
        models = read_models("table2", ground, PAIR)
        column, value = choose_bleu(ground)
        like = ground.corpus.name if ground.corpus.of_paper else "iwslt14"  # which the others stand in for
        printed = {each.name: TABLE2[like, each.name][1] for each in PAIR}
        cells += [models.make_level(each, column, value, printed[each.name]) for each in PAIR]
        cells.append(models.make_contrast(CODA, TRANSFORMER, column, value, printed["coda"] - printed["softmax"]))
    remark = (
        "BLEU of the test part: on the paper's data with compounds split at their hyphens, as its script does; on "
        "others sacrebleu's. Of a stand-in only the sign of the difference is held against the paper, IWSLT14's."
    )
    return Findings(cells, remarks=(remark,))


def table3(setting: Setting) -> Findings:
    """The item: the two models with more and more heads, the width of all heads together staying the same."""
    said = parse_numbers(setting.options.get("heads"), "heads")
    counts = said or setting.at(smoke=(2, 4), small=(4, 8), full=(4, 8, 16, 32))
    cells: list[Cell] = []
    figures: dict[str, tuple[Figure, str]] = {}
    for ground in list_grounds(LIKE_IWSLT14, setting, NAMES):
        rows = {(each.name, count): set_heads(each, count) for each in PAIR for count in counts}
        models = read_models("table3", ground, list(rows.values()))
        measures = dict([choose_bleu(ground), (VALIDATION, read_perplexity("valid"))])
        for place, (column, value) in enumerate(measures.items()):
            for count in counts:
                cells += _compare_at(models, count, column, value, place)
            if len(counts) > 1:
                cells += [_make_trend(models, each, counts, column, value, place) for each in PAIR]
        if models.measured.values:
            says = "test BLEU and validation perplexity by number of heads; lines join the means of the seeds (small)."
            figures[ground.corpus.name] = _draw_sweep(models, counts, measures), f"{ground.corpus.row}: {says}"
    remark = (
        "More heads are smaller heads: the cost stays the same. CODA's net grows with them (24h² + 9h numbers an "
        "attention; at 32 heads 1.1 % of iwslt14's parameters), so the sweep is not at constant size."
    )
    return Findings(cells, figures, (remark,))


def _compare_at(models: Variants, count: int, column: str, value: Value, place: int) -> Iterator[Cell]:
    """The two models with so many heads, and CODA against the other: better at every number of heads in Table 3."""
    printed = {name: row[count][place] for name, row in TABLE3.items() if count in row}
    transformer, coda = (set_heads(each, count) for each in PAIR)
    for each in (transformer, coda):
        yield models.make_level(each, column, value, printed.get(each.name))
    gap = printed["coda"] - printed["softmax"] if printed else None
    yield models.make_contrast(coda, transformer, column, value, gap, sign=(1, -1)[place])


def _make_trend(models: Variants, each: Variant, counts: Sequence[int], column: str, value: Value, place: int) -> Cell:
    """From the fewest heads to the most: the Transformer gets worse, CODA better, says the paper."""
    few, many = min(counts), max(counts)
    printed = TABLE3[each.name]
    gap = printed[many][place] - printed[few][place] if few in printed and many in printed else None
    sign = 1 if printed[32][place] > printed[4][place] else -1
    label = f"{each.label}, {many} − {few} heads"
    return models.make_contrast(
        set_heads(each, many), set_heads(each, few), column, value, gap, sign=sign, label=label
    )  # fmt: skip


def _draw_sweep(models: Variants, counts: Sequence[int], measures: dict[str, Value]) -> Figure:
    panels: dict[str, dict[str, tuple[Sequence[int], np.ndarray]]] = {}
    for column, value in measures.items():
        panels[column] = {}
        for each in PAIR:
            seeds = [[value(found) for found in models.list_values(set_heads(each, count))] for count in counts]
            if seeds[0] and all(len(some) == len(seeds[0]) for some in seeds):
                panels[column][each.name] = counts, np.array(seeds)
    return draw_by_heads(panels)


def _sizes() -> Iterator[Cell]:
    for (name, attention), (published, _) in TABLE2.items():
        row = next(corpus.row for corpus in TRANSLATION if corpus.name == name)
        about: dict[str, Any] = {"row": f"{row}: {LABELS[attention]}", "column": "million parameters"}
        yield Cell(item="table2", published=published, values=(count_millions(name, attention),), exact=True, **about)

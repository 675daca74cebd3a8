"""Table 1 and Figure 2: language models, their perplexity and how much their heads differ (§5.2)."""

from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

from attnlab.experiments.corpora import list_grounds
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.verdicts import Cell
from attnlab.studies.zheng2021.coda_models import CODA, TRANSFORMER, read_models
from attnlab.studies.zheng2021.figures import draw_heat_maps
from attnlab.studies.zheng2021.parameters import count_millions
from attnlab.studies.zheng2021.plan import LANGUAGE, NAMES
from attnlab.studies.zheng2021.published import QUOTED, TABLE1

PAIR = (TRANSFORMER, CODA)
PARTS = {"valid": "validation perplexity", "test": "test perplexity"}


def table1(setting: Setting) -> Findings:
    """The item: perplexity of CODA and the Transformer."""
    cells = [*_sizes(), *_make_quoted()]
    for ground in list_grounds(LANGUAGE, setting, NAMES):
        models = read_models("table1", ground, PAIR)
        for place, (part, column) in enumerate(PARTS.items(), start=1):
            printed = {each.name: TABLE1[each.name][place] for each in PAIR}
            value = lambda found, part=part: found["perplexity"][part]  # noqa: E731
            cells += [models.make_level(each, column, value, printed[each.name]) for each in PAIR]
            cells.append(models.make_contrast(CODA, TRANSFORMER, column, value, printed["coda"] - printed["softmax"]))
    remark = (
        "Each part is read in windows whose first tokens are context only, as the paper does (480 of 512 there, 96 of "
        "128 on the stand-ins at full scale). A perplexity on another text cannot be held against the paper's; the "
        "difference of two models can, for its sign."
    )
    return Findings(cells, remarks=(remark,))


def fig2(setting: Setting) -> Findings:
    """The item: how much the heads of the same models differ, and maps of it."""
    cells: list[Cell] = []
    figures: dict[str, tuple[Figure, str]] = {}
    for ground in list_grounds(LANGUAGE, setting, NAMES):
        models = read_models("fig2", ground, PAIR)
        column, value = "average JSD (nats)", lambda found: found["mean"]
        cells += [models.make_level(each, column, value) for each in PAIR]
        cells.append(models.make_contrast(CODA, TRANSFORMER, column, value, sign=1))
        if shown := {each.name: found for each in PAIR if (found := models.list_values(each))}:
            says = "divergence of every two heads by layer, the mean over seeds; darker differs more."
            figures[ground.corpus.name] = draw_heat_maps(shown), f"{ground.corpus.row}: {says}"
    remark = (
        "At the mean logits, on validation. The paper shows the maps of WikiText-103 and says that CODA's are clearly "
        "darker; it prints no number."
    )
    return Findings(cells, figures, (remark,))


def _sizes() -> Iterator[Cell]:
    for model in PAIR:
        size = count_millions("wikitext103", model.name)
        about: dict[str, Any] = {"row": f"WikiText-103: {model.label}", "column": "million parameters"}
        yield Cell(item="table1", published=TABLE1[model.name][0], values=(size,), exact=True, **about)


def _make_quoted() -> Iterator[Cell]:
    reason = "quoted by the paper from Baevski & Auli 2019, with contexts of 3072 and 2560 tokens; not a run of its own"
    for column, published in zip(PARTS.values(), QUOTED[1:], strict=True):
        yield Cell(item="table1", row="WikiText-103: Transformer†", column=column, published=published, not_run=reason)

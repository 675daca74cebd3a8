"""Table 1 and Figure 2: language models, their perplexity and how much their heads differ (§5.2).

The item depth asks why a small model shows another difference than the paper's: depth, or optimiser and rate?
"""

from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure

from attnlab.experiments.corpora import StudyCorpus, list_grounds
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.variants import VALIDATION, read_perplexity
from attnlab.experiments.verdicts import IMPOSSIBLE, Cell
from attnlab.studies.zheng2021.coda_models import CODA, PAIR, TRANSFORMER, read_models
from attnlab.studies.zheng2021.figures import draw_divergence
from attnlab.studies.zheng2021.measures import JSD, read_jsd
from attnlab.studies.zheng2021.parameters import make_size_cell
from attnlab.studies.zheng2021.plan import DEEP, LANGUAGE, NAMES
from attnlab.studies.zheng2021.published import QUOTED, TABLE1

PARTS = {"valid": VALIDATION, "test": "test perplexity"}


def table1(setting: Setting) -> Findings:
    """The item: perplexity of CODA and the Transformer."""
    sizes = (make_size_cell("table1", "WikiText-103", "wikitext103", name, row[0]) for name, row in TABLE1.items())
    cells = [*sizes, *_make_quoted(), *_compare_perplexities("table1", LANGUAGE, setting)]
    remark = (
        "Each part is read in windows whose first tokens are context only, as in the paper (480 of 512 tokens there, "
        "96 of 128 on other text at full scale). A perplexity on other text is not comparable with the paper's. The "
        "sign of the difference between two models is."
    )
    return Findings(cells, remarks=(remark,))


def depth(setting: Setting) -> Findings:
    """The item: the same difference in models as deep as the paper's, at a rate for small models and at the paper's."""
    remark = (
        "16 layers as on WikiText-103, but width 256. NAG at 1.0 with gradients clipped at 0.1 is the paper's; the "
        "number of updates and the warm-up are not. If only the deep model shows the paper's sign, depth explains it; "
        "if only NAG does, the recipe."
    )
    return Findings(list(_compare_perplexities("depth", DEEP, setting)), remarks=(remark,))


def _compare_perplexities(item: str, corpora: Sequence[StudyCorpus], setting: Setting) -> Iterator[Cell]:
    for ground in list_grounds(corpora, setting, NAMES):
        models = read_models(item, ground, PAIR)
        for place, (part, column) in enumerate(PARTS.items(), start=1):
            printed = {name: row[place] for name, row in TABLE1.items()}
            yield from models.compare_two(CODA, TRANSFORMER, column, read_perplexity(part), printed)


def fig2(setting: Setting) -> Findings:
    """The item: how much the heads of the same models differ, with maps."""
    cells: list[Cell] = []
    figures: dict[str, tuple[Figure, str]] = {}
    for ground in list_grounds(LANGUAGE, setting, NAMES):
        models = read_models("fig2", ground, PAIR)
        cells += models.compare_two(CODA, TRANSFORMER, JSD, read_jsd, sign=1)
        figures |= draw_divergence(models, PAIR)
    remark = (
        "Heads are compared at the mean logits, on validation. The paper shows maps of WikiText-103, says that those "
        "of CODA are clearly darker, and prints no number."
    )
    return Findings(cells, figures, (remark,))


def _make_quoted() -> Iterator[Cell]:
    reason = f"{IMPOSSIBLE}quoted from Baevski & Auli 2019, with contexts of 3072 and 2560 tokens"
    for column, published in zip(PARTS.values(), QUOTED[1:], strict=True):
        yield Cell(item="table1", row="WikiText-103: Transformer†", column=column, published=published, not_run=reason)

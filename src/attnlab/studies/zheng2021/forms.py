"""Forms of CODA that the paper names but does not compare: each against CODA as the authors' code has it.

    α = 2, α = 8          the width of σ's hidden layers, in heads; the code has 4 everywhere (App. A: "α ∈ {2, 4, 8}")
    as printed            variant="paper": eq. 4, with two linears that read Z_{l−1} alone, and App. A's residual
    carry in float32      Z_l is passed on in float32; a run in bfloat16 passes it on in bfloat16
    noisy passes          the same models, scored by their expectation (§3, eq. 3) instead of at the mean logits

The paper prints no number for any of them, so no cell has a verdict.
"""

from collections.abc import Iterator
from typing import Any

from attnlab.decoding.evaluation import score_targets
from attnlab.experiments.corpora import Ground, list_grounds
from attnlab.experiments.plan import Measure, Workplace
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.variants import VALIDATION, Value, Variant, Variants, read_perplexity
from attnlab.experiments.verdicts import Cell
from attnlab.studies.zheng2021.coda_models import CODA, LABELS, choose_bleu, read_models
from attnlab.studies.zheng2021.measures import JSD, read_jsd
from attnlab.studies.zheng2021.plan import LIKE_IWSLT14, NAMES
from attnlab.training.runs import Run

CORPORA = tuple(corpus for corpus in LIKE_IWSLT14 if corpus.name in ("multi30k", "lexicon"))
SAMPLES = 16  # noisy passes; another number needs another edition of the measure
PARTS = {"valid": VALIDATION, "test": "test perplexity"}
MEAN, EXPECTED, BOUND = "mean logits", f"mean of {SAMPLES} noisy passes", f"bound of {SAMPLES} noisy passes"
REMARK = (
    "The paper prints no number for these forms, so no cell has a verdict. All forms have the seeds and the recipe of "
    "CODA in table4. A GPU trains in bfloat16 and a CPU in float32, so on a CPU the carry in float32 repeats "
    "CODA. All models are measured in float32. "
    f"Perplexity by {SAMPLES} noisy passes averages the probabilities of each target; its bound averages their "
    "logarithms (eq. 3) and is never lower."
)


def _change_coda(label: str, **options: str) -> Variant:
    return Variant(CODA.name, f"{CODA.label}, {label}", {**CODA.values, **options})


FORMS = (
    _change_coda("α = 2", alpha="2"),
    _change_coda("α = 8", alpha="8"),
    _change_coda("as printed", variant="paper"),
    _change_coda("carry in float32", carry_dtype="float32"),
)


def forms(setting: Setting) -> Findings:
    """The item: quality and head diversity of each form, and its difference to CODA within each seed."""
    cells: list[Cell] = []
    for ground in list_grounds(CORPORA, setting, NAMES):
        models = read_models("forms", ground, (CODA, *FORMS))
        columns = dict([choose_bleu(ground), (VALIDATION, read_perplexity("valid")), (JSD, read_jsd)])
        for column, value in columns.items():
            cells += [models.make_level(each, column, value) for each in (CODA, *FORMS)]
            cells += [models.make_contrast(each, CODA, column, value) for each in FORMS]
        cells += _make_expectation_cells(ground)
    return Findings(cells, remarks=(REMARK,))


def measure_expectation(run: Run, place: Workplace) -> dict[str, Any]:
    """Return perplexity on validation and test by the mean logits, by noisy passes, and the bound of these passes."""
    found: dict[str, Any] = {MEAN: {}, EXPECTED: {}, BOUND: {}}
    for part in PARTS:
        noisy = score_targets(run, part, samples=SAMPLES)
        found[MEAN][part] = score_targets(run, part).perplexity
        found[EXPECTED][part], found[BOUND][part] = noisy.perplexity, noisy.bound_perplexity
    return found


EXPECTATION = Measure("zheng2021 expectation", measure_expectation)


def _make_expectation_cells(ground: Ground) -> Iterator[Cell]:
    models = Variants("forms", ground, (CODA,), EXPECTATION, tuple(LABELS))
    for part, column in PARTS.items():
        for way in (EXPECTED, BOUND):
            yield models.make_level(CODA, column, _read_way(way, part), label=f"{CODA.label}, {way}")
        both = _read_way(EXPECTED, part), _read_way(MEAN, part)
        yield models.make_contrast(CODA, CODA, column, both, label=f"{CODA.label}, {EXPECTED} − {MEAN}")


def _read_way(way: str, part: str) -> Value:
    return lambda values: values[way][part]

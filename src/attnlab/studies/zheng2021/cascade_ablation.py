"""Table 4, Figures 4–6 and §5.4: what the cascade and the noise each do to quality and to head diversity."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from attnlab.experiments.corpora import list_grounds
from attnlab.experiments.learning_rates import compare_at_best_rates
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.variants import Variant, Variants
from attnlab.experiments.verdicts import Cell
from attnlab.studies.zheng2021.coda_models import ALL, CODA, CODA_CS, TRANSFORMER, choose_bleu, read_models
from attnlab.studies.zheng2021.figures import draw_against, draw_divergence
from attnlab.studies.zheng2021.measures import JSD, read_jsd
from attnlab.studies.zheng2021.plan import LIKE_IWSLT14, NAMES
from attnlab.studies.zheng2021.published import TABLE4

RATES = (0.5, 1.0, 2.0, 4.0)  # multiples of a recipe's learning rate
CONTRASTS = (*((each, TRANSFORMER) for each in ALL[:3]), *((CODA, each) for each in ALL[1:3]))
SAMPLED, PER_QUERY = "average JSD, sampled (nats)", "average JSD a query (nats)"
NULL = "Transformer given the noise (null)"
NOISE_REMARK = (
    "Noise alone raises the divergence of heads: two equal heads whose logits get independent N(0,1) noise differ. The "
    'paper does not say whether CODA\'s heads were compared with their noise. So the columns "average JSD" and all '
    'verdicts are at the mean logits. "Sampled" has one noisy pass. Its null is the Transformer with the same noise.'
)
NATS = (
    "JSD is in nats, summed over the queries of a sentence, so it grows with the sentence; the paper gives no base. On "
    "other data only the order of the models is therefore compared with Table 4."
)
Pair = tuple[list[float], list[float]]  # average JSD and BLEU of a model, seed by seed


def table4(setting: Setting) -> Findings:
    """The item: BLEU of four models and the divergence of their heads, with maps."""
    cells: list[Cell] = []
    figures: dict[str, tuple[Figure, str]] = {}
    for ground in list_grounds(LIKE_IWSLT14, setting, NAMES):
        models = read_models("table4", ground, ALL)
        measures = [(JSD, read_jsd), choose_bleu(ground)]
        for place, (column, value) in enumerate(measures):
            cells += [models.make_level(each, column, value, TABLE4[each.name][place]) for each in ALL]
            for a, b in CONTRASTS:
                gap = TABLE4[a.name][place] - TABLE4[b.name][place]
                cells.append(models.make_contrast(a, b, column, value, gap))
        cells += [models.make_level(each, PER_QUERY, lambda values: values["mean_per_query"]) for each in ALL]
        cells += _make_noise_cells(models)
        figures |= draw_divergence(models, ALL[::-1])
    return Findings(cells, figures, (NOISE_REMARK, NATS))


def section54(setting: Setting) -> Findings:
    """The item: do models whose heads differ more translate better?"""
    cells: list[Cell] = []
    panels: dict[str, dict[str, Pair]] = {}
    for ground in list_grounds(LIKE_IWSLT14, setting, NAMES):
        models = read_models("section54", ground, ALL)
        points: dict[str, Pair] = {}
        for each in ALL:
            jsd, scores = (list(map(read, models.list_values(each))) for read in (read_jsd, choose_bleu(ground)[1]))
            points[each.name] = jsd, scores
        cells += _make_correlations(models, points)
        if shown := {name: pair for name, pair in points.items() if pair[0]}:
            panels[ground.corpus.row] = shown
    caption = "Average JSD at the mean logits and BLEU. Small marks are seeds, large ones the mean of a model."
    figures = {"bleu": (draw_against(panels, x=JSD, y="BLEU"), caption)} if panels else {}
    remark = (
        "The paper notes a positive correlation over four models with one run each. Four points are few, and a "
        "property of the model (noise, cascade) may change both. The correlation over seeds within a model is the "
        "harder test."
    )
    return Findings(cells, figures, (remark,))


def rates(setting: Setting) -> Findings:
    """The item: the best learning rate of each of the four models, and each model at its best."""
    return Findings.join(
        compare_at_best_rates(
            ground, ALL, peer=TRANSFORMER, columns=dict([choose_bleu(ground)]), side=_find_side,
            train=partial(read_models, "rates"), times=RATES,
        )
        for ground in list_grounds(LIKE_IWSLT14, setting, NAMES)
    )  # fmt: skip


def compute_published_correlation() -> float:
    """Return Pearson's r of the two columns of Table 4."""
    return _correlate(*np.array(list(TABLE4.values())).T)


def _find_side(variant: Variant, _: str) -> int:
    """Return the sign of a model's BLEU − the Transformer's in Table 4."""
    return 1 if TABLE4[variant.name][1] > TABLE4[TRANSFORMER.name][1] else -1


def _make_noise_cells(models: Variants) -> Iterator[Cell]:
    sampled, noised = (lambda values: values["sampled_mean"]), (lambda values: values["noised_mean"])
    for each in (CODA, CODA_CS):
        yield models.make_level(each, SAMPLED, sampled)
    yield models.make_level(TRANSFORMER, SAMPLED, noised, label=NULL)
    for each in (CODA, CODA_CS):  # what the model learnt beyond the effect of the noise
        yield models.make_contrast(each, TRANSFORMER, SAMPLED, (sampled, noised), label=f"{each.label} − {NULL}")


def _make_correlations(models: Variants, points: dict[str, Pair]) -> Iterator[Cell]:
    complete = all(len(jsd) == len(models.setting.seeds) for jsd, _ in points.values())
    reason = models.reason or ("" if complete else "all four models must be measured with all seeds")
    claim = models.state_claim(compute_published_correlation())
    for label, compute, about in (
        ("r over the four models, of each seed", _correlate_models, claim),
        ("r over models and seeds", lambda pairs: [_correlate_pairs(pairs.values())], claim),
        ("r over seeds within a model", lambda pairs: [_correlate_pairs(map(_center, pairs.values()))], {}),
    ):
        values = () if reason else tuple(r for r in compute(points) if np.isfinite(r))
        missing = reason or ("" if values else "all values are equal, so they have no correlation")
        about = about | models.describe_cell("", label, "JSD and BLEU")
        yield Cell(**about, values=values, not_run=missing, correlation=True)


def _correlate_models(points: dict[str, Pair]) -> list[float]:
    """Return r over the models, seed by seed."""
    jsd, scores = (np.array([pair[side] for pair in points.values()]) for side in (0, 1))  # (models, seeds)
    return [_correlate(jsd[:, seed], scores[:, seed]) for seed in range(jsd.shape[1])]


def _center(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    jsd, scores = np.array(pair[0]), np.array(pair[1])
    return jsd - jsd.mean(), scores - scores.mean()


def _correlate_pairs(pairs: Iterable[tuple[Any, Any]]) -> float:
    return _correlate(*(np.concatenate(side) for side in zip(*pairs, strict=True)))


def _correlate(x: np.ndarray, y: np.ndarray) -> float:
    """Return Pearson's r; nan if one of the two does not vary."""
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])

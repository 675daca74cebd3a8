"""Table 4, Figures 4–6 and §5.4: what the cascade and the noise do by themselves, to quality and to head diversity.

Noise alone raises the divergence of heads: two equal heads whose logits get independent N(0,1) noise differ. The paper
does not say whether CODA's heads were compared with their noise. So the columns "average JSD" and all verdicts are at
the mean logits; "sampled" has one noisy pass, and beside it stands the null: the Transformer, given the same noise.
"""

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
from attnlab.studies.zheng2021.coda_models import CODA, CODA_CS, REALFORMER, TRANSFORMER, choose_bleu, read_models
from attnlab.studies.zheng2021.figures import draw_against, draw_heat_maps
from attnlab.studies.zheng2021.plan import LIKE_IWSLT14, NAMES
from attnlab.studies.zheng2021.published import TABLE4

ALL = (CODA, CODA_CS, REALFORMER, TRANSFORMER)
CONTRASTS = (
    (CODA, TRANSFORMER), (CODA_CS, TRANSFORMER), (REALFORMER, TRANSFORMER), (CODA, CODA_CS), (CODA, REALFORMER)
)  # fmt: skip
JSD, SAMPLED, PER_QUERY = "average JSD (nats)", "average JSD, sampled (nats)", "average JSD a query (nats)"
NULL = "Transformer given the noise (null)"
NOISE_REMARK = (
    "Noise alone raises the divergence of heads: two equal heads whose logits get independent N(0,1) noise differ. The "
    'paper does not say whether CODA\'s heads were compared with their noise. So the columns "average JSD" and all '
    'verdicts are at the mean logits. "Sampled" has one noisy pass, beside it the null: the Transformer with '
    "the same noise."
)
NATS = (
    "JSD is in nats, summed over the queries of a sentence, so it grows with the sentence; the paper gives no base. A "
    "level on other data is therefore not held against Table 4, only the order of the models."
)
Pair = tuple[list[float], list[float]]  # average JSD and BLEU of a model, seed by seed


def table4(setting: Setting) -> Findings:
    """The item: four models, their BLEU and the divergence of their heads, and its maps."""
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
        cells += [models.make_level(each, PER_QUERY, lambda found: found["mean_per_query"]) for each in ALL]
        cells += _make_noise_cells(models)
        if shown := {each.name: found for each in reversed(ALL) if (found := models.list_values(each))}:
            says = "divergence of every two heads at the mean logits, by model, kind and layer; the mean over seeds."
            figures[ground.corpus.name] = draw_heat_maps(shown), f"{ground.corpus.row}: {says} Darker differs more."
    return Findings(cells, figures, (NOISE_REMARK, NATS))


def section54(setting: Setting) -> Findings:
    """The item: do models whose heads differ more translate better?"""
    cells: list[Cell] = []
    panels: dict[str, dict[str, Pair]] = {}
    for ground in list_grounds(LIKE_IWSLT14, setting, NAMES):
        models = read_models("section54", ground, ALL)
        value = choose_bleu(ground)[1]
        points = {
            each.name: (
                [read_jsd(found) for found in models.list_values(each)],
                [value(found) for found in models.list_values(each)],
            )
            for each in ALL
        }
        cells += _make_correlations(models, points)
        if shown := {name: pair for name, pair in points.items() if pair[0]}:
            panels[ground.corpus.row] = shown
    says = "Average JSD at the mean logits and BLEU: a small mark a model and seed, a large one for a model's mean."
    figures = {"bleu": (draw_against(panels, x=JSD, y="BLEU"), says)} if panels else {}
    remark = (
        "The paper notes a positive correlation over four models, one run each. Four points are few, and a trait of a "
        "model (noise, cascade) may move both: within a model, over seeds, is the sterner question."
    )
    return Findings(cells, figures, (remark,))


def rates(setting: Setting) -> Findings:
    """The item: the rate of learning that is best for each of the four models, and each at its best."""
    return Findings.join(
        compare_at_best_rates(
            ground,
            ALL,
            peer=TRANSFORMER,
            columns=dict([choose_bleu(ground)]),
            side=_find_side,
            train=partial(read_models, "rates"),
        )
        for ground in list_grounds(LIKE_IWSLT14, setting, NAMES)
    )


def read_jsd(found: dict[str, Any]) -> float:
    return found["mean"]


def compute_published_correlation() -> float:
    """Pearson's r of the two columns of Table 4."""
    return _correlate(*np.array(list(TABLE4.values())).T)


def _find_side(variant: Variant, _: str) -> int:
    """Of 0, that on which Table 4 has the BLEU of a model less the Transformer's."""
    return 1 if TABLE4[variant.name][1] > TABLE4[TRANSFORMER.name][1] else -1


def _make_noise_cells(models: Variants) -> Iterator[Cell]:
    sampled, noised = (lambda found: found["sampled_mean"]), (lambda found: found["noised_mean"])
    for each in (CODA, CODA_CS):
        yield models.make_level(each, SAMPLED, sampled)
    yield models.make_level(TRANSFORMER, SAMPLED, noised, label=NULL)
    for each in (CODA, CODA_CS):  # what was learnt beyond what the noise does by itself
        yield models.make_contrast(each, TRANSFORMER, SAMPLED, (sampled, noised), label=f"{each.label} − {NULL}")


def _make_correlations(models: Variants, points: dict[str, Pair]) -> Iterator[Cell]:
    whole = all(len(jsd) == len(models.setting.seeds) for jsd, _ in points.values())
    why = models.reason or ("" if whole else "it needs all four models with all seeds")
    said = models.state_claim(compute_published_correlation())
    for label, values, claim in (
        ("r over the four models, of each seed", _correlate_models, said),
        ("r over models and seeds", lambda pairs: [_correlate_pairs(pairs.values())], said),
        ("r over seeds within a model", lambda pairs: [_correlate_pairs(map(_center, pairs.values()))], {}),
    ):
        known = () if why else tuple(r for r in values(points) if np.isfinite(r))
        missing = why or ("" if known else "all values are the same: there is no correlation")
        about = models.describe_cell("", label, "JSD and BLEU")
        yield Cell(**about, **claim, values=known, not_run=missing, correlation=True)


def _correlate_models(points: dict[str, Pair]) -> list[float]:
    jsd, scores = (np.array([pair[side] for pair in points.values()]) for side in (0, 1))  # (models, seeds)
    return [_correlate(jsd[:, seed], scores[:, seed]) for seed in range(jsd.shape[1])]


def _center(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    jsd, scores = np.array(pair[0]), np.array(pair[1])
    return jsd - jsd.mean(), scores - scores.mean()


def _correlate_pairs(pairs: Iterable[tuple[Any, Any]]) -> float:
    return _correlate(*(np.concatenate(side) for side in zip(*pairs, strict=True)))


def _correlate(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's r; nan where one of the two does not vary."""
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])

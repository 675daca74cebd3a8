"""Does `attnlab diagnose` predict which distributions are learnt? Copying, from permutations to subsets and mixtures.

    k of n              n from k (permutations) to 3k/2
    two sets            of n types each, k of them in a sequence, the first set with probability p
    sets that overlap   permutations of two sets of k types, of which m are in both: from a mixture to one set

Each distribution has a score, from the counts of a sample alone, and the share of seeds whose attention is on the right
position at the end of training. The weight w of the score, gain − w·common, is chosen on every other distribution. The
rank correlation on the rest is the result, with an interval by resampling distributions.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from attnlab.counting.diagnosis import diagnose
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.verdicts import Cell
from attnlab.report.figures import draw_scatter
from attnlab.studies.snell2021.copying import CopyExperiment, make_experiment, read_seeds

WEIGHTS = (1.0, 2.0, 0.5, 3.0, 0.0)  # the first of equally good ones is chosen
ON = 0.9  # attention counts as learnt if it is right for this share of the targets
SAMPLE = 2000  # number of diagnosed sequences
FEWEST = 5  # smallest number of distributions for a rank correlation
CHOOSING, HELD_BACK = slice(0, None, 2), slice(1, None, 2)  # every other distribution
RESAMPLES, ENOUGH = 2000, 10  # draws for the interval of a rank correlation; smallest number of distributions for it

# types of a set beyond k, as shares of k
SUBSETS = (0.0, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)
TWO_SETS = {  # with the probabilities of the first set
    0.0: (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98),
    0.05: (0.97, 0.98, 0.99),
    0.1: (0.5, 0.8, 0.95, 0.96, 0.97, 0.98),
    0.2: (0.5, 0.8, 0.9, 0.93, 0.97, 0.99),
    0.3: (0.5, 0.95, 0.98),
    0.5: (0.5, 0.8, 0.9, 0.95, 0.98),
}
OVERLAPS = (0.9, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)  # types in both sets, as shares of k


def list_distributions(base: CopyExperiment) -> dict[str, dict[str, CopyExperiment]]:
    """Return the distributions by family and name; their number grows with the length."""
    k = base.length
    families: dict[str, dict[str, CopyExperiment]] = {"k of n": {}, "two sets": {}, "sets that overlap": {}}
    for beyond in SUBSETS:
        n = _count_types(k, beyond)
        families["k of n"][f"{k} of {n}"] = replace(base, data="subset", types=n)
    for beyond, often in TWO_SETS.items():
        n = _count_types(k, beyond)
        kind = f"{k} of {n}" if beyond else "permutations"
        for p in often:
            families["two sets"][f"{kind} of two sets, {p}"] = replace(base, data="mixture", types=n, mix=p)
    for overlap in OVERLAPS:
        m = max(1, round(k * overlap))
        case = replace(base, data="mixture", types=k, shared=m)
        families["sets that overlap"][f"permutations of two sets, {m} types in both"] = case
    return families


def _count_types(k: int, beyond: float) -> int:
    """Return k plus a share of it, at least k + 1 unless the share is 0."""
    return k + (max(1, round(k * beyond)) if beyond else 0)


def prediction(setting: Setting) -> Findings:
    """The item: scores from counts, and the share of seeds that learn."""
    base = make_experiment(setting)
    families = list_distributions(base)
    if setting.scale == "smoke":  # both ends of each
        families = {name: dict([*family.items()][:: len(family) - 1]) for name, family in families.items()}
    cases = {name: case for family in families.values() for name, case in family.items()}
    cells: list[Cell] = []

    def add_cell(row: str, column: str, *values: float, **about: Any) -> None:
        cells.append(Cell(item="prediction", row=row, column=column, values=values, tags=setting.tags, **about))

    diagnoses, learnt_shares = [], []
    ends = {name: replace(case, every=case.steps) for name, case in cases.items()}
    for name, results in read_seeds(setting, ends, setting.seeds).items():
        learnt = (results.measures["attention"][:, -1] >= ON).float()[results.finite]
        source, _, targets = cases[name].draw([0], 1, SAMPLE, torch.device("cpu"))
        found = diagnose(list(zip(source[0, :, :-1].numpy(), targets[0, :, :-1].numpy(), strict=True)))
        diagnoses.append(found)
        learnt_shares.append(float(learnt.mean()))
        add_cell(name, "share of seeds whose attention is learnt", *learnt.tolist(), share=True)
        add_cell(name, "gain", found.gain, exact=True)
        add_cell(name, "common", found.common, exact=True)
    gains, commons, shares = (
        np.array(each) for each in ([x.gain for x in diagnoses], [x.common for x in diagnoses], learnt_shares)
    )
    weight = choose_weight(gains, commons, shares)
    scores, own = gains - weight * commons, gains - commons  # own: the score of attnlab diagnose
    halves = {"distributions that chose the weight": CHOOSING, "distributions held back": HELD_BACK}
    for row, half in halves.items():
        if np.isfinite(value := correlate_ranks(scores[half], shares[half])):
            add_cell(row, "Spearman of score and share", value, exact=True)
    chosen, held = (describe_rank(scores[half], shares[half]) for half in halves.values())
    own_chosen, own_held = (describe_rank(own[half], shares[half]) for half in halves.values())
    between = sum(0.1 <= share <= 0.9 for share in learnt_shares)
    remarks = (
        f"{len(cases)} distributions, {between} of them learnt by 10–90 % of the seeds within {base.steps} updates. "
        f"The weight chosen on every other one is {weight:g}: {chosen} there, {held} on the rest. Attention counts as "
        f"learnt if the largest weight is on the right position for {ON:.0%} of the targets.",
        f"attnlab diagnose has the weight 1: {own_chosen} and {own_held}. "
        + describe_verdicts(np.array([each.verdict for each in diagnoses]), own, shares),
    )
    points = dict(zip(cases, zip(scores.tolist(), learnt_shares, strict=True), strict=True))
    groups = {family: [points[name] for name in names] for family, names in families.items()}
    figure = draw_scatter(groups, x=f"score, gain − {weight:g} common", y="share of seeds that learn")
    caption = "Each point is a distribution: its score from counts alone, and the share of seeds that learn to attend."
    return Findings(cells, {"prediction": (figure, caption)}, remarks)


def choose_weight(gains: np.ndarray, commons: np.ndarray, shares: np.ndarray) -> float:
    """Return the weight of common that ranks every other distribution best."""

    def rank(weight: float) -> float:
        return correlate_ranks((gains - weight * commons)[CHOOSING], shares[CHOOSING])

    return max(WEIGHTS, key=lambda weight: np.nan_to_num(rank(weight), nan=-2.0))


def correlate_ranks(scores: np.ndarray, shares: np.ndarray) -> float:
    """Return Spearman's rank correlation; nan if there is nothing to rank."""
    if len(scores) < FEWEST or np.ptp(scores) == 0 or np.ptp(shares) == 0:
        return float("nan")
    return float(spearmanr(scores, shares).statistic)


def describe_rank(scores: np.ndarray, shares: np.ndarray) -> str:
    """Return the rank correlation in words, with an interval by resampling distributions, or why there is none."""
    if not np.isfinite(rank := correlate_ranks(scores, shares)):
        return f"no Spearman (fewer than {FEWEST} distributions, or all scores or all shares are equal)"
    if len(scores) < ENOUGH:
        return f"Spearman {rank:.2f}"
    draws = np.random.default_rng(0).integers(len(scores), size=(RESAMPLES, len(scores)))
    low, high = np.nanpercentile([correlate_ranks(scores[draw], shares[draw]) for draw in draws], [2.5, 97.5])
    return f"Spearman {rank:.2f} [{low:.2f}, {high:.2f}]"


def describe_verdicts(verdicts: np.ndarray, scores: np.ndarray, shares: np.ndarray) -> str:
    """Return how many seeds learn what diagnose calls likely, uncertain and unlikely, with the rank in each group."""
    parts = []
    for verdict in dict.fromkeys(verdicts[np.argsort(-scores, kind="stable")].tolist()):
        score, share = scores[verdicts == verdict], shares[verdicts == verdict]
        rank = f", {describe_rank(score, share)}" if np.isfinite(correlate_ranks(score, share)) else ""
        parts.append(f"{verdict} {len(share)}, learnt by {share.min():.0%} to {share.max():.0%} of the seeds{rank}")
    return f"By its verdict: {'; '.join(parts)}."

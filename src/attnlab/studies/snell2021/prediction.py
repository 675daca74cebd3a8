"""Does `attnlab diagnose` foresee which distributions are learnt? Copying, from permutations to subsets and mixtures.

    k of n              n from k (permutations) to 3k/2
    two sets            of n types each, k of them in a sequence, the first set with probability p
    sets that overlap   permutations of two sets of k types, of which m are in both: from a mixture to one set

For each distribution: the score of a sample, from counts alone, and the share of seeds whose attention is on the right
position at the end of training. The weight of the score's second term, gain − w·common, is chosen on every other
distribution; the rank correlation that counts is that on the rest, with an interval by resampling distributions.
"""

from dataclasses import replace

import numpy as np
import torch
from scipy.stats import spearmanr

from attnlab.counting.diagnosis import diagnose
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.verdicts import Cell
from attnlab.report.figures import draw_scatter
from attnlab.studies.snell2021.copying import CopyExperiment, make_experiment, read_seeds

WEIGHTS = (1.0, 2.0, 0.5, 3.0, 0.0)  # the first of the best is taken
ON = 0.9  # of the targets, where attention counts as learnt
SAMPLE = 2000  # sequences that are diagnosed
FEWEST = 5  # distributions that are ranked
CHOOSING, HELD_BACK = slice(0, None, 2), slice(1, None, 2)  # every other distribution
RESAMPLES, ENOUGH = 2000, 10  # draws of distributions for the interval of a rank correlation, if there are so many

# types that a set has beyond k, as shares of k
SUBSETS = (0.0, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)
TWO_SETS = {  # and how often a sequence is of the first set
    0.0: (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98),
    0.05: (0.97, 0.98, 0.99),
    0.1: (0.5, 0.8, 0.95, 0.96, 0.97, 0.98),
    0.2: (0.5, 0.8, 0.9, 0.93, 0.97, 0.99),
    0.3: (0.5, 0.95, 0.98),
    0.5: (0.5, 0.8, 0.9, 0.95, 0.98),
}
OVERLAPS = (0.9, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)  # types in both sets, as shares of k


def list_distributions(base: CopyExperiment) -> dict[str, dict[str, CopyExperiment]]:
    """By family and name; their number grows with the length."""
    k = base.length
    found: dict[str, dict[str, CopyExperiment]] = {"k of n": {}, "two sets": {}, "sets that overlap": {}}
    for beyond in SUBSETS:
        n = _count_types(k, beyond)
        found["k of n"][f"{k} of {n}"] = replace(base, data="subset", types=n)
    for beyond, often in TWO_SETS.items():
        n = _count_types(k, beyond)
        kind = f"{k} of {n}" if beyond else "permutations"
        for p in often:
            found["two sets"][f"{kind} of two sets, {p}"] = replace(base, data="mixture", types=n, mix=p)
    for overlap in OVERLAPS:
        m = max(1, round(k * overlap))
        case = replace(base, data="mixture", types=k, shared=m)
        found["sets that overlap"][f"permutations of two sets, {m} types in both"] = case
    return found


def _count_types(k: int, beyond: float) -> int:
    """k and a share of it, at least one more where the share is not 0."""
    return k + (max(1, round(k * beyond)) if beyond else 0)


def prediction(setting: Setting) -> Findings:
    """Score against what the seeds did."""
    base = make_experiment(setting)
    families = list_distributions(base)
    if setting.scale == "smoke":  # both ends of each
        families = {name: dict([*family.items()][:: len(family) - 1]) for name, family in families.items()}
    cases = {name: case for family in families.values() for name, case in family.items()}
    tags = () if setting.scale == "full" else ("smaller scale",)
    gains, commons, shares, verdicts, cells = [], [], [], [], []
    ends = {name: replace(case, every=case.steps) for name, case in cases.items()}
    for name, grown in read_seeds(setting, ends, setting.seeds).items():
        learnt = (grown.measures["attention"][:, -1] >= ON).float()[grown.finite]
        source, _, targets = cases[name].draw([0], 1, SAMPLE, torch.device("cpu"))
        found = diagnose(list(zip(source[0, :, :-1].numpy(), targets[0, :, :-1].numpy(), strict=True)))
        gains.append(found.gain)
        commons.append(found.common)
        verdicts.append(found.verdict)
        shares.append(float(learnt.mean()))
        share = "share of seeds whose attention is learnt"
        each = tuple(learnt.tolist())
        cells.append(Cell(item="prediction", row=name, column=share, values=each, share=True, tags=tags))
        for column, value in (("gain", found.gain), ("common", found.common)):
            cells.append(Cell(item="prediction", row=name, column=column, values=(value,), exact=True, tags=tags))
    weight = choose_weight(np.array(gains), np.array(commons), np.array(shares))
    scores, did = np.array(gains) - weight * np.array(commons), np.array(shares)
    halves = {"distributions that chose the weight": CHOOSING, "distributions held back": HELD_BACK}
    ranks = [correlate_ranks(scores[half], did[half]) for half in halves.values()]
    for row, value in zip(halves, ranks, strict=True):
        if np.isfinite(value):
            column = "Spearman of score and share"
            cells.append(Cell(item="prediction", row=row, column=column, values=(value,), exact=True, tags=tags))
    seen, held = (describe_rank(scores[half], did[half]) for half in halves.values())
    between = sum(0.1 <= share <= 0.9 for share in shares)
    remark = (
        f"{len(cases)} distributions, {between} of them learnt by 10–90 % of the seeds within {base.steps} updates; "
        f"the weight chosen on every other one is {weight:g}: {seen} there, {held} on the rest. Learnt is what "
        f"has its largest weight on the right position for {ON:.0%} of the targets."
    )
    placed = dict(zip(cases, zip(scores.tolist(), shares, strict=True), strict=True))
    drawn = {family: [placed[name] for name in named] for family, named in families.items()}
    figure = draw_scatter(drawn, x=f"score, gain − {weight:g} common", y="share of seeds that learn")
    said = "Each point is a distribution: its score from counts alone, and how many seeds learnt to attend."
    own = np.array(gains) - np.array(commons)  # the score of attnlab diagnose
    diagnosed = f"attnlab diagnose has the weight 1: {describe_rank(own[CHOOSING], did[CHOOSING])} and "
    diagnosed += f"{describe_rank(own[HELD_BACK], did[HELD_BACK])}. {describe_verdicts(np.array(verdicts), own, did)}"
    return Findings(cells, {"prediction": (figure, said)}, (remark, diagnosed))


def choose_weight(gains: np.ndarray, commons: np.ndarray, shares: np.ndarray) -> float:
    """The weight of common that ranks every other distribution best."""

    def rank(weight: float) -> float:
        return correlate_ranks((gains - weight * commons)[CHOOSING], shares[CHOOSING])

    return max(WEIGHTS, key=lambda weight: np.nan_to_num(rank(weight), nan=-2.0))


def correlate_ranks(scores: np.ndarray, shares: np.ndarray) -> float:
    """Spearman's rank correlation; nan where there is nothing to rank."""
    if len(scores) < FEWEST or np.ptp(scores) == 0 or np.ptp(shares) == 0:
        return float("nan")
    return float(spearmanr(scores, shares).statistic)


def describe_rank(scores: np.ndarray, shares: np.ndarray) -> str:
    """The rank correlation in words, with the interval that draws of the distributions give; or why there is none."""
    if not np.isfinite(found := correlate_ranks(scores, shares)):
        return f"no Spearman (fewer than {FEWEST} distributions, or all of them have one score or one share)"
    if len(scores) < ENOUGH:
        return f"Spearman {found:.2f}"
    draws = np.random.default_rng(0).integers(len(scores), size=(RESAMPLES, len(scores)))
    low, high = np.nanpercentile([correlate_ranks(scores[drawn], shares[drawn]) for drawn in draws], [2.5, 97.5])
    return f"Spearman {found:.2f} [{low:.2f}, {high:.2f}]"


def describe_verdicts(verdicts: np.ndarray, scores: np.ndarray, shares: np.ndarray) -> str:
    """How many seeds learn what diagnose calls likely, uncertain and unlikely, and how the score ranks within each."""
    parts = []
    for verdict in dict.fromkeys(verdicts[np.argsort(-scores, kind="stable")].tolist()):
        score, share = scores[verdicts == verdict], shares[verdicts == verdict]
        rank = f", {describe_rank(score, share)}" if np.isfinite(correlate_ranks(score, share)) else ""
        parts.append(f"{verdict} {len(share)}, learnt by {share.min():.0%} to {share.max():.0%} of the seeds{rank}")
    return f"By its verdict: {'; '.join(parts)}."

"""Decide links from a soft map J (S,T) of words, 0 … 1.

    argmax       each target word takes its best source word
    mutual       s and t are each other's best: J(s,t) = max of its row and of its column
    grow         mutual links; then cells J ≥ grow that touch a link (also diagonally) and link a word without one,
                 the largest first
    grow-diag-final-and   of the best of each target word and the best of each source word
    threshold    every cell with J ≥ threshold
    itermax      mutual links, then mutual links among the cells of words without a link, with those of one linked word
                 multiplied by 0.9, in up to 3 rounds (Jalili Sabet et al. 2020)
    transport    mutual links of the plan P of entropic optimal transport: P = diag(u) exp(J/ε) diag(v) with even
                 marginals (Sinkhorn), and of cells with P of at least the even share

In all of them a cell below the null threshold gets no link: a larger one trades recall for precision.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from attnlab.analysis.symmetrise import NEIGHBOURS, Link, grow_diag_final_and
from attnlab.config import Probability, check_fields

Decision = Literal["argmax", "mutual", "grow", "grow-diag-final-and", "threshold", "itermax", "transport"]
DECISIONS: tuple[Decision, ...] = get_args(Decision)
DISCOUNT, ROUNDS = 0.9, 3  # of itermax
EPSILON, SINKHORN = 0.05, 100  # of transport


@dataclass(frozen=True)
class DecisionRule:
    """How links are decided; thresholds are on the values of the soft map."""

    decide: Decision = "grow"
    null: Probability = 0.05
    grow: Probability = 0.25
    threshold: Probability = 0.2

    def __post_init__(self) -> None:
        check_fields(self)


def decide_links(joint: Tensor, sizes: Sequence[tuple[int, int]], rule: DecisionRule) -> list[dict[Link, float]]:
    """Return the links of each pair with their values, from maps (b,S,T) that are 0 beyond the words of the pair."""
    if rule.decide in ("argmax", "mutual", "threshold"):
        return _collect(joint, _mark_links(joint, rule) & (joint >= max(rule.null, 1e-12)), len(sizes))
    maps = joint.cpu().numpy()
    decide = SLOWLY[rule.decide]
    found = []
    for values, (source, target) in zip(maps, sizes, strict=True):
        own = values[:source, :target]
        links = decide(own, rule) if own.size else set()
        found.append({link: float(own[link]) for link in sorted(links) if own[link] >= max(rule.null, 1e-12)})
    return found


def _mark_links(joint: Tensor, rule: DecisionRule) -> Tensor:
    if rule.decide == "threshold":
        return joint >= rule.threshold
    best_source = torch.zeros_like(joint, dtype=torch.bool).scatter_(1, joint.argmax(1, keepdim=True), True)
    if rule.decide == "argmax":
        return best_source
    return best_source & torch.zeros_like(best_source).scatter_(2, joint.argmax(2, keepdim=True), True)


def _collect(joint: Tensor, marks: Tensor, count: int) -> list[dict[Link, float]]:
    places, values = marks.nonzero().cpu().numpy(), joint[marks].float().cpu().numpy()
    found: list[dict[Link, float]] = [{} for _ in range(count)]
    for (pair, source, target), value in zip(places.tolist(), values.tolist(), strict=True):
        found[pair][source, target] = value
    return found


def _find_mutual(values: np.ndarray) -> set[Link]:
    best_target, best_source = values.argmax(1), values.argmax(0)
    return {(s, int(t)) for s, t in enumerate(best_target) if best_source[t] == s and values[s, t] > 0}


def _grow(values: np.ndarray, rule: DecisionRule) -> set[Link]:
    links = {link for link in _find_mutual(values) if values[link] >= rule.null}
    sources, targets = {s for s, _ in links}, {t for _, t in links}
    large = sorted(((-values[s, t], int(s), int(t)) for s, t in zip(*np.nonzero(values >= rule.grow), strict=True)))
    grown = True
    while grown:
        grown = False
        for _, s, t in large:
            if (s, t) in links or (s in sources and t in targets):
                continue
            if any((s + across, t + down) in links for across, down in NEIGHBOURS):
                links.add((s, t))
                sources.add(s)
                targets.add(t)
                grown = True
    return links


def _join_directions(values: np.ndarray, rule: DecisionRule) -> set[Link]:
    ahead = {(int(s), t) for t, s in enumerate(values.argmax(0)) if values[s, t] >= rule.null}
    back = {(s, int(t)) for s, t in enumerate(values.argmax(1)) if values[s, t] >= rule.null}
    return set(grow_diag_final_and(ahead, back))


def _iterate_mutual(values: np.ndarray, rule: DecisionRule) -> set[Link]:
    links: set[Link] = set()
    for _ in range(ROUNDS):
        source, target = np.zeros(values.shape[0], bool), np.zeros(values.shape[1], bool)
        for s, t in links:
            source[s] = target[t] = True
        factor = np.where(source[:, None] & target[None], 0.0, np.where(source[:, None] | target[None], DISCOUNT, 1.0))
        more = {link for link in _find_mutual(values * factor) if values[link] >= rule.null}
        if more <= links:
            break
        links |= more
    return links


def _transport(values: np.ndarray, rule: DecisionRule) -> set[Link]:
    kernel = np.exp((values - values.max()) / EPSILON) + 1e-30
    sources, targets = values.shape
    u, v = np.ones(sources), np.ones(targets)
    for _ in range(SINKHORN):
        u = (1 / sources) / (kernel @ v)
        v = (1 / targets) / (kernel.T @ u)
    plan = u[:, None] * kernel * v[None]
    even = 1 / max(sources, targets) / 2  # half the mass of a word of the longer side
    return {link for link in _find_mutual(plan) if plan[link] >= even}


SLOWLY: dict[str, Callable[[np.ndarray, DecisionRule], set[Link]]] = {
    "grow": _grow, "grow-diag-final-and": _join_directions, "itermax": _iterate_mutual, "transport": _transport,
}  # fmt: skip

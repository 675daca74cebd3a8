"""Figures 1 and 3: which outputs convex and affine weights reach, drawn, and how much more that is.

Outputs are y = Σ_j w_j x_j of value vectors x_j. Softmax weights reach the convex hull C of the values. daGPAM's are
(1+λ⁺)p⁺ − λ⁻p⁻ with p⁺ and p⁻ any two softmaxes, so that

    reached = {(1+λ⁺) a − λ⁻ b : a, b ∈ C}        the hull of the points (1+λ⁺) x_j − λ⁻ x_k

Where λ⁺ = λ⁻ the weights sum to 1, the combinations are affine, and C is inside. Else the outputs are also stretched.
"""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy.spatial import ConvexHull, Delaunay

from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.verdicts import Cell
from attnlab.studies.heo2024.figures import draw_region

ITEM, TAGS = "convex", ("other data",)  # the values of the paper's figures are not known
PAIRS = ((0.0, 0.0), (1.0, 1.0), (1.0, 0.0), (1.0, 0.5), (1.0, 2.0))  # Figure 1: the first two; Figure 3: λ⁺ = 1
VALUES = np.array([[0.0, 0.0], [1.0, 0.1], [0.9, 0.8], [0.3, 1.0]])
SHARPNESS = 2.0  # the spread of the logits that outputs are drawn with


def convex(setting: Setting) -> Findings:
    """The item: areas, exactly, and how many outputs of random logits lie outside the convex hull."""
    draws = setting.at(smoke=200, small=1000, full=5000)
    cells, panels = [], {}
    for plus, minus in PAIRS:
        row = name_row(plus, minus)
        about: dict[str, Any] = {"item": ITEM, "row": row, "tags": TAGS}
        ratio = compute_area_ratio(VALUES, plus, minus)
        cells.append(Cell(**about, column="area reached ÷ area of the convex hull", values=(ratio,), exact=True))
        drawn = [draw_outputs(VALUES, plus, minus, draws, seed) for seed in setting.seeds]
        shares = tuple(100 * compute_share_outside(VALUES, each) for each in drawn)
        claimed: Any = 1 if minus else 0  # negative weights: some outputs are outside, says Figure 1
        cells.append(Cell(**about, column="outputs outside the convex hull (%)", values=shares, sign=claimed))
        panels[row] = find_region(VALUES, plus, minus), drawn[0][:200]
    hull = VALUES[ConvexHull(VALUES).vertices]
    figures: dict[str, tuple[Figure, str]] = {}
    says = "Outputs that weights can reach (blue), and some of random logits, given the values (diamonds)."
    for name, chosen in (("figure1", PAIRS[:2]), ("figure3", PAIRS[2:4] + PAIRS[1:2] + PAIRS[4:])):
        shown = {name_row(*pair): panels[name_row(*pair)] for pair in chosen}
        figures[name] = draw_region(VALUES, hull, shown), says
    remark = (
        "Four values in the plane. Where λ⁺ = λ⁻ the weights sum to 1 and the region holds the convex hull. Elsewhere "
        "it holds the hull stretched by the sum, 1 + λ⁺ − λ⁻: at λ⁻ = 0 most outputs are outside though no weight is "
        "negative, so the share outside does not by itself speak for signed weights."
    )
    return Findings(cells, figures, (remark,))


def name_row(plus: float, minus: float) -> str:
    return "softmax" if plus == minus == 0 else f"daGPAM, λ⁺ = {plus:g}, λ⁻ = {minus:g}"


def list_corners(values: np.ndarray, plus: float, minus: float) -> np.ndarray:
    """(1+λ⁺) x_j − λ⁻ x_k for all j and k, (n²,2)."""
    return ((1 + plus) * values[:, None] - minus * values[None]).reshape(-1, values.shape[1])


def find_region(values: np.ndarray, plus: float, minus: float) -> np.ndarray:
    """What is reached, as the corners of a convex polygon in their order."""
    points = list_corners(values, plus, minus)
    return points[ConvexHull(points).vertices]


def compute_area_ratio(values: np.ndarray, plus: float, minus: float) -> float:
    """ConvexHull.volume is the area in the plane."""
    return float(ConvexHull(list_corners(values, plus, minus)).volume / ConvexHull(values).volume)


def draw_outputs(values: np.ndarray, plus: float, minus: float, count: int, seed: int) -> np.ndarray:
    """y of so many pairs of random logits, (count,2)."""
    logits = np.random.default_rng(seed).normal(scale=SHARPNESS, size=(2, count, len(values)))
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return ((1 + plus) * weights[0] - minus * weights[1]) @ values


def compute_share_outside(values: np.ndarray, points: np.ndarray) -> float:
    """Of points (m,2), how many are outside the convex hull."""
    return float((Delaunay(values).find_simplex(points, tol=1e-9) < 0).mean())

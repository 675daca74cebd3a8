"""Figures 1 and 3: the outputs that convex and affine weights reach, and how much larger the second region is.

Outputs are y = Σ_j w_j x_j of value vectors x_j. Softmax weights reach the convex hull C of the values. daGPAM's are
(1+λ⁺)p⁺ − λ⁻p⁻ with p⁺ and p⁻ any two softmaxes, so that

    reached = {(1+λ⁺) a − λ⁻ b : a, b ∈ C}        the hull of the points (1+λ⁺) x_j − λ⁻ x_k

If λ⁺ = λ⁻, the weights sum to 1, the combinations are affine, and C is inside. Otherwise outputs are also stretched.
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
SHARPNESS = 2.0  # standard deviation of the random logits


def convex(setting: Setting) -> Findings:
    """The item: exact areas, and the share of outputs of random logits that lie outside the convex hull."""
    draws = setting.at(smoke=200, small=1000, full=5000)
    cells, panels = [], {}
    for plus, minus in PAIRS:
        row = name_row(plus, minus)
        about: dict[str, Any] = {"item": ITEM, "row": row, "tags": TAGS}
        ratio = compute_area_ratio(VALUES, plus, minus)
        cells.append(Cell(**about, column="area reached ÷ area of the convex hull", values=(ratio,), exact=True))
        drawn = [draw_outputs(VALUES, plus, minus, draws, seed) for seed in setting.seeds]
        shares = tuple(100 * compute_share_outside(VALUES, each) for each in drawn)
        claimed: Any = 1 if minus else 0  # Figure 1: with negative weights some outputs are outside
        cells.append(Cell(**about, column="outputs outside the convex hull (%)", values=shares, sign=claimed))
        panels[row] = find_region(VALUES, plus, minus), drawn[0][:200]
    hull = VALUES[ConvexHull(VALUES).vertices]
    figures: dict[str, tuple[Figure, str]] = {}
    caption = "The blue region is what weights can reach. Points are outputs of random logits, diamonds the values."
    for name, chosen in (("figure1", PAIRS[:2]), ("figure3", PAIRS[2:4] + PAIRS[1:2] + PAIRS[4:])):
        shown = {name_row(*pair): panels[name_row(*pair)] for pair in chosen}
        figures[name] = draw_region(VALUES, hull, shown), caption
    remark = (
        "Four values in the plane. If λ⁺ = λ⁻, the weights sum to 1 and the region contains the convex hull. Otherwise "
        "it contains the hull stretched by the sum, 1 + λ⁺ − λ⁻. At λ⁻ = 0 most outputs are outside although no weight "
        "is negative, so the share outside is not by itself an effect of signed weights."
    )
    return Findings(cells, figures, (remark,))


def name_row(plus: float, minus: float) -> str:
    return "softmax" if plus == minus == 0 else f"daGPAM, λ⁺ = {plus:g}, λ⁻ = {minus:g}"


def list_corners(values: np.ndarray, plus: float, minus: float) -> np.ndarray:
    """Return (1+λ⁺) x_j − λ⁻ x_k for all j and k, (n²,2)."""
    return ((1 + plus) * values[:, None] - minus * values[None]).reshape(-1, values.shape[1])


def find_region(values: np.ndarray, plus: float, minus: float) -> np.ndarray:
    """Return the reached region, as the corners of a convex polygon in order."""
    points = list_corners(values, plus, minus)
    return points[ConvexHull(points).vertices]


def compute_area_ratio(values: np.ndarray, plus: float, minus: float) -> float:
    """Return the area reached ÷ the area of the convex hull; the volume of a hull in the plane is its area."""
    return float(ConvexHull(list_corners(values, plus, minus)).volume / ConvexHull(values).volume)


def draw_outputs(values: np.ndarray, plus: float, minus: float, count: int, seed: int) -> np.ndarray:
    """Return y for `count` pairs of random logits, (count,2)."""
    logits = np.random.default_rng(seed).normal(scale=SHARPNESS, size=(2, count, len(values)))
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return ((1 + plus) * weights[0] - minus * weights[1]) @ values


def compute_share_outside(values: np.ndarray, points: np.ndarray) -> float:
    """Return the share of points (m,2) outside the convex hull."""
    return float((Delaunay(values).find_simplex(points, tol=1e-9) < 0).mean())

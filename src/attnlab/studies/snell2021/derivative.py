"""How the proxy model starts to learn: its derivative at initialisation, as d grows (Snell et al. 2021, §4.1, A.2).

The proxy (eq. 5) gives the target words of a pair the probabilities p = σ((1/L) Σ_l W e_{x_l}); W (|O|,d) and e (|I|,d)
are drawn from N(0, I/d) and follow the gradient flow of its loss (eq. 14). As d → ∞, with C the count table (eq. 16)
and C̄_i the mean of its row i, the paper states for the logits θ̂ = W e and for θ = σ(θ̂) (eq. 13)

    ∂θ̂_{i,o}/∂τ → 2 (C_{i,o} − C̄_i)          eq. 54
    ∂θ_{i,o}/∂τ → 2 (C_{i,o} − C̄_i)          eq. 15, as printed

Erratum: at τ = 0 every θ tends to 1/|O|, so the chain rule through the softmax, ∂θ_o = θ_o (∂θ̂_o − Σ θ_o' ∂θ̂_o'),
adds a factor 1/|O| to the right side of eq. 15. The item measures both derivatives, exact up to rounding, for growing
d: the relative error falls as 1/√d (eq. 48–50), and ∂θ/∂τ is 1/|O| of what is printed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.autograd.functional import jvp

from attnlab.counting.cooccurrence import count_cooccurrences
from attnlab.experiments.plan import Calculation, Workplace
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.verdicts import Cell
from attnlab.report.figures import draw_curves

INPUTS, OUTPUTS, PAIRS, LONGEST = 31, 23, 53, 11

Pair = tuple[list[int], list[int]]


@dataclass(frozen=True)
class GradientFlow:
    """∂/∂τ at τ = 0, (|I|,|O|) each."""

    logits: Tensor  # of θ̂
    probabilities: Tensor  # of θ


def draw_corpus(seed: int = 0) -> list[Pair]:
    """Draw pairs of random sentences, for which the theory holds too; the last pair has every word."""
    draw = np.random.default_rng(seed)

    def draw_sentence(words: int) -> list[int]:
        return draw.integers(words, size=draw.integers(1, LONGEST + 1)).tolist()

    pairs = [(draw_sentence(INPUTS), draw_sentence(OUTPUTS)) for _ in range(PAIRS)]
    return [*pairs, (list(range(INPUTS)), list(range(OUTPUTS)))]


def compute_flow(pairs: Sequence[Pair], e: Tensor, w: Tensor) -> GradientFlow:
    """Return how θ̂ and θ change along −∂L/∂e and −∂L/∂W, by automatic differentiation of eq. 14 and eq. 13."""
    shares, wanted = _count_words(pairs, len(e), len(w))

    def loss(e: Tensor, w: Tensor) -> Tensor:
        return -(wanted.to(e) * (shares.to(e) @ e @ w.T).log_softmax(-1)).sum()

    at = e.clone().requires_grad_(), w.clone().requires_grad_()
    down = tuple(-x for x in torch.autograd.grad(loss(*at), at))
    return GradientFlow(*jvp(lambda e, w: (e @ w.T, (e @ w.T).softmax(-1)), (e, w), down)[1])


def compute_limit(pairs: Sequence[Pair], inputs: int, outputs: int) -> Tensor:
    """Return 2 (C − C̄), (|I|,|O|)."""
    table = torch.from_numpy(count_cooccurrences(pairs, sizes=(inputs, outputs)).toarray())
    return 2.0 * (table - table.mean(-1, keepdim=True))


def compute_error(measured: Tensor, formula: Tensor) -> float:
    return float((measured - formula).norm() / formula.norm())


def fit_scale(measured: Tensor, formula: Tensor) -> float:
    """Return the c for which c · formula is nearest to the measured values: 1 if the formula holds."""
    return float((measured * formula).sum() / formula.square().sum())


def fit_slope(widths: Sequence[int], errors: Sequence[float]) -> float:
    """Return the slope of log error against log d, by least squares."""
    return float(np.polyfit(np.log(widths), np.log(errors), 1)[0])


def draw_parameters(width: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return e (|I|,d) and W (|O|,d) from N(0, I/d), float64."""
    draw = torch.Generator().manual_seed(seed * 1_000_003 + width)
    e, w = (torch.randn(n, width, generator=draw, dtype=torch.float64) for n in (INPUTS, OUTPUTS))
    return (e / math.sqrt(width)).to(device), (w / math.sqrt(width)).to(device)


def measure_derivative(widths: Sequence[int], place: Workplace, seed: int | None) -> dict[str, list[float]]:
    """Return the relative errors of both limits by width, and measured ÷ formula at the largest width."""
    pairs, device = draw_corpus(), torch.device(place.device)
    formula = compute_limit(pairs, INPUTS, OUTPUTS).to(device)
    flows = [compute_flow(pairs, *draw_parameters(width, seed or 0, device)) for width in widths]
    widest = flows[-1]
    return {
        "logit errors": [compute_error(f.logits, formula) for f in flows],
        "probability errors": [compute_error(f.probabilities, formula / OUTPUTS) for f in flows],
        "scales": [fit_scale(widest.logits, formula), fit_scale(widest.probabilities, formula),
                   fit_scale(widest.probabilities, formula / OUTPUTS)],
    }  # fmt: skip


def derivative(setting: Setting) -> Findings:
    """The item: how fast the error falls with d, and measured ÷ formula at the largest d."""
    widths = [2**k for k in setting.at(smoke=range(7, 12), small=range(7, 14), full=range(8, 17))]
    function = partial(measure_derivative, widths)
    plan = {seed: Calculation("derivative", {"widths": widths}, function, seed) for seed in setting.seeds}
    seeds = list(setting.rows.read_plan(plan).values.values())
    of_logits, of_probabilities = ([seed[name] for seed in seeds] for name in ("logit errors", "probability errors"))
    cells = _make_cells(widths, of_logits, of_probabilities, [seed["scales"] for seed in seeds])
    lines = {
        "eq. 54, logits": (widths, np.mean(of_logits, axis=0).tolist()),
        "eq. 15 with 1/|O|": (widths, np.mean(of_probabilities, axis=0).tolist()),
        "∝ 1/√d": (widths, [np.mean(of_logits, axis=0)[0] * math.sqrt(widths[0] / d) for d in widths]),
    }
    figure = draw_curves(lines, x="d", y="relative error, mean over seeds")
    figure.axes[0].set_xscale("log", base=2)
    figure.axes[0].set_yscale("log")
    caption = "The relative error of both limits falls along a line of slope −1/2 in a double logarithmic plot."
    remark = (
        f"{PAIRS + 1} random sentence pairs, {INPUTS} input and {OUTPUTS} output words; derivatives by automatic "
        f"differentiation in float64; sizes at d = {widths[-1]:,}."
    )
    return Findings(cells, {"error": (figure, caption)}, (remark,))


def _make_cells(
    widths: list[int], of_logits: list[list[float]], of_probabilities: list[list[float]], scales: list[list[float]]
) -> list[Cell]:
    logits, printed, right = "∂θ̂/∂τ, eq. 54", "∂θ/∂τ, eq. 15 as printed", "∂θ/∂τ, eq. 15 with 1/|O|"
    power, size = "error ∝ d to the power of", "measured ÷ formula"
    slip = f"the printed form lacks the factor 1/|O| of the chain rule; here 1/|O| = 1/{OUTPUTS} = {1 / OUTPUTS:.4f}"
    of_eq54, as_printed, corrected = zip(*scales, strict=True)
    given: list[tuple[str, str, float, Sequence[float], tuple[str, ...], str]] = [
        (logits, power, -0.5, [fit_slope(widths, errors) for errors in of_logits], (), "the rate of eq. 48–50"),
        (logits, size, 1.0, of_eq54, (), ""),
        (printed, size, 1.0, as_printed, ("erratum",), slip),
        (right, size, 1.0, corrected, ("erratum",), "as corrected"),
        (right, power, -0.5, [fit_slope(widths, errors) for errors in of_probabilities], ("erratum",), "as corrected"),
    ]
    return [
        Cell(item="derivative", row=row, column=column, published=published, values=tuple(values), tags=tags, note=note)
        for row, column, published, values, tags, note in given
    ]


def _count_words(pairs: Sequence[Pair], inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Return Σ_l 1[x_l = i]/L (m,|I|) and Σ_t 1[y_t = o] (m,|O|) of each pair, all that the proxy reads of it."""
    source, target = (torch.zeros(len(pairs), n, dtype=torch.float64) for n in (inputs, outputs))
    for m, (x, y) in enumerate(pairs):
        source[m] = torch.bincount(torch.tensor(x), minlength=inputs).double() / len(x)
        target[m] = torch.bincount(torch.tensor(y), minlength=outputs)
    return source, target

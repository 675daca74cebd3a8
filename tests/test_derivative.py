"""The derivative at initialisation: by finite differences, in closed form, and in the limit that the paper gives."""

import math

import pytest
import torch
from item_runs import run_item

from attnlab.studies.snell2021.derivative import (
    INPUTS,
    OUTPUTS,
    compute_error,
    compute_flow,
    compute_limit,
    derivative,
    draw_corpus,
    draw_parameters,
    fit_scale,
    fit_slope,
)

CPU = torch.device("cpu")


def slow_loss(pairs, e, w):
    """Eq. 14, word by word."""
    total = torch.zeros((), dtype=e.dtype)
    for x, y in pairs:
        p = (w @ torch.stack([e[i] for i in x]).mean(0)).softmax(0)
        for o in y:
            total = total - p[o].log()
    return total


def slow_counts(pairs):
    """Eq. 16, triple by triple."""
    table = torch.zeros(INPUTS, OUTPUTS, dtype=torch.float64)
    for x, y in pairs:
        for i in x:
            for o in y:
                table[i, o] += 1 / len(x)
    return table


def test_the_flow_is_what_one_small_step_does():
    pairs, (e, w) = draw_corpus(1)[:7], draw_parameters(13, 0, CPU)
    at = [x.clone().requires_grad_() for x in (e, w)]
    down = [-x for x in torch.autograd.grad(slow_loss(pairs, *at), at)]
    found, h = compute_flow(pairs, e, w), 1e-5
    after, before = ([x + s * h * g for x, g in zip((e, w), down, strict=True)] for s in (1, -1))
    for ours, value in (
        (found.logits, lambda e, w: e @ w.T),
        (found.probabilities, lambda e, w: (e @ w.T).softmax(-1)),
    ):
        torch.testing.assert_close(ours, (value(*after) - value(*before)) / (2 * h), rtol=1e-6, atol=1e-7)


def test_the_flow_in_closed_form():
    """With D = C − Σ_m n_m T_m p_m / L_m, eq. 45 says ė = D W and Ẇ = Dᵀ e, so that θ̂ changes by D W Wᵀ + e eᵀ D."""
    pairs, (e, w) = draw_corpus(), draw_parameters(17, 3, CPU)
    d = slow_counts(pairs)
    for x, y in pairs:
        p = (e[x].mean(0) @ w.T).softmax(-1)
        for i in x:
            d[i] -= len(y) * p / len(x)
    torch.testing.assert_close(compute_flow(pairs, e, w).logits, d @ w @ w.T + e @ e.T @ d)


def test_the_limit_is_of_the_count_table():
    pairs = draw_corpus()
    table = slow_counts(pairs)
    torch.testing.assert_close(compute_limit(pairs, INPUTS, OUTPUTS), 2 * (table - table.mean(1, keepdim=True)))


@pytest.mark.parametrize("seed", [0, 1])
def test_the_error_falls_as_one_over_the_root_of_d(seed):
    pairs, widths = draw_corpus(), [2**k for k in range(7, 13)]
    formula = compute_limit(pairs, INPUTS, OUTPUTS)
    flows = [compute_flow(pairs, *draw_parameters(width, seed, CPU)) for width in widths]
    assert -0.56 < fit_slope(widths, [compute_error(f.logits, formula) for f in flows]) < -0.44
    assert -0.56 < fit_slope(widths, [compute_error(f.probabilities, formula / OUTPUTS) for f in flows]) < -0.44


def test_equation_15_is_too_large_by_the_number_of_output_words():
    pairs = draw_corpus()
    printed, found = compute_limit(pairs, INPUTS, OUTPUTS), compute_flow(pairs, *draw_parameters(2**13, 0, CPU))
    assert fit_scale(found.logits, printed) == pytest.approx(1.0, abs=0.02)
    assert fit_scale(found.probabilities, printed) == pytest.approx(1 / OUTPUTS, rel=0.02)
    assert (
        compute_error(found.probabilities, printed / OUTPUTS) < 0.1 < 0.9 < compute_error(found.probabilities, printed)
    )


def test_slope_and_scale_by_hand():
    assert fit_slope([4, 16, 64], [8.0, 4.0, 2.0]) == pytest.approx(-0.5)
    assert fit_scale(torch.tensor([2.0, 4.0, 1.0]), torch.tensor([1.0, 2.0, 0.0])) == 2.0
    e, w = draw_parameters(10_007, 5, CPU)
    assert e.shape == (INPUTS, 10_007)
    assert float(w.square().sum(-1).mean()) == pytest.approx(1.0, abs=4 * math.sqrt(2 / 10_007 / OUTPUTS))


def test_the_item_names_the_erratum(tmp_path):
    findings = run_item(derivative, tmp_path, seeds=(0, 1, 2))
    cells = {(cell.row, cell.column): cell for cell in findings.cells}
    (printed,) = [cell for (row, _), cell in cells.items() if row.endswith("as printed")]
    assert printed.verdict == "different"
    assert printed.tags == ("erratum",)
    assert "1/|O|" in printed.note
    assert {cell.verdict for cell in cells.values() if cell != printed} <= {"reproduced", "open"}
    assert [cell.verdict for (_, column), cell in cells.items() if "÷" in column].count("reproduced") == 2
    figure, says = findings.figures["error"]
    assert figure.axes[0].get_xscale() == figure.axes[0].get_yscale() == "log"
    assert "slope" in says

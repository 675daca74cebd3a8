"""Gradients: Jacobians against finite differences and autograd, the lemmas where they hold and where they do not."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from properties import given, settings, st
from small_models import CLASSIFIER, LM, TRANSLATOR, made

import attnlab
from attnlab.analysis.gradient import (
    Jacobians,
    dual_jacobian,
    history,
    jacobians,
    largest_jacobian_size,
    lemma3,
    residual_bound,
    smallest_gamma,
    softmax_jacobian,
    softmax_jacobian_size,
)
from attnlab.analysis.rank import composite_norm, residual
from attnlab.mechanisms import attention
from attnlab.models.presets import SETTINGS, build
from attnlab.recording.gradients import batch_gradient_norms, gradient_norms, projections
from attnlab.training.objective import Objective
from attnlab.training.step import Eager, Flat

TOKENS = torch.tensor([[3, 4, 5, 6, 0], [7, 8, 9, 10, 11], [4, 0, 0, 0, 0]])
NEXT = torch.tensor([[4, 5, 6, 2, 0], [8, 9, 10, 11, 2], [2, 0, 0, 0, 0]])


def differences(function, a, step=1e-6):
    """∂f_j/∂a_k by central differences, (n,n)."""
    columns = [(function(a + step * e) - function(a - step * e)) / (2 * step) for e in torch.eye(len(a)).double()]
    return torch.stack(columns, dim=-1)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), n=st.integers(2, 7), plus=st.floats(0, 3), minus=st.floats(0, 3))
def test_jacobians_are_finite_differences(seed, n, plus, minus):
    torch.manual_seed(seed)
    a = 2 * torch.randn(n, dtype=torch.float64)
    p = a.softmax(-1)
    torch.testing.assert_close(softmax_jacobian(p), differences(lambda x: x.softmax(-1), a), atol=1e-8, rtol=1e-6)
    torch.testing.assert_close(softmax_jacobian_size(p), softmax_jacobian(p).abs().sum())
    made = dual_jacobian(a, plus, minus)
    dual = differences(lambda x: (1 + plus) * x.softmax(-1) - minus * (-x).softmax(-1), a)
    torch.testing.assert_close(made, dual, atol=1e-8, rtol=1e-6)
    sizes = (1 + plus) * softmax_jacobian_size(p) + minus * softmax_jacobian_size((-a).softmax(-1))
    torch.testing.assert_close(made.abs().sum(), sizes)  # the branches never cancel


def test_it_is_the_mechanisms_jacobian_where_its_branches_are_opposite():
    """ReLU is the identity on positive queries, and W⁻ = −1; with one query feature a logit is a key."""
    dagpam = attention("dagpam", heads=1, head_dim=5, initial=(0.7, 0.4), tied=False, negative_init="minus-identity")
    dagpam, logits = dagpam.double(), torch.randn(5, dtype=torch.float64)

    def weights(a):  # the first query feature is 1: keys (5,5) have the logits there
        q, k = torch.zeros(1, 1, 1, 5).double(), torch.zeros(1, 1, 5, 5).double()
        q[..., 0], k = 1.0, k.index_put((*torch.zeros(3, 5).long()[:2], torch.arange(5), torch.zeros(5).long()), a)
        return dagpam.weights(q, k / dagpam.scale)[0][0, 0, 0]

    made = torch.autograd.functional.jacobian(weights, logits)
    torch.testing.assert_close(made, dual_jacobian(logits, 0.7, 0.4))
    saturated = torch.tensor([200.0, 0.3, 0.1, 0.2, 0.0]).double()
    assert softmax_jacobian_size(saturated.softmax(-1)) < 1e-12
    assert dual_jacobian(saturated, 1.0, 1.0).abs().sum() > 0.9 * largest_jacobian_size(4)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), n=st.integers(2, 9), sharp=st.floats(0.01, 20))
def test_lemma3_holds_for_the_sum_of_absolute_values(seed, n, sharp):
    torch.manual_seed(seed)
    p = (sharp * torch.randn(n, dtype=torch.float64)).softmax(-1)
    assert softmax_jacobian_size(p) <= largest_jacobian_size(n) + 1e-12


def test_lemma3_does_not_hold_for_other_norms():
    table = lemma3((2, 3, 4, 8)).set_index(["n", "at"])
    for n in (3, 4, 8):
        uniform, tie, sharp = (table.loc[(n, at)] for at in ("uniform", "tie of two", "0.99 on one"))
        assert uniform["sum_of_absolute"] == pytest.approx(2 * (1 - 1 / n))
        assert uniform["sum_of_absolute"] > tie["sum_of_absolute"] > sharp["sum_of_absolute"]
        for norm in ("frobenius", "spectral"):
            assert tie[norm] == pytest.approx(0.5)
            assert uniform[norm] < tie[norm]
    np.testing.assert_allclose(table.xs("uniform", level="at")["frobenius"], [0.5, 0.471, 0.433, 0.331], atol=5e-4)
    with pytest.raises(ValueError, match="at least 2"):
        lemma3([1])


def test_the_table_of_jacobians():
    record = attnlab.record(made(LM), TOKENS)
    ours = jacobians(record).set_index(["layer", "head"])
    for layer in record.layers:
        for head in range(3):
            sizes, largest = [], []
            for example, length in enumerate((4, 5, 1)):
                rows = [layer.weights[example, head, i, : i + 1] for i in range(length)]
                sizes.append(np.mean([float(softmax_jacobian(row).abs().sum()) for row in rows]))
                largest.append(np.mean([2 * (1 - 1 / len(row)) for row in rows]))
            found = ours.loc[(layer.index, head)]
            assert found["jacobian_size"] == pytest.approx(np.mean(sizes))
            assert found["largest_size"] == pytest.approx(np.mean(largest))
            assert found["share_of_largest"] == pytest.approx(np.mean(sizes) / np.mean(largest))
    parts = Jacobians(), Jacobians()
    for part, some in zip(parts, (record[:1], record[1:]), strict=True):
        part.add(some)
    parts[0].merge(parts[1].tensors())
    pd.testing.assert_frame_equal(parts[0].table(), jacobians(record))
    for name in ("dagpam", "sparsemax", "uniform"):
        with pytest.raises(ValueError, match=f"those of {name} are not"):
            jacobians(attnlab.record(made(LM, name), TOKENS))


# --- gradients of projections ---


@pytest.mark.parametrize(("config", "groups"), [(LM, 3), (LM, 1), (TRANSLATOR, 3)], ids=["lm", "grouped", "translator"])
def test_norms_are_those_of_the_gradients(config, groups):
    model = made(config, key_value_heads=groups)
    batch = (TOKENS, TOKENS) if config is TRANSLATOR else TOKENS
    want = batch_gradient_norms(model, batch, NEXT)
    assert all(p.grad is None for p in model.parameters())
    logits = model(*batch) if config is TRANSLATOR else model(batch)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), NEXT.flatten(), ignore_index=0).backward()
    found = gradient_norms(model)
    pd.testing.assert_frame_equal(pd.DataFrame(found), pd.DataFrame(want))
    assert len(found) == (6 if config is TRANSLATOR else 2) * 4
    row = next(r for r in found if (r["kind"], r["layer"], r["projection"]) == ("decoder-self", 1, "key"))
    assert row["norm"] == pytest.approx(float(model.decoder.blocks[1].attention.key.weight.grad.norm()))
    table = history({30: found, 10: want})
    assert table["step"].tolist() == [10] * len(want) + [30] * len(found)


def test_norms_of_a_training_step():
    model = made(LM).float()
    want = batch_gradient_norms(model, TOKENS, NEXT)
    flat = Flat(model, torch.float32)
    stepper = Eager(Objective(model), flat, torch.optim.Adam([flat.master], fused=True), clip=0.0)
    stepper.accumulate([TOKENS], NEXT, 1 / 10)
    with pytest.raises(ValueError, match="backward"):
        gradient_norms(model)
    found = gradient_norms(model, flat.views(flat.grad))
    pd.testing.assert_frame_equal(pd.DataFrame(found), pd.DataFrame(want), rtol=1e-4)


def test_norms_of_a_classifier_and_where_no_gradient_arrives():
    assert len(batch_gradient_norms(made(CLASSIFIER), TOKENS, torch.tensor([1, 4, 0]))) == 8
    model = made(LM, "uniform")  # which reads no query and no key
    found = batch_gradient_norms(model, TOKENS, NEXT)
    model(TOKENS).sum().backward()
    for rows in (found, gradient_norms(model)):
        for row in rows:
            assert (row["norm"] == 0.0) == (row["projection"] in ("query", "key"))


def test_what_is_refused():
    with pytest.raises(ValueError, match="targets must"):
        batch_gradient_norms(made(LM), TOKENS, NEXT[:, :2])
    lstm = build(replace(SETTINGS["translation"], vocabulary=23, width=6, embedding_width=7))
    with pytest.raises(ValueError, match="LSTMTranslator"):
        batch_gradient_norms(lstm, (TOKENS, TOKENS), NEXT)


# --- residual bounds ---


@pytest.mark.parametrize("groups", [3, 1])
def test_the_smallest_gamma_makes_lemma1_an_equality_for_one_sentence(groups):
    model = made(CLASSIFIER, key_value_heads=groups)
    record, weights = attnlab.record(model, TOKENS), projections(model)
    table = smallest_gamma(record, weights).set_index(["layer", "head"])
    for layer in record.layers:
        query, key, value = (weights[layer.name][name] for name in ("query", "key", "value"))
        bias = model.get_submodule(layer.name).value.bias.view(groups, 1, 4).repeat_interleave(3 // groups, 0)
        torch.testing.assert_close(layer.inputs[:, None] @ value + bias, layer.values)
        for head in range(3):
            qk = float((query[head] @ key[head].T).abs().sum(0).max())
            found, closest = table.loc[(layer.index, head)], np.inf
            for example, length in enumerate((4, 5)):
                x, y = layer.inputs[example, :length], layer.context[example, head, :length]
                size = float(composite_norm(residual(x)))
                bound = residual_bound(found["gamma"], qk, float(composite_norm(value[head])), size, 4)
                assert bound >= float(composite_norm(residual(y))) * (1 - 1e-9)
                closest = min(closest, bound / float(composite_norm(residual(y))))
            assert closest == pytest.approx(1.0)
            assert found["region_below"] == pytest.approx(2 / (32**0.5 * qk * float(composite_norm(value[head]))))


def test_a_larger_bound_is_no_larger_residual():
    """Both branches alike and λ⁺ = 0, λ⁻ = 1: nothing is left of the output, under a bound twice as large."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 7, 5, dtype=torch.float64)
    dagpam = attention("dagpam", heads=1, head_dim=5, initial=(0.0, 1.0), tied=False, fixed=True).double()
    dagpam.negative.data[0] = torch.eye(5)
    output = dagpam(q.abs(), k, v)[0][0, 0].detach()
    one, two = (residual_bound(0.3, (1.0 + 0.0) * 2.0 + minus * 2.0, 3.0, 4.0, 5) for minus in (0.0, 1.0))
    assert one == pytest.approx(4 * 2**0.5 * 0.3 / 5**0.5 * 2 * 3 * 64)
    assert two == pytest.approx(2 * one)
    assert float(composite_norm(residual(output))) < 1e-12


def test_gamma_needs_the_projections_and_a_self_attention():
    model = made(TRANSLATOR)
    record = attnlab.record(model, (TOKENS, TOKENS))
    assert set(smallest_gamma(record, projections(model))["kind"]) == {"encoder-self", "decoder-self"}
    with pytest.raises(ValueError, match=r"no entry for encoder\.blocks\.0\.attention"):
        smallest_gamma(record, {})


@pytest.mark.parametrize(("name", "message"), [("differential-v2", "6 query heads"), ("resformer", "x W_V")])
def test_projections_that_are_not_those_of_the_heads_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        projections(made(LM, name))

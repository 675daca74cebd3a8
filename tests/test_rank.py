"""Rank collapse: norms by hand, laws of the residual, tables against slow loops; what depth does to states."""

import numpy as np
import pandas as pd
import pytest
import torch
from properties import given, settings, st
from representatives import every_kind
from small_models import CLASSIFIER, LM, TRANSLATOR, made
from tiny_models import bert, marian, padded_batch

import attnlab
from attnlab.analysis.rank import (
    Rank,
    collapse,
    composite_norm,
    compute_ranks,
    mean_cosine,
    rank,
    relative_residual,
    residual,
    weight_ranks,
)
from attnlab.models.transformer import TransformerConfig, build
from attnlab.recording.depth import record_states, strip_model
from attnlab.records.record import KINDS

TOKENS = torch.tensor([[3, 4, 5, 6, 0], [7, 8, 9, 10, 11], [4, 0, 0, 0, 0]])
MASK = TOKENS != 0


def test_numbers_by_hand():
    x = torch.tensor([[1.0, -2.0], [3.0, 4.0], [5.0, 4.0]])  # columns 9 and 10, rows 3, 7 and 9
    assert float(composite_norm(x)) == pytest.approx((10 * 9) ** 0.5)
    assert residual(x).tolist() == [[-2.0, -4.0], [0.0, 2.0], [2.0, 2.0]]
    assert residual(x, centre="median").tolist() == [[-2.0, -6.0], [0.0, 0.0], [2.0, 0.0]]
    assert float(relative_residual(x)) == pytest.approx((8 * 6 / 90) ** 0.5)
    assert float(relative_residual(x, centre="median")) == pytest.approx((6 * 8 / 90) ** 0.5)
    y = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])
    assert float(mean_cosine(y)) == pytest.approx(1 / 3)
    assert float(compute_ranks(torch.diag(torch.tensor([2.0, 1.0, 0.0])))[0]) == pytest.approx(1.25)
    assert float(compute_ranks(torch.diag(torch.tensor([2.0, 2.0, 0.0])))[1]) == pytest.approx(2.0)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), n=st.integers(2, 9), e=st.integers(1, 7))
def test_laws(seed, n, e):
    torch.manual_seed(seed)
    x = torch.randn(n, e, dtype=torch.float64)
    shift, columns = 5 * torch.randn(e, dtype=torch.float64), lambda y: y.abs().sum(-2).amax(-1)
    for centre in ("mean", "median"):
        torch.testing.assert_close(residual(x + shift, centre=centre), residual(x, centre=centre))
        torch.testing.assert_close(relative_residual(7.0 * x, centre=centre), relative_residual(x, centre=centre))
        assert relative_residual(shift.expand(n, e), centre=centre) < 1e-12
    others = 0.3 * torch.randn(50, 1, e, dtype=torch.float64)
    least = residual(x, centre="median")
    assert bool((columns(least - others) >= columns(least) - 1e-12).all())  # the median makes ‖·‖₁ least
    frobenius = residual(x) - others
    assert bool((frobenius.norm(dim=(-2, -1)) >= residual(x).norm() - 1e-12).all())  # and the mean this
    torch.testing.assert_close(mean_cosine(shift.expand(n, e)), torch.tensor(1.0, dtype=torch.float64))
    normed = torch.nn.functional.normalize(x, dim=-1)
    pairs = (normed @ normed.T)[~torch.eye(n, dtype=torch.bool)]
    torch.testing.assert_close(mean_cosine(x), pairs.mean())


@pytest.mark.parametrize("scale", [1e-7, 1e-20, 1e-160, 1e-300, 1e200])
def test_what_is_relative_does_not_depend_on_the_scale(scale):
    x = torch.randn(2, 5, 7, dtype=torch.float64)
    whole, tiny = collapse([x]), collapse([scale * x])
    for name in ("relative_residual_mean", "relative_residual_median", "cosine"):
        assert float(tiny[name][0]) == pytest.approx(float(whole[name][0]), rel=1e-9)


def test_a_token_that_is_zero_has_no_cosine_and_states_that_are_have_nothing():
    x = torch.randn(1, 5, 7, dtype=torch.float64)
    with_zero = torch.cat([x, torch.zeros(1, 1, 7, dtype=torch.float64)], dim=1)
    assert float(mean_cosine(with_zero)) == pytest.approx(float(mean_cosine(x)))
    assert float(collapse([with_zero])["residual_mean"][0]) == pytest.approx(float(composite_norm(residual(with_zero))))
    assert collapse([x, 0 * x]).iloc[1, 1:].isna().all()
    two = collapse([torch.cat([x, 0 * x])])  # and what has vanished does not stand for what has not
    pd.testing.assert_frame_equal(two, collapse([x]))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), i=st.integers(1, 7), j=st.integers(1, 7))
def test_ranks_of_matrices(seed, i, j):
    torch.manual_seed(seed)
    matrix = torch.randn(3, i, j, dtype=torch.float64)
    sigma = np.linalg.svd(matrix.numpy(), compute_uv=False)
    share = sigma / sigma.sum(-1, keepdims=True)
    stable, effective = compute_ranks(matrix)
    np.testing.assert_allclose(stable, (sigma**2).sum(-1) / sigma[:, 0] ** 2)
    np.testing.assert_allclose(effective, np.exp(-(share * np.log(share)).sum(-1)))
    same = torch.rand(1, j, dtype=torch.float64).expand(i, j) + 0.1
    assert [float(x) for x in compute_ranks(same)] == pytest.approx([1.0, 1.0], abs=1e-6)
    assert [float(x) for x in compute_ranks(0 * same)] == [0.0, 0.0]


def slow(x, mask):
    """The columns of states (b,n,e), over examples of two tokens or more."""
    rows = []
    for example, kept in zip(x.double(), mask, strict=True):
        y = example[kept]
        if len(y) > 1:
            unit, row = y / y.norm(dim=-1, keepdim=True), {}
            for centre, middle in (("mean", y.mean(0)), ("median", torch.from_numpy(np.median(y, axis=0)))):
                row[f"residual_{centre}"] = float(composite_norm(y - middle))
                row[f"relative_residual_{centre}"] = float(composite_norm(y - middle) / composite_norm(y))
            rows.append(row | {"cosine": float((unit @ unit.T)[~torch.eye(len(y), dtype=torch.bool)].mean())})
    return pd.DataFrame(rows).mean()


@pytest.mark.parametrize("make", [bert, marian], ids=lambda make: make.__name__)
def test_the_table_is_that_of_single_sentences(make):
    model = make()
    record = attnlab.record(model, padded_batch(model))
    ours = rank(record).set_index(["kind", "layer", "of"])
    for layer in record.layers:
        mask = record.masks[KINDS[layer.kind][0]]
        for of, x in {"state": layer.around["residual"], "inputs": layer.inputs, "outputs": layer.outputs}.items():
            want = slow(x, mask)
            np.testing.assert_allclose(
                ours.loc[(layer.kind, layer.index, of), want.index].astype(float), want, rtol=1e-4
            )


def test_ranks_of_weights_are_those_without_padding():
    model = made(CLASSIFIER)
    record = attnlab.record(model, TOKENS)
    ours = weight_ranks(record).set_index(["layer", "head"])
    assert ours["tokens"].unique() == pytest.approx([4.5])  # the third sentence has one token
    for layer in record.layers:
        for head in range(3):
            parts = [layer.weights[0, head, :4, :4], layer.weights[1, head]]
            means = torch.stack([torch.stack(compute_ranks(part)) for part in parts]).mean(0)
            measured = ours.loc[(layer.index, head), ["stable_rank", "effective_rank"]]
            assert measured.tolist() == pytest.approx(means.tolist())


def test_a_corpus_may_be_cut_anywhere_and_joined():
    record = attnlab.record(made(TRANSLATOR), (TOKENS, TOKENS[:, :3]))
    whole, first, second = Rank(), Rank(), Rank()
    whole.add(record)
    first.add(record[:1])
    second.add(record[1:])
    first.merge(second.tensors())
    pd.testing.assert_frame_equal(first.states(), whole.states())
    pd.testing.assert_frame_equal(first.weights(), whole.weights())


# --- depth ---


@every_kind
def test_the_last_state_is_what_the_readout_reads(name):
    model = made(TRANSLATOR, name, final_norm=False)
    encoder, decoder = record_states(model, (TOKENS, TOKENS[:, :3]))
    assert (encoder.kind, decoder.kind) == ("encoder-self", "decoder-self")
    assert encoder.states.shape == (3, 3, 5, 12)
    assert torch.equal(encoder.mask, MASK)
    torch.testing.assert_close(decoder.states[-1], model.hidden(TOKENS, TOKENS[:, :3]))


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("name", ["softmax", "coda", "dagpam"])
def test_stripped_of_nothing_is_the_model_itself(name, norm):
    model = made(TRANSLATOR, name, norm=norm)
    same = strip_model(model, skip=True, feed_forward=True, norm=True)
    batch = (TOKENS, TOKENS[:, :3])
    assert torch.equal(same(*batch), model(*batch))
    assert same.encoder.blocks[0].attention.query.weight is model.encoder.blocks[0].attention.query.weight
    before = model(*batch)
    assert not torch.allclose(strip_model(model)(*batch), before)
    assert torch.equal(model(*batch), before)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("feed_forward", [False, True])
def test_stripped_models_are_the_equations(skip, feed_forward):
    model = made(LM, "realformer")
    bare = strip_model(model, skip=skip, feed_forward=feed_forward)
    (found,) = record_states(bare, TOKENS)
    assert torch.equal(bare.hidden(TOKENS), found.states[-1])  # no last norm either
    x, carry = model.decoder.embedding(TOKENS), None
    torch.testing.assert_close(found.states[0], x)
    for block, state in zip(model.decoder.blocks, found.states[1:], strict=True):
        y, carry = block.attention(x, None, None, carry, causal=True)
        x = skip * x + y
        if feed_forward:
            x = skip * x + block.feed_forward(x)
        torch.testing.assert_close(state, x)


def test_pure_attention_collapses_at_initialisation_and_a_skip_prevents_it():
    """Dong et al. 2021: without skip the residual falls by a larger factor in every layer."""
    config = TransformerConfig(model="classifier", vocabulary=97, layers=3, width=32, heads=2, feed_forward=64)
    model, tokens, left = build(config).double().eval(), torch.randint(1, 97, (3, 31)), {}
    for skip in (False, True):
        (found,) = record_states(strip_model(model, skip=skip), tokens)
        left[skip] = collapse(found.states, found.mask)
    assert list(left[False]["layer"]) == [0, 1, 2, 3]
    np.testing.assert_allclose(left[False].iloc[0], left[True].iloc[0])
    pure, kept = (left[skip]["relative_residual_mean"].to_numpy() for skip in (False, True))
    fall = pure[1:] / pure[:-1]
    assert 1 > fall[0] > 5 * fall[1] > 25 * fall[2]
    assert kept[-1] > 0.3 > 1e-5 > pure[-1]
    assert left[False]["cosine"].iloc[-1] > 0.999 > left[True]["cosine"].iloc[-1]


def test_of_one_token_alone_nothing_is_told():
    found = rank(attnlab.record(made(LM), torch.tensor([[3]])))
    assert len(found)
    assert found[["residual_mean", "relative_residual_median", "cosine"]].isna().to_numpy().all()


def test_what_is_refused():
    x = torch.randn(2, 3, 5)
    with pytest.raises(ValueError, match=r"centre .* 'mode'"):
        residual(x, centre="mode")
    with pytest.raises(ValueError, match=r"mask must be bool \(2, 3\)"):
        mean_cosine(x, torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="two tokens"):
        collapse([x], torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="after layer 0"):
        collapse([x[0]])
    with pytest.raises(TypeError, match="Record"):
        rank(x)
    with pytest.raises(ValueError, match="in training mode"):
        record_states(made(LM).train(), TOKENS)

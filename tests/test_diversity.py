"""Diversity of heads: against scipy and slow transcriptions, whatever the mask, the sign and the cut of the corpus."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from properties import given, settings, st
from representatives import every_kind
from scipy.spatial.distance import jensenshannon
from small_models import LM, TRANSLATOR, made
from tiny_models import bert, gpt2, marian, padded_batch

import attnlab
from attnlab.analysis import diversity as module
from attnlab.analysis.categories import Categories
from attnlab.analysis.diversity import Diversity, diversity, heads, jsd, pair_entropy
from attnlab.analysis.statistics import Statistics
from attnlab.records.record import KINDS

PAIRS = ["kind", "layer", "head_a", "head_b"]


def by_scipy(weights, mask=None):
    """Σ over counted queries of scipy's JSD of each row and its signs, the mean over examples; (h,h)."""
    b, h, i, j = weights.shape
    w, found = weights.double().numpy(), np.zeros((h, h))
    seen = np.ones((b, 1, i, j), bool) if mask is None else np.broadcast_to(mask.numpy(), (b, 1, i, j))
    for e, a, c, q in np.ndindex(b, h, h, i):
        if seen[e, 0, q].any():
            first, second = (w[e, head, q] * seen[e, 0, q] for head in (a, c))
            rows = [np.concatenate([row.clip(0), (-row).clip(0)]) for row in (first, second)]
            found[a, c] += jensenshannon(*rows) ** 2 / b
    return np.nan_to_num(found)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(2, 7)),
    signed=st.booleans(),
    mask=st.sampled_from([None, "keys", "queries", "causal", "full"]),
)
def test_jsd_is_scipys(seed, shape, signed, mask):
    torch.manual_seed(seed)
    b, _, i, j = shape
    weights = torch.randn(shape, dtype=torch.float64)
    weights = weights if signed else weights.softmax(-1)
    seen = {
        None: None,
        "keys": torch.rand(b, 1, 1, j) < 0.7,
        "queries": torch.rand(b, 1, i, 1) < 0.7,
        "causal": torch.ones(i, j, dtype=torch.bool).tril(),
        "full": torch.rand(b, 1, i, j) < 0.5,
    }[mask]
    np.testing.assert_allclose(jsd(weights, seen), by_scipy(weights, seen), atol=1e-7)


def test_a_number_by_hand():
    """Two heads on different keys for one query, and equal ones for another: ln 2 in all."""
    weights = torch.tensor([[[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]]])
    torch.testing.assert_close(jsd(weights)[0, 1], torch.tensor(math.log(2), dtype=torch.float64))
    opposite = torch.tensor([[[[2.0, -1.0]], [[2.0, 1.0]]]])  # ⅔ of the mass is the same outcome, ⅓ is not
    torch.testing.assert_close(jsd(opposite)[0, 1], torch.tensor(math.log(2) / 3, dtype=torch.float64))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), sharp=st.floats(0.0, 40.0))
def test_laws_of_a_divergence(seed, sharp):
    torch.manual_seed(seed)
    weights = (sharp * torch.randn(2, 3, 5, 7)).softmax(-1)
    weights[:, 2] = weights[:, 0]
    found = jsd(weights)
    assert torch.equal(found, found.T)
    assert torch.equal(found.diagonal(), torch.zeros(3, dtype=torch.float64))
    assert found[0, 2] == 0.0  # equal heads, exactly
    assert found.max() <= 5 * math.log(2) + 1e-6
    torch.testing.assert_close(jsd(weights[..., torch.randperm(7)]), found, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(jsd(3.0 * weights), found, atol=1e-5, rtol=1e-5)  # only proportions count


def test_it_is_made_in_pieces_of_any_size(monkeypatch):
    weights = torch.randn(2, 3, 11, 7).softmax(-1)
    whole = pair_entropy(weights)
    for size in (1, 50, 100):
        monkeypatch.setitem(module.AT_ONCE, "cpu", size)
        torch.testing.assert_close(pair_entropy(weights), whole, atol=1e-6, rtol=1e-6)


def test_what_does_not_fit_is_refused():
    weights = torch.rand(2, 3, 5, 7)
    with pytest.raises(TypeError, match=r"ndarray; use torch\.as_tensor"):
        jsd(weights.numpy())
    with pytest.raises(ValueError, match=r"got torch.float32 \(3, 5, 7\)"):
        jsd(weights[0])
    with pytest.raises(ValueError, match=r"\(2, 1, 5, 7\), got torch.bool \(2, 7\)"):
        jsd(weights, torch.ones(2, 7, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"got torch.float32"):
        jsd(weights, torch.ones(2, 1, 5, 7))
    with pytest.raises(ValueError, match="impl must be"):
        jsd(weights, impl="triton")
    with pytest.raises(ValueError, match=r"cover torch.float64"):
        jsd(weights.double(), impl="fused")
    with pytest.raises(TypeError, match=r"diversity .* got a Tensor"):
        diversity(weights)
    with pytest.raises(ValueError, match="no record"):
        Diversity().pairs()


# --- the tables ---


@pytest.fixture(scope="module", params=[bert, gpt2, marian], ids=lambda make: make.__name__)
def record(request):
    torch.manual_seed(0)
    model = request.param()
    return attnlab.record(model, padded_batch(model))


def slow(record):
    """Every head and pair of heads of a record, from the rows that belong to no padding, by scipy."""
    pairs, singles = [], []
    for layer in record.layers:
        query, key = (record.masks[name].numpy() for name in KINDS[layer.kind])
        w, h = layer.weights.double().numpy(), layer.context.shape[1]
        output = torch.einsum("bhid,hde->bhie", layer.mixed, layer.output_weight).norm(dim=-1).numpy()
        for e, a in np.ndindex(len(w), h):
            rows = w[e, a][query[e]][:, key[e]]
            at = {"example": e, "kind": layer.kind, "layer": layer.index}
            spread = [-(row[row > 0] * np.log(row[row > 0])).sum() for row in rows]
            measured = {"confidence": rows.max(1).mean(), "entropy_nats": np.mean(spread)}
            measured |= {"first_token_share": rows[:, 0].mean(), "output": output[e, a][query[e]].mean()}
            singles.append(at | {"head": a} | measured)
            for c in range(a + 1, h):
                others = w[e, c][query[e]][:, key[e]]
                found = [jensenshannon(p, q) ** 2 for p, q in zip(rows, others, strict=True)]
                pairs.append(at | {"head_a": a, "head_b": c, "jsd": sum(found), "jsd_per_query": np.mean(found)})
    return tuple(pd.DataFrame(rows).drop(columns="example") for rows in (pairs, singles))


def test_tables_are_means_over_sentences_without_their_padding(record):
    pairs, singles = slow(record)
    want = pairs.groupby(PAIRS).mean()
    ours = diversity(record).set_index(PAIRS)
    assert len(ours) == len(want)
    for column in want:
        np.testing.assert_allclose(ours.loc[want.index, column], want[column], rtol=1e-3, atol=2e-6)
    np.testing.assert_allclose(ours["jsd_bits"], ours["jsd"] / math.log(2))
    want = singles.groupby(["kind", "layer", "head"]).mean()
    want["output_share"] = want["output"] / want.groupby(level=[0, 1])["output"].transform("sum")
    ours = heads(record).set_index(["kind", "layer", "head"])
    for column in ("confidence", "entropy_nats", "first_token_share", "output_share"):
        np.testing.assert_allclose(ours.loc[want.index, column], want[column], rtol=1e-4, atol=1e-6)
    assert not ours["dead"].any()


def test_entropy_and_first_share_are_those_of_statistics(record):
    everything = Statistics(Categories(("all",), torch.zeros(1000, dtype=torch.long)))
    everything.add(record)
    at, columns = ["kind", "layer", "head"], ["entropy_nats", "first_token_share"]
    theirs, ours = everything.tables()["heads"].set_index(at)[columns], heads(record).set_index(at)[columns]
    pd.testing.assert_frame_equal(ours, theirs.loc[ours.index], rtol=1e-4, atol=1e-6)


def test_a_corpus_may_be_cut_anywhere_and_joined(record):
    whole, first, second = Diversity(), Diversity(), Diversity()
    whole.add(record)
    first.add(record[:1])
    second.add(record[1:])
    first.merge(second.tensors())
    for ours, theirs in ((first.pairs(), whole.pairs()), (first.heads(), whole.heads())):
        pd.testing.assert_frame_equal(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_lazy_record_gives_the_same():
    model = gpt2()
    batch = padded_batch(model)
    eager, lazy = attnlab.record(model, batch), attnlab.record(model, batch, lazy=True)
    pd.testing.assert_frame_equal(diversity(lazy), diversity(eager), rtol=1e-3, atol=1e-5)


@every_kind
def test_every_kind_has_a_table(name):
    model = made(TRANSLATOR, name)
    source, target = torch.tensor([[3, 4, 5, 6, 0], [7, 8, 0, 0, 0]]), torch.tensor([[3, 4, 0], [5, 6, 7]])
    record = attnlab.record(model, (source, target))
    pairs, singles = diversity(record), heads(record)
    assert set(pairs["kind"]) == set(KINDS)
    assert len(pairs) == 6 * 3
    assert pairs["jsd_per_query"].between(0, math.log(2) + 1e-9).all()
    assert singles["confidence"].between(0, 1 + 1e-9).all()
    np.testing.assert_allclose(singles.groupby(["kind", "layer"])["output_share"].sum(), 1.0)


def test_what_padding_holds_does_not_matter():
    model = made(LM)
    short = attnlab.record(model, torch.tensor([[3, 4, 5]]))
    padded = attnlab.record(model, torch.tensor([[3, 4, 5, 0, 0], [0, 0, 0, 0, 0]]))
    for table in (diversity, heads):
        pd.testing.assert_frame_equal(table(padded), table(short), rtol=1e-9)


def test_a_dead_head_is_found_and_tokens_can_be_ignored():
    model = made(LM)
    model.decoder.blocks[1].attention.output.weight.data[:, 4:8] = 0.0  # head 1 of 3
    tokens = torch.tensor([[3, 4, 5, 6]])
    record = attnlab.record(model, tokens)
    assert heads(record)["dead"].tolist() == [False, False, False, False, True, False]
    layer = record.layers[0]
    want = layer.weights[0][:, :, [0, 1, 3]].amax(-1).mean(-1)
    ours = heads(record, ignore=[5])
    np.testing.assert_allclose(ours["confidence"][:3], want)
    np.testing.assert_allclose(ours["entropy_nats"], heads(record)["entropy_nats"])


def test_numbers_that_are_none_are_refused():
    model = made(LM)
    model.decoder.blocks[0].attention.query.weight.data[0, 0] = torch.nan
    record = attnlab.record(model, torch.tensor([[3, 4, 5, 6]]))
    with pytest.raises(ValueError, match=r"decoder\.blocks\.0\.attention: .* not finite"):
        diversity(record)

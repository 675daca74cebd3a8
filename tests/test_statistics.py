"""Statistics over a corpus: against slow transcriptions and scipy, however the corpus is cut, and for every kind."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from properties import given, settings, st
from scipy.stats import spearmanr
from small_models import LM, made
from tiny_models import VOCABULARY, bert, gpt2, llama, marian, padded_batch
from turnings import TURNINGS, made_turning

import attnlab
from attnlab.analysis.categories import Categories, is_punctuation
from attnlab.analysis.categories import parse_categories as parse_categories
from attnlab.analysis.frequency import BINS, Frequency
from attnlab.analysis.frequency import parse_counts as parse_frequency
from attnlab.analysis.joint import NORMS, WEIGHTS, Octaves, correlation
from attnlab.analysis.statistics import Statistics
from attnlab.mechanisms import MECHANISMS, Mechanism
from attnlab.records.record import KINDS

THREE = Categories(("first", "second", "other"), torch.arange(VOCABULARY) % 3)
COUNTS = torch.arange(VOCABULARY) ** 2 + 1


def counted(*records, **options):
    made = Statistics(THREE, Frequency.from_counts(COUNTS), **options)
    for record in records:
        made.add(record)
    return made


def rows(record):
    """Every visible pair of tokens in every head, from the table of contributions; ‖f‖ from the vectors themselves."""
    table = attnlab.contribution(record)
    made = []
    for (kind, layer), part in table.groupby(["kind", "layer"], observed=True):
        found = record.kind(kind)[layer]
        f = torch.einsum("bhjd,hde->bhje", found.values, found.output_weight).norm(dim=-1).numpy()
        tokens = record.tokens[KINDS[kind][1]].numpy()
        example, head, key = (part[name].to_numpy() for name in ("example", "head", "key"))
        category = np.array(THREE.names)[tokens[example, key] % 3]
        made.append(part.assign(f=f[example, head, key], category=category, token=tokens[example, key]))
    return pd.concat(made, ignore_index=True).astype({"kind": str})


# --- the tables ---


@pytest.fixture(scope="module", params=[bert, gpt2, llama, marian, *TURNINGS], ids=lambda m: getattr(m, "__name__", m))
def record(request):
    torch.manual_seed(0)
    if request.param in TURNINGS:
        return attnlab.record(made_turning(request.param), torch.tensor([[3, 4, 5, 6, 9], [7, 8, 11, 0, 0]]))
    model = request.param()
    return attnlab.record(model, padded_batch(model))


def test_shares_are_means_over_examples_of_means_over_queries(record):
    pairs = rows(record).rename(columns={"norm": "norm_sum", "weight": "weight_share"})
    by = ["kind", "layer", "head", "category"]
    summed = (
        pairs.groupby([*by, "example", "query"])[["weight_share", "norm_sum"]].sum().unstack("category").fillna(0.0)
    )
    levels = ["kind", "layer", "head", "example"]
    want = summed.groupby(level=levels).mean().groupby(level=levels[:3]).mean().stack("category", future_stack=True)
    ours = counted(record).tables()["categories"].set_index(by)
    for column in ("weight_share", "norm_sum"):
        np.testing.assert_allclose(ours.loc[want.index, column], want[column], rtol=2e-5, atol=1e-6)
    per_head = ours["weight_share"].groupby(level=by[:3]).sum()
    np.testing.assert_allclose(per_head, 1.0, rtol=1e-5)


def test_dispersion_is_that_of_numpy_over_all_tokens(record):
    tokens = rows(record).drop_duplicates(["kind", "layer", "head", "example", "key"])
    ours = counted(record).tables()["heads"].set_index(["kind", "layer", "head"])
    for place, part in tokens.groupby(["kind", "layer", "head"]):
        f = part["f"].to_numpy(np.float64)
        want = [f.mean(), f.std(), f.std() / f.mean(), f.min(), f.max()]
        columns = ["norm_mean", "norm_sd", "norm_cv", "norm_min", "norm_max"]
        np.testing.assert_allclose(ours.loc[place, columns].to_numpy(float), want, rtol=2e-4)


def test_entropy_and_first_token_are_what_each_row_says(record):
    ours = counted(record).tables()["heads"].set_index(["kind", "layer", "head"]).sort_index()
    for kind in dict.fromkeys(record.kinds):
        masks = record.masks[KINDS[kind][0]]
        for layer in record.kind(kind):
            entropy, first = [], []
            for example, mask in enumerate(masks):
                part = layer.weights[example][:, mask].double()  # (h,i,j)
                entropy.append(-torch.xlogy(part, part).sum(-1).mean(-1))
                first.append(part[:, :, 0].mean(-1))
            for column, want in (("entropy_nats", entropy), ("first_token_share", first)):
                got = ours.loc[(kind, layer.index), column].to_numpy()
                np.testing.assert_allclose(got, torch.stack(want).mean(0), rtol=1e-4, atol=1e-6)


def test_spearman_is_scipys_to_the_bound_and_counts_every_pair(record):
    pairs = rows(record)
    ours = counted(record).tables()["spearman"].set_index(["kind", "category"])
    for place, part in pairs.groupby(["kind", "category"]):
        want = spearmanr(part["weight"], part["f"]).statistic
        assert ours.loc[place, "pairs"] == len(part)
        assert abs(ours.loc[place, "spearman"] - want) <= ours.loc[place, "error_bound"] + 1e-6
        assert abs(ours.loc[place, "spearman"] - want) < 0.02
    for kind, part in pairs.groupby("kind"):
        assert ours.loc[(kind, "all"), "pairs"] == len(part)


def test_frequency_is_scipys_over_every_token(record):
    pairs = rows(record)
    heads = pairs.groupby("kind")[["layer", "head"]].apply(lambda part: len(part.drop_duplicates()))
    ours = counted(record).tables()["frequency"].set_index(["kind", "of"])
    for kind, part in pairs.groupby("kind"):
        tokens = part.groupby(["example", "key", "layer", "head"]).agg(
            norm=("f", "first"), weight=("weight", "mean"), token=("token", "first")
        )
        tokens = tokens.groupby(["example", "key"]).agg(
            norm=("norm", "sum"), weight=("weight", "sum"), token=("token", "first")
        )
        for what in ("norm", "weight"):
            want = spearmanr(-COUNTS.numpy()[tokens["token"]], tokens[what] / heads[kind]).statistic
            assert ours.loc[(kind, what), "tokens"] == len(tokens)
            assert abs(ours.loc[(kind, what), "spearman"] - want) <= ours.loc[(kind, what), "error_bound"] + 1e-6


def test_signed_weights_count_by_size_in_norms_and_entropy():
    torch.manual_seed(3)
    model = gpt2()
    record = attnlab.record(attnlab.adapt(model, "dagpam", initial=0.8), padded_batch(model))
    layer = record.layers[1]
    assert (layer.weights < -0.01).any()
    part = layer.weights[0].double()  # the longest example, without padding
    f = torch.einsum("hjd,hde->hje", layer.values[0], layer.output_weight).norm(dim=-1).double()
    p = part.abs() / part.abs().sum(-1, keepdim=True)
    ours = counted(record[0]).tables()
    at = ours["heads"].query("layer == 1")
    np.testing.assert_allclose(at["entropy_nats"], torch.special.entr(p).sum(-1).mean(-1), rtol=1e-4)
    np.testing.assert_allclose(at["first_token_share"], part[..., 0].mean(-1), rtol=1e-4, atol=1e-6)
    norms = ours["categories"].query("layer == 1").groupby("head")["norm_sum"].sum()
    np.testing.assert_allclose(norms, (part.abs() * f[:, None]).sum(-1).mean(-1), rtol=1e-4)


# --- however the corpus is cut ---


def assert_same(ours, theirs, **tolerance):
    assert ours.keys() == theirs.keys()
    for name in ours:
        pd.testing.assert_frame_equal(ours[name], theirs[name], **tolerance)


@pytest.mark.parametrize("name", [name for name, kind in MECHANISMS.items() if kind.finish is not Mechanism.finish])
def test_a_mechanism_without_contributions_has_weights_alone(name):
    record = attnlab.record(made(LM, name), torch.tensor([[3, 4, 5, 6, 9]]))
    tables = counted(record, record).tables()
    heads, categories, spearman = (tables[key] for key in ("heads", "categories", "spearman"))
    for column in ("norm_mean", "norm_sd", "norm_cv", "norm_min", "norm_max"):
        assert heads[column].isna().all()
    assert categories[["norm_sum", "norm_mean"]].isna().all(axis=None)
    assert not spearman["pairs"].any()
    assert heads["entropy_nats"].notna().all()
    weights = record.layers[1].weights.sum((0, 2, 3)) / 5
    shares = categories[categories["layer"] == 1].groupby("head")["weight_share"].sum()
    np.testing.assert_allclose(shares, weights, rtol=1e-6, atol=1e-9)
    pairs = attnlab.contribution(record)
    assert pairs["norm"].isna().all()
    assert pairs["weight"].sum() == pytest.approx(sum(float(layer.weights.sum()) for layer in record.layers))


def test_records_one_by_one_or_together_or_lazy_are_the_same():
    model = bert()
    batch = padded_batch(model)
    whole = counted(attnlab.record(model, batch)).tables()
    lengths = [11, 7, 2]
    alone = [{name: x[k : k + 1, :n] for name, x in batch.items()} for k, n in enumerate(lengths)]
    close = {"rtol": 2e-3, "atol": 1e-5}  # a number near the edge of a bin may fall to either side
    assert_same(counted(*(attnlab.record(model, one) for one in alone)).tables(), whole, **close)
    assert_same(counted(attnlab.record(model, batch, lazy=True)).tables(), whole, **close)


def test_joined_parts_are_the_whole_and_stored_sums_lose_nothing():
    model = marian()
    record = attnlab.record(model, padded_batch(model))
    whole = counted(record[0], record[1], record[2])
    parts = [counted(record[0]), counted(record[1], record[2])]
    joined = counted()
    for part in parts:
        joined.merge(part.tensors())
    assert_same(joined.tables(), whole.tables(), rtol=1e-12)
    again = counted()
    again.merge(whole.tensors())
    assert_same(again.tables(), whole.tables(), check_exact=True)
    again.add(record), whole.add(record)
    assert_same(again.tables(), whole.tables(), check_exact=True)


def test_chosen_layers_and_heads_are_those_of_the_whole(record):
    whole, some = counted(record).tables(), counted(record, layers=[1], heads=[1, 0]).tables()
    for name in ("heads", "categories"):
        want = whole[name].query("layer == 1 and head < 2").reset_index(drop=True)
        pd.testing.assert_frame_equal(some[name], want)
    with pytest.raises(ValueError, match="no head 11"):
        counted(record, heads=[11])
    with pytest.raises(ValueError, match=r"no layer 99; its layers are 0-"):
        counted(record, layers=[99])


def test_what_cannot_be_counted_is_said():
    with pytest.raises(ValueError, match="no record"):
        counted().tables()
    model = bert()
    record = attnlab.record(model, padded_batch(model))
    broken = record.layers[0].map(lambda name, x: x * math.nan if name == "attended" else x)
    with pytest.raises(ValueError, match="not finite"):
        counted(attnlab.Record([broken], record.tokens, record.masks))
    with pytest.raises(ValueError, match="no tokens of the source"):
        counted(attnlab.Record(record.layers))


# --- ρ from counts ---


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=3, max_size=40))
@settings(max_examples=60, deadline=None)
def test_whole_numbers_in_coarse_bins_stay_within_the_bound(pairs):
    """Values 2^x: bins of one, two or four octaves; the bound must hold whatever the numbers."""
    x, y = (torch.tensor(side).float().exp2() for side in zip(*pairs, strict=True))
    if len(set(x.tolist())) < 2 or len(set(y.tolist())) < 2:
        return
    want = spearmanr(x, y).statistic
    for coarse in (1, 2, 4):
        table = torch.zeros(7, 7, dtype=torch.int64)
        for a, b in pairs:
            table[a // coarse, b // coarse] += 1
        found = correlation(table)
        if math.isnan(found.spearman):
            continue
        assert abs(found.spearman - want) <= found.bound + 1e-9
    exact = torch.zeros(7, 7, dtype=torch.int64)
    for a, b in pairs:
        exact[a, b] += 1
    assert correlation(exact).spearman == pytest.approx(want)


def test_the_bound_is_met_by_the_worst_order_within_bins():
    """Two bins of x with values in an order that y knows: the table sees ρ = 0, the numbers have 1."""
    found = correlation(torch.tensor([[2], [2]]))
    assert math.isnan(found.spearman)
    table = torch.tensor([[1, 1], [1, 1]])
    assert correlation(table).spearman == 0
    assert correlation(table).bound >= abs(spearmanr([1, 2, 3, 4], [2, 3, 1, 4]).statistic)


def test_bins_rise_with_the_numbers_and_single_bins_hide_nothing():
    x = torch.rand(5003).mul(30).sub(20).exp2().sort().values
    for octaves in (WEIGHTS, NORMS, Octaves(-3, 2, 2)):
        numbers = octaves.find_bins(x)
        assert (numbers.diff() >= 0).all()
        assert 0 <= int(numbers.min()) <= int(numbers.max()) < octaves.size
    assert Octaves(-3, 2, 2).find_bins(torch.tensor([0.0, 0.125, 1.0, 1.25, 1.99, 2.0, 99.0])).tolist() == [
        0, 0, 12, 13, 15, 16, 19,
    ]  # fmt: skip
    table = torch.tensor([[5, 0, 2], [1, 4, 3]])
    assert correlation(table, torch.tensor([True, True])).bound < correlation(table).bound


# --- categories and frequencies ---


def test_the_usual_categories():
    pieces = ["[CLS]", ",", "##.", "▁!", "Ġ", "cat", "##s", "a.b", "$", "##"]
    made = Categories.default(pieces, {0})
    assert [made.names[n] for n in made.of_token] == [
        "special", "punctuation", "punctuation", "punctuation", "other", "other", "other", "other", "punctuation",
        "punctuation",
    ]  # fmt: skip
    assert not is_punctuation("")
    assert not any(map(is_punctuation, ("▁", "▁▁", "Ġ", " ", "▁a")))  # a mark by itself is nothing of a text
    assert all(map(is_punctuation, ("##", "@@", "▁.", "Ġ,", "▁▁—")))


def test_categories_of_ones_own_are_tokens_as_written_or_as_plain_text():
    groups = parse_categories("ends\t[SEP] .\nanimals\tcat\n\n", "mine.tsv")
    made = Categories.from_groups(groups, ["[CLS]", "[SEP]", ".", "▁cat", "cat", "dog"])
    assert made.names == ("ends", "animals", "other")
    assert made.of_token.tolist() == [2, 0, 0, 1, 1, 2]
    with pytest.raises(ValueError, match="'animals': token 'cow'"):
        Categories.from_groups({"animals": ["cow"]}, ["cat"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ends [SEP]\n", "f:1: a line"),
        ("a\tx\nb\t \n", "f:2: a line"),
        ("a\tx\na\ty\n", "f:2: .* 'a' .* twice"),
        ("a\tx\nb\tx\n", "'x' .* 'a' and 'b'"),
        ("\n", "0 categories; 1 to 32"),
    ],
)
def test_a_file_of_categories_that_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        parse_categories(text, "f")


def test_frequencies_share_bins_only_where_they_are_rare():
    """1009 tokens by Zipf's law: the bins rise with rank, equal counts share one, frequent tokens have their own."""
    counts = (10**6 / torch.arange(1, 1010)).long()
    made = Frequency.from_counts(counts)
    assert (made.bins.diff() >= 0).all()
    assert int(made.bins.max()) < BINS + 300
    assert made.bins[:50].tolist() == list(range(50))
    assert made.single[:50].all()
    same = Frequency.from_counts(torch.tensor([5, 0, 7, 5]))
    assert same.bins.tolist() == [1, -1, 0, 1]
    assert same.single.all()
    with pytest.raises(ValueError, match="no token"):
        Frequency.from_counts(torch.zeros(3, dtype=torch.int64))


def test_files_of_frequencies():
    pieces = ["a", "##b", "c d"]
    assert parse_frequency("a\t7\n##b\t3\nunknown\t9\n", pieces, "f").tolist() == [7, 3, 0]
    assert parse_frequency("1 70 1\n2 30 0\n", pieces, "f").tolist() == [30, 70, 0]
    for text, message in (
        ("a 7\n", "f:1: a line"),
        ("1 2 3\n", "f:1: token id 3"),
        ("z\t4\n", "none of the tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_frequency(text, pieces, "f")

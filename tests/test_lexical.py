"""Tables and summaries of probes: each row is where it says, padding is nowhere, and chance is beside the agreement."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

from attnlab.analysis import lexical, saliency
from attnlab.analysis.agreement import agreement, kendall, random_baseline
from attnlab.models.lstm import build
from attnlab.models.lstm_config import SETTINGS
from attnlab.recording.probe import record_probes
from attnlab.records.record import Layer, Record

B, H, T, L, D = 3, 2, 5, 7, 4
SOURCE, TARGET = torch.tensor([7, 3, 1]), torch.tensor([5, 2, 4])


def record(extras=None, **changed):
    """Random weights and probes, NaN wherever there is padding."""
    masks = {"source": torch.arange(L) < SOURCE[:, None], "target": torch.arange(T) < TARGET[:, None]}
    seen = masks["target"][:, :, None] & masks["source"][:, None]
    weights = torch.rand(B, H, T, L).masked_fill(~masks["source"][:, None, None], 0.0)
    e = H * D
    probes = {name: torch.randn(B, T, L).masked_fill(~seen, torch.nan) for name in ("beta", "saliency")}
    layer = Layer(
        "cross", 0, "attention", weights, torch.randn(B, H, L, D), torch.randn(B, H, T, D), torch.randn(B, H, T, D),
        torch.randn(H, D, e), None, torch.randn(B, T, e), torch.randn(B, T, e), masks["source"][:, None, None],
        extras=probes | {"targets": torch.randint(99, (B, T))} if extras is None else extras,
    )  # fmt: skip
    words = {"source": [[f"s{b}.{k}" for k in range(L)] for b in range(B)]}
    return Record(**{"layers": [layer], "masks": masks, "words": words} | changed)


def test_every_pair_of_positions_has_its_row_and_padding_has_none():
    made = record()
    table, (layer,) = saliency.saliency(made), made.layers
    assert list(table.columns) == [
        "example", "target_position", "source_position", "source_token", "target", "weight", "beta", "saliency",
    ]  # fmt: skip
    assert len(table) == int((SOURCE * TARGET).sum())
    assert not table.isna().any().any()
    for row in table.itertuples():
        b, t, l = row.example, row.target_position, row.source_position  # noqa: E741
        assert row.weight == pytest.approx(float(layer.weights[b, :, t, l].mean()))
        assert row.beta == pytest.approx(float(layer.extras["beta"][b, t, l]))
        assert row.saliency == pytest.approx(float(layer.extras["saliency"][b, t, l]))
        assert (row.source_token, row.target) == (f"s{b}.{l}", int(layer.extras["targets"][b, t]))
    pd.testing.assert_frame_equal(lexical.lexical(made), table.drop(columns="saliency"))


def test_the_summary_is_the_mean_over_target_positions():
    made = record()
    weight, beta = made.layers[0].weights.mean(1), made.layers[0].extras["beta"]
    held, taus = [], []
    for b in range(B):
        for t in range(TARGET[b]):
            row = weight[b, t, : SOURCE[b]], beta[b, t, : SOURCE[b]]
            held.append(float(agreement(*row)))
            taus.append(float(kendall(*row)))
    (row,) = lexical.summary(made).to_dict("records")
    assert (row["u"], row["v"], row["rows"]) == ("weight", "beta", int(TARGET.sum()))
    assert row["agreement"] == pytest.approx(sum(held) / len(held))
    assert row["agreement_by_chance"] == pytest.approx(float(random_baseline(SOURCE.repeat_interleave(TARGET))))
    ordered = [tau for tau in taus if tau == tau]
    assert row["kendall_rows"] == len(ordered) == int(TARGET[:2].sum())  # the last source has one position
    assert row["kendall_tau_b"] == pytest.approx(sum(ordered) / len(ordered))


def test_a_probe_agrees_with_itself():
    beta = record().layers[0].extras["beta"]
    table = saliency.summary(record(extras={"beta": beta, "saliency": beta}))
    assert list(zip(table["u"], table["v"], strict=True)) == [("saliency", "beta"), ("weight", "saliency")]
    assert table["agreement"][0] == 1.0
    assert table["kendall_tau_b"][0] == pytest.approx(1.0)
    assert saliency.summary(record(), top=1.0)["agreement"].tolist() == [1.0, 1.0]


def test_without_text_or_masks_positions_are_numbers():
    table = lexical.lexical(record(extras={"beta": torch.randn(B, T, L)}, words={}, masks={}))
    assert len(table) == T * int(SOURCE.sum())  # the layer's own mask still hides what it could not see
    assert table["source_token"].tolist() == [str(place) for place in table["source_position"]]
    assert "target" not in table


def test_a_probed_model_has_a_table():
    """Of an LSTM that translates and one that classifies: as many rows as words, and β is a logarithm."""
    source = torch.randint(1, 19, (3, 7)).masked_fill(torch.arange(7) >= SOURCE[:, None], 0)
    written, targets = (x.masked_fill(torch.arange(5) >= TARGET[:, None], 0) for x in torch.randint(1, 19, (2, 3, 5)))
    for name, batch, wanted, rows in (
        ("translation", (source, written), targets, int((SOURCE * TARGET).sum())),
        ("classification", (source,), torch.tensor([0, 1, 1]), int(SOURCE.sum())),
    ):
        model = build(replace(SETTINGS[name], vocabulary=19, width=6, embedding_width=5)).eval()
        made = record_probes(model, batch, wanted)
        table = saliency.saliency(made)
        assert len(table) == rows
        assert (table["beta"] <= 0).all()
        sums = table.groupby(["example", "target_position"])["weight"].sum()
        assert sums.tolist() == pytest.approx([1.0] * len(sums))
        assert saliency.summary(made)["agreement"].between(0, 1).all()


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        (lambda: record(extras={}), {}, "attention has no beta"),
        (lambda: record(extras={"beta": torch.zeros(B, T, 1)}), {}, r"\(3, 5, 1\), expected \(3, 5, 7\)"),
        (record, {"layer": 1}, r"layer 1 .*Record\(3 examples"),
    ],
)
def test_what_is_not_there_is_said(made, options, message):
    with pytest.raises(ValueError, match=message):
        lexical.lexical(made(), **options)


def test_something_else_than_a_record_is_refused():
    with pytest.raises(TypeError, match="Record, got a dict"):
        lexical.lexical({})


def test_nothing_but_padding_is_refused():
    masks = {"source": torch.zeros(B, L, dtype=torch.bool), "target": torch.zeros(B, T, dtype=torch.bool)}
    with pytest.raises(ValueError, match="nothing to compare"):
        lexical.summary(record(masks=masks))

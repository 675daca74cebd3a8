"""What the page of an inspection says: it follows from the numbers, and undefined ones are left out with a reason."""

import re

import numpy as np
import pandas as pd
import pytest
import tiny_models
import torch

import attnlab
from attnlab.commands.inspect.inspection_findings import list_findings, tabulate_predictions
from attnlab.commands.inspect.inspection_tables import name_kind, render_analysis, render_numbers
from attnlab.reading.maps import build_view
from attnlab.reading.predictions import Prediction, predict_label, predict_masked, predict_next
from attnlab.reading.reader import PretrainedReader
from attnlab.reading.text_stream import TextExample
from attnlab.report.colours import HIDDEN, choose_colormap
from attnlab.report.norm_figures import draw_text_maps
from attnlab.report.page import Table, Text

TEXT = TextExample("the cat sat on the mat .")
NAN = float("nan")


def make_tables(rho=-0.25):
    """Two heads: head 0 spreads over e^0 = 1 key, head 1 over e^1.609 = 5; special tokens get 0.6 of 1 by weight."""
    heads = {"kind": "encoder-self", "layer": [0, 1], "head": [0, 1], "norm_mean": [2.0, 1.0], "norm_sd": [0.5, 0.5]}
    heads |= {"norm_cv": [0.25, 0.5], "norm_min": [1.0, 0.5], "norm_max": [3.0, 2.0]}
    heads |= {"entropy_nats": [0.0, np.log(5)], "first_token_share": [0.5, 0.5]}
    categories = {
        "kind": "encoder-self",
        "layer": [0, 0, 0],
        "head": 0,
        "category": ["special", "punctuation", "other"],
    }
    categories |= {"tokens": [2, 0, 5], "weight_share": [0.6, 0.0, 0.4], "norm_sum": [0.3, 0.0, 2.7]}
    spearman = {"kind": "encoder-self", "category": ["special", "punctuation", "other", "all"], "pairs": [9, 0, 1, 10]}
    spearman |= {"spearman": [0.5, NAN, NAN, rho], "error_bound": [0.01, NAN, NAN, 0.02]}
    frequency = {"kind": "encoder-self", "of": ["norm", "weight"], "tokens": [7, 7], "spearman": [0.5, NAN]}
    frequency |= {"error_bound": [0.0, NAN]}
    made = {"heads": heads, "categories": categories, "spearman": spearman, "frequency": frequency}
    return {name: pd.DataFrame(table) for name, table in made.items()}


def test_three_sentences_are_made_of_the_numbers():
    categories, heads, lengths = list_findings(make_tables(), [])
    assert categories.startswith(
        "Special tokens get 60\N{NO-BREAK SPACE}% of the weight of the self-attention, but only"
    )
    assert "10\N{NO-BREAK SPACE}% of what it takes" in categories
    assert "layer 0, head 0: its weights spread over 1.0 tokens" in heads
    assert "layer 1, head 1, over 5.0" in heads
    assert "more weight on short vectors" in lengths
    assert "−0.25 over 10 pairs" in lengths
    assert "on long vectors" in list_findings(make_tables(rho=0.25), [])[2]


def test_a_prediction_comes_first_and_is_named_with_its_probability():
    label = Prediction("label", (("spam", 0.9), ("ham", 0.1)))
    found = list_findings(make_tables(), [[label]])
    assert len(found) == 3
    assert "“spam”, with a probability of 90\N{NO-BREAK SPACE}%" in found[0]
    seen = Prediction("next", (("cat", 0.5), ("dog", 0.25)), "the", "cat", 0.5, True)
    last = Prediction("next", (("sat", 0.75), ("is", 0.05)), "cat")
    told = list_findings(make_tables(), [[seen, last]])[0]
    assert "“cat”, the model expects “sat” (75\N{NO-BREAK SPACE}%), then “is” (5.0\N{NO-BREAK SPACE}%)" in told
    assert "right for 1 of the 1 tokens" in told
    ((_, parts),) = tabulate_predictions([[seen, last]])
    assert [row[:2] for row in parts[1].rows] == [["the", "cat"], ["cat", "sat"]]
    assert parts[1].rows[1][-2:] == ["–", "–"]
    assert tabulate_predictions([[]]) == []
    assert "“Die Katze”" in list_findings(make_tables(), [[seen, last]], "Die Katze")[0]


def test_a_sentence_shows_words_and_a_table_shows_their_marks():
    words = Prediction("next", (("▁sat", 0.5), ("▁", 0.25)), "▁cat")
    told = list_findings(make_tables(), [[words]])[0]
    assert "“cat”, the model expects “sat”" in told
    assert "then “▁”" in told
    assert tabulate_predictions([[words]])[0][1][1].rows[0][:2] == ["▁cat", "▁sat"]
    alike = Prediction("next", (("▁sat", 0.5), ("sat", 0.25)), "▁cat")
    assert "expects “▁sat”" in list_findings(make_tables(), [[alike]])[0]


def test_undefined_values_are_left_out_with_the_reason_and_columns_are_words():
    parts = render_numbers(make_tables())
    tables = [part for part in parts if isinstance(part, Table)]
    assert [len(table.rows) for table in tables] == [3, 2, 1]
    for table in tables:
        assert not any("nan" in str(cell) for row in table.rows for cell in row)
        assert not any("_" in column for column in table.columns)
        assert not any("encoder-self" in str(cell) for row in table.rows for cell in row)
    texts = [part.text for part in parts if isinstance(part, Text)]
    assert any("punctuation (self-attention), because the text has no such token" in text for text in texts)
    assert any("weight |α| (self-attention), because all its values are equal" in text for text in texts)


def test_the_page_says_that_it_shows_the_first_rows_of_an_analysis():
    (whole,) = render_analysis("rank", pd.DataFrame({"layer": range(200)}))
    said, shown = render_analysis("rank", pd.DataFrame({"layer": range(1234)}))
    assert len(whole.rows) == len(shown.rows) == 200
    assert said.text == "The first 200 of 1,234 rows; tables/rank.csv has all."


def test_what_has_no_norms_is_named_and_nothing_else_is_lost():
    tables = make_tables()
    tables["heads"].loc[1, ["norm_mean", "norm_sd", "norm_cv", "norm_min", "norm_max"]] = NAN
    assert "self-attention in layer 1" in list_findings(tables, [])[-1]
    assert [len(part.rows) for part in render_numbers(tables) if isinstance(part, Table)] == [3, 2, 1]
    tables["heads"].loc[0, "norm_mean"] = tables["categories"]["norm_sum"] = NAN
    categories, heads, missing = list_findings(tables | {"spearman": tables["spearman"].assign(spearman=NAN)}, [])
    assert "60\N{NO-BREAK SPACE}% of the weight" in categories
    assert "layer 1, head 1, over 5.0" in heads
    assert "finish" in missing
    assert [part for part in render_numbers(tables) if isinstance(part, Table)] == []


def test_kinds_are_words_a_reader_knows():
    assert name_kind("decoder-self", ["decoder-self"]) == "self-attention"
    assert name_kind("decoder-self", ["encoder-self", "decoder-self", "cross"]) == "self-attention of the decoder"
    assert name_kind("cross", ["cross"]) == "cross-attention"


def test_what_comes_next_is_the_models_own_softmax():
    model, tokenizer = tiny_models.gpt2(), tiny_models.tokenizer()
    found = PretrainedReader("gpt2", model, tokenizer).predict(TEXT)
    ids = tokenizer(TEXT.text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        want = model(ids).logits[0].double().softmax(-1)
    assert len(found) == len(ids[0])
    for place, one in enumerate(found):
        assert one.choices[0][1] == pytest.approx(float(want[place].max()), rel=1e-5)
    assert [one.actual for one in found] == ["cat", "sat", "on", "the", "mat", ".", None]
    assert found[2].share == pytest.approx(float(want[2, ids[0, 3]]), rel=1e-5)


def test_an_encoder_without_outputs_predicts_nothing_and_a_decoder_reads_its_target():
    assert PretrainedReader("bert", tiny_models.bert(), tiny_models.tokenizer()).predict(TEXT) == []
    marian = PretrainedReader("marian", tiny_models.marian(), tiny_models.tokenizer())
    assert len(marian.predict(TextExample("the cat", "the mat ."))) == 3


def test_labels_and_masks_from_given_probabilities():
    log_prob = torch.tensor([0.2, 0.7, 0.1]).log()
    assert predict_label(log_prob, ["a", "b", "c"]).choices[0] == ("b", pytest.approx(0.7))
    rows = torch.stack([log_prob, log_prob.flip(0)])
    (masked,) = predict_masked(rows, [0, 2], ["x", "y", "[MASK]"], 2)
    assert (masked.read, masked.choices[0][0]) == ("[MASK]", "y")
    assert [one.is_right for one in predict_next(rows, [0, 1], ["x", "y", "z"])] == [True, False]
    within, _ = predict_next(rows, [0, 2], ["x", "cat", "▁cat"])
    assert (within.choices[0][0], within.actual, within.is_right) == ("cat", "▁cat", False)


def test_masked_cells_are_grey_in_figures_and_in_every_map_of_the_viewer():
    causal = ~torch.ones(3, 3).tril().bool()
    figure = draw_text_maps(["layer 0"], [torch.eye(3)], [torch.eye(3)], "abc", "abc", [causal], ("query", "key"))
    for axis in figure.axes:
        shown = np.ma.masked_invalid(axis.images[0].get_array())
        assert (np.ma.getmaskarray(shown) == causal.numpy()).all()
    grey = tuple(int(HIDDEN[k : k + 2], 16) / 255 for k in (1, 3, 5))
    for signed in (True, False):
        assert choose_colormap(signed=signed)(NAN)[:3] == pytest.approx(grey, abs=0.01)
    script = re.search(r'hidden: "(#\w+)"', tiny_colours())[1]
    assert script == HIDDEN
    record = attnlab.record(tiny_models.gpt2(), {"input_ids": torch.arange(5)[None] + 3})
    for attention in build_view(record).runs[0].frames[0].attentions:
        assert torch.equal(attention.mask, torch.ones(5, 5).tril().bool()), attention.index


def tiny_colours():
    from importlib.resources import files

    return files("attnlab.report").joinpath("viewer", "colour.js").read_text(encoding="utf-8")

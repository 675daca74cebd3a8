"""attnlab inspect of a long text: totals, links, blocks and windows, equal to what maps of all pairs give."""

import json

import pandas as pd
import pytest
import tiny_models
import torch
from typer.testing import CliRunner

import attnlab
from attnlab.analysis.categories import Categories
from attnlab.analysis.contribution import norms
from attnlab.analysis.totals import totals
from attnlab.cli import app
from attnlab.commands.inspect import inspection
from attnlab.commands.inspect.sink_section import describe_sinks
from attnlab.reading import long_text
from attnlab.reading.reader import PretrainedReader
from attnlab.reading.text_stream import TextExample

WORDS = "the cat sat on the mat . nobody saw it ."
TEXT = " ".join([WORDS] * 25)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long") / "llama"
    tiny_models.llama(max_position_embeddings=512).save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def short_limit(monkeypatch):
    """Texts are long from 50 tokens on."""
    monkeypatch.setattr(inspection, "LONG", 50)
    monkeypatch.setattr(long_text, "WINDOW", 16)


def run(*words):
    return CliRunner().invoke(app, ["inspect", *map(str, words), "--device", "cpu"])


def test_a_long_text_has_the_numbers_of_its_maps(model, tmp_path, short_limit, monkeypatch):
    (tmp_path / "text.txt").write_text(TEXT)
    result = run(model, "--document", tmp_path / "text.txt", "--out", tmp_path / "long", "--window", 3)
    assert result.exit_code == 0, result.exception
    page = (tmp_path / "long" / "report.html").read_text()
    assert "windows of 16 tokens, at 3." in page
    assert "16 in each cell" in page
    assert "pairs of two different tokens" in page
    monkeypatch.setattr(inspection, "LONG", 10_000)
    result = run(model, "--document", tmp_path / "text.txt", "--out", tmp_path / "short")
    assert result.exit_code == 0, result.exception
    for name in ("heads", "categories", "sinks"):
        long, short = (pd.read_csv(tmp_path / way / "tables" / f"{name}.csv") for way in ("long", "short"))
        pd.testing.assert_frame_equal(long, short, rtol=1e-3, atol=1e-5)
    links = pd.read_csv(tmp_path / "long" / "tables" / "links.csv")
    record = attnlab.record(str(model), TEXT)
    layer = record.layers[1]
    norms = (layer.weights[0, 0] * totals(layer).vector[0, 0]).fill_diagonal_(0.0)
    best = links[(links["layer"] == 1) & (links["head"] == 0)].iloc[0]
    assert best["norm"] == pytest.approx(float(norms.max()), rel=1e-3)
    assert float(norms[best["query"], best["key"]]) == pytest.approx(float(norms.max()), rel=1e-3)
    tokens = pd.read_csv(tmp_path / "long" / "tables" / "tokens.csv", keep_default_na=False)
    received = sum(x.weights[0].sum((0, 1)) for x in record.layers) / sum(x.context.shape[1] for x in record.layers)
    assert tokens["received_weight"].tolist() == pytest.approx(received.tolist(), rel=1e-3)
    about = json.loads((tmp_path / "long" / "statistics.json").read_text())["about"]
    assert (about["tokens of a block"], about["windows"]) == (16, [3])


def test_a_long_text_in_a_gated_model(short_limit):
    """Sinks, and the norms of a window, include the gate."""
    torch.manual_seed(0)
    model, tokenizer, text = tiny_models.qwen3_next(), tiny_models.tokenizer(), " ".join([WORDS] * 4)
    reader = PretrainedReader("gated", model, tokenizer)
    groups = Categories.default(reader.sides["source"].texts, reader.sides["source"].special)
    reading = long_text.read_long_text(reader, TextExample(text), groups, windows=[5])
    layer = attnlab.record(model, text, tokenizer=tokenizer).layers[0]
    norm = norms(layer).head[0]
    taken = norm.sum((1, 2))
    assert reading.tables["sinks"]["first_norm"].tolist() == pytest.approx((norm[:, :, 0].sum(1) / taken).tolist())
    (window,) = [one for one in reading.view.runs[0].frames[0].attentions if one.example == 1]
    torch.testing.assert_close(window.maps["norm"], norm[:, 5:21, 5:21], rtol=1e-4, atol=1e-6)


def test_only_some_layers_and_heads(model, tmp_path, short_limit):
    result = run(model, "--text", TEXT, "--layers", "1", "--heads", "0", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.exception
    heads = pd.read_csv(tmp_path / "out" / "tables" / "heads.csv")
    assert heads[["layer", "head"]].to_numpy().tolist() == [[1, 0]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", TEXT, "--window", "9999"], "--window 9999 is outside of the text"),
        (["--text", WORDS, "--window", "3"], "--window is for a text of more than"),
        (["--text", WORDS, "--pan"], "--pan is for a text of more than"),
        (["--text", TEXT, "--pan", "--window", "3"], "--window chooses windows and --pan takes all: pass one of them"),
        (["--text", TEXT, "--analysis", "rank"], "--analysis is for texts of at most 1,024 tokens"),
        (["--text", TEXT, "--importance"], "--importance is for texts of at most 1,024 tokens"),
        (["--text", TEXT, "--frequency", "counts.tsv"], "--max-length 1024 reads the beginning"),
        (["--document", "missing.txt"], "missing.txt"),
        (["--text", TEXT, "--document", "missing.txt"], "pass one of --text, --pair, --file and --document"),
        (["--text", TEXT, "--layers", "7"], "no layer 7; its layers are 0-2"),
        (["--text", TEXT, "--heads", "9"], "has no head 9"),
    ],
)
def test_what_is_wrong_is_said(model, tmp_path, short_limit, words, message):
    result = run(model, *words, "--out", tmp_path / "out")
    assert result.exit_code != 0
    assert message in str(result.exception) + result.output


def test_an_empty_document_is_refused(model, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    result = run(model, "--document", tmp_path / "empty.txt")
    assert "is empty: pass a file with some text" in str(result.exception) + result.output


def test_windows_and_blocks_by_hand():
    assert long_text.choose_windows(1000, [3, 990]) == (3, 904)
    assert long_text.choose_windows(1000, [])[:2] == (0, 181)
    assert [long_text.choose_block(n) for n in (10, 16384, 16385, 100_000)] == [16, 128, 256, 1024]


def test_windows_one_after_another(model, tmp_path, short_limit, monkeypatch):
    """Together they are the text; where the page has less room, the first are there and a note names the others."""
    result = run(model, "--text", TEXT, "--pan", "--layers", 1, "--out", tmp_path / "all")
    assert result.exit_code == 0, result.exception
    about = json.loads((tmp_path / "all" / "statistics.json").read_text())["about"]
    assert about["windows"] == [*range(0, about["tokens"] - 16, 16), about["tokens"] - 16]
    blocks = -(-about["tokens"] // 16)
    monkeypatch.setattr(
        long_text, "HEAD_CELLS", 2 * blocks**2 + 2 * 16**2
    )  # blocks by weight and by norm, and two windows
    result = run(model, "--text", TEXT, "--pan", "--layers", 1, "--heads", 0, "--out", tmp_path / "some")
    assert result.exit_code == 0, result.exception
    some = json.loads((tmp_path / "some" / "statistics.json").read_text())["about"]
    assert some["windows"] == [0, 16]


def test_places_are_named_by_hand():
    assert long_text.name_places([3, 1500]) == "3, 1,500"
    assert long_text.name_places(range(96, 9600, 96)) == "99 places from 96 to 9,504"


def test_the_sentence_on_sinks():
    table = pd.DataFrame({"first_weight": [0.8, 0.1], "first_norm": [0.05, 0.2], "is_sink": [True, False]})
    table["first_uniform"] = 0.37
    assert describe_sinks(table).endswith("too short to find sinks: weights spread evenly put 37\xa0% there.")
    table["first_uniform"] = 0.29
    assert describe_sinks(table).endswith("of what they take comes from it.")
    assert describe_sinks(table).startswith("1 of 2 heads have a sink, a rate of 50")
    assert "No head of 1 " in describe_sinks(table[1:])


def test_the_windows_can_be_chosen_in_a_browser(model, tmp_path, short_limit, opened):
    result = run(model, "--text", TEXT, "--window", 30, "--window", 60, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.exception
    page = opened(tmp_path / "out" / "report.html").ready()
    page.get_by_label("Example").select_option(index=1)
    page.ready()
    assert "tokens 30 to 45" in page.get_by_label("Example").inner_text()
    page.get_by_label("Next", exact=True).click()
    page.ready()
    assert page.get_by_label("Example").evaluate("menu => menu.selectedOptions[0].text").startswith("tokens 60 to 75")
    assert page.get_by_label("Next", exact=True).is_disabled()
    assert page.get_by_label("Previous", exact=True).is_enabled()

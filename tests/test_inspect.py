"""attnlab inspect, as a person uses it: what it writes, what it reads, and what it says when something is wrong."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tiny_models
import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import attnlab
from attnlab.analysis import ANALYSES
from attnlab.analysis.statistics import extremes
from attnlab.cli import app
from attnlab.commands.inspect import inspection
from attnlab.commands.inspect.inspection import InspectionRequest, inspect
from attnlab.commands.inspect.inspection_tables import SCHEMA
from attnlab.config import parse_numbers
from attnlab.reading.maps import build_view
from attnlab.reading.reader import PretrainedReader, RunReader, open_reader
from attnlab.reading.survey import SurveyConfig, expand_analyses, iterate_batches
from attnlab.reading.text_stream import TextCorpus, TextExample
from attnlab.records.record import Record
from attnlab.tasks.task import EOS
from attnlab.terminal.spelling import name_options

HOSTILE = "<script>alert(1)</script> & $x$ cat"
LINES = ["the cat sat on the mat .", "nobody saw it .", "the mat .", "it sat .", "the cat saw nobody on the mat ."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tiny models with a tokenizer, saved as Hugging Face models are, and a corpus."""
    root = tmp_path_factory.mktemp("models")
    transformers.MambaConfig().save_pretrained(root / "mamba")
    for name in ("bert", "gpt2", "marian"):
        getattr(tiny_models, name)().save_pretrained(root / name)
        tiny_models.tokenizer().save_pretrained(root / name)
    attnlab.adapt(tiny_models.gpt2(), "dagpam", initial=0.5).save_pretrained(root / "dagpam")
    tiny_models.tokenizer().save_pretrained(root / "dagpam")
    attnlab.adapt(tiny_models.gpt2(), "nap").save_pretrained(root / "nap")
    tiny_models.tokenizer().save_pretrained(root / "nap")
    (root / "corpus.txt").write_text("\n".join(LINES) + "\n\n", encoding="utf-8")
    (root / "pairs.tsv").write_text("".join(f"{line}\tthe cat sat .\n" for line in LINES), encoding="utf-8")
    return root


def run(*words):
    return CliRunner().invoke(app, ["inspect", *map(str, words), "--device", "cpu"])


def inspected(*words):
    result = run(*words)
    assert result.exit_code == 0, result.exception
    return result


# --- what it writes ---


def test_heads_are_ranked_and_every_analysis_that_applies_is_run(folder, tmp_path):
    words = (folder / "gpt2", "--file", folder / "corpus.txt", "--importance", "--analysis", "all")
    inspected(*words, "--out", tmp_path / "out")
    heads = pd.read_csv(tmp_path / "out" / "tables" / "importance.csv")
    assert list(heads.columns) == ["kind", "layer", "head", "loss_change_nats", "kl_nats", "distance"]
    assert len(heads) == 9
    assert heads["loss_change_nats"].is_monotonic_decreasing
    for name in ANALYSES:
        assert len(pd.read_csv(tmp_path / "out" / "tables" / f"{name}.csv"))
    page = (tmp_path / "out" / "report.html").read_text()
    assert "on 5 texts" in page
    left = inspected(folder / "nap", "--text", LINES[0], "--analysis", "all", "--out", tmp_path / "nap")
    assert "analysis rollout is left out: transformer.h.0.attn" in left.output
    assert not (tmp_path / "nap" / "tables" / "rollout.csv").exists()
    refused = run(folder / "nap", "--text", LINES[0], "--analysis", "rollout", "--out", tmp_path / "refused")
    assert "not a sum over keys" in str(refused.exception)


def test_importance_reads_the_chosen_heads_and_a_text_of_one_token(folder, tmp_path):
    words = folder / "gpt2", "--text", "cat", "--importance", "--layers", "1", "--heads", "0,2"
    inspected(*words, "--out", tmp_path / "out")
    heads = pd.read_csv(tmp_path / "out" / "tables" / "importance.csv")
    assert sorted(heads[["layer", "head"]].to_numpy().tolist()) == [[1, 0], [1, 2]]
    assert list(heads.columns) == ["kind", "layer", "head", "kl_nats", "distance"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "if it is knocked out, on 1 text. kl_nats: how far" in page


def test_a_page_of_a_hybrid_model_names_the_layers_that_are_missing(folder, tmp_path, monkeypatch):
    model = tiny_models.qwen3_next(["linear_attention", "full_attention", "linear_attention", "full_attention"])
    reader = PretrainedReader("hybrid", model, tiny_models.tokenizer())
    monkeypatch.setattr(inspection, "open_reader", lambda *_, **__: reader)
    said = "This page leaves out 2 of 4 layers (linear_attention): 0, 2."
    for name, given in (("text", ["--text", LINES[0]]), ("file", ["--file", folder / "corpus.txt"])):
        result = inspected("hybrid", *given, "--out", tmp_path / name)
        assert said in (tmp_path / name / "report.html").read_text()
        assert said in result.output.replace("\n", " ")
    monkeypatch.setattr(inspection, "LONG", 3)
    inspected("hybrid", "--text", LINES[0], "--out", tmp_path / "long")
    assert said in (tmp_path / "long" / "report.html").read_text()
    view = build_view(reader.record([TextExample(LINES[0])]))
    assert "The maps leave out 2 of 4 layers (linear_attention): 0, 2." in view.notes
    refused = run("hybrid", "--text", LINES[0], "--layers", "0", "--out", tmp_path / "refused")
    assert "has no layer 0; its layers are 1, 3" in str(refused.exception)


def test_one_text_leaves_tables_figures_maps_and_a_page(folder, tmp_path):
    out = tmp_path / "out"
    result = inspected(folder / "bert", "--text", LINES[0], "--out", out)
    assert result.output.strip() == f"report: {out / 'report.html'}"
    whole = json.loads((out / "statistics.json").read_text())
    assert whole["about"]["tokens"] == 7
    assert whole["tables"].keys() == SCHEMA.keys() == whole["schema"].keys()
    for name, rows in whole["tables"].items():
        table = pd.read_csv(out / "tables" / f"{name}.csv")
        assert list(table.columns) == list(SCHEMA[name])
        pd.testing.assert_frame_equal(pd.DataFrame(rows), table, check_dtype=False)
        pd.testing.assert_frame_equal(pd.read_parquet(out / "tables" / f"{name}.parquet"), table, check_dtype=False)
    heads = pd.read_csv(out / "examples" / "1" / "heads.csv")
    assert len(heads) == 3 * 3 * 7 * 7
    want = attnlab.contribution(attnlab.record(folder / "bert", LINES[0]))
    np.testing.assert_allclose(heads["norm"], want["norm"], rtol=1e-4, atol=1e-7)
    assert (out / "examples" / "1" / "maps-encoder-self-0.png").read_bytes()[1:4] == b"PNG"
    assert (out / "figures" / "encoder-self-categories.png").exists()
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "<h1>attnlab inspect: BertModel in bert</h1>" in page
    links = re.findall(r"<a href='\./(.*?)'", page)
    assert len(links) == 3
    assert all((out / link).exists() for link in links)


def test_all_text_on_the_page_is_escaped(tmp_path):
    model = tiny_models.minilm()
    inspected(model, "--text", HOSTILE, "--out", tmp_path, "--layers", "0,2", "--heads", "1-2")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    tags = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append(tag)
    parser.feed(page)
    assert tags.count("script") == 2  # the page's own, and the data of its viewer
    assert tags.count("img") == 5  # sinks, by category, and each of the three head by head; the viewer shows the maps
    assert "&lt;script&gt;alert(1)" in page
    heads = pd.read_csv(tmp_path / "tables" / "heads.csv")
    assert heads[["layer", "head"]].to_numpy().tolist() == [[0, 1], [0, 2], [2, 1], [2, 2]]


def test_a_file_is_counted_line_by_line_and_shown_only_where_asked(folder, tmp_path):
    """Against a mean over lines, each recorded alone."""
    inspected(folder / "bert", "--file", folder / "corpus.txt", "--out", tmp_path, "--batch-tokens", 13)
    assert not (tmp_path / "examples").exists()
    ours = pd.read_csv(tmp_path / "tables" / "categories.csv").query("category == 'punctuation'")["weight_share"]
    shares = []
    for line in LINES:
        table = attnlab.contribution(attnlab.record(folder / "bert", line))
        last = table[table["key_token"] == "."]
        shares.append(last.groupby(["layer", "head"])["weight"].mean().to_numpy())
    np.testing.assert_allclose(ours, np.mean(shares, axis=0), rtol=1e-4)
    about = json.loads((tmp_path / "statistics.json").read_text())["about"]
    assert (about["examples"], about["tokens"]) == (5, sum(len(line.split()) for line in LINES))


def test_limit_and_examples(folder, tmp_path):
    inspected(folder / "gpt2", "--file", folder / "corpus.txt", "--limit", 3, "--examples", 2, "--out", tmp_path)
    assert json.loads((tmp_path / "statistics.json").read_text())["about"]["examples"] == 3
    assert sorted(path.name for path in (tmp_path / "examples").iterdir()) == ["1", "2"]
    second = pd.read_csv(tmp_path / "examples" / "2" / "layers.csv")
    assert set(second["key_token"]) == set(LINES[1].split())
    assert len(second) == 3 * (4 * 5 // 2)  # causal: only what is seen


def test_without_out_each_request_has_a_folder_of_its_own(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = {"text": "a"}, {"text": "b"}, {"file": "a"}
    requests = [InspectionRequest(model=str(folder / "bert"), **text) for text in texts]
    assert len({request.folder for request in requests}) == 3
    assert requests[0].folder.parent.name == "inspected"
    page = inspect(requests[0], None, device="cpu", command="", progress=lambda done, total, what: None)
    assert page == requests[0].folder / "report.html"


def test_categories_and_frequencies_of_ones_own(folder, tmp_path):
    (tmp_path / "groups.tsv").write_text("animals\tcat\nplaces\tmat on\n")
    (tmp_path / "counts.tsv").write_text("the\t90\ncat\t50\nmat\t30\nsat\t20\n.\t95\n")
    words = ["--categories", tmp_path / "groups.tsv", "--frequency", tmp_path / "counts.tsv", "--out", tmp_path / "out"]
    inspected(folder / "bert", "--file", folder / "corpus.txt", *words)
    table = pd.read_csv(tmp_path / "out" / "tables" / "categories.csv").query("layer == 0 and head == 0")
    text = " ".join(LINES).split()
    want = {"animals": text.count("cat"), "places": text.count("mat") + text.count("on")}
    assert dict(zip(table["category"], table["tokens"], strict=True)) == want | {
        "other": len(text) - sum(want.values())
    }
    frequency = pd.read_csv(tmp_path / "out" / "tables" / "frequency.csv")
    assert set(frequency["tokens"]) == {sum(text.count(word) for word in ("the", "cat", "mat", "sat", "."))}


def test_the_heads_that_vary_most_and_least():
    table = pd.DataFrame({"kind": "cross", "layer": 0, "head": [0, 1, 2], "norm_cv": [0.2, 0.5, 0.1]})
    table = table.assign(**{key: [1.0, 2.0, 6.0] for key in ("norm_mean", "norm_sd", "norm_max", "norm_min")})
    made = extremes(table)
    assert made["head"].tolist() == [
        "greatest CV: cross layer 0 head 1",
        "least CV: cross layer 0 head 2",
        "mean over heads",
    ]
    assert made["norm_mean"].tolist() == [2.0, 6.0, 3.0]


# --- what it reads ---


def test_an_encoder_decoder_has_three_kinds(folder, tmp_path):
    first = ["--layers", "0", "--heads", "0-1"]  # figures take time
    inspected(folder / "marian", "--pair", LINES[0], LINES[1], *first, "--out", tmp_path / "pair")
    inspected(folder / "marian", "--file", folder / "pairs.tsv", *first, "--out", tmp_path / "file")
    for name in ("pair", "file"):
        table = pd.read_csv(tmp_path / name / "tables" / "spearman.csv")
        assert list(table["kind"].unique()) == ["encoder-self", "decoder-self", "cross"]
    assert (tmp_path / "pair" / "examples" / "1" / "maps-cross-0.png").exists()


def test_an_encoder_reads_a_pair_as_two_segments():
    reader = open_reader(tiny_models.minilm(), device="cpu", max_length=17)
    examples = [TextExample("The cat sat.", "Nobody saw it."), TextExample("A", "B " * 40)]
    assert list(map(len, reader.encode_examples(examples)["source"])) == [11, 17]
    record = reader.record(examples)
    words = [
        [w for w, m in zip(line, mask, strict=True) if m]
        for line, mask in zip(record.words["source"], record.masks["source"], strict=True)
    ]
    assert " ".join(words[0]) == "[CLS] the cat sat . [SEP] nobody saw it . [SEP]"
    assert words[1][:4] == ["[CLS]", "a", "[SEP]", "b"]
    assert len(words[1]) == 17


def test_segments_are_told_apart():
    """The second segment has the type 1, as the tokenizer says."""
    reader = open_reader(tiny_models.minilm(), device="cpu")
    pair = reader.record([TextExample("The cat sat.", "Nobody saw it.")])
    ids = pair.tokens["source"]
    types = torch.tensor([[0] * 6 + [1] * 5])
    for given, same in ((types, True), (torch.zeros_like(types), False)):
        other = attnlab.record(reader.model, {"input_ids": ids, "token_type_ids": given})
        assert torch.allclose(other.layers[0].inputs, pair.layers[0].inputs, atol=1e-5) is same


def test_an_adapted_model_shows_its_mechanism(folder, tmp_path):
    inspected(folder / "dagpam", "--text", LINES[0], "--out", tmp_path)
    assert pd.read_csv(tmp_path / "examples" / "1" / "heads.csv")["weight"].min() < 0


def test_a_mechanism_without_contributions_is_shown_by_its_weights_and_this_is_said(folder, tmp_path):
    result = inspected(folder / "nap", "--text", "nobody saw it .", "--layers", "0", "--out", tmp_path)
    assert "without norms" in result.output
    pairs = pd.read_csv(tmp_path / "examples" / "1" / "heads.csv")
    assert pairs["norm"].isna().all()
    assert pairs["weight"].notna().all()
    page = re.sub(r"<script.*?</script>", "", (tmp_path / "report.html").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert "without norms" in page
    assert "Right:" not in page
    assert ">nan<" not in page


OWN = {
    "language": (["data=corpus.txt", "block=16", "context=4", "units=word"], ["--text", LINES[0]], ["decoder-self"]),
    "classification": (["data=labelled.csv"], ["--text", LINES[0]], ["encoder-self"]),
    "translation": (
        ["src=corpus.txt", "tgt=corpus.txt", "units=word"],
        ["--pair", LINES[0], LINES[1]],
        ["encoder-self", "decoder-self", "cross"],
    ),
}


MADE = {"language": "language model", "classification": "classifier", "translation": "translator"}


@pytest.mark.parametrize("task", OWN)
def test_a_run_of_ours(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings, words, kinds = OWN[task]
    (tmp_path / "corpus.txt").write_text("".join(f"{line} {k}\n" for k in range(20) for line in LINES))
    rows = "".join(f"{line} {k},{'yes' if 'cat' in line else 'no'}\n" for k in range(20) for line in LINES)
    (tmp_path / "labelled.csv").write_text("text,label\n" + rows)
    small = [
        "model=tiny",
        "width=8",
        "heads=2",
        "layers=2",
        "steps=2",
        "out=runs/mine",
        "device=cpu",
        "batch_tokens=512",
    ]
    done = CliRunner().invoke(app, ["train", task, *settings, *small])
    assert done.exit_code == 0, (done.output, done.exception)
    inspected("mine", *words, "--layers", "1", "--out", "out")
    tables = pd.read_csv("out/tables/heads.csv")
    assert list(tables["kind"].unique()) == kinds
    assert (tables["norm_mean"] > 0).all()
    example = pd.read_csv("out/examples/1/layers.csv")
    assert {"cat", "sat"} <= set(example["key_token"])
    page = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert f"{MADE[task]} with softmax attention" in page
    findings = page.split("class='findings'")[1].split("</section>")[0]
    assert {"language": "“.”", "classification": "label “", "translation": "“.”"}[task] in findings


@pytest.mark.parametrize("task", ["translation", "classification"])
def test_probed_records_have_words(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("".join(f"{line} {k}\n" for k in range(20) for line in LINES))
    rows = "".join(f"{line} {k},{'yes' if 'cat' in line else 'no'}\n" for k in range(20) for line in LINES)
    (tmp_path / "labelled.csv").write_text("text,label\n" + rows)
    small = ["model=lstm", "width=8", "embedding_width=8", "steps=1", "out=runs/mine", "device=cpu", "batch_tokens=512"]
    more = ["src=corpus.txt", "tgt=corpus.txt", "units=word"] if task == "translation" else ["data=labelled.csv"]
    done = CliRunner().invoke(app, ["train", task, *small, *more])
    assert done.exit_code == 0, (done.output, done.exception)
    second = LINES[1] if task == "translation" else None
    examples = [TextExample(LINES[0], second), TextExample(LINES[2], second)]
    reader = open_reader("mine", device="cpu")
    record = reader.record(examples, probes=True)
    layer = record.kind("cross")[-1]
    assert "cat" in record.words["source"][0]
    assert attnlab.show(record).view.title == reader.title
    if task == "classification":
        assert layer.extras["beta"].shape[1] == 1
        assert set(attnlab.contribution(record)["query_token"]) == {"label"}
    else:
        assert record.words["target"][0][:2] == ["<s>", "nobody"]
        read, targets = record.tokens["target"], layer.extras["targets"]
        assert targets[:, :-1].equal(read[:, 1:])
        assert (targets[:, -1] == EOS).all()


# --- batches ---


def test_batches_hold_every_example_once_within_the_budget(folder):
    reader = open_reader(str(folder / "bert"), device="cpu")
    corpus = TextCorpus(tuple(TextExample("cat " * (1 + k % 7), None, str(k)) for k in range(31)))
    made = list(iterate_batches(reader, corpus, 23))
    assert sorted(int(example.where) for batch in made for example in batch) == list(range(31))
    for batch in made:
        lengths = [len(example.text.split()) for example in batch]
        assert max(lengths) * len(batch) <= 23
    assert [len(batch) for batch in iterate_batches(reader, corpus, 1)] == [1] * 31


def test_bytes_written_as_letters_are_known_as_punctuation():
    from attnlab.analysis.categories import Categories

    vocabulary = {"<s>": 0, "Ġcat": 1, "âĢĶ": 2, "Ġ,": 3, "Ċ": 4, "KÃ¤se": 5}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")
    side = PretrainedReader("tiny", tiny_models.gpt2(), tokenizer).sides["target"]
    assert Categories.default(side.texts, side.special).of_token[:6].tolist() == [0, 2, 1, 1, 2, 2]
    assert len(side.pieces) == tiny_models.VOCABULARY
    named = Categories.from_groups({"food": ["Käse"], "dash": ["âĢĶ"]}, side.pieces, side.texts)
    assert named.of_token[:6].tolist() == [2, 2, 1, 2, 2, 0]


def test_every_tokenizer_is_shown_in_one_notation():
    raw = Tokenizer(models.WordLevel({"<s>": 0, "<0x0A>": 1, "▁cat": 2, "<0x2C>": 3}, unk_token="<s>"))
    raw.decoder = decoders.ByteFallback()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")
    side = PretrainedReader("tiny", tiny_models.gpt2(), tokenizer).sides["target"]
    assert side.texts[:4] == ["<s>", "⏎", "▁cat", ","]


# --- what it says ---


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no/such-model", "--text", "a"], "no/such-model.*local cache"),
        (["ROOT/bert", "--text", "cat " * 60], "--text: 60 tokens.* 53 positions; --max-length 53"),
        (["ROOT/bert", "--file", "ROOT/long.txt"], "long.txt:3: 54 tokens"),
        (["ROOT/bert", "--file", "ROOT/empty.txt"], "empty.txt: .*empty"),
        (["ROOT/bert", "--file", "ROOT/binary.txt"], "binary.txt:2: .*binary"),
        (["ROOT/bert", "--file", "ROOT/latin.txt"], r"latin.txt:2: .*UTF-8 \(byte 0xe9\)"),
        (["ROOT/bert", "--file", "ROOT/broken.txt.gz"], "broken.txt.gz: cannot be read"),
        (["ROOT/bert", "--file", "ROOT/nowhere.txt"], "nowhere.txt: no such file"),
        (["ROOT/bert", "--file", "ROOT"], "is a folder"),
        (["ROOT/mamba", "--text", "cat"], "MambaModel has no attention.*state-space"),
        (["ROOT/bert", "--text", "cat", "--revision", "x"], "^--revision x is for an id .*is a folder"),
        (["ROOT/bert", "--text", "cat", "--gguf-file", "x.gguf"], "no x.gguf in|pip install gguf"),
        (["ROOT/marian", "--text", "cat " * 54], "--text: 54 tokens"),
        (["ROOT/marian", "--file", "ROOT/corpus.txt"], "corpus.txt:1: .* reads pairs"),
        (["ROOT/marian", "--file", "ROOT/single.tsv"], "single.tsv:2: .*tab"),
        (["ROOT/marian", "--file", "ROOT/triple.tsv"], "triple.tsv:1: .*tab"),
        (["ROOT/gpt2", "--pair", "cat", "mat"], "--pair: .*gpt2 reads single texts"),
        (["ROOT/bert", "--text", " "], "--text is empty"),
        (["ROOT/bert"], "--text, --pair, --file and --document.*none"),
        (["ROOT/bert", "--text", "a", "--file", "b"], "--text, --pair, --file and --document.*text and file"),
        (["ROOT/bert", "--text", "a", "--examples", "2"], "--limit and --examples.* --file"),
        (["ROOT/bert", "--text", "cat", "--layers", "7"], "layer 7"),
        (["ROOT/bert", "--text", "cat", "--layers", "0,7"], "layer 7"),
        (["ROOT/bert", "--text", "cat", "--heads", "5"], "head 5"),
        (["ROOT/bert", "--text", "cat", "--heads", "a"], "--heads a: expected whole"),
        (["ROOT/bert", "--text", "cat", "--dtype", "float8"], "^--dtype must.*float8"),
        (["ROOT/bert", "--text", "cat", "--max-length", "0"], "^--max-length must be at least 1"),
        (["ROOT/bert", "--text", "cat", "--max-length", "99"], "^--max-length.* 53.* 99"),
        (["ROOT/bert", "--text", "cat", "--batch-tokens", "0"], "^--batch-tokens must be at least 1"),
        (["ROOT/bert", "--file", "ROOT/corpus.txt", "--limit", "0"], "^--limit must be at least 1"),
        (["ROOT/bert", "--text", "cat", "--layers", "3-1"], "^--layers 3-1: a range goes upwards, as 1-3"),
        (["ROOT/bert", "--text", "cat", "--window", "-1"], "^--window must be at least 0, got -1"),
        (
            ["ROOT/bert", "--text", "cat", "--analysis", "signed", "--analysis", "signed"],
            "^--analysis: signed is named",
        ),
        (
            ["ROOT/bert", "--text", "cat", "--categories", "ROOT/corpus.txt"],
            "corpus.txt:1: .*category",
        ),
    ],
)
def test_what_is_wrong_is_said(folder, tmp_path, words, message):
    for name, content in {
        "long.txt": ("cat\n\n" + "cat " * 54).encode(), "empty.txt": b"\n \n", "binary.txt": b"cat\n\x00\x01\n",
        "latin.txt": b"cat\ncaf\xe9\n", "broken.txt.gz": b"no gzip", "single.tsv": b"a\tb\ncat\n",
        "triple.tsv": b"a\tb\tc\n",
    }.items():  # fmt: skip
        (folder / name).write_bytes(content)
    words = [word.replace("ROOT", str(folder)) for word in words]
    result = run(*words, "--out", tmp_path / "out")
    assert result.exit_code != 0
    assert isinstance(result.exception, ValueError | OSError | ImportError), result.exception
    with pytest.raises(type(result.exception), match=message):
        raise result.exception
    assert not (tmp_path / "out").exists()  # what went wrong takes no folder


def test_out_must_not_be_a_file(folder, tmp_path):
    (tmp_path / "file").write_text("mine")
    result = run(folder / "bert", "--text", "cat", "--out", tmp_path / "file")
    assert "is a file" in str(result.exception)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_holds_another_inspection_is_left_alone(folder, tmp_path):
    inspected(folder / "bert", "--text", LINES[0], "--out", tmp_path)
    result = run(folder / "bert", "--text", LINES[1], "--out", tmp_path)
    with pytest.raises(ValueError, match=r"another inspection \(corpus: "):
        raise result.exception


def test_numbers_and_ranges():
    assert parse_numbers("0,2-4,3", "layers") == (0, 2, 3, 4)
    assert parse_numbers(None, "layers") is None
    for wrong in ("", "4-2", "1-2-3", "-1", "1,,2"):
        with pytest.raises(ValueError, match="layers="):
            parse_numbers(wrong, "layers")


def test_analyses_that_share_a_table_are_refused():
    assert expand_analyses(["all", "signed"])[-1] == "signed"
    assert sorted(expand_analyses(["all", "signed"])) == sorted(ANALYSES)
    for names, message in (
        (["signed", "signed"], "signed is named twice$"),
        (["signed", "./mine.py:Signed"], "signed is named twice, as signed and ./mine.py:Signed: rename one class"),
        (["./mine.py:Heads"], "every inspection has a table 'heads'; give the class another name"),
    ):
        with pytest.raises(ValueError, match=message):
            SurveyConfig(analyses=tuple(names))


def test_errors_name_options_as_they_are_typed():
    options = ["--allow-pickle", "--batch-tokens", "--device", "--limit"]
    for message, named in {
        "batch_tokens must be at least 1, got 0": "--batch-tokens must be at least 1, got 0",
        "device=cuda, but there is none; use device=cpu": "--device cuda, but there is none; use --device cpu",
        "limit='a b' is no number": "--limit a b is no number",
        "limit=-5 and device=/tmp": "--limit -5 and --device /tmp",
        "pass --allow-pickle (allow_pickle=True)": "pass --allow-pickle",
        "a/device=x and mydevice=y stay, and the limit too": "a/device=x and mydevice=y stay, and the limit too",
    }.items():
        assert name_options(message, options) == named
    assert name_options("device=cuda", []) == "device=cuda"


# --- in a notebook ---


def test_a_record_shows_itself_and_escapes_what_it_shows():
    model = tiny_models.bert()
    record = attnlab.record(model, tiny_models.padded_batch(model))
    hostile = replace(record, words={"source": [["<b>", "cat"]] * 3}, meta={"model": "<i>"})
    html = hostile._repr_html_()
    assert "<b>" not in html
    assert "<i>" not in html
    assert "&lt;b&gt; cat" in html
    assert "3 encoder-self" in html
    assert "<td>3</td>" in html
    assert "none" in Record([], tokens={"source": torch.zeros(1, 2)})._repr_html_()


def test_a_run_whose_task_reads_no_text_says_what_it_lacks():
    task = SimpleNamespace(architecture="translation", encode=len, source_vocabulary=None)
    run = SimpleNamespace(folder=SimpleNamespace(path="runs/mine"), task=task, model=torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"runs/mine.*encode_target, target_voc"):
        RunReader(run)

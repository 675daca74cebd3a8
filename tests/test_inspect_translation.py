"""attnlab inspect --text of a translator: it translates, and shows what it attends to while it writes."""

import json

import pandas as pd
import pytest
import tiny_models
import torch
from in_process import run_attnlab

from attnlab.reading.reader import PretrainedReader
from attnlab.reading.text_stream import TextExample

SMALL = ["data=lexicon", "examples=50", "held_out=5", "width=8", "layers=1", "heads=2", "feed_forward=8", "steps=2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("translator")
    assert run_attnlab("train", "synthetic", *SMALL, "device=cpu", "out=runs/t", cwd=place).returncode == 0
    return place


def test_a_translator_shows_its_own_output(place):
    text = "nurabu lune sele"
    done = run_attnlab("inspect", "runs/t", "--text", text, "--out", "one", "--device", "cpu", cwd=place)
    assert done.returncode == 0, done.stderr
    translation = run_attnlab("translate", "runs/t", "device=cpu", input=text, cwd=place).stdout.strip()
    assert f"translates the text as “{translation}”" in done.stdout
    about = json.loads((place / "one/statistics.json").read_text())["about"]
    assert (about["text"], about["translation"]) == (text, translation)
    table = pd.read_csv(place / "one/examples/1/layers.csv").query("kind == 'cross'")
    written = table.drop_duplicates("query")["query_token"].tolist()
    assert written == ["<s>", *translation.split()]


def test_a_file_of_single_texts_is_refused_with_what_works(place):
    (place / "a.txt").write_text("nurabu\n")
    done = run_attnlab("inspect", "runs/t", "--file", "a.txt", "--device", "cpu", cwd=place)
    assert done.returncode == 2
    assert "--text" in done.stderr


@pytest.mark.parametrize("name", ["marian", "t5"])
def test_a_hugging_face_translator_adds_its_own_translation(name):
    model, tokenizer = getattr(tiny_models, name)(), tiny_models.tokenizer()
    reader = PretrainedReader(name, model.eval(), tokenizer)
    example = reader.complete(TextExample("the cat sat on the mat"))
    ids = tokenizer(["the cat sat on the mat"], return_tensors="pt")
    told = torch.tensor([[model.config.decoder_start_token_id]])
    with torch.no_grad():
        first = model(**ids, decoder_input_ids=told).logits[0, -1].argmax()
    assert example.second is not None
    assert example.second.startswith(tokenizer.decode([first], skip_special_tokens=True))
    assert reader.record([example]).kind("cross")
    assert reader.complete(TextExample("cat", "mat")).second == "mat"


def test_a_model_of_single_texts_reads_them_as_they_are():
    reader = PretrainedReader("bert", tiny_models.bert(), tiny_models.tokenizer())
    assert reader.complete(TextExample("cat")).second is None

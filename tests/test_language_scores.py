"""Scores of language models: bits per byte compare vocabularies, and training and evaluation print the same."""

import json
import math
import os

import pytest
from in_process import run_attnlab as run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from attnlab.commands.compare.measures import list_measures
from attnlab.training.run_folder import RunFolder
from attnlab.training.runs import open_run

TEXT = "über den Weg läuft ein Hund.\nthe cat sat on the mat.\n" * 60
SMALL = ["width=16", "layers=1", "heads=2", "feed_forward=32", "steps=2", "block=32", "device=cpu"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "text.txt").write_text(TEXT)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet))
    tokenizer.save(str(folder / "own.json"))
    return folder


def train(files, out, *words):
    done = run("train", "language", *SMALL, f"data={files / 'text.txt'}", *words, f"out={out}")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("how", "unit"),
    [("units=character", "character"), ("units=byte", "byte"), ("units=subword", "subword"), ("tokenizer", "token")],
)
def test_bits_per_byte_are_the_nats_of_the_text_over_its_bytes(files, tmp_path, how, unit):
    words = [f"tokenizer={files / 'own.json'}"] if how == "tokenizer" else [how]
    printed = train(files, tmp_path, *words)
    assert f"nats per {unit}" in printed
    run_evaluate = run("evaluate", str(tmp_path), "device=cpu")
    assert "bits_per_byte" in run_evaluate.stdout
    scores = json.loads((tmp_path / "evaluation-valid.json").read_text())
    task = open_run(tmp_path, device="cpu").task
    held = TEXT[TEXT.index("\n", int(len(TEXT) * 0.95)) + 1 :].encode()
    bits = scores["loss"] * scores["targets"] / math.log(2) / len(held)
    assert task.count_bytes("valid") == task.count_bytes("valid-context") == len(held)
    assert scores["bits_per_byte"] == pytest.approx(bits)
    assert scores["perplexity_per_byte"] == pytest.approx(2**bits)
    assert RunFolder(tmp_path).metrics()[-1]["valid_bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    if unit == "byte":
        assert scores["targets"] == len(held)
    assert "bits per byte" in [measure.name for measure in list_measures("perplexity", "valid", [scores])]


def test_a_tokenizer_file_is_the_vocabulary(files, tmp_path):
    train(files, tmp_path, f"tokenizer={files / 'own.json'}")
    task = open_run(tmp_path, device="cpu").task
    assert len(task.vocabulary) == 4 + 280
    ids = task.encode([TEXT])[0].tolist()
    assert task.decode(ids[1:]) == TEXT


def test_unknown_targets_are_counted(files, tmp_path):
    (tmp_path / "other.txt").write_text("the cÄt sat\nthe ÖÖ\n")
    train(files, tmp_path / "run", "units=character", f"valid={tmp_path / 'other.txt'}")
    run("evaluate", str(tmp_path / "run"), "device=cpu")
    assert json.loads((tmp_path / "run" / "evaluation-valid.json").read_text())["unknown_targets"] == 3


def test_one_long_line_is_held_out_by_characters_and_refused_for_words(tmp_path):
    (tmp_path / "text.txt").write_text("abcdefg" * 100)
    train(tmp_path, tmp_path / "run", "units=character")
    task = open_run(tmp_path / "run", device="cpu").task
    assert task.count_bytes("train") == 665
    done = run("train", "language", *SMALL, f"data={tmp_path / 'text.txt'}", "units=word", f"out={tmp_path / 'words'}")
    assert done.returncode == 2
    assert "valid=" in done.stderr


@pytest.mark.parametrize(
    ("tokenizer", "word"), [("none.json", "no such"), ("text.txt", "not a tokenizer"), (".", "tokenizer.json")]
)
def test_what_is_no_tokenizer_is_one_line(files, tmp_path, tokenizer, word):
    words = [*SMALL, f"data={files / 'text.txt'}", f"tokenizer={files / tokenizer}", f"out={tmp_path / 'run'}"]
    done = run("train", "language", *words)
    assert done.returncode == 2
    assert word in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_bf16_learns_on_a_cpu_as_float32_does(files, tmp_path):
    words = ["model=modern-25m", "head_dim=8", "units=character", "batch_tokens=256"]
    done = [
        run("train", "language", *SMALL[:4], *words, f"data={files / 'text.txt'}", "steps=20", "block=32",
            f"precision={precision}", "device=cpu", f"out={tmp_path / precision}")
        for precision in ("fp32", "bf16")
    ]  # fmt: skip
    assert [each.returncode for each in done] == [0, 0], done
    losses = [RunFolder(tmp_path / name).metrics()[-1]["valid_loss"] for name in ("fp32", "bf16")]
    assert losses[0] < 3.0
    assert losses[1] == pytest.approx(losses[0], abs=0.1)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("ATTNLAB_DATA"), reason="ATTNLAB_DATA is not set: it has tinyshakespeare")
def test_a_modern_model_learns_shakespeare_in_a_minute_or_two(tmp_path):
    words = ["data=tinyshakespeare", "model=modern-25m", "layers=4", "width=128", "device=cpu"]
    done = run("train", "language", *words, f"out={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert RunFolder(tmp_path).metrics()[-1]["valid_loss"] <= 2.1

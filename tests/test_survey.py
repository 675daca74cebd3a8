"""A survey is the same however it is cut: by batches, by a kill, by processes."""

import os
import signal
import subprocess
import sys

import pandas as pd
import pytest
import tiny_models
import torch
from process_pairs import run_pair
from typer.testing import CliRunner

from attnlab.cli import app
from attnlab.reading import survey as surveying
from attnlab.reading.reader import PretrainedReader, open_reader
from attnlab.reading.survey import SurveyConfig, iterate_batches, survey
from attnlab.reading.text_stream import TextCorpus, TextExample

WORDS = tiny_models.WORDS[3:]
SCRIPT = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from attnlab.cli import main
from attnlab.reading import reader, survey
survey.SECONDS = 0.0
old, seen = reader.PretrainedReader.record, []
def record(self, examples):
    seen.append(examples)
    if len(seen) > int(os.environ.get("KILL_AFTER", "1000")):
        os.kill(os.getpid(), signal.SIGKILL)
    return old(self, examples)
reader.PretrainedReader.record = record
main()
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """31 lines of 1 to 17 words."""
    generator = torch.Generator().manual_seed(11)
    lines = []
    for _ in range(31):
        count = int(torch.randint(1, 18, (), generator=generator))
        lines.append(" ".join(WORDS[k] for k in torch.randint(len(WORDS), (count,), generator=generator)))
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def reader():
    return PretrainedReader("tiny", tiny_models.bert(), tiny_models.tokenizer())


def tables(folder):
    return {path.stem: pd.read_csv(path) for path in sorted((folder / "tables").glob("*.csv"))}


def assert_same(ours, theirs, **tolerance):
    assert ours.keys() == theirs.keys()
    for name in ours:
        pd.testing.assert_frame_equal(ours[name], theirs[name], **tolerance)


def test_the_size_of_batches_and_windows_makes_no_difference(corpus, tmp_path, monkeypatch):
    whole, contents = survey(reader(), TextCorpus(file=corpus), SurveyConfig(batch_tokens=4096), tmp_path / "a")
    monkeypatch.setattr(surveying, "WINDOW", 5)
    cut, again = survey(reader(), TextCorpus(file=corpus), SurveyConfig(batch_tokens=29), tmp_path / "b")
    assert_same(cut.tables(), whole.tables(), rtol=2e-3, atol=1e-5)  # a number at the edge of a bin may change sides
    assert (contents.examples, contents.fingerprint) == (31, again.fingerprint)
    assert contents.tokens == again.tokens == len(corpus.read_text().split())


def test_a_survey_goes_on_where_it_stopped_and_is_not_made_twice(corpus, tmp_path, monkeypatch):
    config = SurveyConfig(batch_tokens=29)
    whole, _ = survey(reader(), TextCorpus(file=corpus), config, tmp_path / "whole")
    monkeypatch.setattr(surveying, "SECONDS", 0.0)
    read, calls = PretrainedReader.record, []

    def record(self, examples):
        calls.append(len(examples))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return read(self, examples)

    monkeypatch.setattr(PretrainedReader, "record", record)
    with pytest.raises(KeyboardInterrupt):
        survey(reader(), TextCorpus(file=corpus), config, tmp_path / "cut")
    done, told = len(calls), []
    resumed, _ = survey(reader(), TextCorpus(file=corpus), config, tmp_path / "cut", progress=lambda *x: told.append(x))
    assert_same(resumed.tables(), whole.tables(), check_exact=True)
    assert sum(calls) - calls[3] == 31
    assert told[-1] == (31, 31, "examples")
    before = len(calls)
    third, _ = survey(reader(), TextCorpus(file=corpus), config, tmp_path / "cut")
    assert len(calls) == before > done
    assert_same(third.tables(), whole.tables(), check_exact=True)


def test_a_damaged_state_is_named(tmp_path):
    given = TextCorpus((TextExample("the cat"),))
    survey(reader(), given, SurveyConfig(), tmp_path)
    path = tmp_path / "state" / "0-of-1.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"0-of-1.safetensors is damaged .*delete the file"):
        survey(reader(), given, SurveyConfig(), tmp_path)


def test_other_weights_categories_or_counts_are_another_survey(tmp_path):
    """What a folder keeps is of what its files said and the model knew then, whatever their names."""
    given, mine, counts = TextCorpus((TextExample("the cat"),)), tmp_path / "mine.tsv", tmp_path / "counts.tsv"
    config = SurveyConfig(categories=str(mine), frequency=str(counts))
    mine.write_text("animals\tcat\n")
    counts.write_text("cat\t2\nthe\t3\n")
    same, other = reader(), reader()
    first, _ = survey(same, given, config, tmp_path / "out")
    assert_same(survey(same, given, config, tmp_path / "out")[0].tables(), first.tables(), check_exact=True)
    with torch.no_grad():
        next(other.model.parameters()).add_(0.25)
    with pytest.raises(ValueError, match=r"another inspection \(weights: "):
        survey(other, given, config, tmp_path / "out")
    mine.write_text("articles\tthe\n")
    with pytest.raises(ValueError, match=r"another inspection \(groups: .*animals.* there, .*articles.* now"):
        survey(same, given, config, tmp_path / "out")
    mine.write_text("animals\tcat\n")
    counts.write_text("cat\t3\nthe\t2\n")
    with pytest.raises(ValueError, match=r"another inspection \(counts: "):
        survey(same, given, config, tmp_path / "out")


@pytest.fixture(scope="module")
def words(corpus, tmp_path_factory):
    """The command, but for where to write."""
    folder = tmp_path_factory.mktemp("models") / "bert"
    for part in (tiny_models.bert(), tiny_models.tokenizer()):
        part.save_pretrained(folder)
    return ["inspect", str(folder), "--file", str(corpus), "--batch-tokens", "29", "--device", "cpu", "--out"]


def inspected(words, out):
    result = CliRunner().invoke(app, [*words, str(out)])
    assert result.exit_code == 0, result.exception
    return tables(out)


def start(folder, words, **environment):
    """Run the command in a process of its own, which can be killed."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    call = [sys.executable, str(script), *words]
    return subprocess.run(call, capture_output=True, text=True, check=False, env=os.environ | environment)


@pytest.mark.slow
def test_killed_the_tables_are_the_same(corpus, words, tmp_path, monkeypatch):
    whole, out = inspected(words, tmp_path / "one"), tmp_path / "killed"
    calls, read = [], PretrainedReader.record
    monkeypatch.setattr(PretrainedReader, "record", lambda self, some: calls.append(some) or read(self, some))
    assert start(tmp_path, [*words, str(out)], KILL_AFTER="3").returncode == -signal.SIGKILL
    assert not (out / "tables").exists()
    assert_same(inspected(words, out), whole, check_exact=True)
    assert len(calls) == len(list(iterate_batches(reader(), TextCorpus(file=corpus), 29))) - 3


def test_shared_by_two_processes_the_tables_are_the_same(words, tmp_path):
    """With gloo: all counts equal, sums to rounding."""
    out = tmp_path / "two"
    pair = run_pair(tmp_path, *words, out)
    assert [ended.returncode for ended in pair] == [0, 0], pair
    assert "".join(ended.output for ended in pair).count("report:") == 1
    assert {path.name for path in (out / "state").iterdir()} == {"0-of-2.safetensors", "1-of-2.safetensors"}
    assert_same(tables(out), inspected(words, tmp_path / "one"), rtol=1e-12)


def test_a_real_model_in_half_precision_is_near_its_full_one(tmp_path):
    path, text = tiny_models.minilm(), TextCorpus((TextExample("The cat sat on the mat."),))
    full, half = (
        survey(open_reader(path, device="cpu", dtype=dtype), text, SurveyConfig(dtype=dtype), tmp_path / dtype)[0]
        for dtype in ("float32", "bfloat16")
    )
    columns = ["norm_mean", "entropy_nats", "first_token_share"]
    ours, theirs = (one.tables()["heads"][columns] for one in (half, full))
    pd.testing.assert_frame_equal(ours, theirs, rtol=0.1, atol=0.05)
    assert not ours.equals(theirs)

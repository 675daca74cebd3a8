"""What the shell completes, in the protocols of bash and zsh."""

import pytest
from in_process import run_attnlab

from attnlab.mechanisms import MECHANISMS


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "model.json").write_text("{}")
    (tmp_path / "runs" / "finished-bert").mkdir()  # a Hugging Face model
    (tmp_path / "runs" / "finished-bert" / "config.json").write_text("{}")
    return tmp_path


def complete_in_bash(monkeypatch, folder, *words):
    """Return what bash is offered; bash itself splits words at "="."""
    split = [part for word in words for part in word.replace("=", "\n=\n").split("\n") if part or not word]
    monkeypatch.setenv("_ATTNLAB_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(["attnlab", *split]))
    monkeypatch.setenv("COMP_CWORD", str(len(split)))
    done = run_attnlab(cwd=folder)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["eval"], ["evaluate"]),
        (["train", "syn"], ["synthetic"]),
        (["train", "synthetic", "ste"], ["steps=", "steps=5000"]),
        (["train", "synthetic", "steps=3", "ste"], []),
        (["train", "synthetic", "attention=dagpam", "ini"], ["init=", "init=fairseq", "initial="]),
        (["train", "synthetic", "attention=spa"], ["sparsemax"]),
        (["train", "synthetic", "attention="], list(MECHANISMS)),
        (["train", "synthetic", "--attention", "spa"], ["sparsemax"]),
        (["train", "synthetic", "norm="], ["pre", "post"]),
        (["train", "synthetic", "data=key"], ["keyword"]),
        (["train", "translation", "data=mul"], ["multi30k"]),
        (["train", "language", "model=ti"], ["tiny"]),
        (["train", "synthetic", "device=c"], ["cpu", "cuda"]),
        (["train", "synthetic", "--device=c"], ["cpu", "cuda"]),
        (["train", "synthetic", "--dev"], ["--device"]),
        (["compare", "synthetic", "attention=softmax,dag"], ["softmax,dagpam"]),
        (["demo", "cop"], ["copying=", "copying=true"]),
        (["describe", "iwslt14", "tie="], ["none", "output", "all"]),
        (["check", "dagpam", "ini"], ["initial="]),
        (["evaluate", ""], ["first"]),
        (["evaluate", "runs/"], ["runs/first"]),
        (["evaluate", "first", "boot"], ["bootstrap="]),
        (["inspect", "f"], ["first"]),
        (["reproduce", "ko"], ["kobayashi2020"]),
        (["reproduce", "zheng2021", "--only", "table"], ["table1", "table2", "table3", "table4"]),
        (["reproduce", "zheng2021", "--scale", "s"], ["smoke", "small"]),
        (["list", "lan"], ["language"]),
        (["train", "nothing", ""], []),
    ],
)
def test_bash_is_offered(monkeypatch, folder, words, offered):
    assert complete_in_bash(monkeypatch, folder, *words) == offered


def test_zsh_gets_whole_words_with_their_meaning(monkeypatch, folder):
    monkeypatch.setenv("_ATTNLAB_COMPLETE", "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "attnlab train synthetic attention=spa")
    assert '"attention=sparsemax":"Sparsemax' in run_attnlab(cwd=folder).stdout

"""attnlab align hmm, fertility and eflomal: links of known text, folders that are used again, and bad input."""

import re
import stat

import numpy as np
import pytest
from aligned_text import cli

from attnlab.aligning import AlignmentRequest, align
from attnlab.aligning.hmm_aligner import FILE, HmmAligner, name_folder
from attnlab.analysis.alignment import aer
from attnlab.analysis.symmetrise import grow_diag_final_and


@pytest.fixture(scope="module")
def language():
    """300 pairs: most words translate one to one, w0 as two words, neighbours change places; w1 has no translation."""
    generator = np.random.default_rng(0)
    source, target, links = [], [], []
    for _ in range(300):
        x = generator.zipf(1.5, generator.integers(2, 9)) % 40
        order = [*range(len(x))]
        for k in range(0, len(x) - 1, 2):
            if generator.random() < 0.3:
                order[k], order[k + 1] = order[k + 1], order[k]
        y, own = [], set()
        for k in order:
            for word in {0: ["va", "vb"], 1: []}.get(int(x[k]), [f"v{x[k]}"]):
                own.add((k, len(y)))
                y.append(word)
        source.append([f"w{i}" for i in x])
        target.append(y)
        links.append(frozenset(own))
    return source, target, links


@pytest.fixture
def files(tmp_path, monkeypatch, language):
    monkeypatch.chdir(tmp_path)
    for name, side in zip(("s", "t"), language, strict=False):
        (tmp_path / name).write_text("".join(" ".join(words) + "\n" for words in side))
    gold = "".join(" ".join(f"{s}-{t}" for s, t in sorted(pair)) + "\n" for pair in language[2])
    (tmp_path / "gold").write_text(gold)
    return tmp_path / "s", tmp_path / "t"


@pytest.mark.parametrize(("kind", "most"), [("hmm", 0.1), ("fertility", 0.04)])
def test_the_links_of_an_artificial_language_are_found(kind, most, language):
    source, target, links = language
    ahead, back = HmmAligner.train((source, target), kind)
    made = ahead.align((source, target))[0].links()
    turned = [frozenset((s, t) for t, s in pair) for pair in back.align((target, source))[0].links()]
    assert aer(list(map(grow_diag_final_and, made, turned)), links, links) < most


def test_both_directions_are_trained_once_and_their_folders_are_used_again(files, language):
    done = cli("fertility", *files, "--reverse", "fertility", "--gold", "gold")
    assert done.exit_code == 0, done.output
    ahead, back = (name_folder(text, "fertility") for text in (language[:2], language[1::-1]))
    assert f"runs/{ahead}: trained on 300 pairs; the other direction is in runs/{back}" in done.stderr
    assert f"reverse: runs/{back}: trained earlier on this text" in done.stderr
    assert float(re.search(r"AER ([\d.]+)", done.stderr)[1]) < 4
    assert len(done.stdout.split("\n")) == 301
    alone = cli("fertility", *files)
    assert "trained earlier" in alone.stderr
    assert alone.stdout == cli(f"runs/{ahead}", *files).stdout == cli(ahead, *files).stdout
    turned = cli(f"runs/{back}", files[1], files[0])
    assert turned.exit_code == 0, turned.output
    assert turned.stdout != alone.stdout
    assert "never seen" not in turned.stderr
    wrong = cli(f"runs/{back}", *files)
    assert "100 % of the source words were never seen in training: check the order of the files" in wrong.stderr


def test_text_that_was_not_trained_on_is_aligned_with_words_that_were_never_seen(files, tmp_path):
    (tmp_path / "a").write_text("w2 unseen w5\n\nw3\n")
    (tmp_path / "b").write_text("v2 unknown v5\nv3\n\n")
    done = cli("hmm", "a", "b", "--train-on", *files, "--scores")
    assert done.exit_code == 0, done.output
    lines = done.stdout.split("\n")
    assert [link.split(":")[0] for link in lines[0].split()] == ["0-0", "1-1", "2-2"]
    assert all(0 < float(link.split(":")[1]) <= 1.0001 for link in lines[0].split())
    assert lines[1:] == ["", "", ""]


@pytest.mark.parametrize("words", [10_000, 3])
@pytest.mark.parametrize("model", ["hmm", "ibm1"])
def test_a_pair_of_very_long_lines_is_left_without_links_and_named(model, words, files):
    with files[0].open("a") as s, files[1].open("a") as t:
        s.write("w2 " * 10_000 + "\nw2\n")
        t.write("v2 " * words + "\nv2\n")
    done = cli(model, *files)
    assert done.exit_code == 0, done.output
    assert done.stdout.split("\n")[-3:] == ["", "0-0", ""]
    assert "left without links" in done.stderr
    assert "line 301; split them into sentences" in done.stderr
    assert cli(model, *files).stdout == done.stdout  # by the saved model


@pytest.mark.parametrize("kind", ["hmm", "ibm1"])
def test_gold_links_of_another_text_are_refused_before_training(kind, files, tmp_path):
    (tmp_path / "gold").write_text("0-0\n")
    failed = cli(kind, *files, "--gold", "gold")
    assert re.match("gold has 1 lines? for 300 sentence pairs", str(failed.exception))
    assert failed.stdout == ""
    assert not (tmp_path / "runs").exists()


def test_training_reports_every_block():
    seen = []
    text = [["a", "b"], ["a"]], [["x", "y"], ["x"]]
    HmmAligner.train(text, "fertility", tick=lambda done, of: seen.append((done, of)))
    assert seen == [(k, 6) for k in range(1, 7)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hmm", "--diagonal"], "--diagonal is for MODEL ibm1; omit it for hmm"),
        (["fertility", "--by", "norm"], "--by is for models with attention"),
        (["eflomal", "--layer", "1"], "--layer is for models with attention"),
        (["eflomal"], "eflomal-align was not found: install it"),
    ],
)
def test_options_of_other_models_are_refused(words, message, files, monkeypatch):
    monkeypatch.setenv("PATH", "")
    done = cli(words[0], *files, *words[1:])
    assert re.match(message, str(done.exception))


def test_a_trained_folder_takes_no_text_to_train_on_and_must_be_whole(tmp_path):
    text = [["a", "b"], ["a"]], [["x", "y"], ["x"]]
    HmmAligner.train(text, "hmm")[0].save(tmp_path / "model")
    with pytest.raises(ValueError, match="--train-on is for training"):
        align(str(tmp_path / "model"), text, AlignmentRequest(train_on=text))
    (tmp_path / "model" / "source.txt").write_text("<pad>\n<s>\n</s>\n<unk>\na\n")
    with pytest.raises(ValueError, match=f"the vocabularies do not fit {FILE}"):
        align(str(tmp_path / "model"), text)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A program called eflomal-align that links the words of each line in order, and keeps its source text."""

    def write(body):
        path = tmp_path / "bin" / "eflomal-align"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")

    return write


def test_eflomal_is_called_where_it_is_installed(files, tmp_path, program):
    program(f'cp "$3" {tmp_path}/copy; sed "s/.*/0-0/" "$3" > "$7"')
    (tmp_path / "a").write_text("w2 w3\n\nw4\n")
    (tmp_path / "b").write_text("v2\nv9\nv4\n")
    done = cli("eflomal", "a", "b", "--train-on", *files)
    assert done.exit_code == 0, done.output
    assert done.stdout == "0-0\n\n0-0\n"
    full = sum(bool(line.strip()) for line in files[1].read_text().split("\n"))
    assert len((tmp_path / "copy").read_text().splitlines()) == 2 + full
    program("echo out of memory >&2; exit 3")
    failed = cli("eflomal", "a", "b")
    assert re.search("eflomal-align failed with exit status 3: out of memory", str(failed.exception))

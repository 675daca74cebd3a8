"""A run notices when its vocabulary or its text is not what it was trained with."""

import shutil

import pytest
from in_process import run_attnlab

from attnlab.tasks.vocabulary import Subwords

TINY = ["width=8", "layers=1", "heads=2", "feed_forward=8", "vocabulary=40", "device=cpu"]
WORDS = ("ein Hund läuft", "eine Katze schläft", "der Vogel singt laut", "das Kind spielt")


def train(folder, steps=2):
    return run_attnlab("train", "translation", "src=a.en", "tgt=a.de", *TINY, f"steps={steps}", "out=run", cwd=folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    for name in ("a.en", "a.de"):
        (folder / name).write_text("".join(f"{WORDS[k % 4]} {WORDS[k % 3]} {k}\n" for k in range(60)))
    done = train(folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def own(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "own")


def damage_vocabulary(file, kind):
    whole = file.read_bytes()
    file.unlink()
    if kind != "missing":
        file.write_bytes(b"" if kind == "empty" else whole.replace(b"K", b"Q", 1))


@pytest.mark.parametrize("kind", ["missing", "changed", "empty"])
def test_a_vocabulary_of_another_content_is_named_and_not_learnt_again(own, kind, capfd):
    file = own / "run" / "vocabulary.model"
    damage_vocabulary(file, kind)
    for done in (run_attnlab("translate", "run", input="Hund\n", cwd=own), train(own)):
        assert done.returncode == 2
        assert "vocabulary.model" in done.stderr
        assert done.stderr.count("\n") == 1
    assert file.exists() == (kind != "missing")
    assert capfd.readouterr().err == ""  # of SentencePiece


def test_a_run_does_not_resume_on_other_text(own):
    whole = (own / "a.de").read_text()
    (own / "a.de").write_text(whole.upper())
    for steps in (2, 3):
        done = train(own, steps)
        assert (done.returncode, "changed" in done.stderr, "a.de" in done.stderr) == (2, True, True)
    evaluated = run_attnlab("evaluate", "run", "bootstrap=2", "device=cpu", cwd=own)
    assert evaluated.returncode == 0
    assert "a.de: the text has changed" in evaluated.stderr
    (own / "a.de").unlink()
    assert run_attnlab("translate", "run", input="Hund\n", cwd=own).returncode == 0
    (own / "a.de").write_text(whole)
    assert train(own, 3).returncode == 0
    evaluated = run_attnlab("evaluate", "run", "bootstrap=2", "device=cpu", cwd=own)
    assert "changed" not in evaluated.stderr


def test_a_run_without_hashes_still_opens(own):
    (own / "run" / "hashes.json").unlink()
    assert run_attnlab("translate", "run", input="Hund\n", cwd=own).returncode == 0
    assert train(own, 3).returncode == 0
    assert not (own / "run" / "hashes.json").exists()


def test_an_empty_vocabulary_is_named(tmp_path, capfd):
    (tmp_path / "vocabulary.model").write_bytes(b"")
    with pytest.raises(ValueError, match=r"vocabulary\.model"):
        len(Subwords.load(tmp_path / "vocabulary.model"))
    assert capfd.readouterr().err == ""

"""A vocabulary is learned once for the same texts and settings; a cache that fails changes nothing."""

import os
import threading

import pytest
import sentencepiece

from attnlab.tasks import vocabulary, vocabulary_cache
from attnlab.tasks.vocabulary import Subwords

CORPUS = [f"der {a} hund sieht {b} katzen" for a in ("alte", "junge", "kluge") for b in ("zwei", "drei", "vier")] * 5


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(vocabulary_cache, "LEAST_TEXT", 100)
    return tmp_path / "cache" / "attnlab" / "vocabularies"


@pytest.fixture
def learned(monkeypatch):
    """Sizes of the vocabularies that are learned, not read."""
    sizes, learn = [], vocabulary._learn_pieces
    monkeypatch.setattr(
        vocabulary, "_learn_pieces", lambda s, how, **more: sizes.append(how["vocab_size"]) or learn(s, how, **more)
    )
    return sizes


def test_a_vocabulary_is_learned_once(folder, learned):
    first = Subwords.train(CORPUS, 31)
    assert Subwords.train(list(CORPUS), 31).model == first.model
    assert learned == [31]
    assert len(list(folder.iterdir())) == 1


def test_other_texts_and_settings_have_their_own_vocabulary(folder, learned, monkeypatch):
    Subwords.train(CORPUS, 31)
    others = [
        Subwords.train(CORPUS, 30), Subwords.train(CORPUS, 31, kind="bpe"), Subwords.train(CORPUS, 31, coverage=1.0),
        Subwords.train(CORPUS, 31, shrink=True), Subwords.train([*CORPUS[1:], "ein anderer satz"], 31),
    ]  # fmt: skip
    assert len(learned) == 1 + len(others)
    monkeypatch.setattr(sentencepiece, "__version__", "another")
    Subwords.train(CORPUS, 31)
    assert len(learned) == 2 + len(others)


def test_lines_split_elsewhere_are_other_texts():
    digests = [vocabulary_cache._digest(lines, {}) for lines in (["ab", "c"], ["a", "bc"], ["abc"], ["ab", "c", ""])]
    assert len(set(digests)) == 4
    assert vocabulary_cache._digest(["\ud800"], {})  # a lone surrogate, which UTF-8 refuses


def test_a_size_that_shrank_is_recalled_and_an_error_is_not(folder, learned):
    sizes = [len(Subwords.train(CORPUS, 8000, shrink=True)) for _ in range(2)]
    assert sizes[0] == sizes[1] < 8000
    count = len(learned)
    for _ in range(2):
        with pytest.raises(ValueError, match="too large"):
            Subwords.train(CORPUS, 8000)
    assert len(learned) == count + 2


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-7], lambda data: b"", lambda data: data[:50] + b"x" + data[51:]]
)
def test_a_damaged_file_is_learned_again(folder, learned, damage):
    model = Subwords.train(CORPUS, 31).model
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert Subwords.train(CORPUS, 31).model == model
    assert (learned, file.read_bytes()) == ([31, 31], whole)


def test_short_texts_are_not_kept(folder, learned, monkeypatch):
    monkeypatch.setattr(vocabulary_cache, "LEAST_TEXT", 10**6)
    Subwords.train(CORPUS, 31)
    assert learned == [31]
    assert not folder.exists()


def test_a_cache_that_cannot_be_used_fails_no_run(tmp_path, learned, monkeypatch):
    monkeypatch.setattr(vocabulary_cache, "LEAST_TEXT", 100)
    (tmp_path / "file").write_text("not a folder")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    for place in (tmp_path / "file", closed):
        if place == closed and os.access(closed, os.W_OK):  # the superuser may write everywhere
            continue
        monkeypatch.setenv("XDG_CACHE_HOME", str(place))
        assert len(Subwords.train(CORPUS, 31)) == 31
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(vocabulary_cache.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert len(Subwords.train(CORPUS, 31)) == 31


def test_several_learn_the_same_at_once(folder):
    models = []
    threads = [threading.Thread(target=lambda: models.append(Subwords.train(CORPUS, 31).model)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(models) == 4
    assert len(set(models)) == 1
    assert [path.suffix for path in folder.iterdir()] == [".vocabulary"]

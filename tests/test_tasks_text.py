"""User files are read exactly, and errors name the file and the line."""

import gzip

import numpy as np
import pytest

from attnlab.files import write_bytes
from attnlab.tasks import text
from attnlab.tasks.vocabulary import Characters, Subwords, Words

TMX = """<?xml version="1.0"?><tmx version="1.4"><header/><body>
<tu><tuv xml:lang="de-AT"><seg>Guten <bpt i="1"/>Tag</seg></tuv><tuv xml:lang="EN"><seg>Good
day</seg></tuv></tu>
<tu><tuv xml:lang="de"><seg>allein</seg></tuv></tu>
</body></tmx>"""


@pytest.fixture
def write(tmp_path):
    def writer(name, content):
        path = tmp_path / name
        data = content if isinstance(content, bytes) else content.encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return writer


def test_lines_end_at_line_feeds_alone(write):
    assert text.read_lines(write("a.txt", "\ufeffeins\r\nzwei\u2028drei\x0bvier\n\nfünf")) == [
        "eins", "zwei\u2028drei\x0bvier", "", "fünf",
    ]  # fmt: skip
    assert text.read_lines(write("a.txt.gz", "x\ny\n")) == ["x", "y"]


def test_bad_files_are_named_with_their_line(write, tmp_path):
    with pytest.raises(ValueError, match=r"bad\.txt:3: not UTF-8 \(byte 0xe9\)"):
        text.read_lines(write("bad.txt", b"a\nb\ncaf\xe9\n"))
    with pytest.raises(ValueError, match=r"empty\.txt: the file is empty"):
        text.read_lines(write("empty.txt", "\n \n"))
    with pytest.raises(FileNotFoundError, match=r"none\.txt: no such file"):
        text.read_lines(tmp_path / "none.txt")
    path = write("cut.txt.gz", "x" * 1000)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"cut\.txt\.gz: cannot be read"):
        text.read_lines(path)


def test_unequal_line_counts_are_named(write):
    with pytest.raises(ValueError, match=r"a\.de has 3 lines and .*a\.en 2: line 3"):
        text.read_parallel(write("a.de", "1\n2\n3\n"), write("a.en", "1\n2\n"))


def test_tsv_takes_two_columns_and_names_a_line_without_a_tab(write):
    assert text.read_pairs(write("a.tsv", "ja\tyes\tCC BY\nnein\tno\n"), ("de", "en")) == (
        ["ja", "nein"],
        ["yes", "no"],
    )
    with pytest.raises(ValueError, match=r"b\.tsv:2: no tab"):
        text.read_pairs(write("b.tsv", "ja\tyes\nnein\n"), ("de", "en"))


def test_tmx_takes_units_that_have_both_languages(write):
    assert text.read_pairs(write("a.tmx", TMX), ("en", "de")) == (["Good day"], ["Guten Tag"])
    with pytest.raises(ValueError, match="no unit has both fr and en"):
        text.read_pairs(write("a.tmx", TMX), ("fr", "en"))
    with pytest.raises(ValueError, match=r"b\.tmx:4: not well-formed XML"):
        text.read_pairs(write("b.tmx", TMX.replace("</tu>\n<tu>", "<tu>")), ("en", "de"))


def test_tmx_does_not_expand_a_bomb(write):
    levels = "".join(f'<!ENTITY e{k} "{f"&e{k - 1};" * 10}">' for k in range(1, 9))
    bomb = (
        f'<!DOCTYPE tmx [<!ENTITY e0 "{"x" * 100}">{levels}]><tmx><tu><tuv lang="de"><seg>&e8;</seg></tuv></tu></tmx>'
    )
    with pytest.raises(ValueError, match="not well-formed XML"):
        text.read_pairs(write("bomb.tmx", bomb), ("en", "de"))


def test_labelled_files_of_each_kind_agree(write):
    csv = write("a.csv", 'text,label,id\n"good, really",pos,1\n"two\nlines",neg,2\n')
    jsonl = write("a.jsonl", '{"label": "pos", "text": "good, really"}\n\n{"text": "two\\nlines", "label": "neg"}\n')
    tsv = write("a.tsv.gz", 'label\ttext\npos\tgood, really\nneg\t"two\nlines"\n')
    expected = (["good, really", "two\nlines"], ["pos", "neg"])
    for path in (csv, jsonl, tsv):
        assert text.read_labelled(path, "text", "label") == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,label\ngood,\n", r"a\.csv:2: no label \(field 'label'\).*: text"),
        ("b.csv", "review,label\ngood,1\n", r"b\.csv:2: no text \(field 'text'\).*: review, label"),
        ("c.jsonl", '{"text": "x", "label": 0}\n{"text": "x"}\n', r"c\.jsonl:2: no label"),
        ("d.jsonl", '{"text": "x", "label": 0}\n{"text"\n', r"d\.jsonl:2: not JSON"),
        ("e.jsonl", "[1]\n", r"e\.jsonl:1: must be a JSON object"),
        ("f.csv", "text,label\n", r"f\.csv: no examples"),
        ("g.xml", "text,label\n", r"g\.xml: labelled text must be in a \.csv"),
        ("h.csv", 'text,label\n"good,1\n', r"h\.csv:2: .*quote is not closed"),
        ("i.csv", "label;text\n1;good, really\n", r"i\.csv:2: no text .*separated by ';'"),
        ("j.tsv", "label,text\n1,good\n", r"j\.tsv:2: no text .*separated by ','"),
        ("k.csv", f"1,{'good ' * 99}\n1,good\n", r"k\.csv:2: no text .{,150}header"),
    ],
)
def test_bad_labelled_files_are_named_with_their_line(write, name, content, message):
    with pytest.raises(ValueError, match=message):
        text.read_labelled(write(name, content), "text", "label")


def test_a_label_of_zero_is_a_label(write):
    assert text.read_labelled(write("a.jsonl", '{"text": "x", "label": 0}\n'), "text", "label") == (["x"], ["0"])


def test_what_is_held_out_shares_no_key_with_the_rest():
    keys = [f"k{n % 37}" for n in range(500)]
    out = text.draw_held_out(keys, 0.2, seed=3)
    assert not {k for k, o in zip(keys, out, strict=True) if o} & {k for k, o in zip(keys, out, strict=True) if not o}
    assert 0.2 <= out.mean() < 0.2 + 14 / 500
    assert np.array_equal(out, text.draw_held_out(keys, 0.2, seed=3))
    assert not np.array_equal(out, text.draw_held_out(keys, 0.2, seed=4))


def test_numeric_lines():
    numeric = ["1, 2.", "2019", "½ – 3 %"]
    assert [line for line in [*numeric, "in 2019", "–", ""] if text.is_numeric(line)] == numeric


def test_moses_splits_and_joins():
    split, join = text.load_moses("en")
    assert split("It's \"fine\", isn't it?") == "It 's \" fine \" , isn 't it ?"
    assert join(split("Hello, world.")) == "Hello, world."


def test_writing_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a" / "file"
    write_bytes(path, b"old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [child.name for child in path.parent.iterdir()] == ["file"]


def test_words_are_counted_encoded_and_kept(tmp_path):
    words = Words.from_lines(["b a b <unk>", "c b a \\x"], at_least=2, keep=frozenset({"c"}))
    assert words.words == ["<pad>", "<s>", "</s>", "<unk>", "b", "a", "c"]
    assert list(words.encode(["a z b <unk>", ""])) == [[5, 3, 4, 3], []]
    assert words.decode([1, 5, 3, 4, 2, 4]) == "a <unk> b"
    words.save(tmp_path / "v.txt")
    assert Words.load(tmp_path / "v.txt").words == words.words


def test_characters_survive_the_file_they_are_kept_in(tmp_path):
    line = "Tab\t, \\ and\r\nline\u2028breaks \u00a0 ü 🂡"
    characters = Characters.from_lines([line])
    characters.save(tmp_path / "v.txt")
    read = Characters.load(tmp_path / "v.txt")
    assert read.decode(next(read.encode([line]))) == line
    assert next(read.encode(["é"])).tolist() == [3]


def test_a_file_that_is_no_vocabulary_is_refused(write):
    with pytest.raises(ValueError, match="not an attnlab vocabulary"):
        Words.load(write("v.txt", "a\nb\nc\nd\ne\n"))
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        Subwords.load(write("v.model", b"nonsense"))


CORPUS = [f"der {a} hund sieht {b} katzen" for a in ("alte", "junge", "kluge") for b in ("zwei", "drei", "vier")] * 5


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_subwords_give_the_text_back_and_are_the_same_each_time(kind, tmp_path):
    subwords = Subwords.train(CORPUS, 31, kind=kind)
    assert len(subwords) == 31
    assert subwords.get_tokens([0, 1, 2, 3]) == ["<pad>", "<s>", "</s>", "<unk>"]
    for line, ids in zip(CORPUS, subwords.encode(CORPUS), strict=True):
        assert subwords.decode([1, *ids, 2, 7]) == line
    assert Subwords.train(CORPUS, 31, kind=kind).model == subwords.model
    subwords.save(tmp_path / "v.model")
    assert Subwords.load(tmp_path / "v.model").model == subwords.model


def test_too_many_subwords_are_refused_in_plain_words():
    with pytest.raises(ValueError, match=r"too large.*set vocabulary=(\d+)$") as refused:
        Subwords.train(CORPUS, 8000)
    largest = int(str(refused.value).rpartition("=")[2])
    assert len(Subwords.train(CORPUS, largest)) == largest
    assert len(Subwords.train(CORPUS, 8000, shrink=True)) == largest
    with pytest.raises(ValueError, match="too large"):
        Subwords.train(CORPUS, largest + 1)
    with pytest.raises(ValueError, match=r"too small.*set vocabulary=(\d+) or more") as refused:
        Subwords.train(CORPUS, 5)

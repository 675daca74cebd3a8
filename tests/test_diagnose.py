"""What the counts of a corpus tell of attention: numbers known in closed form, and clear answers to bad input."""

import json
import math
import re
import tracemalloc

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from attnlab.cli import app, main
from attnlab.commands import diagnose as study
from attnlab.counting import cooccurrence, diagnosis, packed_pairs
from attnlab.counting.corpus_text import read_corpus
from attnlab.counting.diagnosis import LEAST, TOP, HalfDraw, diagnose


def copies(length, types, *, number=3001, first=None, seed=0):
    """Copies of so many of some types in random order; first: the share of the first of two disjoint sets."""
    draw = np.random.default_rng(seed)
    x = np.argsort(draw.random((number, types)), axis=1)[:, :length]
    if first is not None:
        x = x + types * (draw.random((number, 1)) >= first)
    return [(row, row) for row in x]


def slow(pairs):
    """The module's equations, word by word: rows (o, l*'s word, gain, common, agreement)."""
    half_of_each = HalfDraw(len(pairs)).take(len(pairs))
    halves = [[p for p, h in zip(pairs, half_of_each, strict=True) if h == half] for half in (0, 1)]
    counted = []
    for half in halves:
        c, row, column = {}, {}, {}
        for x, y in half:
            for i in x:
                for o in y:
                    c[i, o] = c.get((i, o), 0) + 1 / len(x)
                    row[i] = row.get(i, 0) + 1 / len(x)
                    column[o] = column.get(o, 0) + 1 / len(x)
        total = sum(column.values())
        counted.append((c, row, {o: n / total for o, n in column.items()}))

    def beta(half, i, o):
        c, row, p = counted[half]
        return (c.get((i, o), 0) + p.get(o, 0)) / (row.get(i, 0) + 1)

    rows = []
    for half in (0, 1):
        p = counted[1 - half][2]
        for x, y in halves[half]:
            for o in y:
                if len(set(x)) == 1:
                    continue
                own, other = ([beta(h, i, o) for i in x] for h in (half, 1 - half))
                best = int(np.argmax(own))
                places = math.ceil(len(x) / TOP)
                if not p.get(o):
                    rows.append((o, x[best], 0.0, 0.0, places / len(x)))
                    continue
                rest = np.mean([b for i, b in zip(x, other, strict=True) if i != x[best]])
                above = sum(b > other[best] * (1 + 1e-9) for b in other)
                tied = sum(abs(b - other[best]) <= 1e-9 * other[best] for b in other)
                agrees = min(max((places - above) / tied, 0), 1)
                rows.append((o, x[best], math.log(other[best] / rest), math.log(rest / p[o]), agrees))
    return pd.DataFrame(rows, columns=["id", "from_id", "gain", "common", "agreement"])


def test_it_equals_a_slow_transcription():
    draw = np.random.default_rng(1)
    pairs = [tuple(draw.integers(n, size=draw.integers(1, 23)).tolist() for n in (17, 13)) for _ in range(101)]
    pairs[5] = (pairs[5][0], [13])  # a word that only one half has
    found, expected = diagnose(pairs), slow(pairs)
    assert found.judged == len(expected)
    for name in ("gain", "common", "agreement"):
        assert getattr(found, name) == pytest.approx(expected[name].mean())
        by_word = expected.groupby("id")[name].mean()
        assert found.words.set_index("id")[name].sort_index().to_numpy() == pytest.approx(by_word.to_numpy())
    led = expected.groupby("id")["from_id"].agg(lambda words: words.value_counts().sort_index().idxmax())
    assert found.words.set_index("id")["from_id"].sort_index().tolist() == led.tolist()
    assert found.score == pytest.approx(found.gain - found.common)
    assert int(found.words["count"].sum()) == found.judged


def test_it_does_not_depend_on_what_is_in_memory(monkeypatch):
    draw = np.random.default_rng(1)
    pairs = [tuple(draw.integers(n, size=draw.integers(0, 23)).tolist() for n in (17, 13)) for _ in range(211)]
    whole = diagnose(pairs)
    monkeypatch.setattr(cooccurrence, "CHUNK_WORDS", 150)  # pairs in chunks of a few
    monkeypatch.setattr(diagnosis, "MOST_CELLS", 3 * 17)  # three output words at a time
    monkeypatch.setattr(packed_pairs, "IN_MEMORY", 1000)  # the rest in a file
    ticks = []
    parts = diagnose(iter(pairs), tick=lambda *done: ticks.append(done))
    assert ticks == [(k, 5) for k in range(1, 6)]  # 13 output words
    pd.testing.assert_frame_equal(parts.words, whole.words)
    assert (parts.pairs, parts.judged, parts.verdict) == (whole.pairs, whole.judged, whole.verdict)
    assert parts.score == pytest.approx(whole.score)
    packed = packed_pairs.PackedPairs(pairs)
    assert [(x.tolist(), y.tolist()) for x, y in packed] == pairs
    assert all((x.tolist(), y.tolist()) == pairs[k] for k in (0, 100, 210) for x, y in [packed[k]])


def test_large_corpora_are_halved_block_by_block(monkeypatch):
    whole = HalfDraw(700).take(700)
    monkeypatch.setattr(diagnosis, "BLOCK", 256)
    halves = HalfDraw(700)
    parts = np.concatenate([halves.take(n) for n in (1, 299, 0, 400)])
    assert len(parts) == 700
    assert all(abs(part.sum() - 128) <= 0 for part in (parts[:256], parts[256:512]))
    assert not (parts == whole).all()


def test_memory_does_not_grow_with_the_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(cooccurrence, "CHUNK_WORDS", 4000)
    monkeypatch.setattr(packed_pairs, "IN_MEMORY", 1000)
    draw, peaks = np.random.default_rng(0), []
    for number in (1000, 8000):
        for side in ("s", "t"):
            rows = draw.integers(50, size=(number, 6))
            (tmp_path / side).write_text("".join(" ".join(f"{side}{i}" for i in row) + "\n" for row in rows))
        tracemalloc.start()
        text = read_corpus(tmp_path / "s", tmp_path / "t")
        diagnose(text.pairs, sizes=(len(text.source), len(text.target)))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


def test_a_pair_with_too_many_words_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("attnlab.counting.corpus_text.MOST_CELLS", 30)
    (tmp_path / "s").write_text("a b c\n" * 5 + "a b c d e f\n")
    (tmp_path / "t").write_text("a b c d e f\n" * 6)
    with pytest.raises(ValueError, match=r"pair 6 .*ATTNLAB_BUDGET"):
        read_corpus(tmp_path / "s", tmp_path / "t")


@pytest.mark.parametrize("types", [13, 17, 29])
def test_k_of_n_types_gain_what_theory_says(types):
    """gain = log (n−1)/(k−1), and the others say a little less than nothing: common = log n(k−1)/(k(n−1))."""
    found = diagnose(copies(13, types))
    assert found.gain == pytest.approx(math.log((types - 1) / 12), abs=0.01)
    assert found.common == pytest.approx(math.log(types * 12 / (13 * (types - 1))), abs=0.01)
    assert found.agreement == pytest.approx(1.0 if types > 13 else 1 / 13, abs=0.01)


@pytest.mark.parametrize("first", [0.5, 0.8])
def test_a_mixture_of_permutations_tells_the_set_and_nothing_in_it(first):
    """Its table is informative from set to set, but flat within every sentence; common is the entropy of the set."""
    found = diagnose(copies(11, 11, first=first))
    entropy = -first * math.log(first) - (1 - first) * math.log(1 - first)
    assert found.gain == pytest.approx(0.0, abs=1e-9)
    assert found.common == pytest.approx(entropy, abs=0.03)
    assert found.agreement == pytest.approx(found.chance)
    assert found.verdict == "unlikely"
    assert found.learnable == 0.0


def test_the_score_orders_the_distributions():
    """More types to choose from: better. The flat table of one set: 0. Two sets that are told apart: worse."""
    rising = [
        diagnose(copies(13, types, first=first)).score
        for types, first in [(13, 0.5), (13, 0.8), (13, 0.95), (13, None), (14, None), (16, None), (19, None)]
    ]
    assert rising == sorted(rising)
    assert rising[3] == pytest.approx(0.0, abs=1e-9)
    for types in (13, 17):
        assert diagnose(copies(13, types, first=0.5)).score < diagnose(copies(13, types)).score


def test_noise_gains_nothing():
    """Sources and targets that have nothing to do with one another: the largest of many counts is still noise."""
    draw = np.random.default_rng(2)
    pairs = [(draw.integers(61, size=11), draw.integers(61, size=11)) for _ in range(2000)]
    found = diagnose(pairs)
    assert found.gain < LEAST
    assert found.agreement == pytest.approx(found.chance, abs=0.01)


def zipf(draw, types, size):
    share = 1 / np.arange(1, types + 1)
    return draw.choice(types, size=size, p=share / share.sum())


NOISE = {
    "few types": lambda draw: [draw.choice(15, size=10, replace=False) for _ in "xy"],
    "labels": lambda draw: [zipf(draw, 500, 20), [draw.integers(2)]],
    "words as unequal as a language's": lambda draw: [zipf(draw, 2000, draw.integers(3, 20)) for _ in "xy"],
}


@pytest.mark.parametrize("number", [10, 100, 700])
@pytest.mark.parametrize("kind", NOISE)
def test_hardly_a_word_of_noise_is_called_learnable(kind, number):
    """By their mean gains alone one in twenty would be, and more, in some samples all."""
    found = [diagnose([NOISE[kind](draw) for _ in range(number)]) for draw in map(np.random.default_rng, range(5))]
    assert np.mean([each.learnable for each in found]) < 0.02
    assert "likely" not in [each.verdict for each in found]
    gained = [each.words["count"][each.words["gain"] > LEAST].sum() / each.judged for each in found]
    assert np.mean(gained) > 0.05


def test_a_few_pairs_are_too_little_to_tell():
    """The same dictionary as below, of which twelve pairs tell nothing and a hundred do."""
    draw = np.random.default_rng(3)
    pairs = [(x, x[::-1] + 1) for x in (draw.choice(53, size=7, replace=False) for _ in range(100))]
    assert [diagnose(pairs[:number]).verdict for number in (12, 100)] == ["too little", "likely"]


def test_a_dictionary_is_found_word_by_word():
    draw = np.random.default_rng(3)
    pairs = [(x, x[::-1] + 1) for x in (draw.choice(53, size=7, replace=False) for _ in range(1000))]
    found = diagnose(pairs)
    assert found.verdict == "likely"
    assert (found.words["from_id"] == found.words["id"] - 1).all()
    assert found.learnable == 1.0


def test_labels_are_targets_of_one_word():
    """Word 0 means label 1; all else means nothing, so only label 1 is told by a word of its own."""
    draw = np.random.default_rng(4)
    pairs = []
    for k in range(2000):
        x = draw.integers(1, 29, size=11)
        x[draw.integers(11)] = 0 if k % 3 else x[0]
        pairs.append((x, [int(k % 3 > 0)]))
    words = diagnose(pairs, sizes=(29, 5)).words.set_index("id")
    assert words.index.tolist() == [1, 0]  # labels 2 … 4 never occur
    assert words.loc[1, "from_id"] == 0
    assert words.loc[1, "gain"] > 0.3 > words.loc[0, "gain"]


@pytest.mark.parametrize(
    ("pairs", "verdict"),
    [
        ([([3], [1]), ([2], [0]), ([1], [1])], "no choice"),
        ([([3, 3], [1]), ([2, 2, 2], [0])], "no choice"),
        ([([3, 1], [1, 0])] * 5, "all alike"),
        ([([3], [1])] * 5, "all alike"),
        ([([], [1]), ([0, 1], []), ([0, 1], [2]), ([1, 0], [2])], "uncertain"),
    ],
)
def test_poor_corpora_get_an_answer_and_no_nan(pairs, verdict):
    found = diagnose(pairs)
    assert found.verdict == verdict
    assert not found.words.isna().any(axis=None)
    assert all(math.isfinite(getattr(found, name)) for name in ("score", "gain", "common", "agreement", "learnable"))


def test_too_little_is_refused():
    with pytest.raises(ValueError, match="both sides"):
        diagnose([([0], [1]), ([], [1]), ([2], [])])


@pytest.fixture
def files(tmp_path):
    draw = np.random.default_rng(5)
    rows = [draw.choice(31, size=5, replace=False) for _ in range(300)]
    (tmp_path / "a.de").write_text("".join(" ".join(f"q{i}" for i in row) + "\n" for row in rows) + "Allein\n\n")
    (tmp_path / "a.en").write_text("".join(" ".join(f"e${i}" for i in row) + ".\n" for row in rows) + "alone\nno\n")
    frame = pd.DataFrame({"text": [f"A good film, {k % 7}" if k % 2 else f"a bad film {k % 5}" for k in range(200)]})
    frame.assign(label=["pos" if k % 2 else "neg" for k in range(200)]).to_csv(tmp_path / "l.csv", index=False)
    return tmp_path


def run(*words):
    return CliRunner().invoke(app, ["diagnose", *map(str, words)])


def test_two_files_become_tables_and_figures(files):
    result = run(files / "a.de", files / "a.en", "--out", files / "out", "--sentence", 2)
    assert result.exit_code == 0, result.output
    assert "attention is likely to be learnt" in result.output.splitlines()[0]
    assert "1 of 302 pairs have an empty side" in result.output
    page = (files / "out" / "report.html").read_text()
    assert page.index("Attention is likely to be learnt") < page.index("expected agreement")
    assert "1 of 302 pairs have a source of one word" in result.output
    names = {"words.csv", "summary.json", "report.html"}
    names |= {f"{stem}{suffix}" for stem in ("words", "counts-2") for suffix in (".png", ".svg", ".pdf")}
    assert {path.name for path in (files / "out").iterdir()} == names
    words = pd.read_csv(files / "out" / "words.csv").set_index("word")
    assert words.columns.tolist() == study.COLUMNS[1:]
    assert not words.isna().any(axis=None)
    assert words.loc["30", "from"] == "q30"  # "e$30" is three words, of which the last tells
    assert not words.loc[".", "learnable"]
    summary = json.loads((files / "out" / "summary.json").read_text())
    assert summary["verdict"] == "likely"
    assert summary["pairs"] == 301


def test_one_word_sentences_have_a_page_without_a_figure_of_words(tmp_path):
    for side in ("s", "t"):
        (tmp_path / side).write_text("".join(f"{side}{k % 7}\n" for k in range(50)))
    result = run(tmp_path / "s", tmp_path / "t", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "report.html" in names
    assert "words.png" not in names


def test_pairs_with_an_empty_side_are_not_among_those_that_are_drawn(files):
    lines = (files / "a.de").read_text().splitlines()
    (files / "hole.de").write_text("\n".join([lines[0], "", *lines[2:]]) + "\n")
    result = run(files / "hole.de", files / "a.en", "--out", files / "out")
    assert result.exit_code == 0, result.output
    drawn = {path.stem for path in (files / "out").glob("counts-*.png")}
    assert drawn == {"counts-1", "counts-3", "counts-4"}


@pytest.mark.parametrize("options", [(), ("--units", "subword", "--vocabulary", 31)])
def test_a_labelled_file(files, options):
    result = run(files / "l.csv", "--out", files / "out", *options)
    assert result.exit_code == 0, result.output
    assert {path.name for path in (files / "out").glob("counts*.png")} == {f"counts-{k}.png" for k in (1, 2, 3)}
    if not options:
        assert "attention is likely to be learnt" in result.output
        words = pd.read_csv(files / "out" / "words.csv").set_index("word")
        assert words["from"].to_dict() == {"neg": "bad", "pos": "good"}


def test_what_occurs_once_is_counted_and_not_called_hard(tmp_path):
    texts = [f"a film of kind {k % 7}" for k in range(60)]
    labels = ["good" if k % 2 else "bad" for k in range(58)] + ["odd", "strange"]
    frame = pd.DataFrame({"text": texts, "label": labels})
    frame.to_csv(tmp_path / "l.csv", index=False)
    result = run(tmp_path / "l.csv", "--out", tmp_path / "out")
    assert "2 of 4 labels occur only once" in result.output
    *_, hard = result.output.partition("labels not shown to be learnable")
    assert hard
    assert "odd" not in hard.partition("only once")[0]
    words = pd.read_csv(tmp_path / "out" / "words.csv").set_index("word")
    assert (words["at_least"] < words["gain"]).all()
    assert (words["learnable"] == ((words["at_least"] > 0.01) & (words["count"] > 1))).all()
    assert "2 of 4 labels occur only once" in json.loads((tmp_path / "out" / "summary.json").read_text())["notes"][-1]


def test_a_limit_and_a_vocabulary_cut(files):
    text = read_corpus(files / "a.de", files / "a.en", limit=7, vocabulary=9)
    assert len(text.pairs) == 7
    assert len(text.source) == len(text.target) == 9
    assert text.source[:4] == ["<pad>", "<s>", "</s>", "<unk>"]
    assert 3 in {i for x, _ in text.pairs for i in x}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.de", "short"], "line 2 has no partner"),
        (["a.de", "binary"], "binary:1: not UTF-8"),
        (["a.de", "empty"], "empty: the file is empty"),
        (["a.de", "nowhere"], "no such file"),
        (["a.de"], r"labelled text \(.csv, .tsv, .jsonl\)"),
        (["one.csv"], "label 'x'"),
        (["l.csv", "--label", "stars"], r"no label \(field 'stars'\)"),
        (["a.de", "a.en", "--limit", "1"], "limit .* at least 2"),
        (["a.de", "a.en", "--units", "letter"], "units .*'letter'"),
        (["a.de", "a.en", "--vocabulary", "4"], "vocabulary .* special tokens"),
        (["a.de", "a.en", "--sentence", "1"], "needs --out"),
        (["a.de", "a.en", "--sentence", "303", "--out", "out"], "302.*got 303"),
        (["a.de", "a.en", "--sentence", "302", "--out", "out"], "sentence 302 .* empty"),
    ],
)
def test_an_error_is_one_plain_line(files, words, message, monkeypatch, capsys):
    (files / "short").write_text("x\n")
    (files / "binary").write_bytes(b"\x93\x00\xff\n" * 302)
    (files / "empty").write_text("\n\n")
    (files / "one.csv").write_text("text,label\na b,x\nc d,x\n")
    monkeypatch.chdir(files)
    monkeypatch.setattr("sys.argv", ["attnlab", "diagnose", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    (error,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert re.search(message, error), error
    assert not (files / "out").exists()

"""Readers of named sets that are not in ATTNLAB_DATA, tested on small files in their layout."""

import json

import pytest

from attnlab.tasks.classification import Classification, ClassificationConfig
from attnlab.tasks.language import Language, LanguageConfig
from attnlab.tasks.task import PAD
from attnlab.tasks.translation import Translation, TranslationConfig


@pytest.fixture
def lay(tmp_path):
    """Write files into a folder in the layout of ATTNLAB_DATA, and return the folder."""

    def write(folder, files):
        (tmp_path / "data" / folder).mkdir(parents=True)
        for name, content in files.items():
            data = content if isinstance(content, bytes) else content.encode()
            (tmp_path / "data" / folder / name).write_bytes(data)
        return str(tmp_path / "data")

    return write


def numbered(stem, number):
    return "".join(f"{stem} {k}\n" for k in range(number))


def test_news_commentary_is_split_nine_to_one_without_numeric_lines(lay, tmp_path):
    lines = [f"english {k}\tnederlands {k}" for k in range(200)] + ["2008\t2008", "1.\tEen", "\t", "x\t"]
    folder = lay("news-commentary-v14", {"news-commentary-v14.en-nl.tsv": "\n".join(lines) + "\n"})
    settings = {"data": "news-commentary-v14", "data_dir": folder, "units": "word"}
    task = Translation.prepare(TranslationConfig(**settings), tmp_path / "a")
    assert task.parts == ("train", "valid")
    assert {part: task.count_examples(part) for part in task.parts} == {"train": 180, "valid": 20}
    assert sorted(task.read_sources("train") + task.read_sources("valid")) == sorted(f"english {k}" for k in range(200))
    back = Translation.prepare(TranslationConfig(**settings, pair="nl-en"), tmp_path / "b")
    assert all(line.startswith("nederlands") for line in back.read_sources("train"))
    other = Translation.prepare(TranslationConfig(**settings, data_seed=1), tmp_path / "c")
    assert set(other.read_sources("valid")) != set(task.read_sources("valid"))


def test_wmt14_is_its_three_corpora_and_two_news_tests(lay, tmp_path):
    files = {
        f"{stem}.{language}": numbered(f"{stem}-{language}", number)
        for stem, number in {"europarl-v7.de-en": 5, "commoncrawl.de-en": 3, "news-commentary-v9.de-en": 2}.items()
        for language in ("de", "en")
    }
    files |= {f"newstest2013.{language}": numbered(language, 4) for language in ("de", "en")}
    for name, text in (("src.de", "Grüße &amp; Küsse"), ("ref.en", "love &amp; kisses")):
        files[f"newstest2014-deen-{name}.sgm"] = (
            f'<srcset><doc><seg id="1">{text}</seg>\n<seg id="2"> x </seg></doc></srcset>'
        )
    config = TranslationConfig(data="wmt14", data_dir=lay("wmt14.en-de", files), units="word")
    task = Translation.prepare(config, tmp_path / "run")
    assert {part: task.count_examples(part) for part in task.parts} == {"train": 10, "valid": 4, "test": 2}
    assert task.read_sources("test") == ["love & kisses", "x"]
    assert task.read_references("test") == ["Grüße & Küsse", "x"]
    assert task.read_sources("train")[5] == "commoncrawl.de-en-en 0"
    assert task.read_references("train")[5] == "commoncrawl.de-en-de 0"


def test_iwslt14_in_both_directions(lay, tmp_path):
    files = {
        f"{part}.{x}": numbered(x, n) for part, n in (("train", 7), ("valid", 3), ("test", 2)) for x in ("de", "en")
    }
    folder = lay("iwslt14.de-en", files)
    for pair in (None, "en-de"):
        config = TranslationConfig(data="iwslt14", pair=pair, data_dir=folder, units="word")
        task = Translation.prepare(config, tmp_path / str(pair))
        assert task.read_sources("test")[1] == ("de 1" if pair is None else "en 1")
        assert task.count_examples("train") == 7


def test_enwik8_is_cut_by_bytes_and_loses_none(lay, tmp_path):
    content = ("Größe\r\n" * 125).encode()  # 1,125 bytes, cut within a character and within a line break
    config = LanguageConfig(data="enwik8", data_dir=lay("enwik8", {"enwik8": content}), block=100, context=90)
    task = Language.prepare(config, tmp_path / "run")
    assert task.unit == "byte"
    assert {part: task.count_units(part)["bytes"] for part in ("train", "valid", "test")} == {
        "train": 1012, "valid": 57, "test": 56,
    }  # fmt: skip
    seen = b""
    for part in ("train", "valid", "test"):
        batch = task.make_batch(part, list(range(task.count_examples(part))))
        ids = batch.targets[batch.targets != PAD].tolist()
        seen += "".join(task.vocabulary.get_tokens(ids)).encode("latin-1")
    assert seen == content
    assert task.get_sizes() == {"vocabulary": 4 + len(set(content))}


def test_wikitext_103_has_the_layout_of_wikitext_2(lay, tmp_path):
    files = {f"{part}.txt": " \n = Title = \n a <unk> b b\n" for part in ("train", "valid", "test")}
    task = Language.prepare(LanguageConfig(data="wikitext-103", data_dir=lay("wikitext-103", files)), tmp_path / "run")
    assert task.count_units("test")["tokens"] == 3 + 4 + 3
    batch = task.make_batch("test", [0])
    assert " ".join(task.vocabulary.get_tokens(batch.targets[0].tolist())) == "</s> = Title = </s> a <unk> b b </s>"


def test_ag_news_tells_world_from_business(lay, tmp_path):
    rows = '"1","World","peace 42"\n"2","Sports","x"\n"3","Business","7, as \\""usual"""\n"4","Sci","y"\n'
    config = ClassificationConfig(data="ag-news", data_dir=lay("ag-news", {"train.csv": rows * 3, "test.csv": rows}))
    task = Classification.prepare(config, tmp_path / "run")
    assert task.classes == ["business", "world"]
    assert {part: task.count_examples(part) for part in task.parts} == {"train": 6, "valid": 2, "test": 2}
    batch = task.make_batch("test", [0, 1])
    assert batch.targets.tolist() == [1, 0]
    assert task.vocabulary.get_tokens(batch.inputs[0][0].tolist())[:5] == ["<s>", "world", "peace", "<unk>", "</s>"]
    assert task.vocabulary.get_tokens(batch.inputs[0][1].tolist()) == ["<s>", "business", "7", "as", "usual", "</s>"]


def test_yelp_tells_at_most_two_stars_from_at_least_four(lay, tmp_path):
    rows = "".join(json.dumps({"stars": float(k % 5 + 1), "text": f"text {k}"}) + "\n" for k in range(100))
    config = ClassificationConfig(data="yelp", data_dir=lay("yelp", {"yelp.jsonl": rows}))
    task = Classification.prepare(config, tmp_path / "run")
    assert task.classes == ["negative", "positive"]
    assert task.count_examples("train") + task.count_examples("valid") == 80
    labels = task.make_batch("train", list(range(task.count_examples("train")))).targets
    assert 0.4 < labels.float().mean() < 0.6

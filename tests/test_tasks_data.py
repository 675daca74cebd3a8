"""The named sets in ATTNLAB_DATA have their published sizes."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from attnlab.files.user_files import read_bytes
from attnlab.tasks.classification import Classification, ClassificationConfig
from attnlab.tasks.contents import CONTENTS
from attnlab.tasks.language import Language, LanguageConfig
from attnlab.tasks.task import PAD
from attnlab.tasks.translation import Translation, TranslationConfig

pytestmark = pytest.mark.data


@pytest.fixture(autouse=True)
def data(monkeypatch, tmp_path):
    if not os.environ.get("ATTNLAB_DATA"):
        pytest.skip("ATTNLAB_DATA is not set: it names the folder of data sets that these tests read")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-cache"))
    monkeypatch.setattr(
        "urllib.request.urlopen", lambda *_, **__: (_ for _ in ()).throw(OSError("no network in tests"))
    )
    return Path(os.environ["ATTNLAB_DATA"])


def translation(folder, **settings):
    return Translation.prepare(TranslationConfig(**settings), folder)


@pytest.mark.parametrize("folder", sorted(CONTENTS))
def test_the_files_are_the_official_ones(data, folder):
    for name, right in CONTENTS[folder].items():
        path = data / folder / name
        content = read_bytes(path if path.exists() else path.with_name(f"{name}.gz"))
        assert hashlib.sha256(content).hexdigest() == right, name


def test_multi30k(tmp_path):
    task = translation(tmp_path)
    assert {part: task.count_examples(part) for part in task.parts} == {
        "train": 29_000, "valid": 1_014, "test": 1_000, "test2017": 1_000, "mscoco": 461, "test2018": 1_071,
    }  # fmt: skip
    assert task.get_sizes() == {"source_vocabulary": 8000, "vocabulary": 8000}
    assert abs(task.get_lengths("valid")[0].sum() / 15_630 - 1) < 0.01  # as SentencePiece 0.2.2 cuts it
    assert np.median(task.get_lengths("valid")[0]) - 1 == 14
    seen = 0
    for indices in task.plan_batches("train", tokens=4096, seed=1, epoch=0):
        batch = task.make_batch("train", indices)
        assert max(batch.targets.numel(), batch.inputs[0].numel()) <= 4096
        assert batch.count == int((batch.targets != PAD).sum())
        seen += batch.count
    assert seen == task.get_lengths("train")[0].sum()
    line = 7
    assert task.decode(task.make_batch("test", [line]).targets[0].tolist()) == task.read_references("test")[line]
    assert task.read_references("test")[line].startswith("A boy in a red uniform")


@pytest.mark.parametrize(("pair", "tests"), [("en-de", 4), ("en-fr", 4), ("en-cs", 2), ("fr-de", 4)])
def test_multi30k_in_other_pairs(tmp_path, pair, tests):
    task = translation(tmp_path, pair=pair, units="word")
    assert len(task.parts) == 2 + tests
    assert len(task.read_sources("test2018")) == len(task.read_references("test2018")) == 1_071
    assert task.text.languages == tuple(pair.split("-"))


def test_tatoeba_shares_no_english_sentence_between_parts(tmp_path):
    task = translation(tmp_path, data="tatoeba", pair="de-en", units="word", vocabulary=1000)
    parts = {part: set(task.read_references(part)) for part in task.parts}
    assert sum(task.count_examples(part) for part in task.parts) == 169_813
    for one, other in (("train", "valid"), ("train", "test"), ("valid", "test")):
        assert not parts[one] & parts[other]
    assert 0.045 < task.count_examples("valid") / 169_813 < 0.055
    assert "Hi." in set().union(*parts.values())


def test_europarl_in_both_directions(tmp_path):
    one = translation(tmp_path / "a", data="europarl", pair="it-pt", units="word", joint=False)
    assert {part: one.count_examples(part) for part in one.parts} == {"train": 60_000, "valid": 3_000, "test": 3_000}
    other = translation(tmp_path / "b", data="europarl", pair="pt-it", units="word", joint=False)
    assert other.read_sources("test") == one.read_references("test")


@pytest.mark.slow
def test_more_europarl_is_disjoint_from_the_held_out_parts(tmp_path):
    task = translation(tmp_path, data="europarl-480k", pair="de-en", units="word", joint=False)
    assert {part: task.count_examples(part) for part in task.parts} == {"train": 480_000, "valid": 3_000, "test": 3_000}
    train = set(zip(task.read_sources("train"), task.read_references("train"), strict=True))
    assert not train & set(zip(task.read_sources("test"), task.read_references("test"), strict=True))


def test_iwslt14_without_its_training_part_says_how_to_come_by_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"iwslt14: train\.de is missing.*prepare-iwslt14\.sh"):
        translation(tmp_path, data="iwslt14")


@pytest.mark.parametrize(
    ("name", "vocabulary", "tokens"),
    [  # the official vocabularies with <unk> and <eos>, to which <pad> and <s> are added
        ("wikitext-2", 33_278 + 2, {"train": 2_088_628, "valid": 217_646, "test": 245_569}),
        ("ptb", 10_000 + 2, {"train": 929_589, "valid": 73_760, "test": 82_430}),
        ("tinyshakespeare", 65 + 4, {"train": 1_003_855, "valid": 55_769, "test": 55_770}),
    ],
)
def test_language_modelling_sets(tmp_path, name, vocabulary, tokens):
    task = Language.prepare(LanguageConfig(data=name), tmp_path)
    assert task.get_sizes() == {"vocabulary": vocabulary}
    assert {part: task.count_units(part)["tokens"] for part in tokens} == tokens
    for part in ("valid", "valid-context"):
        plan = task.plan_batches(part, tokens=2**17, shuffle=False)
        assert sum(task.make_batch(part, indices).count for indices in plan) == tokens["valid"]


@pytest.mark.parametrize(
    ("name", "sizes", "medians"),
    [  # medians of words in training and validation (Snell et al., Table 9), where the data are the paper's
        pytest.param("imdb", {"train": 25_000, "valid": 4_000, "test": 25_000}, (181, None), marks=pytest.mark.slow),
        ("20newsgroups", {"train": 1_197, "valid": 796, "test": 796}, (183, 207)),
        ("ag-news-sample", {"train": 10_521, "valid": 3_800, "test": 3_800}, (40, None)),
        ("sst", {"train": 6_920, "valid": 872, "test": 1_821}, (None, 17)),
        ("amazon", {"train": 6_773, "valid": 753}, (None, None)),
        ("yelp", {"train": 7_685, "valid": 854}, (None, None)),
        ("sms-spam", {"train": 5_016, "valid": 558}, (None, None)),
    ],
)
def test_classification_sets(tmp_path, name, sizes, medians):
    task = Classification.prepare(ClassificationConfig(data=name), tmp_path)
    assert {part: task.count_examples(part) for part in task.parts} == sizes
    for part, median in zip(("train", "valid"), medians, strict=True):
        assert median is None or np.median(task.get_lengths(part)[0]) - 2 == median
    assert task.get_sizes()["classes"] == 2
    balance = task.make_batch("train", list(range(sizes["train"]))).targets.float().mean()
    assert 0.1 < balance < 0.9
    assert name == "sms-spam" or task.get_lengths("train")[0].max() > 40


def test_what_validates_can_be_held_out_of_training_instead(tmp_path):
    task = Classification.prepare(ClassificationConfig(data="20newsgroups", valid_from="train"), tmp_path)
    assert task.count_examples("train") + task.count_examples("valid") == 1_197
    assert task.count_examples("test") == 796

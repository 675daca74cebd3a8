"""Translation, language modelling and classification on user files, without a download."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from attnlab.tasks import language
from attnlab.tasks.classification import Classification, ClassificationConfig
from attnlab.tasks.labelled import split_without_numbers, split_words
from attnlab.tasks.language import Language, LanguageConfig
from attnlab.tasks.task import BOS, EOS, PAD
from attnlab.tasks.translation import Translation, TranslationConfig

GERMAN = [f"der {a} Hund sieht {n} Katzen" for a in ("alte", "junge", "kluge") for n in ("zwei", "drei", "vier", "elf")]
ENGLISH = [f"the {a} dog sees {n} cats" for a in ("old", "young", "clever") for n in ("two", "three", "four", "eleven")]


@pytest.fixture
def files(tmp_path):
    """Write files of lines, and return their paths."""

    def write(**lines):
        paths = {}
        for name, content in lines.items():
            path = tmp_path / name.replace("__", ".")
            path.write_text("".join(f"{line}\n" for line in content), encoding="utf-8")
            paths[name] = str(path)
        return paths

    return write


@pytest.fixture
def pairs(files):
    paths = files(a__de=GERMAN, a__en=ENGLISH, v__de=GERMAN[:5], v__en=ENGLISH[:5])
    return {"src": paths["a__de"], "tgt": paths["a__en"], "valid_src": paths["v__de"], "valid_tgt": paths["v__en"]}


def translation(folder, **settings):
    return Translation.prepare(TranslationConfig(**({"units": "word"} | settings)), folder)


class TestTranslation:
    def test_batches_are_what_the_model_reads_and_is_scored_on(self, pairs, tmp_path):
        task = translation(tmp_path / "run", **pairs)
        batch = task.make_batch("valid", [0, 3])
        source, target_in = batch.inputs
        assert task.decode(source[0].tolist()) == GERMAN[0]
        assert task.decode(batch.targets[1].tolist()) == ENGLISH[3]
        assert (target_in[:, 0] == BOS).all()
        assert torch.equal(target_in[:, 1:], batch.targets[:, :-1])
        assert (source[:, -1] == EOS).all()
        assert batch.count == 2 * 7
        assert task.get_sizes()["source_vocabulary"] == task.get_sizes()["vocabulary"]

    def test_the_source_may_begin_with_bos(self, pairs, tmp_path):
        task = translation(tmp_path / "run", **pairs, source_begin=True)
        assert (task.make_batch("valid", [0]).inputs[0][:, 0] == BOS).all()
        assert task.encode(GERMAN[:1]).pad([0]).tolist() == task.make_batch("valid", [0]).inputs[0].tolist()

    def test_separate_vocabularies_know_their_own_language_alone(self, pairs, tmp_path):
        task = translation(tmp_path / "run", **pairs, joint=False)
        assert "Hund" in task.source_vocabulary.ids
        assert "Hund" not in task.target_vocabulary.ids
        assert task.get_sizes() == {"source_vocabulary": 4 + 11, "vocabulary": 4 + 11}

    def test_the_run_folder_is_all_that_translating_needs(self, pairs, tmp_path):
        config = TranslationConfig(**pairs, units="subword", vocabulary=50)
        first = Translation.prepare(config, tmp_path / "run")
        gone = replace(config, src="/nowhere.de", tgt="/nowhere.en", valid_src="/nowhere.de", valid_tgt="/nowhere.en")
        again = Translation.prepare(gone, tmp_path / "run")
        assert again.encode(GERMAN).ids.tolist() == first.encode(GERMAN).ids.tolist()
        assert again.decode(list(first.target_vocabulary.encode(ENGLISH))[2]) == ENGLISH[2]
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["vocabulary.model"]

    def test_without_validation_text_some_is_held_out_and_shares_no_source(self, files, tmp_path):
        paths = files(a__tsv=[f"{d}\t{e}" for d, e in zip(GERMAN * 3, ENGLISH * 3, strict=True)])
        task = translation(tmp_path / "run", data=paths["a__tsv"], held_out=0.2)
        train, valid = set(task.read_sources("train")), set(task.read_sources("valid"))
        assert not train & valid
        assert train | valid == set(GERMAN)
        assert task.count_examples("valid") == 9  # three of twelve sentences, each there three times
        assert task.parts == ("train", "valid")

    def test_lower_case_and_moses(self, files, tmp_path):
        german, english = ["Der Hund, er bellt."] * 4, ['The dog, it barks: "woof".'] * 4
        paths = files(a__de=german, a__en=english)
        own = {"src": paths["a__de"], "tgt": paths["a__en"], "valid_src": paths["a__de"], "valid_tgt": paths["a__en"]}
        task = translation(tmp_path / "run", **own, pair="de-en", moses=True, lower=True)
        assert task.read_references("valid")[0] == english[0].lower()
        batch = task.make_batch("valid", [0])
        assert task.target_vocabulary.get_tokens(batch.targets[0].tolist())[:4] == ["the", "dog", ",", "it"]
        assert task.decode(batch.targets[0].tolist()) == english[0].lower()

    def test_long_sentences_are_refused_cut_or_skipped_and_counted(self, files, tmp_path):
        paths = files(a__de=[*GERMAN, "x " * 30], a__en=[*ENGLISH, "y"])
        own = {"src": paths["a__de"], "tgt": paths["a__en"], "valid_src": paths["a__de"], "valid_tgt": paths["a__en"]}
        settings = own | {"max_length": 11}
        with pytest.raises(ValueError, match=r"train: 1 of 13 .*pair 13 \(31 tokens\)"):
            translation(tmp_path / "a", **settings).count_examples("train")
        cut = translation(tmp_path / "b", **settings, too_long="truncate")
        assert cut.count_examples("train") == 13
        assert cut.make_batch("train", [12]).inputs[0].tolist()[0][-1] == EOS
        assert cut.make_batch("train", [12]).inputs[0].shape == (1, 11)
        assert cut.notes == ["train: 1 of 13 pairs have more than 11 tokens on a side: truncated to 11"]
        skipped = translation(tmp_path / "c", **settings, too_long="skip")
        assert skipped.count_examples("train") == 12 == len(skipped.read_references("train"))
        assert skipped.read_references("train") == ENGLISH
        assert "skipped" in skipped.notes[0]

    def test_empty_sides_are_left_out_of_training_alone_and_counted(self, files, tmp_path):
        paths = files(a__de=[*GERMAN, "", "x"], a__en=[*ENGLISH, "y", " "])
        own = {"src": paths["a__de"], "tgt": paths["a__en"], "valid_src": paths["a__de"], "valid_tgt": paths["a__en"]}
        task = translation(tmp_path / "run", **own)
        assert task.count_examples("train") == 12
        assert task.count_examples("valid") == 14
        assert task.notes == ["train: 2 of 14 pairs have an empty side: dropped"]

    def test_bad_text_leaves_no_vocabulary_behind(self, pairs, files, tmp_path):
        bad = files(b__de=GERMAN[:3])["b__de"]
        with pytest.raises(ValueError, match=r"b\.de has 3 lines and .*v\.en 5"):
            translation(tmp_path / "run", **(pairs | {"valid_src": bad}))
        assert not (tmp_path / "run").exists()

    def test_bad_settings_are_refused(self, pairs):
        with pytest.raises(ValueError, match="src= and tgt= must be given together"):
            TranslationConfig(src="a.de")
        with pytest.raises(ValueError, match="pair=de: expected two languages"):
            TranslationConfig(pair="de")
        with pytest.raises(ValueError, match="error, truncate, skip"):
            TranslationConfig(too_long="drop")
        with pytest.raises(ValueError, match=r"did you mean 'multi30k'\?\); available: multi30k, iwslt14"):
            Translation.prepare(TranslationConfig(data="multi30"), None)
        with pytest.raises(ValueError, match="pair=de-nl: multi30k has de-en, "):
            Translation.prepare(TranslationConfig(pair="de-nl"), None)
        with pytest.raises(ValueError, match="valid_src= needs src="):
            Translation.prepare(TranslationConfig(valid_src="a", valid_tgt="b"), None)
        with pytest.raises(ValueError, match="set pair="):
            Translation.prepare(TranslationConfig(data="a.tmx"), None)


LINES = [f"line {k} of a small text" for k in range(40)]


class TestLanguage:
    @pytest.fixture
    def task(self, files, tmp_path):
        paths = files(a__txt=LINES, v__txt=LINES[:7])
        config = LanguageConfig(data=paths["a__txt"], valid=paths["v__txt"], units="word", block=11, context=8)
        return Language.prepare(config, tmp_path / "run")

    def stream(self, task, part):
        return [
            token for line in task.vocabulary.encode(LINES if part == "train" else LINES[:7]) for token in [*line, EOS]
        ]

    @pytest.mark.parametrize("part", ["train", "valid", "valid-context"])
    def test_every_token_is_scored_once_given_the_one_before(self, task, part):
        stream = self.stream(task, part)
        batch = task.make_batch(part, list(range(task.count_examples(part))))
        scored = batch.targets != PAD
        assert batch.targets[scored].tolist() == stream
        assert batch.inputs[0][scored].tolist() == [EOS, *stream[:-1]]
        assert batch.count == len(stream) == task.count_units(part)["tokens"]

    def test_a_window_sees_its_context_and_scores_the_rest(self, task):
        stream = [EOS, *self.stream(task, "valid")]
        for index in range(task.count_examples("valid-context")):
            batch = task.make_batch("valid-context", [index])
            start, first = max(0, 3 * index - 8), 3 * index
            assert batch.inputs[0][0].tolist() == stream[start : min(first + 3, len(stream) - 1)]
            assert (batch.targets[0, : first - start] == PAD).all()
            assert batch.count == min(3, len(stream) - 1 - first)

    def test_plans_hold_whole_blocks(self, task):
        for indices in task.plan_batches("train", tokens=45, seed=1, epoch=0):
            batch = task.make_batch("train", indices)
            assert batch.inputs[0].numel() <= 45
        with pytest.raises(ValueError, match=r"11 tokens.*at most 10.*block="):
            task.plan_batches("train", tokens=10)

    @pytest.mark.parametrize("units", ["character", "byte"])
    def test_characters_and_bytes_give_the_text_back(self, files, tmp_path, units):
        paths = files(a__txt=["über 🂡\ttab", "zweite\\n"] * 30)
        task = Language.prepare(LanguageConfig(data=paths["a__txt"], units=units, block=7, context=3), tmp_path / "run")
        batch = task.make_batch("valid", list(range(task.count_examples("valid"))))
        text = task.decode(batch.targets[batch.targets != PAD].tolist())
        counts = task.count_units("valid")
        assert text
        assert set(text.splitlines()) <= {"über 🂡\ttab", "zweite\\n"}
        assert counts["tokens"] == counts["characters" if units == "character" else "bytes"] == batch.count
        assert counts["bytes"] == len(text.encode())
        assert task.get_sizes()["vocabulary"] == 4 + len(set("über 🂡\ttabzweite\\n\n" if units == "character" else
                                                         "über 🂡\ttabzweite\\n\n".encode()))  # fmt: skip

    def test_the_end_of_the_text_validates_cut_at_a_line(self, files, tmp_path):
        paths = files(a__txt=LINES)
        task = Language.prepare(LanguageConfig(data=paths["a__txt"], units="word", held_out=0.1), tmp_path / "run")
        assert task.count_units("train")["words"] + task.count_units("valid")["words"] == 40 * 7
        assert 3 <= task.count_units("valid")["words"] / 7 <= 4
        assert task.parts == ("train", "valid", "valid-context")

    def test_subwords_count_words_too(self, files, tmp_path):
        paths = files(a__txt=LINES)
        task = Language.prepare(LanguageConfig(data=paths["a__txt"], vocabulary=31), tmp_path / "run")
        assert task.unit == "subword"
        assert task.count_units("valid")["tokens"] > task.count_units("valid")["words"]

    def test_bad_settings_are_refused(self, files, tmp_path):
        with pytest.raises(ValueError, match="context=512"):
            LanguageConfig(context=512)
        with pytest.raises(ValueError, match="did you mean 'wikitext-2'"):
            Language.prepare(LanguageConfig(data="wikitext2"), tmp_path)
        with pytest.raises(ValueError, match=r"no such set.*existing text file"):
            Language.prepare(LanguageConfig(data="/no/file.txt"), tmp_path)
        with pytest.raises(ValueError, match="valid= and test= need a file"):
            LanguageConfig(data="ptb", valid="a.txt")
        with pytest.raises(ValueError, match=r"a\.txt has too few lines"):
            Language.prepare(LanguageConfig(data=files(a__txt=["one line"])["a__txt"]), tmp_path)

    @pytest.mark.parametrize("lines", [[], [" ", ""]])
    def test_an_empty_text_is_named(self, files, tmp_path, lines):
        paths = files(empty__txt=lines, a__txt=LINES)
        for given in ({"data": "empty__txt"}, {"data": "a__txt", "valid": "empty__txt"}):
            config = LanguageConfig(**{key: paths[name] for key, name in given.items()}, units="word")
            with pytest.raises(ValueError, match=r"empty\.txt: the file is empty"):
                Language.prepare(config, tmp_path / "run")


REVIEWS = [
    ("a fine film, fine indeed", "pos"),
    ("a dull film", "neg"),
    ("fine cast", "pos"),
    ("dull and dull", "neg"),
] * 5


class TestClassification:
    @pytest.fixture
    def path(self, tmp_path):
        path = tmp_path / "reviews.jsonl"
        path.write_text(
            "".join(json.dumps({"text": f"{t} {k}", "label": y}) + "\n" for k, (t, y) in enumerate(REVIEWS))
        )
        return path

    def test_texts_become_words_between_ends_and_labels_classes(self, path, tmp_path):
        task = Classification.prepare(ClassificationConfig(data=str(path), valid=str(path)), tmp_path / "run")
        assert task.classes == ["neg", "pos"]
        batch = task.make_batch("train", [0, 1])
        words = [task.vocabulary.get_tokens(row) for row in batch.inputs[0].tolist()]
        assert words[0] == ["<s>", "a", "fine", "film", "fine", "indeed", "<unk>", "</s>"]
        assert words[1] == ["<s>", "a", "dull", "film", "<unk>", "</s>", "<pad>", "<pad>"]
        assert batch.targets.tolist() == [1, 0]
        assert batch.count == 2
        assert task.get_sizes() == {"vocabulary": 4 + 7, "classes": 2}

    def test_what_validates_is_held_out(self, path, tmp_path):
        task = Classification.prepare(ClassificationConfig(data=str(path), held_out=0.3), tmp_path / "run")
        assert task.count_examples("train") + task.count_examples("valid") == 20
        assert task.count_examples("valid") == 6
        few = Classification.prepare(ClassificationConfig(data=str(path), held_out=0.3, most_valid=2), tmp_path / "few")
        assert few.count_examples("valid") == 2

    def test_the_message_about_an_unknown_label_is_short(self, path, tmp_path):
        path.write_text("".join(json.dumps({"text": f"{k} " * 999}) + "\n" for k in range(40)))
        task = Classification.prepare(ClassificationConfig(data=str(path), label="text"), tmp_path / "run")
        with pytest.raises(ValueError, match=r"36 labels.*label=") as error:
            task.count_examples("valid")
        assert len(str(error.value).removeprefix(str(path))) < 500

    def test_the_run_folder_holds_classes_and_vocabulary(self, path, tmp_path):
        config = ClassificationConfig(data=str(path), valid=str(path))
        first = Classification.prepare(config, tmp_path / "run")
        again = Classification.prepare(replace(config, data="gone.csv", valid="gone.csv"), tmp_path / "run")
        assert again.classes == first.classes
        assert again.encode(["fine film"]).ids.tolist() == first.encode(["fine film"]).ids.tolist()

    def test_vectors_keep_rare_words_and_leave_the_rest_random(self, path, tmp_path):
        vectors = tmp_path / "glove.txt"
        vectors.write_text("cast 1 2 3\n7 -1 -2 -3\nunseen 9 9 9\n")
        config = ClassificationConfig(data=str(path), valid=str(path), embeddings=str(vectors))
        task = Classification.prepare(config, tmp_path / "run")
        table = task.read_embeddings()
        assert table.shape == (len(task.vocabulary), 3)
        assert table[task.vocabulary.ids["cast"]].tolist() == [1, 2, 3]
        assert table[task.vocabulary.ids["7"]].tolist() == [-1, -2, -3]  # it occurs once
        assert "unseen" not in task.vocabulary.ids
        assert table[PAD].tolist() == [0, 0, 0]
        assert torch.equal(table, task.read_embeddings())
        assert task.notes == [f"embeddings: 2 of {len(task.vocabulary):,} words are in {vectors}"]
        assert Classification.prepare(ClassificationConfig(data=str(path)), tmp_path / "none").read_embeddings() is None

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("cast 1 2 x\n", r"glove\.txt:1: expected numbers, got '1 2 x'"),
            ("cast 1 2\nfilm 1\n", r"glove\.txt:2: 'film' has 1 numbers"),
            ("unseen 1\n", "no vector for any word"),
        ],
    )
    def test_bad_vectors_are_named(self, path, tmp_path, content, message):
        (tmp_path / "glove.txt").write_text(content)
        config = ClassificationConfig(data=str(path), valid=str(path), embeddings=str(tmp_path / "glove.txt"))
        with pytest.raises(ValueError, match=message):
            Classification.prepare(config, tmp_path / "run").read_embeddings()

    def test_long_texts_are_refused_cut_or_skipped(self, path, tmp_path):
        settings = {"data": str(path), "valid": str(path), "max_length": 6}
        long = sum(len(split_words(text)) + 1 > 4 for text, _ in REVIEWS)
        with pytest.raises(ValueError, match=rf"train: {long} of 20 texts have more than 6 tokens"):
            Classification.prepare(ClassificationConfig(**settings), tmp_path / "a").count_examples("train")
        cut = Classification.prepare(ClassificationConfig(**settings, too_long="truncate"), tmp_path / "b")
        assert cut.count_examples("train") == 20
        assert cut.get_lengths("train")[0].max() == 6
        skipped = Classification.prepare(ClassificationConfig(**settings, too_long="skip"), tmp_path / "c")
        assert skipped.count_examples("train") == 20 - long
        assert set(np.concatenate([skipped.make_batch("train", [k]).targets for k in range(20 - long)])) == {0, 1}

    def test_a_label_not_seen_in_training_is_named(self, path, tmp_path):
        other = tmp_path / "valid.jsonl"
        other.write_text('{"text": "fine", "label": "so-so"}\n')
        task = Classification.prepare(ClassificationConfig(data=str(path), valid=str(other)), tmp_path / "run")
        with pytest.raises(ValueError, match="label 'so-so' of the valid part"):
            task.count_examples("valid")

    def test_words_by_the_papers_rules(self):
        assert split_words("It's GOOD_stuff, 10/10 — éa") == ["it", "s", "good_stuff", "10", "10", "éa"]
        assert split_without_numbers("foo_bar 7 42 a42") == ["foo", "bar", "7", "<unk>", "a42"]


class TestHub:
    """Hugging Face datasets, from folders on this disk."""

    @pytest.fixture(autouse=True)
    def _hub(self, tmp_path, monkeypatch):
        pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
        monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        self.folder = tmp_path / "set"
        self.folder.mkdir()

    def rows(self, part, rows):
        (self.folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def test_translation(self, tmp_path):
        both = [{"translation": {"de": d, "en": e}} for d, e in zip(GERMAN, ENGLISH, strict=True)]
        self.rows("train", both)
        self.rows("validation", both[:5])
        task = translation(tmp_path / "run", data=f"hf:{self.folder}", pair="en-de")
        assert task.read_sources("valid") == ENGLISH[:5]
        assert task.read_references("train") == GERMAN
        with pytest.raises(ValueError, match="has de, en, not en and fr; set pair="):
            translation(tmp_path / "other", data=f"hf:{self.folder}", pair="en-fr")

    def test_language(self, tmp_path):
        for part in ("train", "validation", "test"):
            self.rows(part, [{"text": line} for line in LINES])
        task = Language.prepare(LanguageConfig(data=f"hf:{self.folder}", units="word"), tmp_path / "run")
        assert task.count_units("test")["words"] == 40 * 7

    def test_classification(self, tmp_path):
        self.rows("train", [{"text": f"{text} {k}", "label": label} for k, (text, label) in enumerate(REVIEWS)])
        task = Classification.prepare(ClassificationConfig(data=f"hf:{self.folder}"), tmp_path / "run")
        assert task.classes == ["neg", "pos"]
        assert task.count_examples("train") + task.count_examples("valid") == 20

    def test_what_is_missing_is_named(self, tmp_path):
        self.rows("train", [{"review": "x", "label": 1}])
        with pytest.raises(ValueError, match=r"'text'.* review, label"):
            Classification.prepare(ClassificationConfig(data=f"hf:{self.folder}"), tmp_path / "run")
        with pytest.raises(ValueError, match="data=hf:/nowhere/at/all: "):
            Classification.prepare(ClassificationConfig(data="hf:/nowhere/at/all"), tmp_path / "run")


def test_a_vocabulary_of_very_many_words_is_noted(tmp_path, monkeypatch):
    files = tmp_path
    monkeypatch.setattr(language, "MANY_WORDS", 3)
    (files / "many.txt").write_text("".join(f"a{n} b\n" for n in range(40)))
    (files / "run").mkdir()
    for _ in range(2):  # learned, then loaded
        task = Language(LanguageConfig(data=str(files / "many.txt"), units="word"), files / "run")
        assert len(task.notes) == 1
        assert "words, and so have the logits of every token: at_least=5 keeps fewer" in task.notes[0]
    assert Language(LanguageConfig(data=str(files / "many.txt"), units="character"), files / "run").notes == []

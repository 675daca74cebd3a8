"""Where labelled text comes from: files of one's own, or a named set, part by part; and how it becomes words.

Words are runs of letters, digits and underscores in lower case. Snell et al. do not say how they split; this gives
their median lengths of IMDB (181) and 20 Newsgroups with headers (183) exactly (Table 9).
"""

import csv
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attnlab.tasks import hub
from attnlab.tasks.fetch import find_file, find_set, obtain_file
from attnlab.tasks.sources import SETS, NamedSet
from attnlab.tasks.task import SPECIALS, UNK
from attnlab.tasks.text import Labelled, draw_held_out, read_labelled, read_lines, read_text

if TYPE_CHECKING:
    from attnlab.tasks.classification import ClassificationConfig

Split = Callable[[str], list[str]]
Reader = Callable[[], Labelled]


def split_words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def split_without_numbers(text: str) -> list[str]:
    """As split_words, but also at underscores, and every integer of more than one digit is unknown (A.8)."""
    words = split_words(text.replace("_", " "))
    return [SPECIALS[UNK] if len(word) > 1 and word.isdecimal() else word for word in words]


@dataclass(frozen=True)
class LabelledText:
    """Parts by name, each read when it is asked for, and how its texts are split."""

    name: str
    readers: dict[str, Reader]
    split: Split = split_words


def find_labelled_text(config: "ClassificationConfig") -> LabelledText:
    """What a configuration asks for: one's own files, or a named set."""
    if hub.is_hub_name(config.data):
        return _open_hub(config)
    if config.data not in SETS and Path(config.data).suffix:
        return _open_files(config)
    if config.valid or config.test:
        raise ValueError(f"valid= and test= go with a file as data=; data={config.data} has its own parts")
    dataset = find_set(config.data, "classification")
    return READERS[dataset.name](config, dataset)


def _open_files(config: "ClassificationConfig") -> LabelledText:
    def reader(file: str) -> Reader:
        return lambda: read_labelled(Path(file), config.text, config.label)

    train = reader(config.data)
    readers = {"train": train, "valid": reader(config.valid)} if config.valid else _hold_out(train, config)
    return LabelledText(config.data, readers | ({"test": reader(config.test)} if config.test else {}))


def _open_hub(config: "ClassificationConfig") -> LabelledText:
    splits = hub.load_splits(config.data)

    def reader(part: str) -> Reader:
        return lambda: hub.read_labelled(splits[part], config.text, config.label, config.data)

    readers = {part: reader(part) for part in splits}
    if "valid" not in readers:
        train, test = readers["train"], readers.get("test")
        readers |= _validate_on_test(train, test, config) if test else _hold_out(train, config)
    return LabelledText(config.data, readers)


def _hold_out(whole: Reader, config: "ClassificationConfig") -> dict[str, Reader]:
    """A share of one text validates, equal texts together, and at most so many as the paper has."""

    @lru_cache(maxsize=1)
    def parts() -> tuple[Labelled, Labelled]:
        texts, labels = whole()
        share = min(config.held_out, config.most_valid / len(texts))
        out = draw_held_out(texts, share, config.data_seed)
        if out.all() or not out.any():
            raise ValueError(f"{len(texts)} examples are too few to hold out {share:.0%} of them; give valid=")
        return _pick_examples((texts, labels), ~out), _pick_examples((texts, labels), out)

    return {"train": lambda: parts()[0], "valid": lambda: parts()[1]}


def _validate_on_test(train: Reader, test: Reader, config: "ClassificationConfig") -> dict[str, Reader]:
    """Official training and test parts; what validates is drawn from the test part as in the paper, or held out."""
    if config.valid_from == "train":
        return _hold_out(train, config) | {"test": test}

    def valid() -> Labelled:
        whole = test()
        if len(whole[0]) <= config.most_valid:
            return whole
        drawn = np.random.default_rng(config.data_seed).permutation(len(whole[0])) < config.most_valid
        return _pick_examples(whole, drawn)

    return {"train": train, "valid": valid, "test": test}


def _pick_examples(whole: Labelled, kept: np.ndarray) -> Labelled:
    places = np.flatnonzero(kept).tolist()
    return [whole[0][k] for k in places], [whole[1][k] for k in places]


def _select_labels(rows: list[tuple[str, str]], names: dict[str, str]) -> Labelled:
    """Texts whose label has a name, by that name."""
    kept = [(text, names[label]) for text, label in rows if label in names]
    return [text for text, _ in kept], [label for _, label in kept]


POLARITY = {"0": "negative", "1": "positive"}


def _open_imdb(config: "ClassificationConfig", dataset: NamedSet) -> LabelledText:
    def reader(name: str) -> Reader:
        def read() -> Labelled:
            rows = [line.split("\t", 3) for line in read_lines(obtain_file(dataset, name, config.data_dir))]
            return _select_labels([(row[3], row[0]) for row in rows], POLARITY)

        return read

    return LabelledText(dataset.name, _validate_on_test(reader("train.tsv"), reader("test.tsv"), config))


def _open_ag_news(config: "ClassificationConfig", dataset: NamedSet) -> LabelledText:
    """World against business: title and description."""

    def reader(name: str) -> Reader:
        def read() -> Labelled:
            rows = csv.reader(io.StringIO(read_text(obtain_file(dataset, name, config.data_dir)), newline=""))
            return _select_labels([(" ".join(row[1:]), row[0]) for row in rows], {"1": "world", "3": "business"})

        return read

    readers = _validate_on_test(reader("train.csv"), reader("test.csv"), config)
    return LabelledText(dataset.name, readers, split_without_numbers)


def _open_ag_news_sample(config: "ClassificationConfig", dataset: NamedSet) -> LabelledText:
    """The same, but for training on two samples of the official part: title, full stop, description."""
    names = {"1": "world", "3": "business"}

    def train() -> Labelled:
        first, second = (
            list(csv.reader(io.StringIO(read_text(obtain_file(dataset, name, config.data_dir)), newline="")))[1:]
            for name in ("heldout12k_from_train.csv", "noisyag_val10k_from_train.csv")
        )
        rows = {f"{row[1]} . {row[2]}": row[0] for row in first} | {row[2]: str(int(row[1]) + 1) for row in second}
        tested = set(test()[0])
        return _select_labels([row for row in rows.items() if row[0] not in tested], names)

    @lru_cache(maxsize=1)
    def test() -> Labelled:
        rows = csv.reader(io.StringIO(read_text(obtain_file(dataset, "test.csv", config.data_dir)), newline=""))
        return _select_labels([(f"{row[1]} . {row[2]}", row[0]) for row in rows], names)

    return LabelledText(dataset.name, _validate_on_test(train, test, config), split_without_numbers)


def _open_newsgroups(config: "ClassificationConfig", dataset: NamedSet) -> LabelledText:
    """Baseball against hockey, by date, with headers."""
    names = {"rec.sport.baseball": "baseball", "rec.sport.hockey": "hockey"}

    def reader(name: str) -> Reader:
        def read() -> Labelled:
            texts, labels = read_labelled(obtain_file(dataset, name, config.data_dir), "text", "label")
            return _select_labels(list(zip(texts, labels, strict=True)), names)

        return read

    readers = _validate_on_test(reader("train.jsonl"), reader("test.jsonl"), config)
    return LabelledText(dataset.name, readers, split_without_numbers)


def _open_sst(config: "ClassificationConfig", dataset: NamedSet) -> LabelledText:
    """Sentences, neutral ones left out, in their official parts."""

    def reader(part: str) -> Reader:
        def read() -> Labelled:
            rows = [line.split(" ", 1) for line in read_lines(obtain_file(dataset, f"stsa.binary.{part}", config.data_dir))]
            return _select_labels([(row[1], row[0]) for row in rows], POLARITY)

        return read

    return LabelledText(dataset.name, {"train": reader("train"), "valid": reader("dev"), "test": reader("test")})


def _open_amazon(config: "ClassificationConfig", dataset: NamedSet) -> LabelledText:
    """Reviews of fewer than 400 words."""

    def read() -> Labelled:
        rows = [line.split("\t", 3) for line in read_lines(obtain_file(dataset, "reviews.tsv", config.data_dir))]
        return _select_labels([(row[3], row[1]) for row in rows if len(split_words(row[3])) < 400], POLARITY)

    return LabelledText(dataset.name, _hold_out(read, config))


def _open_yelp(config: "ClassificationConfig", dataset: NamedSet) -> LabelledText:
    """At most two stars against at least four."""
    stars = {"1": "negative", "2": "negative", "4": "positive", "5": "positive"}

    def read() -> Labelled:
        path = find_file(dataset, "yelp.jsonl", config.data_dir) or obtain_file(dataset, "yelp.csv", config.data_dir)
        texts, labels = read_labelled(path, "text", "stars")
        return _select_labels([(text, label.removesuffix(".0")) for text, label in zip(texts, labels, strict=True)], stars)

    return LabelledText(dataset.name, _hold_out(read, config))


def _open_sms_spam(config: "ClassificationConfig", dataset: NamedSet) -> LabelledText:
    def read() -> Labelled:
        rows = [line.split("\t", 1) for line in read_lines(obtain_file(dataset, "SMSSpamCollection.tsv", config.data_dir))]
        return _select_labels([(row[1], row[0]) for row in rows], {"ham": "ham", "spam": "spam"})

    return LabelledText(dataset.name, _hold_out(read, config))


READERS: dict[str, Callable[["ClassificationConfig", NamedSet], LabelledText]] = {
    "imdb": _open_imdb,
    "ag-news": _open_ag_news,
    "ag-news-sample": _open_ag_news_sample,
    "20newsgroups": _open_newsgroups,
    "sst": _open_sst,
    "amazon": _open_amazon,
    "yelp": _open_yelp,
    "sms-spam": _open_sms_spam,
}

"""Sources of labelled text: user files, a named set or the Hugging Face hub, part by part; and its split into words.

Words are runs of letters, digits and underscores in lower case. Snell et al. do not describe their tokenization. This
one gives exactly their median lengths of IMDB (181) and 20 Newsgroups with headers (183) (Table 9).
"""

import csv
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from attnlab.tasks import hub
from attnlab.tasks.fetch import find_file, find_set, obtain_file
from attnlab.tasks.sources import SETS, NamedSet
from attnlab.tasks.task import SPECIALS, UNK
from attnlab.tasks.text import Labelled, Reader, draw_mask, hold_out, pick_rows, read_labelled, read_lines, read_text

if TYPE_CHECKING:
    from attnlab.tasks.classification import ClassificationConfig

Split = Callable[[str], list[str]]


def split_words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def split_without_numbers(text: str) -> list[str]:
    """Split as split_words does, but also at underscores; integers of several digits become <unk> (A.8)."""
    words = split_words(text.replace("_", " "))
    return [SPECIALS[UNK] if len(word) > 1 and word.isdecimal() else word for word in words]


@dataclass(frozen=True)
class LabelledText:
    """A labelled corpus in named parts, each read on demand, and the function that splits a text into words."""

    name: str
    readers: dict[str, Reader]
    split: Split = split_words


def find_labelled_text(config: "ClassificationConfig") -> LabelledText:
    """Find the corpus of a configuration: a hub set, user files or a named set."""
    if hub.is_hub_name(config.data):
        return _open_hub(config)
    if config.data not in SETS and Path(config.data).suffix:
        return _open_files(config)
    if config.valid or config.test:
        raise ValueError(f"valid= and test= need a file as data=: data={config.data} has its own parts")
    dataset = find_set(config.data, "classification")
    return READERS[dataset.name](config, dataset)


def _open_files(config: "ClassificationConfig") -> LabelledText:
    def make_reader(file: str) -> Reader:
        return lambda: read_labelled(Path(file), config.text, config.label)

    train = make_reader(config.data)
    readers = {"train": train, "valid": make_reader(config.valid)} if config.valid else _hold_out(train, config)
    return LabelledText(config.data, readers | ({"test": make_reader(config.test)} if config.test else {}))


def _open_hub(config: "ClassificationConfig") -> LabelledText:
    splits = hub.load_splits(config.data)

    def read_part(part: str) -> Labelled:
        return hub.read_labelled(splits[part], config.text, config.label, config.data)

    readers: dict[str, Reader] = {part: partial(read_part, part) for part in splits}
    if "valid" not in readers:
        train, test = readers["train"], readers.get("test")
        readers |= _add_validation(train, test, config) if test else _hold_out(train, config)
    return LabelledText(config.data, readers)


def _hold_out(read_all: Reader, config: "ClassificationConfig") -> dict[str, Reader]:
    return hold_out(read_all, 0, config.held_out, config.data_seed, limit=config.most_valid)


def _add_validation(train: Reader, test: Reader, config: "ClassificationConfig") -> dict[str, Reader]:
    """Add a validation part to official ones: drawn from the test part, as in the paper, or held out of training."""
    if config.valid_from == "train":
        return _hold_out(train, config) | {"test": test}

    def read_valid() -> Labelled:
        examples = test()
        return pick_rows(examples, draw_mask(len(examples[0]), config.most_valid, config.data_seed))

    return {"train": train, "valid": read_valid, "test": test}


def _select_labels(rows: list[tuple[str, str]], names: dict[str, str]) -> Labelled:
    """Keep the rows whose label is in `names`, and rename the labels."""
    kept = [(text, names[label]) for text, label in rows if label in names]
    return [text for text, _ in kept], [label for _, label in kept]


def _read_split(config: "ClassificationConfig", dataset: NamedSet, name: str, sep: str, fields: int) -> list[list[str]]:
    """Read a file of a set and split each line at `sep` into at most `fields` fields."""
    return [line.split(sep, fields - 1) for line in read_lines(obtain_file(dataset, name, config.data_dir))]


def _read_csv(config: "ClassificationConfig", dataset: NamedSet, name: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(read_text(obtain_file(dataset, name, config.data_dir)), newline="")))


POLARITY = {"0": "negative", "1": "positive"}
TOPICS = {"1": "world", "3": "business"}


def _open_imdb(config: "ClassificationConfig", dataset: NamedSet) -> LabelledText:
    def read_part(name: str) -> Labelled:
        rows = _read_split(config, dataset, name, "\t", 4)
        return _select_labels([(row[3], row[0]) for row in rows], POLARITY)

    readers = _add_validation(partial(read_part, "train.tsv"), partial(read_part, "test.tsv"), config)
    return LabelledText(dataset.name, readers)


def _open_ag_news(config: "ClassificationConfig", dataset: NamedSet) -> LabelledText:
    """Open AG News, world or business: title and description."""

    def read_part(name: str) -> Labelled:
        return _select_labels([(" ".join(row[1:]), row[0]) for row in _read_csv(config, dataset, name)], TOPICS)

    readers = _add_validation(partial(read_part, "train.csv"), partial(read_part, "test.csv"), config)
    return LabelledText(dataset.name, readers, split_without_numbers)


def _open_ag_news_sample(config: "ClassificationConfig", dataset: NamedSet) -> LabelledText:
    """Open AG News with two samples of the official training part: title, full stop, description."""

    def read_train() -> Labelled:
        names = ("heldout12k_from_train.csv", "noisyag_val10k_from_train.csv")
        first, second = (_read_csv(config, dataset, name)[1:] for name in names)
        rows = {f"{row[1]} . {row[2]}": row[0] for row in first} | {row[2]: str(int(row[1]) + 1) for row in second}
        test_texts = set(read_test()[0])
        return _select_labels([row for row in rows.items() if row[0] not in test_texts], TOPICS)

    @lru_cache(maxsize=1)
    def read_test() -> Labelled:
        rows = _read_csv(config, dataset, "test.csv")
        return _select_labels([(f"{row[1]} . {row[2]}", row[0]) for row in rows], TOPICS)

    return LabelledText(dataset.name, _add_validation(read_train, read_test, config), split_without_numbers)


def _open_newsgroups(config: "ClassificationConfig", dataset: NamedSet) -> LabelledText:
    """Open 20 Newsgroups, baseball or hockey, split by date, with headers."""
    names = {"rec.sport.baseball": "baseball", "rec.sport.hockey": "hockey"}

    def read_part(name: str) -> Labelled:
        texts, labels = read_labelled(obtain_file(dataset, name, config.data_dir), "text", "label")
        return _select_labels(list(zip(texts, labels, strict=True)), names)

    readers = _add_validation(partial(read_part, "train.jsonl"), partial(read_part, "test.jsonl"), config)
    return LabelledText(dataset.name, readers, split_without_numbers)


def _open_sst(config: "ClassificationConfig", dataset: NamedSet) -> LabelledText:
    """Open the Stanford Sentiment Treebank: sentences without the neutral ones, in the official parts."""

    def read_part(part: str) -> Labelled:
        rows = _read_split(config, dataset, f"stsa.binary.{part}", " ", 2)
        return _select_labels([(row[1], row[0]) for row in rows], POLARITY)

    names = {"train": "train", "valid": "dev", "test": "test"}
    return LabelledText(dataset.name, {part: partial(read_part, name) for part, name in names.items()})


def _open_amazon(config: "ClassificationConfig", dataset: NamedSet) -> LabelledText:
    """Open the Amazon reviews of fewer than 400 words."""

    def read_all() -> Labelled:
        rows = _read_split(config, dataset, "reviews.tsv", "\t", 4)
        return _select_labels([(row[3], row[1]) for row in rows if len(split_words(row[3])) < 400], POLARITY)

    return LabelledText(dataset.name, _hold_out(read_all, config))


def _open_yelp(config: "ClassificationConfig", dataset: NamedSet) -> LabelledText:
    """Open the Yelp reviews: negative with one or two stars, positive with four or five."""
    stars = {"1": "negative", "2": "negative", "4": "positive", "5": "positive"}

    def read_all() -> Labelled:
        path = find_file(dataset, "yelp.jsonl", config.data_dir) or obtain_file(dataset, "yelp.csv", config.data_dir)
        texts, labels = read_labelled(path, "text", "stars")
        return _select_labels(list(zip(texts, (label.removesuffix(".0") for label in labels), strict=True)), stars)

    return LabelledText(dataset.name, _hold_out(read_all, config))


def _open_sms_spam(config: "ClassificationConfig", dataset: NamedSet) -> LabelledText:
    def read_all() -> Labelled:
        rows = _read_split(config, dataset, "SMSSpamCollection.tsv", "\t", 2)
        return _select_labels([(row[1], row[0]) for row in rows], {"ham": "ham", "spam": "spam"})

    return LabelledText(dataset.name, _hold_out(read_all, config))


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

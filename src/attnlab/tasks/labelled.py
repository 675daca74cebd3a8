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

import numpy as np

from attnlab.files.user_files import read_text
from attnlab.tasks import hub
from attnlab.tasks.fetch import find_file, find_set, obtain_file
from attnlab.tasks.sources import SETS, NamedSet
from attnlab.tasks.task import SPECIALS, UNK
from attnlab.tasks.text import Labelled, Reader, draw_mask, hold_out, pick_rows, read_labelled, read_lines

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
    fields = (config.text, config.label, config.data)
    splits = hub.load_splits(config.data).items()
    readers: dict[str, Reader] = {part: partial(hub.read_labelled, split, *fields) for part, split in splits}
    return LabelledText(config.data, _add_validation(readers, config))


def _hold_out(read_all: Reader, config: "ClassificationConfig") -> dict[str, Reader]:
    return hold_out(read_all, 0, config.held_out, config.data_seed, limit=config.most_valid)


def _add_validation(readers: dict[str, Reader], config: "ClassificationConfig") -> dict[str, Reader]:
    """Add a missing validation part: drawn from the test part, as in the paper, or held out of training."""
    test = readers.get("test")
    if "valid" in readers:
        return readers
    if test is None or config.valid_from == "train":
        return _hold_out(readers["train"], config) | ({"test": test} if test else {})

    def read_valid() -> Labelled:
        examples = test()
        return pick_rows(examples, draw_mask(len(examples[0]), config.most_valid, config.data_seed))

    return {"train": readers["train"], "valid": read_valid, "test": test}


def _select_labels(columns: Labelled, names: dict[str, str]) -> Labelled:
    """Keep the rows whose label is in `names`, and rename the labels."""
    kept = [(text, names[label]) for text, label in zip(*columns, strict=True) if label in names]
    return [text for text, _ in kept], [label for _, label in kept]


def _read_columns(path: Path, *, text: int, label: int, sep: str = "\t") -> Labelled:
    """Read two columns of a file without a header; the text is the last one, which may contain the separator."""
    rows = [line.split(sep, text) for line in read_lines(path)]
    return [row[text] for row in rows], [row[label] for row in rows]


def _read_csv(path: Path) -> list[list[str]]:
    return list(csv.reader(io.StringIO(read_text(path), newline="")))


def _read_ag_news(path: Path, sep: str = " ") -> Labelled:
    """Read title and description as one text."""
    rows = _read_csv(path)
    return [sep.join(row[1:]) for row in rows], [row[0] for row in rows]


def _read_amazon(path: Path) -> Labelled:
    """Read the reviews of fewer than 400 words."""
    columns = _read_columns(path, text=3, label=1)
    return pick_rows(columns, np.array([len(split_words(text)) < 400 for text in columns[0]]))


def _open_set(
    config: "ClassificationConfig",
    dataset: NamedSet,
    *,
    read: Callable[[Path], Labelled],
    labels: dict[str, str],
    split: Split = split_words,
    **files: str,
) -> LabelledText:
    """Open a set with one file for each part, keeping some labels under new names."""

    def read_part(name: str) -> Labelled:
        return _select_labels(read(obtain_file(dataset, name, config.data_dir)), labels)

    readers: dict[str, Reader] = {part: partial(read_part, name) for part, name in files.items()}
    return LabelledText(dataset.name, _add_validation(readers, config), split)


def _open_ag_news_sample(config: "ClassificationConfig", dataset: NamedSet) -> LabelledText:
    """Open AG News with two samples of the official training part: title, full stop, description."""

    def obtain(name: str) -> Path:
        return obtain_file(dataset, name, config.data_dir)

    def read_train() -> Labelled:
        first = _read_csv(obtain("heldout12k_from_train.csv"))[1:]
        second = _read_csv(obtain("noisyag_val10k_from_train.csv"))[1:]
        rows = {f"{row[1]} . {row[2]}": row[0] for row in first} | {row[2]: str(int(row[1]) + 1) for row in second}
        for text in read_test()[0]:
            rows.pop(text, None)
        return _select_labels((list(rows), list(rows.values())), TOPICS)

    @lru_cache(maxsize=1)
    def read_test() -> Labelled:
        return _select_labels(_read_ag_news(obtain("test.csv"), " . "), TOPICS)

    readers: dict[str, Reader] = {"train": read_train, "test": read_test}
    return LabelledText(dataset.name, _add_validation(readers, config), split_without_numbers)


def _open_yelp(config: "ClassificationConfig", dataset: NamedSet) -> LabelledText:
    """Open the Yelp reviews: negative with one or two stars, positive with four or five."""
    stars = {"1": "negative", "2": "negative", "4": "positive", "5": "positive"}

    def read_all() -> Labelled:
        path = find_file(dataset, "yelp.jsonl", config.data_dir) or obtain_file(dataset, "yelp.csv", config.data_dir)
        texts, labels = read_labelled(path, "text", "stars")
        return _select_labels((texts, [label.removesuffix(".0") for label in labels]), stars)

    return LabelledText(dataset.name, _hold_out(read_all, config))


POLARITY = {"0": "negative", "1": "positive"}
TOPICS = {"1": "world", "3": "business"}
SPORTS = {"rec.sport.baseball": "baseball", "rec.sport.hockey": "hockey"}

READERS: dict[str, Callable[["ClassificationConfig", NamedSet], LabelledText]] = {
    "imdb": partial(
        _open_set, read=partial(_read_columns, text=3, label=0), labels=POLARITY, train="train.tsv", test="test.tsv",
    ),
    "ag-news": partial(
        _open_set, read=_read_ag_news, labels=TOPICS, split=split_without_numbers, train="train.csv", test="test.csv",
    ),
    "ag-news-sample": _open_ag_news_sample,
    "20newsgroups": partial(  # split by date, with headers
        _open_set, read=partial(read_labelled, text="text", label="label"), labels=SPORTS, split=split_without_numbers,
        train="train.jsonl", test="test.jsonl",
    ),
    "sst": partial(  # the Stanford Sentiment Treebank: sentences without the neutral ones, in the official parts
        _open_set, read=partial(_read_columns, text=1, label=0, sep=" "), labels=POLARITY,
        train="stsa.binary.train", valid="stsa.binary.dev", test="stsa.binary.test",
    ),
    "amazon": partial(_open_set, read=_read_amazon, labels=POLARITY, train="reviews.tsv"),
    "yelp": _open_yelp,
    "sms-spam": partial(
        _open_set, read=partial(_read_columns, text=1, label=0), labels={"ham": "ham", "spam": "spam"},
        train="SMSSpamCollection.tsv",
    ),
}  # fmt: skip

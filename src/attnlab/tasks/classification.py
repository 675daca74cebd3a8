"""Classification of texts, in words: every text is <s> w_1 … w_n </s>, as in Snell et al. 2021 (A.8)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from attnlab.files import write_bytes
from attnlab.tasks.batching import Sequences
from attnlab.tasks.embeddings import read_vectors, read_words
from attnlab.tasks.labelled import LabelledText, find_labelled_text
from attnlab.tasks.pairs import TooLong
from attnlab.tasks.task import BOS, EOS, PAD, Batch, Task, TaskConfig
from attnlab.tasks.text import Labelled, draw_mask, read_lines
from attnlab.tasks.vocabulary import Words


@dataclass(frozen=True, kw_only=True)
class ClassificationConfig(TaskConfig):
    data: str = "imdb"  # a named set, or a .csv, .tsv or .jsonl file
    text: str = "text"  # the field of the text, in one's own files
    label: str = "label"  # the field of the label
    valid: str | None = None
    test: str | None = None
    held_out: float = 0.1  # the share that validates where there is neither a validation nor a test part
    valid_from: Literal["test", "train"] = "test"  # where a set has a test part: from it as in the paper, or held out
    most_valid: int = 4000
    most_train: int | None = None  # at most so many training examples, drawn by data_seed
    at_least: int = 3  # how often a word must occur in training to be in the vocabulary
    embeddings: str | None = None  # a file of vectors (GloVe's text format), whose words are kept if rare too
    max_length: int | None = None  # tokens, <s> and </s> included
    too_long: TooLong = "error"
    data_dir: str | None = None  # a folder in the layout of ATTNLAB_DATA
    data_seed: int = 0  # of what is drawn to validate

    def check(self) -> None:
        if not 0.0 < self.held_out < 1.0:
            raise ValueError(f"held_out is a share, between 0 and 1, not {self.held_out}")


class Classification(Task):
    architecture = "classification"
    config_type: ClassVar[type] = ClassificationConfig

    def __init__(self, config: ClassificationConfig, text: LabelledText, folder: Path) -> None:
        self.config, self.text, self.notes = config, text, []
        self._examples = lru_cache(maxsize=None)(self._read)
        self._encoded = lru_cache(maxsize=None)(self._encode)
        self.classes, self.vocabulary = self._learnt(folder)

    @classmethod
    def prepare(cls, config: ClassificationConfig, folder: Path) -> "Classification":
        return cls(config, find_labelled_text(config), folder)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.text.readers)

    def get_sizes(self) -> dict[str, int]:
        return {"vocabulary": len(self.vocabulary), "classes": len(self.classes)}

    def get_lengths(self, part: str) -> tuple[np.ndarray, ...]:
        return (self._encoded(part)[0].lengths,)

    def make_batch(self, part: str, indices: list[int]) -> Batch:
        sequences, classes = self._encoded(part)
        return Batch((sequences.pad(indices),), torch.from_numpy(classes[indices]), len(indices), list(indices))

    def encode(self, texts: Sequence[str]) -> Sequences:
        """Texts as the model reads them."""
        words = (" ".join(self.text.split(text)) for text in texts)
        return Sequences.from_ids(self.vocabulary.encode(words), begin=BOS, end=EOS)

    def read_embeddings(self) -> Tensor | None:
        """The vectors (vocabulary, size) of the file embeddings=, N(0,1) where it has none, 0 for <pad>; or None."""
        if self.config.embeddings is None:
            return None
        found = read_vectors(Path(self.config.embeddings), self.vocabulary.ids)
        size = len(next(iter(found.values())))
        generator = torch.Generator().manual_seed(self.config.data_seed)
        vectors = torch.randn(len(self.vocabulary), size, generator=generator)
        for word, vector in found.items():
            vectors[self.vocabulary.ids[word]] = torch.from_numpy(vector)
        vectors[PAD] = 0.0
        self.add_notes(f"embeddings: {len(found):,} of {len(self.vocabulary):,} words are in {self.config.embeddings}")
        return vectors

    def _read(self, part: str) -> Labelled:
        self.check_part(part)
        texts, labels = self.text.readers[part]()
        if not texts:
            raise ValueError(f"{self.text.name}: the {part} part has no example")
        if part == "train":
            kept = draw_mask(len(texts), self.config.most_train, self.config.data_seed)
            texts, labels = list(compress(texts, kept)), list(compress(labels, kept))
        return texts, labels

    def _encode(self, part: str) -> tuple[Sequences, np.ndarray]:
        texts, labels = self._examples(part)
        number = {name: k for k, name in enumerate(self.classes)}
        if unknown := next((label for label in labels if label not in number), None):
            have = ", ".join(self.classes)
            raise ValueError(f"{self.text.name}: label {unknown!r} of the {part} part is not in training: {have}")
        sequences, classes = self.encode(texts), np.array([number[label] for label in labels])
        return self._limited(sequences, classes, part)

    def _limited(self, sequences: Sequences, classes: np.ndarray, part: str) -> tuple[Sequences, np.ndarray]:
        """Without texts longer than a model allows, or with their ends cut off."""
        longest = self.config.max_length or np.iinfo(np.int64).max
        long = sequences.lengths > longest
        if not long.any():
            return sequences, classes
        found = f"{part}: {long.sum():,} of {len(long):,} texts have more than {longest} tokens"
        if self.config.too_long == "error":
            where = int(long.argmax())
            raise ValueError(
                f"{found}, the first is example {where + 1:,} ({sequences.lengths[where]} tokens); "
                "raise max_length=, or set too_long=truncate or too_long=skip"
            )
        if self.config.too_long == "truncate":
            self.add_notes(f"{found}: cut to {longest}")
            return sequences.truncate(longest), classes
        if long.all():
            raise ValueError(f"{found}: nothing would be left; raise max_length=")
        self.add_notes(f"{found}: skipped")
        return sequences.select(~long), classes[~long]

    def _learnt(self, folder: Path) -> tuple[list[str], Words]:
        """The classes and the vocabulary: read from the folder where they are, else made from training and written."""
        classes, words = folder / "classes.txt", folder / f"vocabulary{Words.suffix}"
        if not (classes.exists() and words.exists()):
            self._examples("valid")  # what is wrong with it is said now, not after an epoch
            texts, labels = self._examples("train")
            names = sorted(set(labels))
            if len(names) < 2:
                raise ValueError(f"{self.text.name}: every training example has the label {names[0]!r}")
            keep = read_words(Path(self.config.embeddings)) if self.config.embeddings else frozenset()
            lines = (" ".join(self.text.split(text)) for text in texts)
            Words.from_lines(lines, at_least=self.config.at_least, keep=keep).save(words)
            write_bytes(classes, "".join(f"{name}\n" for name in names).encode())
        return read_lines(classes), Words.load(words)

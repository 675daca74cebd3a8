"""Text classification with words: every text is <s> w_1 … w_n </s>, as in Snell et al. 2021 (A.8)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from attnlab.config import Natural, Share
from attnlab.files import write_bytes
from attnlab.tasks.batching import Sequences, TooLong, limit_lengths
from attnlab.tasks.embeddings import read_vectors, read_words
from attnlab.tasks.labelled import find_labelled_text
from attnlab.tasks.task import BOS, EOS, PAD, Batch, Task, TaskConfig
from attnlab.tasks.text import Labelled, draw_mask, pick_rows, read_lines
from attnlab.tasks.vocabulary import Words

SHOWN = 5  # labels in a message


@dataclass(frozen=True, kw_only=True)
class ClassificationConfig(TaskConfig):
    data: str = "imdb"  # a named set, or a .csv, .tsv or .jsonl file
    text: str = "text"  # name of the text field in your files
    label: str = "label"  # name of the label field in your files
    valid: str | None = None  # your validation file; not for named sets
    test: str | None = None  # your test file; not for named sets
    held_out: Share = 0.1  # share of the training part held out for validation if no validation part is given
    valid_from: Literal["test", "train"] = "test"  # draw validation from the test part, as in the paper, or hold it out
    most_valid: int = 4000  # maximum number of validation examples
    most_train: int | None = None  # maximum number of training examples, drawn by data_seed
    at_least: int = 3  # minimum number of occurrences in training for a word of the vocabulary
    embeddings: str | None = None  # a file of vectors in GloVe's text format; its words are kept even if rare
    max_length: int | None = None  # largest number of tokens, <s> and </s> included; none: no limit
    too_long: TooLong = "error"  # what happens to longer texts
    data_dir: str | None = None  # a folder in the layout of ATTNLAB_DATA
    data_seed: Natural = 0  # seed of the validation draw


class Classification(Task):
    architecture = "classification"
    config_type: ClassVar[type] = ClassificationConfig

    def __init__(self, config: ClassificationConfig, folder: Path) -> None:
        self.config, self.text, self.notes = config, find_labelled_text(config), []
        self._get_examples = lru_cache(maxsize=None)(self._read_part)
        self._get_encoded = lru_cache(maxsize=None)(self._encode_part)
        self.classes, self.vocabulary = self._load_vocabulary(folder)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.text.readers)

    def get_sizes(self) -> dict[str, int]:
        return {"vocabulary": len(self.vocabulary), "classes": len(self.classes)}

    def get_lengths(self, part: str) -> tuple[np.ndarray, ...]:
        return (self._get_encoded(part)[0].lengths,)

    def make_batch(self, part: str, indices: list[int]) -> Batch:
        sequences, classes = self._get_encoded(part)
        return Batch((sequences.pad(indices),), torch.from_numpy(classes[indices]), len(indices), list(indices))

    def split(self, text: str) -> list[str]:
        """Split a text into the words that the model reads."""
        return self.text.split(text)

    def encode(self, texts: Sequence[str]) -> Sequences:
        """Encode texts as the model reads them."""
        words = (" ".join(self.split(text)) for text in texts)
        return Sequences.from_ids(self.vocabulary.encode(words), begin=BOS, end=EOS)

    def read_embeddings(self) -> Tensor | None:
        """Read the vectors (vocabulary, size) of embeddings=, or return None if it is not set.

        Words without a vector get random ones from N(0,1); <pad> gets 0.
        """
        if self.config.embeddings is None:
            return None
        known = read_vectors(Path(self.config.embeddings), self.vocabulary.ids)
        size = len(next(iter(known.values())))
        generator = torch.Generator().manual_seed(self.config.data_seed)
        vectors = torch.randn(len(self.vocabulary), size, generator=generator)
        for word, vector in known.items():
            vectors[self.vocabulary.ids[word]] = torch.from_numpy(vector)
        vectors[PAD] = 0.0
        self.add_notes(f"embeddings: {len(known):,} of {len(self.vocabulary):,} words are in {self.config.embeddings}")
        return vectors

    def _read_part(self, part: str) -> Labelled:
        self.check_part(part)
        texts, labels = self.text.readers[part]()
        if not texts:
            raise ValueError(f"{self.text.name}: the {part} part has no examples")
        if part == "train":
            return pick_rows((texts, labels), draw_mask(len(texts), self.config.most_train, self.config.data_seed))
        return texts, labels

    def _encode_part(self, part: str) -> tuple[Sequences, np.ndarray]:
        texts, labels = self._get_examples(part)
        ids = {name: k for k, name in enumerate(self.classes)}
        if unknown := next((label for label in labels if label not in ids), None):
            known = ", ".join(f"{name:.40}" for name in self.classes[:SHOWN])
            if len(self.classes) > SHOWN:
                known += f", …: {len(self.classes):,} labels; is label={self.config.label} the right field?"
            raise ValueError(
                f"{self.text.name}: label {unknown[:40]!r} of the {part} part is not in training ({known})"
            )
        sequences, classes = self.encode(texts), np.array([ids[label] for label in labels])
        limit, too_long = self.config.max_length, self.config.too_long
        kept, note = limit_lengths((sequences.lengths,), limit, too_long, part, "text")
        if note and limit:
            self.add_notes(note)
            sequences = sequences.truncate(limit) if too_long == "truncate" else sequences.select(kept)
        return sequences, classes[kept]

    def _load_vocabulary(self, folder: Path) -> tuple[list[str], Words]:
        """Load the classes and the vocabulary; learn them from training and save them first if they do not exist."""
        classes, words = folder / "classes.txt", folder / f"vocabulary{Words.suffix}"
        if not (classes.exists() and words.exists()):
            self._get_examples("valid")  # raises its errors now, not after an epoch
            texts, labels = self._get_examples("train")
            names = sorted(set(labels))
            if len(names) < 2:
                raise ValueError(f"{self.text.name}: every training example has the label {names[0]!r}")
            keep = read_words(Path(self.config.embeddings)) if self.config.embeddings else frozenset()
            lines = (" ".join(self.text.split(text)) for text in texts)
            Words.from_lines(lines, at_least=self.config.at_least, keep=keep).save(words)
            write_bytes(classes, "".join(f"{name}\n" for name in names).encode())
        return read_lines(classes), Words.load(words)

"""Translation: sentence pairs from files of one's own or from a named set, in subwords or words."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from attnlab.tasks.batching import Sequences
from attnlab.tasks.pairs import SentencePairs, TooLong, encode_sources, limit_lengths
from attnlab.tasks.parallel import ParallelText, find_parallel_text
from attnlab.tasks.task import BOS, Batch, Task, TaskConfig
from attnlab.tasks.text import Pairs, draw_mask, load_moses
from attnlab.tasks.vocabulary import Subwords, Vocabulary, Words


@dataclass(frozen=True, kw_only=True)
class TranslationConfig(TaskConfig):
    data: str = "multi30k"  # a named set, or a .tsv or .tmx file of training pairs; src= and tgt= take its place
    pair: str | None = None  # source-target, as de-en; None: the first the named set has
    src: str | None = None  # one's own text, a sentence a line
    tgt: str | None = None
    valid: str | None = None  # a .tsv or .tmx file
    valid_src: str | None = None
    valid_tgt: str | None = None
    test: str | None = None
    test_src: str | None = None
    test_tgt: str | None = None
    most_train: int | None = None  # at most so many training pairs, drawn by data_seed
    held_out: float = 0.05  # the share of one's own training pairs that validates where no other text does
    units: Literal["subword", "word"] = "subword"
    subwords: Literal["unigram", "bpe"] = "unigram"
    vocabulary: int = 8000  # subwords, specials included
    joint: bool = True  # one vocabulary for both languages
    coverage: float = 0.9995  # of characters by subwords
    at_least: int = 1  # how often a word must occur in training to be in the vocabulary
    moses: bool = False  # tokenise with Moses first, and detokenise what is decoded
    lower: bool = False  # lower case throughout, references too
    source_begin: bool = False  # <s> before the source too (Snell et al.)
    max_length: int | None = 1024  # tokens on either side, </s> included
    too_long: TooLong = "error"
    data_dir: str | None = None  # a folder in the layout of ATTNLAB_DATA
    data_seed: int = 0  # of the split, where a set has none

    def check(self) -> None:
        for one, other in (("src", "tgt"), ("valid_src", "valid_tgt"), ("test_src", "test_tgt")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise ValueError(f"{one}= and {other}= go together; only one is given")
        if self.pair is not None and len(self.languages) != 2:
            raise ValueError(f"pair={self.pair}: expected two languages, as de-en")
        if not 0.0 < self.held_out < 1.0 or not 0.0 < self.coverage <= 1.0:
            raise ValueError("held_out and coverage are shares, between 0 and 1")

    @property
    def languages(self) -> list[str]:
        return (self.pair or "").split("-")


class Translation(Task):
    architecture = "translation"
    config_type: ClassVar[type] = TranslationConfig

    def __init__(self, config: TranslationConfig, text: ParallelText, folder: Path) -> None:
        self.config, self.text, self.notes = config, text, []
        self._texts: dict[str, Pairs] = {}
        self._encoded = lru_cache(maxsize=None)(self._encode)
        self._moses = [load_moses(language) for language in text.languages] if config.moses else None
        self.source_vocabulary, self.target_vocabulary = self._vocabularies(folder)

    @classmethod
    def prepare(cls, config: TranslationConfig, folder: Path) -> "Translation":
        return cls(config, find_parallel_text(config), folder)

    @property
    def parts(self) -> tuple[str, ...]:
        return self.text.parts

    def get_sizes(self) -> dict[str, int]:
        return {"source_vocabulary": len(self.source_vocabulary), "vocabulary": len(self.target_vocabulary)}

    def get_lengths(self, part: str) -> tuple[np.ndarray, ...]:
        return self._encoded(part)[0].lengths

    def make_batch(self, part: str, indices: list[int]) -> Batch:
        return self._encoded(part)[0].make_batch(indices)

    def encode(self, lines: Sequence[str]) -> Sequences:
        """Lines of the source language as the model reads them."""
        lines = [line.lower() for line in lines] if self.config.lower else lines
        return encode_sources(self.source_vocabulary, self._split(lines, 0), begin=self.config.source_begin)

    def encode_target(self, lines: Sequence[str]) -> Sequences:
        """Lines of the target language as the decoder reads them, <s> before each."""
        lines = [line.lower() for line in lines] if self.config.lower else lines
        return Sequences.from_ids(self.target_vocabulary.encode(self._split(lines, 1)), begin=BOS)

    def decode(self, ids: Sequence[int]) -> str:
        """The target text of ids, detokenised."""
        line = self.target_vocabulary.decode(ids)
        return self._moses[1][1](line) if self._moses else line

    def read_sources(self, part: str) -> list[str]:
        """The source text of every example, as it stands in the file but for the case."""
        return self._kept(part, 0)

    def read_references(self, part: str) -> list[str]:
        """The target text of every example, as it stands in the file but for the case: what is scored against."""
        return self._kept(part, 1)

    def _kept(self, part: str, side: int) -> list[str]:
        return list(compress(self._cleaned(part)[side], self._encoded(part)[1]))

    def _cleaned(self, part: str) -> Pairs:
        """The pairs of a part; without those of which a side is empty, in training."""
        self.check_part(part)
        if part not in self._texts:
            self._texts[part] = self._read(part)
        return self._texts[part]

    def _read(self, part: str) -> Pairs:
        source, target = self.text.read_part(part)
        if self.config.lower:
            source, target = [line.lower() for line in source], [line.lower() for line in target]
        full = [bool(x.strip() and y.strip()) for x, y in zip(source, target, strict=True)]
        if part == "train" and not all(full):
            self.add_notes(f"train: {full.count(False):,} of {len(full):,} pairs have an empty side: left out")
            source, target = list(compress(source, full)), list(compress(target, full))
        if not source:
            raise ValueError(f"{self.text.name}: the {part} part has no sentence pair")
        if part == "train":
            kept = draw_mask(len(source), self.config.most_train, self.config.data_seed)
            source, target = list(compress(source, kept)), list(compress(target, kept))
        return source, target

    def _split(self, lines: Sequence[str], side: int) -> list[str]:
        return [self._moses[side][0](line) for line in lines] if self._moses else list(lines)

    def _encode(self, part: str) -> tuple[SentencePairs, np.ndarray]:
        source, target = self._cleaned(part)
        pairs = SentencePairs.from_ids(
            self.source_vocabulary.encode(self._split(source, 0)),
            self.target_vocabulary.encode(self._split(target, 1)),
            begin=self.config.source_begin,
        )
        pairs, kept, notes = limit_lengths(pairs, self.config.max_length, self.config.too_long, part)
        self.add_notes(*notes)
        if part == "train":
            del self._texts[part]  # its text is large, and seldom asked for again
        return pairs, kept

    def _vocabularies(self, folder: Path) -> tuple[Vocabulary, Vocabulary]:
        """One for both languages, or one each: read from the folder where they are, else made and written."""
        kind = Subwords if self.config.units == "subword" else Words
        names = ["vocabulary"] if self.config.joint else ["source_vocabulary", "target_vocabulary"]
        paths = [folder / f"{name}{kind.suffix}" for name in names]
        if not all(path.exists() for path in paths):
            self._cleaned("valid")  # what is wrong with it is said now, not after an epoch
            sides = [self._split(side, k) for k, side in enumerate(self._cleaned("train"))]
            for path, lines in zip(paths, [sides[0] + sides[1]] if self.config.joint else sides, strict=True):
                self._learn(lines).save(path)
        made = [kind.load(path) for path in paths]
        return made[0], made[-1]

    def _learn(self, lines: list[str]) -> Vocabulary:
        if self.config.units == "word":
            return Words.from_lines(lines, at_least=self.config.at_least)
        size, coverage = self.config.vocabulary, self.config.coverage
        return Subwords.train(lines, size, kind=self.config.subwords, coverage=coverage)

"""Translation: sentence pairs from user files or a named set, as subwords or words."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np

from attnlab.config import Natural, Share
from attnlab.tasks.batching import Sequences, TooLong, limit_lengths
from attnlab.tasks.pairs import SentencePairs
from attnlab.tasks.parallel import find_parallel_text
from attnlab.tasks.task import BOS, EOS, Batch, Task, TaskConfig
from attnlab.tasks.text import Pairs, draw_mask, load_moses, pick_rows
from attnlab.tasks.vocabulary import Subwords, Vocabulary, Words, learn_subwords


@dataclass(frozen=True, kw_only=True)
class TranslationConfig(TaskConfig):
    data: str = "multi30k"  # a named set, or a .tsv or .tmx file of training pairs; src= and tgt= replace it
    pair: str | None = None  # languages as source-target, for example de-en; none: the first pair of the named set
    src: str | None = None  # your source text for training, one sentence per line
    tgt: str | None = None  # your target text for training, line by line with src
    valid: str | None = None  # your validation pairs, a .tsv or .tmx file
    valid_src: str | None = None  # your source text for validation
    valid_tgt: str | None = None  # your target text for validation
    test: str | None = None  # your test pairs, a .tsv or .tmx file
    test_src: str | None = None  # your source text for testing
    test_tgt: str | None = None  # your target text for testing
    most_train: int | None = None  # maximum number of training pairs, drawn by data_seed
    held_out: Share = 0.05  # share of the training pairs held out for validation if no validation text is given
    units: Literal["subword", "word"] = "subword"  # what a token is
    subwords: Literal["unigram", "bpe"] = "unigram"  # how SentencePiece finds the subwords
    vocabulary: int = 8000  # number of subwords, special tokens included; the default shrinks to what a text supports
    joint: bool = True  # one vocabulary for both languages
    coverage: Annotated[float, "(0, 1]"] = 0.9995  # share of the characters that the subwords cover
    at_least: int = 1  # minimum number of occurrences in training for a word of the vocabulary
    moses: bool = False  # tokenise with Moses first, and detokenise decoded text
    lower: bool = False  # convert everything to lower case, references included
    source_begin: bool = False  # add <s> before the source (Snell et al.)
    max_length: int | None = 1024  # largest number of tokens on either side, </s> included; none: no limit
    too_long: TooLong = "error"  # what happens to longer sentences
    data_dir: str | None = None  # a folder in the layout of ATTNLAB_DATA
    data_seed: Natural = 0  # seed of the split, for sets without an official one

    def check(self) -> None:
        for one, other in (("src", "tgt"), ("valid_src", "valid_tgt"), ("test_src", "test_tgt")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise ValueError(f"{one}= and {other}= must be given together")
        if self.pair is not None and len(self.languages) != 2:
            raise ValueError(f"pair={self.pair}: expected two languages, for example de-en")

    @property
    def languages(self) -> list[str]:
        return (self.pair or "").split("-")


class Translation(Task):
    architecture = "translation"
    config_type: ClassVar[type] = TranslationConfig

    def __init__(self, config: TranslationConfig, folder: Path) -> None:
        self.config, self.text, self.notes = config, find_parallel_text(config), []
        self._texts: dict[str, Pairs] = {}
        self._get_encoded = lru_cache(maxsize=None)(self._encode_part)
        self._moses = [load_moses(language) for language in self.text.languages] if config.moses else None
        self.source_vocabulary, self.target_vocabulary = self._load_vocabularies(folder)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.text.readers)

    def get_sizes(self) -> dict[str, int]:
        return {"source_vocabulary": len(self.source_vocabulary), "vocabulary": len(self.target_vocabulary)}

    def get_lengths(self, part: str) -> tuple[np.ndarray, ...]:
        return self._get_encoded(part)[0].lengths

    def make_batch(self, part: str, indices: list[int]) -> Batch:
        return self._get_encoded(part)[0].make_batch(indices)

    def encode(self, lines: Sequence[str]) -> Sequences:
        """Encode lines of the source language as the model reads them."""
        lines = [line.lower() for line in lines] if self.config.lower else lines
        ids = self.source_vocabulary.encode(self._tokenise(lines, 0))
        return Sequences.from_ids(ids, begin=BOS if self.config.source_begin else None, end=EOS)

    def encode_target(self, lines: Sequence[str]) -> Sequences:
        """Encode lines of the target language as the decoder reads them, with <s> before each."""
        lines = [line.lower() for line in lines] if self.config.lower else lines
        return Sequences.from_ids(self.target_vocabulary.encode(self._tokenise(lines, 1)), begin=BOS)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode target ids into detokenised text."""
        line = self.target_vocabulary.decode(ids)
        return self._moses[1][1](line) if self._moses else line

    def read_sources(self, part: str) -> list[str]:
        """Read the source text of every example, as in the file but in lower case if lower=true."""
        return self._select_side(part, 0)

    def read_references(self, part: str) -> list[str]:
        """Read the reference translation of every example, as in the file but in lower case if lower=true."""
        return self._select_side(part, 1)

    def _select_side(self, part: str, side: int) -> list[str]:
        return list(compress(self._get_pairs(part)[side], self._get_encoded(part)[1]))

    def _get_pairs(self, part: str) -> Pairs:
        """Return the pairs of a part, reading them at the first call."""
        self.check_part(part)
        if part not in self._texts:
            self._texts[part] = self._read_part(part)
        return self._texts[part]

    def _read_part(self, part: str) -> Pairs:
        """Read the pairs of a part; in training, drop pairs with an empty side and apply most_train."""
        source, target = self.text.readers[part]()
        if self.config.lower:
            source, target = [line.lower() for line in source], [line.lower() for line in target]
        full = [bool(x.strip() and y.strip()) for x, y in zip(source, target, strict=True)]
        if part == "train" and not all(full):
            self.add_notes(f"train: {full.count(False):,} of {len(full):,} pairs have an empty side: dropped")
            source, target = pick_rows((source, target), np.array(full))
        if not source:
            raise ValueError(f"{self.text.name}: the {part} part has no sentence pairs")
        if part == "train":
            return pick_rows((source, target), draw_mask(len(source), self.config.most_train, self.config.data_seed))
        return source, target

    def _tokenise(self, lines: Sequence[str], side: int) -> list[str]:
        return [self._moses[side][0](line) for line in lines] if self._moses else list(lines)

    def _encode_part(self, part: str) -> tuple[SentencePairs, np.ndarray]:
        source, target = self._get_pairs(part)
        pairs = SentencePairs.from_ids(
            self.source_vocabulary.encode(self._tokenise(source, 0)),
            self.target_vocabulary.encode(self._tokenise(target, 1)),
            begin=self.config.source_begin,
        )
        limit, too_long = self.config.max_length, self.config.too_long
        kept, note = limit_lengths(pairs.lengths, limit, too_long, part, "pair")
        if note and limit:
            self.add_notes(note)
            pairs = pairs.truncate(limit) if too_long == "truncate" else pairs.select(kept)
        if part == "train":
            del self._texts[part]  # large and rarely needed again
        return pairs, kept

    def _load_vocabularies(self, folder: Path) -> tuple[Vocabulary, Vocabulary]:
        """Load one vocabulary for both languages, or one for each; learn and save them first if they do not exist."""
        kind = Subwords if self.config.units == "subword" else Words
        names = ["vocabulary"] if self.config.joint else ["source_vocabulary", "target_vocabulary"]
        paths = [folder / f"{name}{kind.suffix}" for name in names]
        if not all(path.exists() for path in paths):
            self._get_pairs("valid")  # raises its errors now, not after an epoch
            sides = [self._tokenise(side, k) for k, side in enumerate(self._get_pairs("train"))]
            for path, lines in zip(paths, [sides[0] + sides[1]] if self.config.joint else sides, strict=True):
                self._learn_vocabulary(lines).save(path)
        vocabularies = [kind.load(path) for path in paths]
        return vocabularies[0], vocabularies[-1]

    def _learn_vocabulary(self, lines: list[str]) -> Vocabulary:
        if self.config.units == "word":
            return Words.from_lines(lines, at_least=self.config.at_least)
        learned, notes = learn_subwords(self.config, lines, coverage=self.config.coverage)
        self.add_notes(*notes)
        return learned

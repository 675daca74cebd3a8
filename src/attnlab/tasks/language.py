"""Language modelling: one stream of tokens a part, cut into blocks, or into windows that score after a context.

The stream s_1 … s_N has </s> after every line, but not in characters or bytes, where a line break is a token itself,
nor with the tokenizer of a pretrained model, which reads line breaks as it always did. A block of B tokens is scored on
s_{kB+1} … s_{kB+B}, each given those before it in the block; the first token of all is given </s>. A window with a
context of C scores B−C tokens, each given at least C before it, where there are so many: parts "valid-context" and
"test-context" (CODA: blocks of 512, 480 of context, 32 scored).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from attnlab.tasks import hub
from attnlab.tasks.batching import Sequences, pad_rows
from attnlab.tasks.fetch import find_set, obtain_file
from attnlab.tasks.sources import SETS
from attnlab.tasks.task import EOS, PAD, Batch, Task, TaskConfig
from attnlab.tasks.text import read_bytes, read_text
from attnlab.tasks.vocabulary import Characters, Pretrained, Subwords, Vocabulary, Words

Units = Literal["word", "subword", "character", "byte"]

KINDS: dict[str, type[Vocabulary]] = {
    "word": Words, "subword": Subwords, "character": Characters, "byte": Characters, "pretrained": Pretrained,
}  # fmt: skip
FILES = {
    "wikitext-2": ("train.txt", "valid.txt", "test.txt"),
    "wikitext-103": ("train.txt", "valid.txt", "test.txt"),
    "ptb": ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
}
SHARES = {  # sets of one file, by where their validation and test parts begin
    "enwik8": ("enwik8", 0.90, 0.95),
    "tinyshakespeare": ("input.txt", 0.90, 0.95),
}
UNITS: dict[str, Units] = {"enwik8": "byte", "tinyshakespeare": "character"}


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(TaskConfig):
    data: str = "wikitext-2"  # a named set, or a text file of one's own
    valid: str | None = None  # text files
    test: str | None = None
    held_out: float = 0.05  # the share at the end of one's own text that validates where no other text does
    units: Units | None = None  # None: the named set's own; subword for one's own text
    tokenizer: str | None = None  # instead: of a pretrained model, by its folder or its id on the Hugging Face hub
    subwords: Literal["unigram", "bpe"] = "unigram"
    vocabulary: int = 8000  # subwords, specials included
    at_least: int = 1  # how often a word or character must occur in training to be in the vocabulary
    block: int = 512
    context: int = 480  # of a window, in tokens that are read but not scored
    lower: bool = False
    data_dir: str | None = None  # a folder in the layout of ATTNLAB_DATA

    def check(self) -> None:
        if self.context >= self.block:
            raise ValueError(f"context={self.context} must be less than block={self.block}: the rest is scored")
        if self.units is not None and self.tokenizer is not None:
            raise ValueError(f"units={self.units}, but tokenizer= has units of its own: say only one of the two")
        if self.units == "byte" and self.lower:
            raise ValueError("lower=true is for words, subwords and characters, not for bytes")
        if not 0.0 < self.held_out < 1.0:
            raise ValueError(f"held_out is a share, between 0 and 1, not {self.held_out}")
        if self.data in SETS and (self.valid or self.test):
            raise ValueError(f"valid= and test= go with a file as data=; data={self.data} has its own parts")


class Language(Task):
    architecture = "language"
    config_type: ClassVar[type] = LanguageConfig

    def __init__(self, config: LanguageConfig, folder: Path) -> None:
        self.config, self.notes = config, []
        own: Units = UNITS.get(config.data, "word" if config.data in SETS else "subword")
        self.unit: Units | Literal["pretrained"] = "pretrained" if config.tokenizer else config.units or own
        self._text = lru_cache(maxsize=None)(self._read)
        self._stream = lru_cache(maxsize=None)(self._encode)
        self.vocabulary = self._vocabulary(folder)

    @classmethod
    def prepare(cls, config: LanguageConfig, folder: Path) -> "Language":
        return cls(config, folder)

    @property
    def parts(self) -> tuple[str, ...]:
        own = self.config.data not in SETS and not hub.is_hub_name(self.config.data)
        tested = self.config.test is not None if own else True
        return ("train", "valid", "valid-context", *(("test", "test-context") if tested else ()))

    def get_sizes(self) -> dict[str, int]:
        return {"vocabulary": len(self.vocabulary)}

    def get_lengths(self, part: str) -> tuple[np.ndarray, ...]:
        first, _, end = self._spans(part, np.arange(self._number(part)))
        return (end - first,)

    def make_batch(self, part: str, indices: list[int]) -> Batch:
        first, scored, end = self._spans(part, np.asarray(indices, dtype=np.int64))
        stream = self._stream(part.removesuffix("-context"))
        tokens, targets = pad_rows(stream, first, end - first), pad_rows(stream, first + 1, end - first)
        for row, context in enumerate((scored - first).tolist()):
            targets[row, :context] = PAD
        return Batch((tokens,), targets, int((end - scored).sum()), list(indices))

    def encode(self, lines: Sequence[str]) -> Sequences:
        """Lines as a model reads them, each with </s> before it."""
        return Sequences.from_ids(self.vocabulary.encode(self._units(lines)), begin=EOS)

    def decode(self, ids: Sequence[int]) -> str:
        text = self.vocabulary.decode(ids)
        return text.encode("latin-1").decode("utf-8", errors="replace") if self.unit == "byte" else text

    def count_units(self, part: str) -> dict[str, int]:
        """What a part's nats can be divided by: its tokens, its words and ends of lines, its characters, its bytes."""
        part = part.removesuffix("-context")
        text, tokens = self._text(part), len(self._stream(part)) - 1
        ends = text.removesuffix("\n").count("\n") + 1
        sizes = {"words": len(text.split()) + ends, "characters": len(text), "bytes": len(_encode_utf8(text))}
        return {"tokens": tokens, **sizes}

    def _number(self, part: str) -> int:
        self.check_part(part)
        step = self.config.block - (self.config.context if part.endswith("-context") else 0)
        return -(-(len(self._stream(part.removesuffix("-context"))) - 1) // step)

    def _spans(self, part: str, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each example, where in the stream of inputs it begins, where its scored targets do, and where it ends."""
        self.check_part(part)
        context = self.config.context if part.endswith("-context") else 0
        step = self.config.block - context
        scored = index * step
        end = np.minimum(scored + step, len(self._stream(part.removesuffix("-context"))) - 1)
        return np.maximum(scored - context, 0), scored, end

    def _units(self, lines: Sequence[str]) -> list[str]:
        if self.config.lower:
            lines = [line.lower() for line in lines]
        if self.unit == "pretrained":
            return [_encode_utf8(line).decode("utf-8", errors="replace") for line in lines]
        return [_encode_utf8(line).decode("latin-1") for line in lines] if self.unit == "byte" else list(lines)

    def _lines(self, part: str) -> list[str]:
        """What the vocabulary encodes: lines, or the whole text where line breaks are tokens."""
        text = self._text(part)
        if self.unit in ("character", "byte"):
            return self._units([text])
        if self.unit == "pretrained":
            return self._units(text.splitlines(keepends=True))
        return self._units(text.removesuffix("\n").split("\n"))

    def _encode(self, part: str) -> np.ndarray:
        """The inputs of a part: </s>, then its tokens."""
        end = EOS if self.unit in ("word", "subword") else None
        ids = Sequences.from_ids(self.vocabulary.encode(self._lines(part)), end=end).ids
        return np.concatenate([np.array([EOS], dtype=np.int32), ids])

    def _read(self, part: str) -> str:
        config, place = self.config, ("train", "valid", "test").index(part)
        if config.data in FILES:
            text = read_text(obtain_file(find_set(config.data, "language"), FILES[config.data][place], config.data_dir))
        elif config.data in SHARES:
            name, *cuts = SHARES[config.data]
            whole = read_bytes(obtain_file(find_set(config.data, "language"), name, config.data_dir))
            bounds = [0, *(round(cut * len(whole)) for cut in cuts), len(whole)]
            text = whole[bounds[place] : bounds[place + 1]].decode("utf-8", errors="surrogateescape")
        elif hub.is_hub_name(config.data):
            text = self._from_hub(part)
        else:
            text = self._own(part)
        if not text.strip():
            raise ValueError(f"{config.data}: the {part} part is empty")
        return text

    def _from_hub(self, part: str) -> str:
        splits = hub.load_splits(self.config.data)
        if part not in splits:
            raise ValueError(f"data={self.config.data}: has no split for the {part} part")
        return hub.read_text(splits[part], self.config.data)

    def _own(self, part: str) -> str:
        """One's own text; without a file that validates, the end of the training text does, cut at a line."""
        config = self.config
        other = {"valid": config.valid, "test": config.test}.get(part)
        if other is not None:
            return read_text(Path(other)).replace("\r\n", "\n")
        if not Path(config.data).exists():
            find_set(config.data, "language")  # says which sets there are
        text = read_text(Path(config.data)).replace("\r\n", "\n")
        if config.valid is not None:
            return text
        cut = text.find("\n", int(len(text) * (1 - config.held_out))) + 1
        if not 0 < cut < len(text):
            raise ValueError(f"{config.data}: too few lines to hold out {config.held_out:.0%}; give valid=")
        return text[:cut] if part == "train" else text[cut:]

    def _vocabulary(self, folder: Path) -> Vocabulary:
        kind = KINDS[self.unit]
        path = folder / f"vocabulary{kind.suffix}"
        if not path.exists():
            self._text("valid")  # what is wrong with it is said now, not after an epoch
            lines = self._lines("train")
            made: Vocabulary
            if self.config.tokenizer is not None:
                made = Pretrained.find(self.config.tokenizer)
            elif self.unit == "subword":
                made = Subwords.train(lines, self.config.vocabulary, kind=self.config.subwords)
            else:
                counting = Words if self.unit == "word" else Characters
                made = counting.from_lines(lines, at_least=self.config.at_least)
            made.save(path)
        return kind.load(path)


def _encode_utf8(text: str) -> bytes:
    """The bytes of a text; a cut may have left half a character at either end of it."""
    return text.encode("utf-8", errors="surrogateescape")

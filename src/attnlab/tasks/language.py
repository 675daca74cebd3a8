"""Language modelling: each part is one stream of tokens, cut into blocks, or into windows that score after a context.

The stream s_1 … s_N has </s> after every line. Two kinds of units have none: with characters or bytes a line break is
itself a token, and the tokenizer of a pretrained model encodes line breaks its own way. A block of B tokens is scored
on s_{kB+1} … s_{kB+B}, each given the tokens before it in the block; the first token of the stream is given </s>.
The parts "valid-context" and "test-context" use windows with a context of C tokens. A window scores B−C tokens, each
given at least C earlier tokens, or all of them at the start of the stream (CODA: B = 512, C = 480, so 32 are scored).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from attnlab.config import Share
from attnlab.files.user_files import read_bytes, read_text
from attnlab.tasks import hub
from attnlab.tasks.batching import Sequences, pad_rows
from attnlab.tasks.fetch import find_set, obtain_file
from attnlab.tasks.sources import SETS
from attnlab.tasks.task import EOS, PAD, UNK, Batch, Task, TaskConfig
from attnlab.tasks.vocabulary import Bytes, Characters, Pretrained, Subwords, Vocabulary, Words, learn_subwords

Units = Literal["word", "subword", "character", "byte"]

KINDS: dict[str, type[Vocabulary]] = {
    "word": Words, "subword": Subwords, "character": Characters, "byte": Bytes, "pretrained": Pretrained,
}  # fmt: skip
FILES = {"wikitext-2": "{}.txt", "wikitext-103": "{}.txt", "ptb": "ptb.{}.txt"}  # by part
SHARED_FILES = {"enwik8": "enwik8", "tinyshakespeare": "input.txt"}  # 90 % training, 5 % validation, 5 % test
MANY_WORDS = 300_000  # more than WikiText-103 has
UNITS: dict[str, Units] = {"enwik8": "byte", "tinyshakespeare": "character"}


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(TaskConfig):
    data: str = "wikitext-2"  # a named set, or a text file
    valid: str | None = None  # your validation text; not for named sets
    test: str | None = None  # your test text; not for named sets
    held_out: Share = 0.05  # share at the end of your text held out for validation if valid= is not given
    units: Units | None = None  # what a token is; none: that of the named set, subword for your files
    tokenizer: str | None = None  # a Hugging Face tokenizer instead: a folder, a tokenizer.json, or an id on the hub
    subwords: Literal["unigram", "bpe"] = "unigram"  # how SentencePiece finds the subwords
    vocabulary: int = 8000  # number of subwords, special tokens included; the default shrinks to what a text supports
    at_least: int = 1  # minimum number of occurrences in training for a word or character of the vocabulary
    block: int = 512  # number of tokens of a block or window
    context: int | None = None  # tokens of a window that are read but not scored; None: 15/16 of the block, as in CODA
    lower: bool = False  # convert everything to lower case
    data_dir: str | None = None  # a folder in the layout of ATTNLAB_DATA

    def check(self) -> None:
        if self.context is not None and self.context >= self.block:
            raise ValueError(f"context={self.context} must be less than block={self.block}")
        if self.units is not None and self.tokenizer is not None:
            raise ValueError(f"units={self.units} and tokenizer={self.tokenizer} exclude each other: set only one")
        if self.units == "byte" and self.lower:
            raise ValueError("lower=true does not work with units=byte; use words, subwords or characters")
        if self.data in SETS and (self.valid or self.test):
            raise ValueError(f"valid= and test= need a file as data=: data={self.data} has its own parts")

    @property
    def unit(self) -> Units | Literal["pretrained"]:
        """What a token is."""
        default: Units = UNITS.get(self.data, "word" if self.data in SETS else "subword")
        return "pretrained" if self.tokenizer else self.units or default

    def resolve(self) -> "LanguageConfig":
        return self if self.context is not None else replace(self, context=max(1, self.block * 15 // 16))


class Language(Task):
    architecture = "language"
    config_type: ClassVar[type] = LanguageConfig

    def __init__(self, config: LanguageConfig, folder: Path) -> None:
        self.config, self.notes = config.resolve(), []
        self.unit = config.unit
        self._get_text = lru_cache(maxsize=None)(self._read_part)
        self._get_stream = lru_cache(maxsize=None)(self._encode_part)
        self.vocabulary = self._load_vocabulary(folder)

    @property
    def parts(self) -> tuple[str, ...]:
        is_file = self.config.data not in SETS and not hub.is_hub_name(self.config.data)
        has_test = self.config.test is not None if is_file else True
        return ("train", "valid", "valid-context", *(("test", "test-context") if has_test else ()))

    def get_sizes(self) -> dict[str, int]:
        return {"vocabulary": len(self.vocabulary)}

    def get_lengths(self, part: str) -> tuple[np.ndarray, ...]:
        first, _, end = self._locate_spans(part, None)
        return (end - first,)

    def make_batch(self, part: str, indices: list[int]) -> Batch:
        first, scored, end = self._locate_spans(part, np.asarray(indices, dtype=np.int64))
        stream = self._get_stream(part.removesuffix("-context"))
        tokens, targets = pad_rows(stream, first, end - first), pad_rows(stream, first + 1, end - first)
        for row, context in enumerate((scored - first).tolist()):
            targets[row, :context] = PAD
        return Batch((tokens,), targets, int((end - scored).sum()), list(indices))

    def encode(self, lines: Sequence[str]) -> Sequences:
        """Encode lines as the model reads them, with </s> before each."""
        return Sequences.from_ids(self.vocabulary.encode(self._normalise_lines(lines)), begin=EOS)

    def decode(self, ids: Sequence[int]) -> str:
        text = self.vocabulary.decode(ids)
        return text.encode("latin-1").decode("utf-8", errors="replace") if self.unit == "byte" else text

    def count_units(self, part: str) -> dict[str, int]:
        """Count the tokens, words (ends of lines included), characters and bytes of a part."""
        part = part.removesuffix("-context")
        text, tokens = self._get_text(part), len(self._get_stream(part)) - 1
        ends = text.removesuffix("\n").count("\n") + 1
        sizes = {"words": len(text.split()) + ends, "characters": len(text), "bytes": self.count_bytes(part)}
        return {"tokens": tokens, **sizes}

    def count_bytes(self, part: str) -> int:
        return len(_encode_utf8(self._get_text(part.removesuffix("-context"))))

    def count_unknown(self, part: str) -> int:
        """Count the tokens of a part that are <unk>."""
        return int((self._get_stream(part.removesuffix("-context")) == UNK).sum())

    def _locate_spans(self, part: str, index: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return where in the input stream examples begin, their scored targets begin, and they end; None: all."""
        self.check_part(part)
        context = (self.config.context or 0) if part.endswith("-context") else 0
        step, length = self.config.block - context, len(self._get_stream(part.removesuffix("-context"))) - 1
        scored = np.arange(0, length, step) if index is None else index * step
        return np.maximum(scored - context, 0), scored, np.minimum(scored + step, length)

    def _normalise_lines(self, lines: Sequence[str]) -> list[str]:
        if self.config.lower:
            lines = [line.lower() for line in lines]
        if self.unit == "pretrained":
            return [_encode_utf8(line).decode("utf-8", errors="replace") for line in lines]
        return [_encode_utf8(line).decode("latin-1") for line in lines] if self.unit == "byte" else list(lines)

    def _split_part(self, part: str) -> list[str]:
        """Return the text of a part as lines for the vocabulary; as one item if line breaks are tokens."""
        text = self._get_text(part)
        if self.unit in ("character", "byte"):
            return self._normalise_lines([text])
        if self.unit == "pretrained":
            return self._normalise_lines(text.splitlines(keepends=True))
        return self._normalise_lines(text.removesuffix("\n").split("\n"))

    def _encode_part(self, part: str) -> np.ndarray:
        """Return the input stream of a part: </s>, then its tokens."""
        end = EOS if self.unit in ("word", "subword") else None
        ids = Sequences.from_ids(self.vocabulary.encode(self._split_part(part)), end=end).ids
        return np.concatenate([np.array([EOS], dtype=np.int32), ids])

    def _read_part(self, part: str) -> str:
        config = self.config
        if config.data in FILES:
            text = read_text(obtain_file(SETS[config.data], FILES[config.data].format(part), config.data_dir))
        elif config.data in SHARED_FILES:
            whole = read_bytes(obtain_file(SETS[config.data], SHARED_FILES[config.data], config.data_dir))
            first, last = {"train": (0.0, 0.9), "valid": (0.9, 0.95), "test": (0.95, 1.0)}[part]
            bounds = slice(round(first * len(whole)), round(last * len(whole)))
            text = whole[bounds].decode("utf-8", errors="surrogateescape")
        elif hub.is_hub_name(config.data):
            splits = hub.load_splits(config.data)
            if part not in splits:
                raise ValueError(f"data={config.data} has no split for the {part} part")
            text = hub.read_text(splits[part], config.data)
        else:
            text = self._read_files(part)
        if not text.strip():
            raise ValueError(f"{config.data}: the {part} part is empty")
        return text

    def _read_files(self, part: str) -> str:
        """Read user files. Without valid=, the end of the training text is held out.

        The text is cut at a line break; characters and bytes are cut anywhere if its end has no line break.
        """
        config = self.config
        file = {"valid": config.valid, "test": config.test}.get(part)
        if file is not None:
            return _read_own_text(Path(file))
        if not Path(config.data).exists():
            find_set(config.data, "language")  # raises, listing the named sets
        text = _read_own_text(Path(config.data))
        if config.valid is not None:
            return text
        place = int(len(text) * (1 - config.held_out))
        cut = text.find("\n", place) + 1
        if not cut and self.unit in ("character", "byte"):
            cut = place
        if not 0 < cut < len(text):
            raise ValueError(f"{config.data} has too few lines to hold out {config.held_out:.0%}; give valid=")
        return text[:cut] if part == "train" else text[cut:]

    def _load_vocabulary(self, folder: Path) -> Vocabulary:
        kind = KINDS[self.unit]
        path = folder / f"vocabulary{kind.suffix}"
        if not path.exists():
            self._get_text("valid")  # raises its errors now, not after an epoch
            lines = self._split_part("train")
            vocabulary: Vocabulary
            if self.config.tokenizer is not None:
                vocabulary = Pretrained.find(self.config.tokenizer)
            elif self.unit == "subword":
                vocabulary, notes = learn_subwords(self.config, lines)
                self.add_notes(*notes)
            else:
                counted = Words if self.unit == "word" else Characters
                vocabulary = counted.from_lines(lines, at_least=self.config.at_least)
            vocabulary.save(path)
        loaded = kind.load(path)
        if self.unit == "word" and len(loaded) > MANY_WORDS:
            fewer = "at_least=5 keeps fewer words, and units=subword a few thousand parts of words"
            self.add_notes(f"the vocabulary has {len(loaded):,} words, and so have the logits of every token: {fewer}")
        return loaded


def _read_own_text(path: Path) -> str:
    text = read_text(path).replace("\r\n", "\n")
    if not text.strip():
        raise ValueError(f"{path}: the file is empty or has only blank lines")
    return text


def _encode_utf8(text: str) -> bytes:
    """Return the bytes of a text, even if a cut left half a character at either end."""
    return text.encode("utf-8", errors="surrogateescape")

"""Vocabularies: text to ids and back. Ids 0 … 3 are <pad>, <s>, </s>, <unk> in all of them.

A vocabulary is learned from the training part, saved as one file in the run folder, and loaded from there.
"""

import re
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import sentencepiece
from tokenizers import Tokenizer

from attnlab.files import write_bytes
from attnlab.files.user_files import read_bytes, read_text
from attnlab.records.pieces import show_parts, show_pieces
from attnlab.tasks.batching import split_chunks
from attnlab.tasks.hub import is_hub_reachable, is_path, reach_hub
from attnlab.tasks.task import BOS, EOS, PAD, SPECIALS, UNK
from attnlab.tasks.text import read_lines
from attnlab.tasks.vocabulary_cache import recall_or_learn

MOST_LINES = 4_000_000  # maximum number of lines for learning subwords
MANY_LINES = 2000  # number of lines from which starting threads to encode them pays
TRAINING = {  # options of SentencePiece; the number of threads is fixed, because the scores of pieces depend on it
    "pad_id": PAD, "bos_id": BOS, "eos_id": EOS, "unk_id": UNK, "pad_piece": SPECIALS[PAD], "num_threads": 4,
    "minloglevel": 2,
}  # fmt: skip


def describe_unknown(task: Any, pieces: Iterable[str]) -> str:
    """Say which pieces of a text the vocabulary of a task lacks; "" if it has all."""
    distinct = [piece for piece in dict.fromkeys(pieces) if piece != SPECIALS[UNK]]
    encoded = task.encode(distinct)
    unknown = [piece for place, piece in enumerate(distinct) if UNK in encoded[place]]
    named = ", ".join(map(repr, unknown[:5])) + (", …" if len(unknown) > 5 else "")
    return f"not in the vocabulary, read as <unk>: {named}" if unknown else ""


class Vocabulary(ABC):
    """A mapping between text and ids. `encode` adds no special tokens; `decode` drops <pad>, <s> and </s>."""

    suffix: str

    @classmethod
    @abstractmethod
    def load(cls, path: Path) -> "Vocabulary":
        """Load a vocabulary that `save` wrote."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write the vocabulary to a file, atomically."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def encode(self, lines: Iterable[str]) -> Iterator[Sequence[int]]:
        """Yield the ids of each line."""

    @abstractmethod
    def get_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return each id as text, special tokens included."""

    def show_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens of one text in the notation of `attnlab.records.pieces`."""
        return show_pieces(self.get_tokens(ids), plain=SPECIALS)

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the line of these ids, up to the first </s>."""


class Subwords(Vocabulary):
    """A SentencePiece vocabulary, unigram or BPE."""

    suffix = ".model"

    def __init__(self, model: bytes) -> None:
        self.model = model
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)

    @classmethod
    def train(
        cls, lines: Sequence[str], size: int, *, kind: str = "unigram", coverage: float = 0.9995, shrink: bool = False
    ) -> "Subwords":
        """Learn `size` pieces (special tokens included) from the lines, or from every n-th if over MOST_LINES.

        The user's cache keeps the pieces of long texts.

        shrink   learn as many pieces as the lines support if these are fewer than `size`, instead of raising ValueError
        """
        sentences = [line for line in lines[:: 1 + len(lines) // MOST_LINES] if line.strip()]
        how = {"model_type": kind, "vocab_size": size, "character_coverage": coverage} | TRAINING
        key = how | {"shrink": shrink, "sentencepiece": sentencepiece.__version__}
        return cls(recall_or_learn(sentences, key, lambda: _learn_pieces(sentences, how, shrink=shrink)))

    @classmethod
    def load(cls, path: Path) -> "Subwords":
        try:
            if not (model := read_bytes(path)):  # SentencePiece would accept it and log an error for each use
                raise RuntimeError
            return cls(model)
        except RuntimeError:
            raise ValueError(f"{path}: not a SentencePiece model; delete it to create it again") from None

    def save(self, path: Path) -> None:
        write_bytes(path, self.model)

    def __len__(self) -> int:
        return self.processor.get_piece_size()

    def encode(self, lines: Iterable[str]) -> Iterator[Sequence[int]]:
        for chunk in split_chunks(lines):
            yield from self.processor.encode(chunk, num_threads=4 if len(chunk) >= MANY_LINES else 1)

    def get_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.processor.id_to_piece(int(token)) for token in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return self.processor.decode(strip_specials(ids))


def learn_subwords(config: Any, lines: Sequence[str], **how: Any) -> tuple[Subwords, list[str]]:
    """Learn the subwords that a task's configuration describes, and return notes for the log.

    The default size shrinks to what the lines support; how: options of `Subwords.train`.
    """
    size, default = config.vocabulary, type(config).vocabulary
    learned = Subwords.train(lines, size, kind=config.subwords, shrink=size == default, **how)
    n = len(learned)
    note = f"vocabulary={n}: the training text supports only {n:,} subwords of the default {size:,}"
    return learned, [note] if n < size else []


class Words(Vocabulary):
    """A list of words in order of decreasing frequency. A line is split at white space.

    A word that looks like a special token is that token, such as <unk> in the official language modelling sets.
    """

    suffix = ".txt"

    def __init__(self, words: Sequence[str]) -> None:
        self.words = [*SPECIALS, *words]
        self.ids = {word: k for k, word in enumerate(self.words)}
        if len(self.ids) != len(self.words):
            raise ValueError("the words of a vocabulary must be distinct, and none may be a special token")

    @classmethod
    def from_lines(cls, lines: Iterable[str], *, at_least: int = 1, keep: frozenset[str] = frozenset()) -> "Words":
        """Collect the words that occur at_least times or are in keep, by decreasing frequency, then by name."""
        counts = Counter(word for line in lines for word in line.split())
        kept = [word for word, n in counts.items() if (n >= at_least or word in keep) and word not in SPECIALS]
        return cls(sorted(kept, key=lambda word: (-counts[word], word)))

    @classmethod
    def load(cls, path: Path) -> "Words":
        lines = read_lines(path)
        try:
            words = [_unescape_word(line) for line in lines]
            if tuple(words[: len(SPECIALS)]) != SPECIALS:
                raise ValueError(f"it must begin with {' '.join(SPECIALS)}")
            return cls(words[len(SPECIALS) :])
        except ValueError as error:
            raise ValueError(f"{path}: not an attnlab vocabulary ({error}); delete it to create it again") from None

    def save(self, path: Path) -> None:
        write_bytes(path, "".join(f"{_escape_word(word)}\n" for word in self.words).encode())

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, lines: Iterable[str]) -> Iterator[Sequence[int]]:
        return ([self.ids.get(word, UNK) for word in line.split()] for line in lines)

    def get_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.words[token] for token in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[token] for token in strip_specials(ids))


class Characters(Words):
    """The characters of a text, line breaks included."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(words)
        self.table = np.full(sys.maxunicode + 1, UNK, dtype=np.int32)  # id of each code point
        for character, k in self.ids.items():
            if len(character) == 1:
                self.table[ord(character)] = k

    @classmethod
    def from_lines(cls, lines: Iterable[str], *, at_least: int = 1, keep: frozenset[str] = frozenset()) -> "Characters":
        points, counts = np.unique(np.concatenate([_get_code_points(line) for line in lines]), return_counts=True)
        order = np.lexsort([points, -counts])
        kept = [chr(points[k]) for k in order if counts[k] >= at_least or chr(points[k]) in keep]
        return cls(kept)

    def encode(self, lines: Iterable[str]) -> Iterator[Sequence[int]]:
        return (cast(Sequence[int], self.table[_get_code_points(line)]) for line in lines)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[token] for token in strip_specials(ids))


class Bytes(Characters):
    """The bytes of a text, each as a character of Latin-1."""

    def show_tokens(self, ids: Sequence[int]) -> list[str]:
        return show_parts([token if token in SPECIALS else token.encode("latin-1") for token in self.get_tokens(ids)])


def is_byte_level(tokenizer: Any) -> bool:
    """Return whether a tokenizer of tokenizers or transformers writes bytes as letters, as GPT-2's does."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, Tokenizer):
        return hasattr(tokenizer, "byte_decoder")
    return backend.decoder is not None and b"ByteLevel" in backend.decoder.__getstate__()


class Pretrained(Vocabulary):
    """The tokenizer of a Hugging Face model, whose token t has the id 4 + t.

    Text that looks like a special token stays text.
    """

    suffix = ".json"

    def __init__(self, tokenizer: str) -> None:
        self.tokenizer: Any = Tokenizer.from_str(tokenizer)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True
        added = self.tokenizer.get_added_tokens_decoder().values()
        self.byte_level = is_byte_level(self.tokenizer)
        self.plain = frozenset(SPECIALS) | {token.content for token in added}

    @classmethod
    def find(cls, name: str) -> "Pretrained":
        """Find a tokenizer: a tokenizer.json, or that of a model by its folder or its id on the Hugging Face hub."""
        folder = Path(name).expanduser()
        if folder.is_file():
            return cls.load(folder)
        if folder.is_dir():
            if not (folder / "tokenizer.json").is_file():
                raise ValueError(f"{name} has no tokenizer.json; set tokenizer= to a folder that has one")
            return cls.load(folder / "tokenizer.json")
        if is_path(name):
            raise FileNotFoundError(f"tokenizer={name}: no such folder or file")
        try:
            with reach_hub(name):
                return cls(Tokenizer.from_pretrained(name).to_str())
        except Exception as error:  # a missing tokenizer raises many types
            if not is_hub_reachable():
                where = f"no tokenizer {name!r}: it is neither a folder nor in the local cache"
                raise ValueError(f"{where}, and the Hugging Face hub does not answer: pass a folder") from None
            reason = str(error).strip().split("\n")[0]
            raise ValueError(f"no tokenizer {name!r}, neither as a folder nor on the hub ({reason})") from None

    @classmethod
    def load(cls, path: Path) -> "Pretrained":
        try:
            return cls(read_text(path))
        except Exception as error:  # tokenizers raises a plain Exception
            raise ValueError(f"{path}: not a tokenizer ({error})") from None

    def save(self, path: Path) -> None:
        write_bytes(path, self.tokenizer.to_str().encode())

    def __len__(self) -> int:
        return len(SPECIALS) + max(self.tokenizer.get_vocab().values()) + 1

    def encode(self, lines: Iterable[str]) -> Iterator[Sequence[int]]:
        for chunk in split_chunks(lines):
            for encoding in self.tokenizer.encode_batch_fast(chunk, add_special_tokens=False):
                yield [token + len(SPECIALS) for token in encoding.ids]

    def get_tokens(self, ids: Sequence[int]) -> list[str]:
        return [
            SPECIALS[token] if token < len(SPECIALS) else self.tokenizer.id_to_token(token - len(SPECIALS))
            for token in map(int, ids)
        ]

    def show_tokens(self, ids: Sequence[int]) -> list[str]:
        return show_pieces(self.get_tokens(ids), byte_level=self.byte_level, plain=self.plain)

    def decode(self, ids: Sequence[int]) -> str:
        own = [token - len(SPECIALS) for token in strip_specials(ids) if token != UNK]
        return self.tokenizer.decode(own, skip_special_tokens=False)


def _learn_pieces(sentences: Sequence[str], how: Mapping[str, Any], *, shrink: bool) -> bytes:
    """Learn a SentencePiece model; with shrink, of the largest size up to vocab_size that the sentences support."""
    model = BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(sentences), model_writer=model, **how)
    except RuntimeError as error:
        largest = re.search(r"value <= (\d+)", str(error))
        if largest and shrink:
            return _learn_pieces(sentences, {**how, "vocab_size": int(largest[1])}, shrink=False)
        raise ValueError(_explain_size(how["vocab_size"], str(error), largest)) from None
    return model.getvalue()


def _explain_size(size: int, error: str, largest: re.Match[str] | None) -> str:
    """Say in plain words why SentencePiece refused a size."""
    if largest:
        most = int(largest[1])
        return f"vocabulary={size} is too large: the training text supports {most:,} subwords; set vocabulary={most}"
    if required := re.search(r"required_chars\. \d+ vs (\d+)", error):
        least = f"the training text needs {required[1]} pieces for its characters"
        return f"vocabulary={size} is too small: {least}; set vocabulary={required[1]} or more"
    return f"vocabulary={size} does not fit this training text: {error.rpartition('] ')[2] or error}"


def _get_code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)


def strip_specials(ids: Sequence[int]) -> list[int]:
    """Return the ids up to the first </s>, without <pad> and <s>."""
    line = [int(token) for token in ids]
    if EOS in line:
        line = line[: line.index(EOS)]
    return [token for token in line if token not in (PAD, BOS)]


def _escape_word(word: str) -> str:
    return word.encode("unicode_escape").decode() if not word.isprintable() or "\\" in word else word


def _unescape_word(word: str) -> str:
    return word.encode("ascii").decode("unicode_escape") if "\\" in word else word

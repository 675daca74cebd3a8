"""Tokenize lines for a Hugging Face model, and know the word that each token belongs to.

Where a tokenizer cuts every word as it cuts it in its line, as SentencePiece does, each distinct word is tokenized
once. This is checked on the first lines; other tokenizers read whole lines. Special tokens, a language code (NLLB,
M2M100, mBART) and a prefix (T5) belong to no word.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from attnlab.aligning.extraction import Sentences, number_pieces
from attnlab.analysis.alignment import NOWHERE
from attnlab.analysis.words import number_words as numbered_by_marks
from attnlab.config import suggest_nearest

CHECKED = 100  # lines on which words are tokenized both alone and in their line


@dataclass(frozen=True)
class Languages:
    """How a multilingual model is told what to translate: codes of the tokenizer, or a text before the source."""

    source: str | None = None
    target: str | None = None
    prefix: str = ""  # words before each source line

    def reverse(self, prefix: str) -> "Languages":
        """Return the languages of the other direction."""
        return Languages(self.target, self.source, prefix)


@dataclass(frozen=True, eq=False)
class EncodedLines:
    """The token ids of each line, with special tokens, and the word of each token, NOWHERE for special tokens."""

    ids: list[list[int]]
    owners: list[list[int]]

    def pick(self, numbers: Sequence[int]) -> "EncodedLines":
        return EncodedLines([self.ids[k] for k in numbers], [self.owners[k] for k in numbers])


@dataclass(eq=False)
class WordTokenizer:
    """The tokenizer of one side."""

    tokenizer: Any
    argument: str  # text or text_target
    name: str
    languages: Languages
    known: dict[str, list[int]] = field(default_factory=dict)  # ids of words seen so far
    by_word: bool | None = None  # None: not checked yet

    @classmethod
    def open(cls, tokenizer: Any, argument: str, name: str, languages: Languages) -> "WordTokenizer":
        """Set the tokenizer's languages. Raises ValueError for a code that it lacks or does not know."""
        for code, attribute in ((languages.source, "src_lang"), (languages.target, "tgt_lang")):
            if code is None:
                if getattr(tokenizer, attribute, "none needed") is None:
                    what = f"{name} translates between many languages: name both by --languages"
                    raise ValueError(f"{what}, as eng_Latn-fra_Latn with the codes of its tokenizer")
                continue
            if not hasattr(tokenizer, attribute):
                raise ValueError(f"{name} takes no language codes; omit --languages, or pass --prefix for T5")
            _check_code(tokenizer, code, name)
            setattr(tokenizer, attribute, code)
        return cls(tokenizer, argument, name, languages)

    @property
    def padding(self) -> int:
        named = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((number for number in named if number is not None), 0)

    def encode(self, sentences: Sentences) -> EncodedLines:
        """Return the ids and the words of each line; nothing for an empty line."""
        from attnlab.huggingface.pretrained import silence_transformers

        with silence_transformers():  # it warns of lines that are too long; the caller leaves them out and names them
            return self._encode(sentences)

    def _encode(self, sentences: Sentences) -> EncodedLines:
        self._set_languages()
        prefix = self.languages.prefix.split() if self.argument == "text" else []
        lines = [[*prefix, *words] if words else [] for words in sentences]
        if self.by_word is None:
            self.by_word = self._is_cut_by_word([line for line in lines if line][:CHECKED])
        encoded = self._encode_by_word(lines) if self.by_word else self._encode_lines(lines)
        if prefix:
            shifted = [[max(owner - len(prefix), NOWHERE) for owner in row] for row in encoded.owners]
            return EncodedLines(encoded.ids, shifted)
        return encoded

    def _set_languages(self) -> None:
        """Set the languages again: two directions may share one tokenizer."""
        for code, attribute in ((self.languages.source, "src_lang"), (self.languages.target, "tgt_lang")):
            if code is not None and getattr(self.tokenizer, attribute) != code:
                setattr(self.tokenizer, attribute, code)

    def _is_cut_by_word(self, lines: list[list[str]]) -> bool:
        if not lines:
            return False
        try:
            found = self._encode_by_word(lines)
        except (ValueError, StopIteration):
            return False
        return found.ids == self._encode_lines(lines).ids

    def _encode_by_word(self, lines: list[list[str]]) -> EncodedLines:
        before, after = self._find_frame()
        new = [word for word in dict.fromkeys(word for line in lines for word in line) if word not in self.known]
        if new:
            made = self.tokenizer(**{self.argument: new}, add_special_tokens=False)["input_ids"]
            self.known.update(zip(new, made, strict=True))
        ids, owners = [], []
        for line in lines:
            pieces = [self.known[word] for word in line]
            body = [token for word in pieces for token in word]
            ids.append([*before, *body, *after] if line else [])
            numbers = number_pieces(pieces)
            owners.append([NOWHERE] * len(before) + numbers + [NOWHERE] * len(after) if line else [])
        return EncodedLines(ids, owners)

    def _find_frame(self) -> tuple[list[int], list[int]]:
        """Return the special tokens before and after a line."""
        whole, bare = (
            self.tokenizer(**{self.argument: "a"}, add_special_tokens=special)["input_ids"] for special in (True, False)
        )
        start = _find_start(whole, bare, self.name)
        return whole[:start], whole[start + len(bare) :]

    def _encode_lines(self, lines: list[list[str]]) -> EncodedLines:
        owners = find_owners(self.tokenizer, lines, self.argument, self.name)
        ids = [list(self.tokenizer(**{self.argument: " ".join(line)})["input_ids"]) if line else [] for line in lines]
        return EncodedLines(ids, owners)


def _check_code(tokenizer: Any, code: str, name: str) -> None:
    """Raise ValueError for a language code that the tokenizer does not list."""
    listed = getattr(tokenizer, "lang_code_to_id", None) or getattr(tokenizer, "fairseq_language_codes", None)
    codes = [*(listed or []), *tokenizer.all_special_tokens]
    plain = [each.strip("_") for each in codes]
    if code not in codes and code not in plain:
        raise ValueError(f"{name} has no language code {code!r}{suggest_nearest(code, codes)}")


def find_owners(tokenizer: Any, sentences: Sentences, argument: str, name: str) -> list[list[int]]:
    """Return the word that each token of each line belongs to, NOWHERE for special tokens."""
    lines = enumerate(sentences, start=1)
    return [_find_line_owners(tokenizer, list(words), argument, name, line) for line, words in lines]


def _find_line_owners(tokenizer: Any, words: list[str], argument: str, name: str, line: int) -> list[int]:
    if not words:
        return []
    text = " ".join(words)
    if tokenizer.is_fast:
        made = tokenizer(**{argument: text}, return_offsets_mapping=True, return_special_tokens_mask=True)
        of_character = _word_of_character(words)
        return [
            NOWHERE if special else of_character[start]
            for (start, _), special in zip(made["offset_mapping"], made["special_tokens_mask"], strict=True)
        ]
    ids, own = (tokenizer(**{argument: text}, add_special_tokens=special)["input_ids"] for special in (True, False))
    start = _find_start(ids, own, name)
    of_word = number_pieces(tokenizer(**{argument: words}, add_special_tokens=False)["input_ids"])
    if len(of_word) != len(own):
        of_word = numbered_by_marks(tokenizer.convert_ids_to_tokens(own))
        if of_word[-1:] != [len(words) - 1]:
            raise ValueError(f"line {line}: cannot match the tokens of {name} to the words of {text!r}")
    return [NOWHERE] * start + of_word + [NOWHERE] * (len(ids) - start - len(own))


def _find_start(whole: list[int], bare: list[int], name: str) -> int:
    """Return where the tokens of a text begin among its tokens with special ones. M2M100 lists no code as special."""
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return start
    raise ValueError(f"{name}: its tokenizer changes a line when it adds special tokens")


def _word_of_character(words: Sequence[str]) -> list[int]:
    """Return the word of each character in the words joined by spaces. A space belongs to the word after it."""
    return [number for number, word in enumerate(words) for _ in range(len(word) + (number > 0))]


def number_specials(owners: Sequence[int], first: int) -> list[int]:
    """Replace NOWHERE, the owner of special tokens, by the numbers first, first + 1, …"""
    specials = iter(range(first, first + len(owners)))
    return [next(specials) if owner == NOWHERE else owner for owner in owners]

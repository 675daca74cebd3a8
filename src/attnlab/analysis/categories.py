"""The category of each token: special, punctuation or other; or categories from a file.

A file of categories has one line for each category: its name, a tab, and its tokens separated by spaces. Tokens are
written as the tokenizer writes them, or as plain text. All other tokens are "other".

    cls	[CLS]
    sep	[SEP]
    punctuation	, .
"""

import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.analysis.words import strip_marks
from attnlab.records.pieces import BEGINS, BREAKS

SPECIAL, PUNCTUATION, OTHER = "special", "punctuation", "other"
MARKS = " " + "".join((*BEGINS, *BREAKS.values()))  # a piece made only of these has no text
LIMIT = 32  # categories; each needs tables of about 16 MB


@dataclass(frozen=True, eq=False)
class Categories:
    """The category of every token of a vocabulary."""

    names: tuple[str, ...]
    of_token: Tensor  # (vocabulary,) the index of each token's category in names

    @classmethod
    def default(cls, pieces: Sequence[str], special: Collection[int]) -> "Categories":
        """Build the categories special (by token id), punctuation (by the characters of the piece) and other."""
        numbers = [0 if token in special else 1 if is_punctuation(piece) else 2 for token, piece in enumerate(pieces)]
        return cls((SPECIAL, PUNCTUATION, OTHER), torch.tensor(numbers))

    @classmethod
    def from_groups(
        cls, groups: Mapping[str, Collection[str]], pieces: Sequence[str], texts: Sequence[str] | None = None
    ) -> "Categories":
        """Build categories from named groups of tokens. Raises ValueError for a token outside the vocabulary.

        texts   the pieces as they are shown, another way to write a token
        """
        names = (*(name for name in groups if name != OTHER), OTHER)
        of_token = torch.full((len(pieces),), len(names) - 1)
        places: dict[str, list[int]] = {}
        for token, forms in enumerate(zip(pieces, texts or pieces, strict=True)):
            for text in {*forms, *map(strip_marks, forms)}:
                places.setdefault(text, []).append(token)
        for number, name in enumerate(names[:-1]):
            for text in groups[name]:
                if text not in places:
                    raise ValueError(f"category {name!r}: token {text!r} is not in the model's vocabulary")
                of_token[places[text]] = number
        return cls(names, of_token)


def parse_categories(text: str, where: str) -> dict[str, list[str]]:
    """Parse the text of a file of categories; `where` names the file in errors."""
    groups: dict[str, list[str]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        name, tab, tokens = line.partition("\t")
        if not tab or not name.strip() or not tokens.split():
            raise ValueError(f"{where}:{number}: a line must be a category, a tab, and its tokens separated by spaces")
        if name.strip() in groups:
            raise ValueError(f"{where}:{number}: the category {name.strip()!r} is defined twice")
        groups[name.strip()] = tokens.split()
    if not groups or len(groups) > LIMIT:
        raise ValueError(f"{where}: has {len(groups)} categories; 1 to {LIMIT} are allowed")
    seen: dict[str, str] = {}
    for name, group in groups.items():
        for token in group:
            if seen.setdefault(token, name) != name:
                raise ValueError(f"{where}: the token {token!r} is in two categories, {seen[token]!r} and {name!r}")
    return groups


def is_punctuation(piece: str) -> bool:
    """Return whether a piece has only punctuation and symbols, apart from the tokenizer's marks."""
    text = strip_marks(piece).strip(MARKS) or piece.strip(MARKS)
    return bool(text) and all(unicodedata.category(character)[0] in "PS" for character in text)

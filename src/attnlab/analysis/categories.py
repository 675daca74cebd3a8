"""Which kind of token each token is: special, punctuation or other; or categories of one's own.

A file of categories has a line for each: its name, a tab, and its tokens with spaces between them, as the tokenizer
writes them or as plain text. What is in none of them is "other".

    cls	[CLS]
    sep	[SEP]
    punctuation	, .
"""

import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.analysis.words import BEGINS, strip_marks

SPECIAL, PUNCTUATION, OTHER = "special", "punctuation", "other"
MARKS = " " + "".join(BEGINS)  # a piece of nothing else is none of a text
MOST = 32  # each has tables of its own, of some 16 MB


@dataclass(frozen=True, eq=False)
class Categories:
    names: tuple[str, ...]
    of_token: Tensor  # (vocabulary,) the place of each token's category in names

    @classmethod
    def default(cls, pieces: Sequence[str], special: Collection[int]) -> "Categories":
        """Special tokens by their numbers, punctuation by what the pieces are made of, and all the others."""
        numbers = [0 if token in special else 1 if is_punctuation(piece) else 2 for token, piece in enumerate(pieces)]
        return cls((SPECIAL, PUNCTUATION, OTHER), torch.tensor(numbers))

    @classmethod
    def from_groups(cls, groups: Mapping[str, Collection[str]], pieces: Sequence[str]) -> "Categories":
        """Groups of tokens by name; a token that the vocabulary does not have is an error."""
        names = (*(name for name in groups if name != OTHER), OTHER)
        of_token = torch.full((len(pieces),), len(names) - 1)
        places: dict[str, list[int]] = {}
        for token, piece in enumerate(pieces):
            for text in {piece, strip_marks(piece)}:
                places.setdefault(text, []).append(token)
        for number, name in enumerate(names[:-1]):
            for text in groups[name]:
                if text not in places:
                    raise ValueError(f"category {name!r}: the model's vocabulary has no token {text!r}")
                of_token[places[text]] = number
        return cls(names, of_token)


def parse_categories(text: str, where: str) -> dict[str, list[str]]:
    """The categories of a file's text; where: what it is called in errors."""
    groups: dict[str, list[str]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        name, tab, tokens = line.partition("\t")
        if not tab or not name.strip() or not tokens.split():
            raise ValueError(
                f"{where}:{number}: a line is a category's name, a tab, and its tokens with spaces between"
            )
        if name.strip() in groups:
            raise ValueError(f"{where}:{number}: the category {name.strip()!r} is there twice")
        groups[name.strip()] = tokens.split()
    if not groups or len(groups) > MOST:
        raise ValueError(f"{where}: {len(groups)} categories; there may be 1 to {MOST}")
    seen: dict[str, str] = {}
    for name, group in groups.items():
        for token in group:
            if seen.setdefault(token, name) != name:
                raise ValueError(f"{where}: the token {token!r} is in {seen[token]!r} and in {name!r}")
    return groups


def is_punctuation(piece: str) -> bool:
    """Nothing but punctuation and symbols, the marks of the tokenizer aside."""
    text = strip_marks(piece).strip(MARKS) or piece.strip(MARKS)
    return bool(text) and all(unicodedata.category(character)[0] in "PS" for character in text)

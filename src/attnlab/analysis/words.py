"""From subword pieces to words: sum over the pieces of the key word, mean over the pieces of the query word.

map_word(I, J) = mean over pieces i of I of Σ over pieces j of J of map(i, j)        (Kobayashi et al. 2020)
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from attnlab.records.pieces import BEGINS, BREAKS, CONTINUES, ENDS, PART, UNFINISHED, join_shown

LINE_ENDS = tuple(BREAKS.values())


def number_words(pieces: Sequence[str]) -> list[int]:
    """Return the index of the word that each piece belongs to, read from the tokenizer's marks.

    Without any marks, each piece is a word, but pieces of one character stay together. A special token such as <s>,
    [CLS] or <|endoftext|> is always a word.
    """
    alone = [_is_special(piece) for piece in pieces]
    starts = [n == 0 or start or alone[n] or alone[n - 1] for n, start in enumerate(_starts(pieces))]
    return [count - 1 for count in accumulate(starts)]


def join_pieces(pieces: Sequence[str], words: Sequence[int]) -> list[str]:
    """Join pieces to the text of each word, without the tokenizer's marks."""
    of_word: list[list[str]] = [[] for _ in range(max(words, default=-1) + 1)]
    for piece, word in zip(pieces, words, strict=True):
        of_word[word].append(piece)
    strip = _strip_space if _has_spaces(pieces) else strip_marks
    texts = (join_shown(piece if _is_special(piece) else strip(piece) for piece in own) for own in of_word)
    return [text or "".join(own) for text, own in zip(texts, of_word, strict=True)]  # a lone mark is its own text


def pool_by_word(x: Tensor, queries: Sequence[int], keys: Sequence[int]) -> Tensor:
    """Turn a map (…,i,j) of pieces into a map of words, given the word index of each query and key."""
    if (len(queries), len(keys)) != tuple(x.shape[-2:]):
        raise ValueError(f"words of {len(queries)} queries and {len(keys)} keys do not fit a map {tuple(x.shape)}")
    of_query, of_key = (_membership(words).to(x) for words in (queries, keys))  # (I,i), (J,j)
    return of_query / of_query.sum(-1, keepdim=True) @ x @ of_key.mT


def _membership(words: Sequence[int]) -> Tensor:
    if sorted(set(words)) != list(range(len(set(words)))):
        raise ValueError(f"words must be numbered from 0 without gaps, got {sorted(set(words))}")
    return torch.tensor(words) == torch.arange(len(set(words)))[:, None]  # (words, pieces)


def _starts(pieces: Sequence[str]) -> list[bool]:
    if _has_spaces(pieces):
        before = ["", *pieces[:-1]]
        starts = [
            x.startswith((*BEGINS, *LINE_ENDS)) or y.endswith(LINE_ENDS) for x, y in zip(pieces, before, strict=True)
        ]
    elif any(map(_is_continuing, pieces)):
        starts = [not piece.startswith(CONTINUES) for piece in pieces]
    elif any(piece.endswith(ENDS) for piece in pieces):
        starts = [True, *(piece.endswith(ENDS) for piece in pieces[:-1])]
    else:
        starts = [True, *(not piece.endswith(UNFINISHED) for piece in pieces[:-1])]
    return [start and not _continues_character(piece) for start, piece in zip(starts, pieces, strict=False)]


def _has_spaces(pieces: Sequence[str]) -> bool:
    """Return whether the pieces mark spaces. A lone mark can also be a character of a text."""
    marked = [piece for piece in pieces if piece.startswith(BEGINS)]
    return any(piece not in BEGINS for piece in marked) or (bool(marked) and not any(map(_is_continuing, pieces)))


def _is_continuing(piece: str) -> bool:
    return piece.startswith(CONTINUES) and piece != CONTINUES


def _continues_character(piece: str) -> bool:
    part = PART.match(piece)
    return part is not None and part[2] != "1"


def _is_special(piece: str) -> bool:
    return len(piece) > 2 and (piece[0], piece[-1]) in (("<", ">"), ("[", "]")) and piece != ENDS


def strip_marks(piece: str) -> str:
    """Remove the tokenizer's marks from a piece."""
    return _strip_space(piece).removeprefix(CONTINUES).removesuffix(ENDS).removesuffix(UNFINISHED)


def _strip_space(piece: str) -> str:
    for mark in BEGINS:
        piece = piece.removeprefix(mark)
    return piece

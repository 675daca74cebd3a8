"""From subword pieces to words: sum over the pieces of the key word, mean over the pieces of the query word.

map_word(I, J) = mean over pieces i of I of Σ over pieces j of J of map(i, j)        (Kobayashi et al. 2020)
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

BEGINS = ("▁", "Ġ")  # prefix of the first piece of a word: SentencePiece, byte-level BPE
CONTINUES = "##"  # prefix of the other pieces: WordPiece
ENDS = "</w>"  # suffix of the last piece: BPE
UNFINISHED = "@@"  # suffix of all pieces but the last: subword-nmt


def number_words(pieces: Sequence[str]) -> list[int]:
    """Return the index of the word that each piece belongs to, read from the tokenizer's marks.

    Without any marks, each piece is a word. A special token such as <s>, [CLS] or <|endoftext|> is always a word.
    """
    alone = [_is_special(piece) for piece in pieces]
    starts = [n == 0 or start or alone[n] or alone[n - 1] for n, start in enumerate(_starts(pieces))]
    return [count - 1 for count in accumulate(starts)]


def join_pieces(pieces: Sequence[str], words: Sequence[int]) -> list[str]:
    """Join pieces to the text of each word, without the tokenizer's marks."""
    texts = [""] * (max(words, default=-1) + 1)
    for piece, word in zip(pieces, words, strict=True):
        texts[word] += piece if _is_special(piece) else strip_marks(piece)
    return texts


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
    if any(piece.startswith(CONTINUES) and piece != CONTINUES for piece in pieces):
        return [not piece.startswith(CONTINUES) for piece in pieces]
    if any(piece.startswith(BEGINS) for piece in pieces):
        return [piece.startswith(BEGINS) for piece in pieces]
    for mark, finished in ((ENDS, True), (UNFINISHED, False)):
        if any(piece.endswith(mark) for piece in pieces):
            return [True, *(piece.endswith(mark) is finished for piece in pieces[:-1])]
    return [True] * len(pieces)


def _is_special(piece: str) -> bool:
    return len(piece) > 2 and (piece[0], piece[-1]) in (("<", ">"), ("[", "]")) and piece != ENDS


def strip_marks(piece: str) -> str:
    """Remove the tokenizer's marks from a piece."""
    for mark in (*BEGINS, CONTINUES):
        piece = piece.removeprefix(mark)
    return piece.removesuffix(ENDS).removesuffix(UNFINISHED)

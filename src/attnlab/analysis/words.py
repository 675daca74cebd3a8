"""From pieces of words to words: what a word gives is the sum over its pieces, what it receives the mean over them.

map_word(I, J) = mean over pieces i of I of Σ over pieces j of J of map(i, j)        (Kobayashi et al. 2020)
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

BEGINS = ("▁", "Ġ")  # marks the first piece of a word: SentencePiece, byte-level BPE
CONTINUES = "##"  # marks the other pieces: WordPiece
ENDS = "</w>"  # marks the last piece: BPE
UNFINISHED = "@@"  # marks all but the last: subword-nmt


def number_words(pieces: Sequence[str]) -> list[int]:
    """The number of the word that each piece belongs to, from 0, by the marks that tokenizers leave in pieces.

    Without any marks each piece is a word. So is always what looks like a special token: <s>, [CLS], <|endoftext|>.
    """
    alone = [_is_special(piece) for piece in pieces]
    starts = [n == 0 or start or alone[n] or alone[n - 1] for n, start in enumerate(_starts(pieces))]
    return [count - 1 for count in accumulate(starts)]


def join_pieces(pieces: Sequence[str], words: Sequence[int]) -> list[str]:
    """The words as text, without the marks."""
    made = [""] * (max(words, default=-1) + 1)
    for piece, word in zip(pieces, words, strict=True):
        made[word] += piece if _is_special(piece) else strip_marks(piece)
    return made


def pool_by_word(x: Tensor, queries: Sequence[int], keys: Sequence[int]) -> Tensor:
    """A map (…,i,j) of pieces as one of words, given the number of the word that each query and each key is of."""
    if (len(queries), len(keys)) != tuple(x.shape[-2:]):
        raise ValueError(f"words of {len(queries)} queries and {len(keys)} keys do not fit a map {tuple(x.shape)}")
    of_query, of_key = (_membership(words).to(x) for words in (queries, keys))  # (I,i), (J,j)
    return of_query / of_query.sum(-1, keepdim=True) @ x @ of_key.mT


def _membership(words: Sequence[int]) -> Tensor:
    numbers = torch.tensor(words)
    if sorted(set(words)) != list(range(len(set(words)))):
        raise ValueError(f"words must be numbered from 0 without a gap, not {sorted(set(words))}")
    return numbers == torch.arange(len(set(words)))[:, None]  # (words, pieces)


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
    """A piece without the marks of its tokenizer."""
    for mark in (*BEGINS, CONTINUES):
        piece = piece.removeprefix(mark)
    return piece.removesuffix(ENDS).removesuffix(UNFINISHED)

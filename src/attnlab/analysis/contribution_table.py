"""The table of contributions: one row for every query and visible key, in every head or layer.

    example, kind, layer, head, query, key   query and key are positions in their sequences, layer is within its kind
    query_token, key_token                   the token there: its text if the record has it, else its id; the query of
                                             a decoder is the token that it reads, from which it writes the next one
    weight                                   α; for a layer, the mean over heads
    norm                                     ‖αf(x)‖; for a layer, ‖Σ_h αf(x)‖; NaN if the mechanism transforms the
                                             mixed context (finish), because then no key has a contribution of its own
    signed                                   ⟨αf(x), y⟩ / ‖y‖², the part of the layer's output y that the key accounts
                                             for, with its sign (`signed`); NaN where norm is

Padding has no rows, neither as query nor as key.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from attnlab.analysis.contribution import average_heads, is_linear, norms
from attnlab.analysis.signed import signed_shares
from attnlab.analysis.sums import check_record
from attnlab.analysis.words import join_pieces, number_words, pool_by_word
from attnlab.config import check_known
from attnlab.mechanisms.mechanism import widen
from attnlab.records.record import KINDS, Layer, Record

Words = Mapping[str, Sequence[Sequence[int]]]  # for each sequence and example, the index of each token's word


def contribution(
    record: Record, *, level: Literal["head", "layer"] = "head", kinds: Collection[str] | None = None,
    layers: Collection[int] | None = None, heads: Collection[int] | None = None, words: bool | Words = False,
    limit: int = 20_000_000,
) -> pd.DataFrame:  # fmt: skip
    """Return every weight, norm and signed contribution of a record, in the columns described above.

    level                  "head", or "layer": heads combined, without the column head
    kinds, layers, heads   only these; layers count within their kind
    words                  True: rows are words, read from the tokenizer's marks; or the word index of each token
    limit                  maximum number of rows; a larger table raises ValueError
    """
    check_record(record, "contribution")
    if level not in ("head", "layer"):
        raise ValueError(f"level must be 'head' or 'layer', got {level!r}")
    if level == "layer" and heads is not None:
        raise ValueError("heads= needs level='head': level='layer' combines all heads")
    frames: list[pd.DataFrame] = []
    rows = 0
    for layer in select_layers(record, kinds, layers):
        for frame in _frames(record, layer, level, heads, words):
            rows += len(frame)
            if rows > limit:
                raise ValueError(
                    f"the table has more than limit={limit:,} rows; choose kinds=, layers= or heads=, level='layer', "
                    "fewer examples (record[0]), or a higher limit="
                )
            frames.append(frame)
    table = pd.concat(frames, ignore_index=True)
    return table.astype(dict.fromkeys(("kind", "query_token", "key_token"), "category"))


def select_layers(record: Record, kinds: Collection[str] | None, layers: Collection[int] | None) -> Iterator[Layer]:
    """Yield the selected layers, loading each one when its turn comes."""
    available = record.kinds
    if not available:
        raise ValueError("this record has no layers")
    for kind in kinds or ():
        if kind not in available:
            raise ValueError(f"the record has no {kind!r} layers; it has {', '.join(dict.fromkeys(available))}")
    places = record.places
    check_known(layers, (index for _, index in places), "the record", "layer")
    for place, (kind, index) in enumerate(places):
        if (kinds is None or kind in kinds) and (layers is None or index in layers):
            yield record.layers[place]


@dataclass(frozen=True, eq=False)
class TokenSide:
    """The queries or the keys of one example, as the table shows them."""

    places: Tensor  # positions of tokens that are not padding
    words: list[int] | None  # the word index of each position, if rows are words
    labels: np.ndarray  # the text of each token or word

    @property
    def numbers(self) -> np.ndarray:
        return self.places.numpy() if self.words is None else np.arange(len(self.labels))


def read_side(record: Record, name: str, example: int, length: int, words: bool | Words) -> TokenSide:
    """Read one side of an example; name is "source" or "target"."""
    mask = record.masks.get(name)
    places = torch.arange(length) if mask is None else mask[example].cpu().nonzero().flatten()
    pieces = _pieces(record, name, example, length)
    labels = [pieces[place] for place in places.tolist()]
    if words is False:
        return TokenSide(places, None, np.array(labels, dtype=object))
    if words is True:
        if name not in record.words:
            raise ValueError(f"the record has no text of its {name}; pass the word index of each token as words=")
        numbers = number_words(labels)
    elif name not in words:
        raise ValueError(f"words= has no word indices for the {name}")
    else:
        numbers = list(words[name][example])
    if len(numbers) != len(labels):
        raise ValueError(f"words= has {len(numbers)} word indices, but {name} {example} has {len(labels)} tokens")
    return TokenSide(places, numbers, np.array(join_pieces(labels, numbers), dtype=object))


def _pieces(record: Record, name: str, example: int, length: int) -> Sequence[str]:
    if name in record.words:
        return record.words[name][example]
    if name in record.tokens:
        return [str(token) for token in record.tokens[name][example].tolist()]
    return [str(place) for place in range(length)]


def _frames(
    record: Record, layer: Layer, level: str, heads: Collection[int] | None, words: bool | Words
) -> Iterator[pd.DataFrame]:
    """Yield the rows of one layer, example by example."""
    sizes = norms(layer) if is_linear(layer) else None
    if level == "head":
        numbers = select_heads(layer, heads)
        weights = widen(layer.weights)[:, numbers]  # (b,h,i,j)
        computed = [] if sizes is None else [sizes.head[:, numbers], signed_shares(layer).head[:, numbers]]
    else:
        numbers = [0]
        weights = average_heads(layer)[:, None]
        computed = [] if sizes is None else [sizes.layer[:, None], signed_shares(layer).layer[:, None]]
    maps = [weights, *(computed or [torch.full_like(weights, torch.nan)] * 2)]
    b, _, i, j = maps[0].shape
    seen = layer.mask.expand(b, 1, i, j)
    for example in range(b):
        sides = zip(KINDS[layer.kind], (i, j), strict=True)
        query, key = (read_side(record, name, example, length, words) for name, length in sides)
        weight, norm, share, visible = (_cut(x[example], query, key) for x in (*maps, seen.to(maps[0].dtype)))
        shown = visible[0] > 0  # (i,j)
        rows, columns = (np.tile(places, len(numbers)) for places in shown.nonzero().T.cpu().numpy())
        table = {"example": example, "kind": layer.kind, "layer": layer.index}
        if level == "head":
            table["head"] = np.repeat(numbers, int(shown.sum()))
        table |= {"query": query.numbers[rows], "key": key.numbers[columns]}
        table |= {"query_token": query.labels[rows], "key_token": key.labels[columns]}
        table |= {
            name: x[:, shown].flatten().cpu().numpy()
            for name, x in (("weight", weight), ("norm", norm), ("signed", share))
        }
        yield pd.DataFrame(table)


def _cut(x: Tensor, query: TokenSide, key: TokenSide) -> Tensor:
    """Remove padding from a map (h,i,j), and pool pieces to words if rows are words."""
    x = x[:, query.places.to(x.device)][:, :, key.places.to(x.device)]
    return x if query.words is None or key.words is None else pool_by_word(x, query.words, key.words)


def select_heads(layer: Layer, heads: Collection[int] | None) -> list[int]:
    """Return the sorted indices of the selected heads; None = all. Raises ValueError for a head that does not exist."""
    every = range(layer.context.shape[1])
    check_known(heads, every, layer.name, "head")
    return sorted(set(every if heads is None else heads))

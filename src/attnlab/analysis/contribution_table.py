"""The table of contributions: one row for every query and every key that it may see, in every head or layer.

    example, kind, layer, head, query, key   query and key are places in their sequences, layer is among its kind
    query_token, key_token                   what stands there: text, where the record has it, else the token's number
    weight                                   α; of a layer, the mean over heads
    norm                                     ‖αf(x)‖; of a layer, ‖Σ_h αf(x)‖

Padding has no rows, neither as query nor as key.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from attnlab.analysis.contribution import norms, widen
from attnlab.analysis.words import join_pieces, number_words, pool_by_word
from attnlab.records.record import KINDS, Layer, Record

Words = Mapping[str, Sequence[Sequence[int]]]  # for each sequence and example, the number of each token's word


def contribution(
    record: Record,
    *,
    level: Literal["head", "layer"] = "head",
    kinds: Collection[str] | None = None,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
    words: bool | Words = False,
    limit: int = 20_000_000,
) -> pd.DataFrame:
    """Every weight and norm of a record, in the columns described above.

    level                  "layer": heads together, and no column for them
    kinds, layers, heads   only these; layers are counted within their kind
    words                  rows are words, not pieces: by the marks of the tokenizer, or as numbered here
    limit                  refuse a table of more rows
    """
    if not isinstance(record, Record):
        raise TypeError(f"contribution reads a Record, not a {type(record).__name__}; attnlab.record makes one")
    if level not in ("head", "layer"):
        raise ValueError(f"level must be 'head' or 'layer', not {level!r}")
    if level == "layer" and heads is not None:
        raise ValueError("heads= chooses heads, and level='layer' has them together; leave one of them out")
    frames: list[pd.DataFrame] = []
    rows = 0
    for layer in select_layers(record, kinds, layers):
        for frame in _frames(record, layer, level, heads, words):
            rows += len(frame)
            if rows > limit:
                raise ValueError(
                    f"the table would have more than limit={limit:,} rows: choose kinds=, layers= or heads=, "
                    "level='layer', some examples (record[0]), or a higher limit="
                )
            frames.append(frame)
    table = pd.concat(frames, ignore_index=True)
    return table.astype(dict.fromkeys(("kind", "query_token", "key_token"), "category"))


def select_layers(record: Record, kinds: Collection[str] | None, layers: Collection[int] | None) -> Iterator[Layer]:
    """The layers asked for, each made when its turn comes."""
    there = record.kinds
    if not there:
        raise ValueError("this record has no layers")
    for kind in kinds or ():
        if kind not in there:
            raise ValueError(f"the record has no {kind!r} layers; it has {', '.join(dict.fromkeys(there))}")
    counts: Counter[str] = Counter()
    indices = []  # of each layer, within its kind
    for kind in there:
        indices.append(counts[kind])
        counts[kind] += 1
    for layer in layers or ():
        if layer not in indices:
            raise ValueError(f"there is no layer {layer}; layers are numbered 0 … {max(indices)} within their kind")
    for place, (kind, index) in enumerate(zip(there, indices, strict=True)):
        if (kinds is None or kind in kinds) and (layers is None or index in layers):
            yield record.layers[place]


@dataclass(frozen=True, eq=False)
class TokenSide:
    """The queries, or the keys, of one example, as the table shows them."""

    places: Tensor  # of tokens that are not padding
    words: list[int] | None  # the word that each of them is of, where rows are words
    labels: np.ndarray  # what stands at each of them, or what each word is

    @property
    def numbers(self) -> np.ndarray:
        return self.places.numpy() if self.words is None else np.arange(len(self.labels))


def read_side(record: Record, name: str, example: int, length: int, words: bool | Words) -> TokenSide:
    """One side of one example; name: "source" or "target"."""
    mask = record.masks.get(name)
    places = torch.arange(length) if mask is None else mask[example].cpu().nonzero().flatten()
    pieces = _pieces(record, name, example, length)
    labels = [pieces[place] for place in places.tolist()]
    if words is False:
        return TokenSide(places, None, np.array(labels, dtype=object))
    if words is True:
        if name not in record.words:
            raise ValueError(f"the record has no text of its {name}; words= can also number the word of each token")
        numbers = number_words(labels)
    elif name not in words:
        raise ValueError(f"words= numbers no words of the {name}")
    else:
        numbers = list(words[name][example])
    if len(numbers) != len(labels):
        raise ValueError(f"words= has {len(numbers)} numbers for the {len(labels)} tokens of {name} {example}")
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
    """The rows of one layer, example by example."""
    found = norms(layer)
    if level == "head":
        numbers = _heads(layer, heads)
        maps = [widen(layer.weights)[:, numbers], found.head[:, numbers]]  # (b,h,i,j)
    else:
        numbers = [0]
        maps = [found.weight[:, None], found.layer[:, None]]
    b, _, i, j = maps[0].shape
    seen = layer.mask.expand(b, 1, i, j)
    for example in range(b):
        query, key = (
            read_side(record, name, example, n, words) for name, n in zip(KINDS[layer.kind], (i, j), strict=True)
        )
        weight, norm, visible = (_cut(x[example], query, key) for x in (*maps, seen.to(maps[0].dtype)))
        rows, columns = (visible[0] > 0).nonzero().T.cpu().numpy()
        where = {"example": example, "kind": layer.kind, "layer": layer.index}
        if level == "head":
            where["head"] = np.repeat(numbers, len(rows))
        rows, columns = np.tile(rows, len(numbers)), np.tile(columns, len(numbers))
        who = {"query": query.numbers[rows], "key": key.numbers[columns]}
        what = {"query_token": query.labels[rows], "key_token": key.labels[columns]}
        size = {"weight": _flat(weight, visible), "norm": _flat(norm, visible)}
        yield pd.DataFrame(where | who | what | size)


def _cut(x: Tensor, query: TokenSide, key: TokenSide) -> Tensor:
    """A map (h,i,j) without padding, and of words where rows are words."""
    x = x[:, query.places.to(x.device)][:, :, key.places.to(x.device)]
    return x if query.words is None or key.words is None else pool_by_word(x, query.words, key.words)


def _flat(x: Tensor, visible: Tensor) -> np.ndarray:
    return x[:, visible[0] > 0].flatten().cpu().numpy()


def _heads(layer: Layer, heads: Collection[int] | None) -> list[int]:
    count = layer.context.shape[1]
    for head in heads or ():
        if not 0 <= head < count:
            raise ValueError(f"{layer.name} has no head {head}; heads are 0 … {count - 1}")
    return list(range(count)) if heads is None else sorted(set(heads))

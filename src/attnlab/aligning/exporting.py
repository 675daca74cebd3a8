"""Export what an aligner knows to other tools.

ctranslate2   the layer and the number of heads whose mean attention a converted model returns (return_attention=True):
              those whose weights, with rows that predict, link words that tell most about each other;
              the fewest heads where two standard errors do not tell choices apart
guided        links of the pieces of subword files, for guided alignment in Marian and fairseq: every piece of a word
              with every piece of the word that it is linked to

CTranslate2 averages the first heads of one layer, so these are the candidates. It reads both numbers from model.bin,
a list of named arrays: name, number of dimensions, dimensions, type, number of bytes, bytes.
"""

import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from attnlab.aligning.extraction import MapKey, PairReader, Sentences
from attnlab.aligning.row_evidence import WordIds, measure_evidence
from attnlab.analysis.alignment import CorpusAlignment, assign_rows, choose_words
from attnlab.analysis.symmetrise import Link
from attnlab.analysis.words import number_words

INT16 = 2  # CTranslate2's number of this type
NAMES = (b"decoder/alignment_layer", b"decoder/alignment_heads")


FirstHeads = tuple[int, int]  # layer, number of first heads that are averaged


def measure_first_heads(reader: PairReader, source: Sentences, target: Sentences) -> dict[FirstHeads, np.ndarray]:
    """Return the evidence of the links of each choice, for every target word, without gold links."""
    layers, heads = reader.size
    wanted: set[MapKey] = {("weight", layer, "mean") for layer in range(layers)}
    places = [(layer, count) for layer in range(layers) for count in range(1, heads + 1)]
    found = {place: CorpusAlignment.empty(reader.target_words) for place in places}
    for numbers in reader.plan_batches():
        batch = reader.read_batch(numbers, wanted)
        rows = assign_rows(batch.labels, "awo")
        for index, layer in batch.layers.items():
            totals = layer.weights.float().cumsum(1)  # (b,h,i,j): of the first heads
            for count in range(1, heads + 1):
                chosen = choose_words(totals[:, count - 1] / count, rows, batch.keys, batch.words)
                best, value = (x.cpu().numpy() for x in chosen)
                for k, number in enumerate(numbers):
                    found[index, count].set_links(number, best[k], value[k])
    x, y = WordIds.number_words(source, target)
    return {place: measure_evidence(x, y, links) for place, links in found.items()}


def choose_first_heads(nats: Mapping[FirstHeads, np.ndarray]) -> FirstHeads:
    """Return the choice of fewest heads among those that are less than two standard errors below the best."""
    best = max(nats, key=lambda place: float(nats[place].mean()))
    close = []
    for place, values in nats.items():
        less = nats[best] - values
        if less.mean() <= 2 * less.std() / math.sqrt(len(less)):
            close.append(place)
    return min(close, key=lambda place: (place[1], -float(nats[place].mean())))


def write_alignment_heads(folder: Path, layer: int, heads: int) -> None:
    """Set the layer and the number of heads in a model that CTranslate2 converted."""
    places = check_converted(folder)
    with (folder / "model.bin").open("r+b") as file:
        for place, value in zip(places, (layer, heads), strict=True):
            file.seek(place)
            file.write(struct.pack("<h", value))


def check_converted(folder: Path) -> list[int]:
    """Return where a converted model has the layer and the number of heads. Raises ValueError for another folder."""
    path = folder / "model.bin"
    if not path.is_file():
        raise ValueError(f"{folder} is not a model that CTranslate2 converted: it has no model.bin")
    with path.open("rb") as file:
        try:
            places = _find_numbers(file)
        except (struct.error, ValueError) as error:
            raise ValueError(f"{path} is not a model of CTranslate2, or is damaged ({error})") from None
    if missing := [name.decode() for name in NAMES if name not in places]:
        raise ValueError(f"{path} has no {missing[0]}: convert a translator with CTranslate2 4 or later")
    return [places[name] for name in NAMES]


def _find_numbers(file: IO[bytes]) -> dict[bytes, int]:
    """Return where the int16 numbers of a model begin, by name."""

    def read_number(form: str) -> int:
        return int(struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))[0])

    def read_name() -> bytes:
        return file.read(read_number("H")).rstrip(b"\0")

    size = os.fstat(file.fileno()).st_size
    read_number("I")  # version of the format
    read_name()
    read_number("I")  # revision of the model
    places: dict[bytes, int] = {}
    for _ in range(read_number("I")):
        name = read_name()
        file.seek(4 * read_number("B"), os.SEEK_CUR)  # dimensions
        kind, length = read_number("B"), read_number("I")
        if kind == INT16 and length == 2:
            places[name] = file.tell()
        if file.tell() + length > size:
            raise ValueError(f"{name!r:.40} ends after the file")
        file.seek(length, os.SEEK_CUR)
    return places


def expand_links(links: Iterable[Link], source: str, target: str, words: tuple[int, int], where: str) -> list[Link]:
    """Return the links between the pieces of two subword lines, whose marks must give as many words as were linked."""
    numbers = [number_words(line.split()) if line.split() else [] for line in (source, target)]
    for side, found, count in zip(("source", "target"), numbers, words, strict=True):
        have = found[-1] + 1 if found else 0
        if have != count:
            raise ValueError(f"{where}: the {side} pieces make {have} words, but the aligned line has {count}")
    pieces = [_group(each, count) for each, count in zip(numbers, words, strict=True)]
    return sorted((i, j) for s, t in links for i in pieces[0][s] for j in pieces[1][t])


def _group(numbers: Sequence[int], count: int) -> list[list[int]]:
    grouped: list[list[int]] = [[] for _ in range(count)]
    for place, number in enumerate(numbers):
        grouped[number].append(place)
    return grouped

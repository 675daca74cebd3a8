"""Read word vectors in GloVe's text format: each line is a word and its numbers, separated by single spaces."""

from collections.abc import Container, Iterator
from pathlib import Path

import numpy as np

from attnlab.files.user_files import iterate_lines


def read_words(path: Path) -> frozenset[str]:
    """Read the words of a file of vectors."""
    return frozenset(word for _, word, _ in _read_lines(path))


def read_vectors(path: Path, wanted: Container[str]) -> dict[str, np.ndarray]:
    """Read the float32 vectors of the wanted words. Raises ValueError if their sizes differ or the file has none."""
    vectors: dict[str, np.ndarray] = {}
    size = 0
    for number, word, rest in _read_lines(path):
        if word not in wanted:
            continue
        try:
            with np.errstate(over="ignore"):
                vector = np.array(rest.split(), dtype=np.float32)
        except (ValueError, OverflowError):
            raise ValueError(f"{path}:{number}: expected numbers, got {rest[:40]!r}") from None
        if not np.isfinite(vector).all():
            raise ValueError(f"{path}:{number}: the vector of {word!r} has a number that is not finite in float32")
        size = size or len(vector)
        if len(vector) != size or not size:
            raise ValueError(f"{path}:{number}: {word!r} has {len(vector)} numbers, but earlier words have {size}")
        vectors[word] = vector
    if not vectors:
        raise ValueError(f"{path} has no vector for any word of the vocabulary")
    return vectors


def _read_lines(path: Path) -> Iterator[tuple[int, str, str]]:
    for number, line in enumerate(iterate_lines(path), start=1):
        word, _, rest = line.partition(" ")
        yield number, word, rest

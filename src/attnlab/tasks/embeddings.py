"""Read word vectors in GloVe's text format: each line is a word and its numbers, separated by single spaces."""

from collections.abc import Container, Iterator
from pathlib import Path

import numpy as np


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
            vector = np.array(rest.split(), dtype=np.float32)
        except ValueError:
            raise ValueError(f"{path}:{number}: expected numbers, got {rest[:40]!r}") from None
        size = size or len(vector)
        if len(vector) != size or not size:
            raise ValueError(f"{path}:{number}: {word!r} has {len(vector)} numbers, but earlier words have {size}")
        vectors[word] = vector
    if not vectors:
        raise ValueError(f"{path} has no vector for any word of the vocabulary")
    return vectors


def _read_lines(path: Path) -> Iterator[tuple[int, str, str]]:
    if not path.exists():
        raise FileNotFoundError(f"embeddings={path}: no such file")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                word, _, rest = line.decode("utf-8").rstrip("\n").partition(" ")
            except UnicodeDecodeError:
                raise ValueError(f"{path}:{number}: not UTF-8") from None
            yield number, word, rest

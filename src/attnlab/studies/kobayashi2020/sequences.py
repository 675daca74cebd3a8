"""What the paper's BERT reads: [CLS] p1 [SEP] p2 [SEP], two paragraphs that follow each other, 128 tokens at most.

The paper takes 992 sequences of Wikipedia from Clark et al. 2019, which are not published as text; here paragraphs of
wikitext-2 or of a file are drawn by the seed.
"""

import re
from pathlib import Path

import numpy as np

from attnlab.reading.text_stream import TextExample
from attnlab.tasks.fetch import obtain_file
from attnlab.tasks.sources import SETS
from attnlab.tasks.text import read_lines

LENGTH = 128
SEQUENCES = 992


def pair_neighbours(lines: list[str]) -> list[tuple[str, str]]:
    """Paragraphs that follow each other, with neither a heading nor another paragraph between them."""
    found = []
    before = None
    for line in map(str.strip, lines):
        if not line:
            continue
        is_heading = line.startswith("= ") and line.endswith(" =")
        if before is not None and not is_heading:
            found.append((before, line))
        before = None if is_heading else line
    return found


def clean_text(text: str, unknown: str) -> str:
    """wikitext's text without its marks: a @-@ b is a-b, and <unk> the model's own unknown token."""
    return re.sub(r" @(.)@ ", r"\1", text).replace("<unk>", unknown)


def draw_sequences(
    file: str | None, count: int, seed: int, unknown: str, data_dir: str | None
) -> tuple[TextExample, ...]:
    """Draw `count` pairs of paragraphs by a seed; unknown: the model's unknown token."""
    path = obtain_file(SETS["wikitext-2"], "train.txt", data_dir) if file is None else Path(file)
    pairs = pair_neighbours(read_lines(path))
    if len(pairs) < count:
        raise ValueError(f"{path} has {len(pairs)} pairs of neighbouring paragraphs, and {count} are needed")
    places = np.random.default_rng(seed).permutation(len(pairs))[:count]
    chosen = [tuple(clean_text(side, unknown) for side in pairs[place]) for place in places]
    return tuple(
        TextExample(first, second, f"{path}, pair {place}")
        for place, (first, second) in zip(places, chosen, strict=True)
    )

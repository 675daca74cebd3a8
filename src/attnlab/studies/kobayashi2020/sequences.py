"""The sequences that BERT reads: [CLS] p1 [SEP] p2 [SEP], two neighbouring paragraphs, at most 128 tokens.

The paper has 992 sequences of Wikipedia from Clark et al. 2019, which are not published as text. Here a seed draws
paragraphs of wikitext-2 or of a file.
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
    """Return paragraphs that follow each other without a heading between them."""
    pairs = []
    before = None
    for line in map(str.strip, lines):
        if not line:
            continue
        is_heading = line.startswith("= ") and line.endswith(" =")
        if before is not None and not is_heading:
            pairs.append((before, line))
        before = None if is_heading else line
    return pairs


def clean_text(text: str, unknown: str) -> str:
    """Remove wikitext's marks: a @-@ b becomes a-b, and <unk> becomes the unknown token of the model."""
    return re.sub(r" @(.)@ ", r"\1", text).replace("<unk>", unknown)


def draw_sequences(
    file: str | None, count: int, seed: int, unknown: str, data_dir: str | None
) -> tuple[TextExample, ...]:
    """Draw `count` pairs of paragraphs by a seed; unknown: the model's unknown token."""
    path = obtain_file(SETS["wikitext-2"], "train.txt", data_dir) if file is None else Path(file)
    pairs = pair_neighbours(read_lines(path))
    if len(pairs) < count:
        raise ValueError(f"{path} has {len(pairs)} pairs of neighbouring paragraphs, but {count} are needed")
    examples = []
    for place in np.random.default_rng(seed).permutation(len(pairs))[:count]:
        first, second = (clean_text(side, unknown) for side in pairs[place])
        examples.append(TextExample(first, second, f"{path}, pair {place}"))
    return tuple(examples)

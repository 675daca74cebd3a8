"""What the tests of attnlab align share: a text whose links are known, and links from a map, computed slowly."""

import numpy as np
from typer.testing import CliRunner

from attnlab.cli import app
from attnlab.tasks.synthetic import Synthetic, SyntheticConfig


def write_pairs(folder):
    """Two files of an artificial language pair and its links: 20 pairs, the third with an empty target."""
    task = Synthetic(SyntheticConfig(held_out=20))
    lines, links = [task.read_sources("test"), task.read_references("test")], list(task.read_alignments("test"))
    lines[1][2], links[2] = "", frozenset()
    for name, side in zip(("s", "t"), lines, strict=True):
        (folder / name).write_text("\n".join(side) + "\n")
    (folder / "gold").write_text("\n".join(" ".join(f"{s}-{t}" for s, t in pair) for pair in links) + "\n")
    return folder, [line.split() for line in lines[0]], [line.split() for line in lines[1]], links


def slow_links(made, x_words, y_words, setting, begin):
    """Links from a map of pieces, given how many pieces each word has; <s>, if there is one, and </s> are no word."""
    offset = setting == "awi"
    links, row = set(), int(offset)
    for target, pieces in enumerate(y_words):
        mean, column, sums = made[row : row + pieces].mean(0), int(begin), []
        for size in x_words:
            sums.append(float(mean[column : column + size].sum()))
            column += size
        special = max(float(mean[-1]), float(mean[0]) if begin else -1.0)
        if max(sums) > special:
            links.add((int(np.argmax(sums)), target))
        row += pieces
    return links


def cli(*words):
    return CliRunner().invoke(app, ["align", *map(str, words)])

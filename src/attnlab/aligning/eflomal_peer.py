"""Word alignment by eflomal (Östling & Tiedemann 2016), another program, where it is installed: pip install eflomal."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from attnlab.aligning.extraction import Sentences
from attnlab.analysis.alignment import CorpusAlignment

PROGRAM = "eflomal-align"


def align_by_eflomal(
    pairs: tuple[Sentences, Sentences], train_on: tuple[Sentences, Sentences] | None
) -> tuple[CorpusAlignment, list[str]]:
    """Run eflomal on the pairs, and on further text to train on. Pairs with an empty side are not passed on.

    Raises ValueError if eflomal is not installed or fails.
    """
    program = find_program()
    full = [k for k, (x, y) in enumerate(zip(*pairs, strict=True)) if x and y]
    text = [[side[k] for k in full] for side in pairs]
    if train_on:
        more = [k for k, (x, y) in enumerate(zip(*train_on, strict=True)) if x and y]
        text = [own + [side[k] for k in more] for own, side in zip(text, train_on, strict=True)]
    aligned = CorpusAlignment.empty([*map(len, pairs[1])])
    if not text[0]:
        return aligned, ["no pair has words on both sides"]
    with tempfile.TemporaryDirectory() as folder:
        source, target, links = (Path(folder) / name for name in ("source", "target", "links"))
        for file, side in ((source, text[0]), (target, text[1])):
            file.write_text("".join(f"{' '.join(words)}\n" for words in side), encoding="utf-8")
        command = [program, "--overwrite", "-s", source, "-t", target, "-f", links]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        if done.returncode or not links.is_file():
            reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
            raise ValueError(f"{program} failed with exit status {done.returncode}: {reason[0]}")
        for pair, line in zip(full, links.read_text().splitlines(), strict=False):
            for s, t in (link.split("-") for link in line.split()):
                place = aligned.starts[pair] + int(t)
                aligned.choice[place], aligned.value[place] = int(s), 1.0
    return aligned, [f"links of {program}, trained on {len(text[0]):,} pairs"]


def find_program() -> str:
    beside = Path(sys.executable).parent / PROGRAM
    found = shutil.which(PROGRAM) or (str(beside) if beside.is_file() else None)
    if not found:
        raise ValueError(f"{PROGRAM} was not found: install it with pip install eflomal, or use fertility, our own")
    return found

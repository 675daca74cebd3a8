"""attnlab align-train: train an alignment layer on parallel text without gold links."""

import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from attnlab.aligning.aligner_training import AlignerConfig, train_aligner
from attnlab.aligning.request import AlignmentRequest, is_word_model
from attnlab.aligning.trained_aligner import FILE
from attnlab.config import Natural, check_fields
from attnlab.tasks.text import draw_mask, pick_rows, read_parallel
from attnlab.terminal import Bar
from attnlab.training.run_list import ROOT


@dataclass(frozen=True, kw_only=True)
class AlignTrainOptions(AlignmentRequest):
    """The options that `attnlab align-train --help` lists."""

    reverse: str | None = None
    pairs: Natural = 20_000
    config: AlignerConfig = field(default_factory=AlignerConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.pairs < 1:
            raise ValueError(f"--pairs must be at least 1, got {self.pairs}")


def train_on_files(model: str, source: Path, target: Path, options: AlignTrainOptions, out: str) -> None:
    """Train on a random part of two files, and save the aligner as runs/OUT or at the path OUT."""
    folder = Path(out) if "/" in out else ROOT / out
    if (folder / FILE).exists():
        raise FileExistsError(f"{folder / FILE} exists: pass another --out, or delete the folder")
    models = [name for name in (model, options.reverse) if name is not None]
    for name in models:
        if is_word_model(name):
            raise ValueError(f"{name} has no encoder; align-train needs translators or an encoder")
    lines = read_parallel(source, target)
    some = pick_rows(lines, draw_mask(len(lines[0]), options.pairs, options.config.seed))
    words = [line.split() for line in some[0]], [line.split() for line in some[1]]
    start = time.monotonic()
    request = replace(options, by=options.by or (None if options.reverse else "encoder"))
    with Bar(1) as progress:
        aligner = train_aligner(models, words, request, options.config, tick=progress.tick)
    aligner.about["seconds"] = round(time.monotonic() - start, 1)
    aligner.save(folder)
    sys.stderr.writelines(f"teacher: {note}\n" for note in aligner.about["teacher"])
    sys.stderr.write(f"{folder}: trained on {len(words[0]):,} pairs in {aligner.about['seconds']:,.0f} s; ")
    sys.stderr.write(f"use it as attnlab align {out} SRC TGT\n")

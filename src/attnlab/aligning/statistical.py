"""The statistical aligners that `attnlab align` knows beside IBM Model 1.

hmm         hidden Markov models of both directions that agree        attnlab.counting.hmm
fertility   the same with fertilities                                 attnlab.counting.fertility
eflomal     another program, where it is installed
"""

from attnlab.aligning.eflomal_peer import align_by_eflomal
from attnlab.aligning.extraction import Sentences, Tick
from attnlab.aligning.hmm_aligner import FILE, KINDS, HmmAligner, name_folder
from attnlab.analysis.alignment import CorpusAlignment
from attnlab.training.run_list import ROOT, find_folder

STATISTICAL = (*KINDS, "eflomal")

Pairs = tuple[Sentences, Sentences]
LinksAndNotes = tuple[CorpusAlignment, list[str]]


def is_statistical(model: str) -> bool:
    """Return whether the name is hmm, fertility or eflomal, or the folder of a trained hmm or fertility."""
    return model in STATISTICAL or find_folder(model, FILE) is not None


def align_statistically(
    model: str, pairs: Pairs, train_on: Pairs | None, tick: Tick = lambda done, of: None
) -> LinksAndNotes:
    """Align by name or folder; train_on is the text to train on, by default the pairs themselves."""
    if model == "eflomal":
        return align_by_eflomal(pairs, train_on)
    known = find_folder(model, FILE)
    if known is None:
        return _train_or_load(model, pairs, train_on or pairs, tick)
    if train_on:
        raise ValueError(f"--train-on is for training; {known} is already trained")
    return HmmAligner.load(known).align(pairs, tick)


def _train_or_load(kind: str, pairs: Pairs, text: Pairs, tick: Tick) -> LinksAndNotes:
    """Train both directions and save each in a folder of runs/, or load the folder of an earlier call."""
    folder, other = (ROOT / name_folder(side, kind) for side in (text, (text[1], text[0])))
    if (folder / FILE).is_file():
        aligned, notes = HmmAligner.load(folder).align(pairs, tick)
        return aligned, [f"{folder}: trained earlier on this text", *notes]
    ahead, back = HmmAligner.train(text, kind, tick=tick)
    back.save(other)
    ahead.save(folder)
    del back  # its counts need memory
    aligned, notes = ahead.align(pairs, tick)
    count = f"{len(text[0]):,} pair{'s' if len(text[0]) != 1 else ''}"
    return aligned, [f"{folder}: trained on {count}; the other direction is in {other}", *notes]

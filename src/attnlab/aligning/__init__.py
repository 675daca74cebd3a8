"""Word alignment of sentence pairs with attnlab runs, Hugging Face translators or encoders, or IBM Model 1."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from attnlab.aligning.choice import Reading
from attnlab.aligning.extraction import Tick
from attnlab.aligning.ibm1_aligner import FILE, WordModel, name_folder
from attnlab.aligning.map_aligner import MapAligner, Scored
from attnlab.aligning.request import OF_MAPS, AlignmentRequest, Pairs, SelectionGold, is_word_model
from attnlab.aligning.statistical import align_statistically, is_statistical
from attnlab.analysis.alignment import CorpusAlignment
from attnlab.analysis.symmetrise import Link, Links
from attnlab.training.run_list import ROOT, find_folder

__all__ = ["AlignmentRequest", "MapAligner", "Reading", "SelectionGold", "align"]


@dataclass(frozen=True)
class PairLinks:
    """The links of each sentence pair with their values; a word may have several."""

    scored: Scored

    def __len__(self) -> int:
        return len(self.scored)

    def links(self) -> list[Links]:
        return [frozenset(links) for links in self.scored]

    def scores(self) -> Scored:
        return self.scored

    def iterate_scores(self) -> Iterator[dict[Link, float]]:
        return iter(self.scored)


@dataclass(frozen=True)
class AlignmentResult:
    """Links, and notes for the user on how they were computed."""

    aligned: CorpusAlignment | PairLinks
    notes: list[str] = field(default_factory=list)


def align(
    model: str,
    pairs: Pairs,
    request: AlignmentRequest | None = None,
    *,
    reverse: str | None = None,
    tick: Tick = lambda done, of: None,
) -> AlignmentResult:
    """Align sentence pairs (words of the sources, words of the targets).

    model     a run's folder or its name in runs/; the id or folder of a Hugging Face translator or encoder; an aligner
              that align-train saved; ibm1, hmm, fertility or eflomal; or the folder of a statistical model that an
              earlier call saved
    reverse   a translator of the other direction, whose maps are joined with those of the first
    """
    request = request or AlignmentRequest()
    if len(pairs[0]) != len(pairs[1]):
        raise ValueError(f"{len(pairs[0])} sources but {len(pairs[1])} targets: pass one target for each source")
    if is_word_model(model):
        attention_options = ("by", "setting", "layer", "head", *OF_MAPS)
        request.refuse_options(attention_options, f"is for models with attention; omit it for {model}")
        if is_statistical(model):
            request.refuse_options(("diagonal",), f"is for MODEL ibm1; omit it for {model}")
            return AlignmentResult(*align_statistically(model, pairs, request.train_on, tick))
        return _align_by_ibm1(pairs, request, find_folder(model, FILE))
    request.refuse_training(model)
    aligner = MapAligner.open(model, request, reverse)
    aligner.choose(pairs, tick)
    scored = aligner.align(pairs, tick)
    return AlignmentResult(PairLinks(scored), aligner.list_notes())


def _align_by_ibm1(pairs: Pairs, request: AlignmentRequest, known: Path | None) -> AlignmentResult:
    if known:
        request.refuse_options(("diagonal", "train_on"), f"is for training; {known} is already trained")
        return AlignmentResult(*WordModel.load(known).align(*pairs))
    text = request.train_on or pairs
    folder = ROOT / name_folder(*text, diagonal=request.diagonal)
    if (folder / FILE).is_file():
        aligned, notes = WordModel.load(folder).align(*pairs)
        return AlignmentResult(aligned, [f"{folder}: trained earlier on this text", *notes])
    model = WordModel.train(*text, diagonal=request.diagonal)
    model.save(folder)
    ended = "" if model.model.converged else ", not converged"
    count = f"{len(text[0]):,} pair{'s' if len(text[0]) != 1 else ''}"
    note = f"{folder}: trained on {count} in {len(model.model.log_likelihood)} iterations{ended}"
    aligned, notes = model.align(*pairs)
    return AlignmentResult(aligned, [note, *notes])

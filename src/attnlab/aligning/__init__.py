"""Word alignment of sentence pairs with an attnlab run, a Hugging Face encoder-decoder, or IBM Model 1."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import get_args

from attnlab.aligning.choice import Reading, RowSetting, parse_place
from attnlab.aligning.extraction import PairReader, Sentences, Tick, find_links
from attnlab.aligning.ibm1_aligner import FILE, WordModel, name_folder
from attnlab.aligning.pair_readers import open_pretrained_reader, open_run_reader
from attnlab.aligning.row_evidence import compare_settings
from attnlab.aligning.statistical import align_statistically, is_statistical
from attnlab.analysis.alignment import CorpusAlignment
from attnlab.models.lstm_config import LSTMConfig
from attnlab.tasks.links import Gold
from attnlab.training.run_list import ROOT, find_folder, refuse_missing_run, suggest_runs
from attnlab.training.runs import Run, choose_device, open_run

__all__ = ["AlignmentRequest", "Reading", "SelectionGold", "align"]

Pairs = tuple[Sentences, Sentences]


@dataclass(frozen=True)
class SelectionGold:
    """Gold links to choose a layer or head by, and their text if it is not the text to align."""

    gold: Gold
    pairs: Pairs | None = None


@dataclass(frozen=True)
class AlignmentRequest:
    """What the user asks of a model; None stands for the defaults of `Reading`.

    The default setting is auto: the text decides, or the gold links of best-on. For probes it is awo.
    """

    by: str | None = None
    setting: str | None = None
    layer: str | None = None
    head: str | None = None
    selection: SelectionGold | None = None
    diagonal: bool = False  # for IBM Model 1
    train_on: Pairs | None = None  # for IBM Model 1; by default the text to align
    device: str = "auto"
    allow_code: bool = False  # run the file of a user-written mechanism that the model names

    def build_reading(self) -> Reading:
        by = self.by or "norm"
        setting = self.setting or ("awo" if by == "probe" else "auto")
        if by == "probe" and (setting != "awo" or self.layer or self.head):
            always = "always reads the last layer with all heads together, setting awo"
            raise ValueError(f"--by probe {always}: omit --setting, --layer and --head")
        places = {name: parse_place(text, name) for name in ("layer", "head") if (text := getattr(self, name))}
        return Reading(by, setting, **places)  # type: ignore[arg-type]

    def for_model(self, model: str, other: str) -> "AlignmentRequest":
        """Return the request for one of two models. If only one is IBM Model 1, drop the options of the other."""
        if is_word_model(model) == is_word_model(other):
            return self
        if is_word_model(model):
            return replace(self, by=None, setting=None, layer=None, head=None, selection=None)
        return replace(self, diagonal=False, train_on=None)

    def refuse_options(self, names: Sequence[str], reason: str) -> None:
        for name in names:
            if getattr(self, name):
                raise ValueError(f"--{name.replace('_', '-')} {reason}")


def is_word_model(model: str) -> bool:
    """Return whether the name is ibm1, hmm, fertility or eflomal, or the folder of a trained one."""
    return model == "ibm1" or is_statistical(model) or find_folder(model, FILE) is not None


@dataclass(frozen=True)
class AlignmentResult:
    """Links, and notes for the user on how they were computed."""

    aligned: CorpusAlignment
    notes: list[str] = field(default_factory=list)


def align(
    model: str, pairs: Pairs, request: AlignmentRequest | None = None, *, tick: Tick = lambda done, of: None
) -> AlignmentResult:
    """Align sentence pairs (words of the sources, words of the targets).

    model   a run's folder or its name in runs/; the id or folder of a Hugging Face encoder-decoder; ibm1, hmm,
            fertility or eflomal; or the folder of a statistical model that an earlier call saved
    """
    request = request or AlignmentRequest()
    if len(pairs[0]) != len(pairs[1]):
        raise ValueError(f"{len(pairs[0])} sources but {len(pairs[1])} targets: pass one target for each source")
    if is_word_model(model):
        attention_options = ("by", "setting", "layer", "head")
        request.refuse_options(attention_options, "is for models with attention; omit it for IBM Model 1")
        if is_statistical(model):
            request.refuse_options(("diagonal",), f"is for MODEL ibm1; omit it for {model}")
            return AlignmentResult(*align_statistically(model, pairs, request.train_on, tick))
        return _align_by_ibm1(pairs, request, find_folder(model, FILE))
    request.refuse_options(("diagonal", "train_on"), f"is for MODEL ibm1; omit it for {model}")
    if find_folder(model, "model.json"):
        run = open_run(model, device=request.device, allow_code=request.allow_code)
        return _align_by_attention(lambda some: open_run_reader(run, *some), pairs, request, run, tick)
    refuse_missing_run(model)
    open_reader = partial(open_pretrained_reader, device=choose_device(request.device), allow_code=request.allow_code)
    with suggest_runs(model):
        return _align_by_attention(lambda some: open_reader(model, *some), pairs, request, None, tick)


def _align_by_ibm1(pairs: Pairs, request: AlignmentRequest, known: Path | None) -> AlignmentResult:
    if known:
        request.refuse_options(("diagonal", "train_on"), f"is for training; {known} is already trained")
        return AlignmentResult(WordModel.load(known).align(*pairs))
    text = request.train_on or pairs
    folder = ROOT / name_folder(*text, diagonal=request.diagonal)
    if (folder / FILE).is_file():
        return AlignmentResult(WordModel.load(folder).align(*pairs), [f"{folder}: trained earlier on this text"])
    model = WordModel.train(*text, diagonal=request.diagonal)
    model.save(folder)
    ended = "" if model.model.converged else ", not converged"
    count = f"{len(text[0]):,} pair{'s' if len(text[0]) != 1 else ''}"
    note = f"{folder}: trained on {count} in {len(model.model.log_likelihood)} iterations{ended}"
    return AlignmentResult(model.align(*pairs), [note])


def _align_by_attention(
    read: Callable[[Pairs], PairReader], pairs: Pairs, request: AlignmentRequest, run: Run | None, tick: Tick
) -> AlignmentResult:
    reading = request.build_reading()
    if reading.rule == "best-on" and request.selection is None:
        raise ValueError("best-on needs gold links: write best-on:FILE, or pass --gold FILE")
    reader = read(pairs)
    selection = request.selection if reading.rule == "best-on" else None
    notes = list(reader.notes)
    if run is not None and getattr(run.recipe.data, "moses", False):
        trained = "this run was trained on Moses-tokenised text"
        notes.append(f"{trained}; if your files are not tokenised, pass --tokenize moses")
    if selection and selection.pairs:
        chosen = find_links(read(selection.pairs), reading.candidates, tick=tick).choose_best(reading, selection.gold)
        found = find_links(reader, lambda layers, heads: [chosen], tick=tick)
    else:
        how = {"with_norms": reading.rule == "highest-norm", "with_probe": reading.by == "probe"}
        found = find_links(reader, reading.candidates, **how, tick=tick)
    if not found.aligned:
        return AlignmentResult(CorpusAlignment.empty(reader.target_words), [*notes, "no pair has words on both sides"])
    chosen = found.choose_best(reading, selection.gold if selection else None)
    if reading.setting == "auto" and selection is None:
        readings = {setting: replace(chosen, setting=setting) for setting in get_args(RowSetting)}
        evidence = compare_settings(*pairs, {setting: found.aligned[c] for setting, c in readings.items()})
        chosen = readings[evidence.choose_setting(usual := _get_usual_setting(run))]
        notes.append(evidence.explain(usual))
    return AlignmentResult(found.aligned[chosen], [*notes, f"read {chosen}"])


def _get_usual_setting(run: Run | None) -> RowSetting:
    """Return awo for an LSTM, which predicts after it attends, else awi (Kobayashi et al. 2020)."""
    return "awo" if run is not None and isinstance(run.recipe.model, LSTMConfig) else "awi"

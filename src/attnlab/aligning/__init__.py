"""Word alignment: the links of sentence pairs from a run of ours, a Hugging Face encoder-decoder, or IBM Model 1."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from attnlab.aligning.choice import Reading, place
from attnlab.aligning.extraction import PairReader, Sentences, Tick, find
from attnlab.aligning.ibm1_aligner import FILE, WordModel, folder_name
from attnlab.aligning.pair_readers import pretrained_reader, run_reader
from attnlab.analysis.alignment import CorpusAlignment
from attnlab.models.lstm_config import LSTMConfig
from attnlab.tasks.links import Gold
from attnlab.training.runs import ROOT, Run, choose_device, open_run

__all__ = ["Asked", "Choosing", "Reading", "align", "place"]

Pairs = tuple[Sentences, Sentences]


@dataclass(frozen=True)
class Choosing:
    """Gold links that a layer or head is chosen on, and their text, where it is not the one to be aligned."""

    gold: Gold
    pairs: Pairs | None = None


@dataclass(frozen=True)
class Asked:
    """What of a model is to be read, as far as the user says; the rest is `Reading`'s defaults.

    Where setting is not said it is awi; but awo of an LSTM, whose state predicts after it attends, and by probe.
    """

    by: str | None = None
    setting: str | None = None
    layer: str | None = None
    head: str | None = None
    choosing: Choosing | None = None
    diagonal: bool = False  # of IBM Model 1
    train_on: Pairs | None = None  # of IBM Model 1, where not the text itself
    device: str = "auto"

    def reading(self, *, lstm: bool) -> Reading:
        by = self.by or "norm"
        setting = self.setting or ("awo" if lstm or by == "probe" else "awi")
        if by == "probe" and (setting != "awo" or self.layer or self.head):
            raise ValueError(
                "--by probe reads what each source word says of the word to be predicted, from the last layer with "
                "its heads together: leave --setting, --layer and --head out"
            )
        open_places = {name: place(text, name) for name in ("layer", "head") if (text := getattr(self, name))}
        return Reading(by, setting, **open_places)  # type: ignore[arg-type]

    def beside(self, model: str, other: str) -> "Asked":
        """What of it is for model, where other aligns too: what only one of them takes is not asked of the other."""
        if of_words(model) == of_words(other):
            return self
        if of_words(model):
            return replace(self, by=None, setting=None, layer=None, head=None, choosing=None)
        return replace(self, diagonal=False, train_on=None)

    def refuse(self, names: Sequence[str], reason: str) -> None:
        for name in names:
            if getattr(self, name):
                raise ValueError(f"--{name.replace('_', '-')} {reason}")


ATTENTION = ("by", "setting", "layer", "head")  # what is asked of attention alone


def of_words(model: str) -> bool:
    """Whether it is an IBM Model 1, to be trained or kept in a folder."""
    return model == "ibm1" or _kept(model) is not None


def _kept(model: str) -> Path | None:
    return next((path for path in (Path(model), ROOT / model) if (path / FILE).is_file()), None)


@dataclass(frozen=True)
class Answer:
    """Links, and what is to be said of how they were made."""

    aligned: CorpusAlignment
    notes: list[str] = field(default_factory=list)


def align(model: str, pairs: Pairs, asked: Asked | None = None, *, tick: Tick = lambda done, of: None) -> Answer:
    """The links of sentence pairs (words of the sources, words of the targets).

    model   a run's folder or its name in runs/; the id or folder of a Hugging Face encoder-decoder; ibm1; or the folder
            of an IBM Model 1 that an earlier call left
    """
    asked = asked or Asked()
    if len(pairs[0]) != len(pairs[1]):
        raise ValueError(f"{len(pairs[0])} sources but {len(pairs[1])} targets: give one for each")
    if of_words(model):
        asked.refuse(ATTENTION, "is for models with attention; IBM Model 1 has none")
        return _by_ibm1(pairs, asked, _kept(model))
    asked.refuse(("diagonal", "train_on"), "is for MODEL ibm1; this model is trained already")
    if any((path / "model.json").is_file() for path in (Path(model), ROOT / model)):
        run = open_run(model, device=asked.device)
        return _by_attention(lambda some: run_reader(run, *some), pairs, asked, run, tick)
    device = choose_device(asked.device)
    return _by_attention(lambda some: pretrained_reader(model, *some, device=device), pairs, asked, None, tick)


def _by_ibm1(pairs: Pairs, asked: Asked, known: Path | None) -> Answer:
    if known:
        asked.refuse(("diagonal", "train_on"), f"is for training; {known} is trained already")
        return Answer(WordModel.load(known).align(*pairs))
    text = asked.train_on or pairs
    folder = ROOT / folder_name(*text, diagonal=asked.diagonal)
    if (folder / FILE).is_file():
        return Answer(WordModel.load(folder).align(*pairs), [f"{folder}: trained earlier on this text"])
    made = WordModel.train(*text, diagonal=asked.diagonal)
    made.save(folder)
    ended = "" if made.model.converged else ", not converged"
    pairs_told = f"{len(text[0]):,} pair{'s' if len(text[0]) != 1 else ''}"
    note = f"{folder}: trained on {pairs_told} in {len(made.model.log_likelihood)} iterations{ended}"
    return Answer(made.align(*pairs), [note])


def _by_attention(
    read: Callable[[Pairs], PairReader], pairs: Pairs, asked: Asked, run: Run | None, tick: Tick
) -> Answer:
    reading = asked.reading(lstm=run is not None and isinstance(run.recipe.model, LSTMConfig))
    if reading.rule == "best-on" and asked.choosing is None:
        raise ValueError("best-on chooses by gold links: name their file, as best-on:FILE, or with --gold")
    reader = read(pairs)
    choosing = asked.choosing if reading.rule == "best-on" else None
    notes = [*reader.notes, *_spelling(run)]
    if choosing and choosing.pairs:
        chosen = find(read(choosing.pairs), reading.candidates, tick=tick).best(reading, choosing.gold)
        found = find(reader, lambda layers, heads: [chosen], tick=tick)
    else:
        how = {"with_norms": reading.rule == "highest-norm", "with_probe": reading.by == "probe"}
        found = find(reader, reading.candidates, **how, tick=tick)
    if not found.aligned:
        return Answer(CorpusAlignment.empty(reader.target_words), [*notes, "no pair has words on both sides"])
    chosen = found.best(reading, choosing.gold if choosing else None)
    return Answer(found.aligned[chosen], [*notes, f"read {chosen}"])


def _spelling(run: Run | None) -> list[str]:
    if run is None or not getattr(run.recipe.data, "moses", False):
        return []
    return ["this run was trained on Moses-tokenised text; words are fed as they stand: else say --tokenize moses"]

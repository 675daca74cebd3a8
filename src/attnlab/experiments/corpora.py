"""Corpora of a study: what its models are trained on at each scale, and whether they can be run now.

A corpus that the paper used has a row in every table. Others stand in for it, with the tag "other data". Recipes that
take hours run only if data=NAME asks for them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from attnlab.config import suggest_nearest
from attnlab.experiments.engine import NOT_MEASURED
from attnlab.experiments.plan import Measure, TrainedRun, prepare_vocabulary
from attnlab.experiments.study import Scale, Setting
from attnlab.experiments.verdicts import IMPOSSIBLE
from attnlab.files import write_text
from attnlab.tasks.lexicon import Lexicon
from attnlab.training.recipe import Recipe, resolve_recipe

ARTIFICIAL = "lexicon-text"  # the target side of the artificial language pair, as running text
LINES = {"train": 1200, "valid": 60, "test": 60}


@dataclass(frozen=True)
class StudyCorpus:
    """A corpus with its settings at each scale: what attnlab train would get, without attention and seed."""

    name: str  # the value of data=
    row: str  # its name in tables
    task: str
    settings: Mapping[Scale, Mapping[str, str]]
    tags: tuple[str, ...] = ()
    asked: str = ""  # what it takes, if it runs only when data= names it
    lacking: str = ""  # what of the paper's data is not at hand here, so that results/ has no row of it

    @property
    def of_paper(self) -> bool:
        return "other data" not in self.tags

    def at(self, setting: Setting) -> "Ground":
        return Ground(self, setting)


@dataclass(frozen=True)
class Ground:
    """A corpus at a scale, with what the runs on it share."""

    corpus: StudyCorpus
    setting: Setting

    def recipe(self, seed: int, values: Mapping[str, str]) -> Recipe:
        """Return the recipe of a seed with these values: attention, heads, …"""
        settings = dict(self.corpus.settings[self.setting.scale])
        if settings.get("data") == ARTIFICIAL:
            settings |= name_artificial_text(self.text)
        recipe = resolve_recipe(self.corpus.task, {**settings, **values, "seed": str(seed)})
        data: Any = recipe.data
        if not hasattr(data, "data_dir"):
            return recipe
        return replace(recipe, data=replace(data, data_dir=self.setting.place.data_dir))

    def plan_run(self, seed: int, values: Mapping[str, str], measure: Measure) -> TrainedRun:
        return TrainedRun(self.recipe(seed, values), measure, files=self.text)

    @cached_property
    def vocabulary(self) -> Path:
        """The folder of what the task derives from its data; OSError if the data are not available."""
        if self.corpus.settings[self.setting.scale].get("data") == ARTIFICIAL:
            write_artificial_text(self.text)
        return prepare_vocabulary(self.recipe(0, {}), self.setting.place)

    def explain_absence(self) -> str:
        """Return why it cannot be run, or an empty text."""
        corpus, setting = self.corpus, self.setting
        chosen = setting.options.get("data", "")
        if chosen and corpus.name not in chosen.split(","):
            return self.explain_missing() if corpus.lacking and not setting.running else f"excluded by data={chosen}"
        if setting.scale not in corpus.settings:
            return f"this row runs at scale {' and '.join(corpus.settings)}"
        if not setting.running:
            return ""
        if corpus.asked and not chosen:
            return self.explain_missing()
        return explain_missing_data(lambda: self.vocabulary)

    def explain_missing(self) -> str:
        """Return why the ledger has no row of it."""
        corpus = self.corpus
        if corpus.lacking and not self.setting.running:
            return f"{IMPOSSIBLE}{corpus.lacking} not at hand; data={corpus.name} runs it where it is"
        return f"{corpus.asked}: data={corpus.name} runs it" if corpus.asked else NOT_MEASURED

    @property
    def tags(self) -> tuple[str, ...]:
        """What differs from the paper: the corpus's tags, and those of a smaller model."""
        cut = () if self.setting.scale == "full" else ("other model", "smaller scale")
        return tuple(dict.fromkeys((*self.corpus.tags, *cut)))

    @property
    def text(self) -> Path:
        return (self.setting.folder / ARTIFICIAL).absolute()


def explain_missing_data(load: Callable[[], Any]) -> str:
    """Return why data cannot be loaded, or an empty text."""
    try:
        load()
    except OSError as error:
        return " ".join(str(error).split())
    return ""


def list_grounds(corpora: Iterable[StudyCorpus], setting: Setting, known: Sequence[str]) -> list[Ground]:
    """Return the corpora that a table of this scale has a row for; data= must name corpora of the study (known)."""
    select_names(setting, "data", known)
    return [corpus.at(setting) for corpus in corpora if setting.scale in corpus.settings or corpus.of_paper]


def select_names(setting: Setting, key: str, names: Sequence[str]) -> list[str]:
    """Return the names that the option key=a,b gives, or all of them."""
    if key not in setting.options:
        return list(names)
    chosen = setting.options[key].split(",")
    for name in chosen:
        if name not in names:
            raise ValueError(
                f"{key}: unknown name {name!r}{suggest_nearest(name, names)}; available: {', '.join(names)}"
            )
    return [name for name in names if name in chosen]


def name_artificial_text(folder: Path) -> dict[str, str]:
    """Return the settings of a language model of the artificial language, whose text files are in a folder."""
    files = {part: str(folder / f"{part}.txt") for part in LINES}
    return {"data": files["train"], "valid": files["valid"], "test": files["test"], "units": "word"}


def write_artificial_text(folder: Path) -> None:
    """Write running text in the artificial language: what a language model learns if no data set is available."""
    lexicon = Lexicon(0)
    for number, (part, lines) in enumerate(LINES.items()):
        if not (folder / f"{part}.txt").exists():
            text = "".join(" ".join(sentence.target) + "\n" for sentence in lexicon.draw_sentences(number, lines))
            write_text(folder / f"{part}.txt", text)

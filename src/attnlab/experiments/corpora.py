"""What the models of a study are trained on: a corpus with its recipe at each scale, and whether it can be run now.

A corpus that the paper used has a row in every table; others stand in for it, with the tag "other data". Recipes that
take hours are run only where data=NAME asks for them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from attnlab.config import compute_digest, suggest_nearest
from attnlab.experiments.study import Scale, Setting
from attnlab.files import write_bytes
from attnlab.tasks import TASKS
from attnlab.tasks.lexicon import Lexicon
from attnlab.training.recipe import Recipe, resolve_recipe

ARTIFICIAL = "lexicon-text"  # the target side of the artificial language pair, as running text
LINES = {"train": 1200, "valid": 60, "test": 60}


@dataclass(frozen=True)
class StudyCorpus:
    """settings: at each scale it has, what attnlab train would be told but for attention and seed."""

    name: str  # as data= says it
    row: str  # as a table says it
    task: str
    settings: Mapping[Scale, Mapping[str, str]]
    tags: tuple[str, ...] = ()
    asked: str = ""  # what it takes, where it is run only if data= names it

    @property
    def of_paper(self) -> bool:
        return "other data" not in self.tags

    def on(self, setting: Setting) -> "Ground":
        return Ground(self, setting)


@dataclass(frozen=True)
class Ground:
    """A corpus at a scale, with what the runs on it share."""

    corpus: StudyCorpus
    setting: Setting

    def recipe(self, seed: int, values: Mapping[str, str]) -> Recipe:
        """The run of a seed with these values: attention, heads, …"""
        settings = dict(self.corpus.settings[self.setting.scale])
        if settings.get("data") == ARTIFICIAL:
            settings |= artificial_text(self.setting.folder.parent / ARTIFICIAL)
        made = resolve_recipe(self.corpus.task, {**settings, **values, "seed": str(seed)})
        data: Any = made.data
        return replace(made, data=replace(data, data_dir=self.setting.data_dir)) if hasattr(data, "data_dir") else made

    @cached_property
    def vocabulary(self) -> Path:
        """What the task makes of its data, once for all runs; OSError where the data are not at hand."""
        recipe = self.recipe(0, {})
        folder = (self.setting.folder.parent / "vocabulary" / compute_digest(recipe.data)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        TASKS[recipe.task].prepare(recipe.data, folder)
        return folder

    def why_not(self) -> str:
        """The reason why it cannot be run; empty where it can."""
        corpus, setting = self.corpus, self.setting
        said = setting.options.get("data", "")
        if said and corpus.name not in said.split(","):
            return f"left out by data={said}"
        if setting.scale not in corpus.settings:
            return f"this row is run at scale {' and '.join(corpus.settings)}"
        if corpus.asked and not said:
            return f"{corpus.asked}: it is run where data={corpus.name} asks for it"
        try:
            self.vocabulary  # noqa: B018 (to see whether its data are there)
        except OSError as error:  # not at hand, and cannot be fetched
            return " ".join(str(error).split())
        return ""

    @property
    def tags(self) -> tuple[str, ...]:
        """What differs from the paper: the corpus's own, and of a model that was cut down."""
        cut = () if self.setting.scale == "full" else ("other model", "smaller scale")
        return tuple(dict.fromkeys((*self.corpus.tags, *cut)))


def grounds(corpora: Iterable[StudyCorpus], setting: Setting, known: Sequence[str]) -> list[Ground]:
    """Those that a table of this scale has a row for; data= is refused where it names none of the study's (known)."""
    chosen(setting, "data", known)
    return [corpus.on(setting) for corpus in corpora if setting.scale in corpus.settings or corpus.of_paper]


def chosen(setting: Setting, key: str, names: Sequence[str]) -> list[str]:
    """Of these, the ones that the option key=a,b says; all where it is not said."""
    if key not in setting.options:
        return list(names)
    said = setting.options[key].split(",")
    for name in said:
        if name not in names:
            raise ValueError(f"{key}: there is no {name!r}{suggest_nearest(name, names)}; there are {', '.join(names)}")
    return [name for name in names if name in said]


def artificial_text(folder: Path) -> dict[str, str]:
    """Files of running text in the artificial language: what a language model learns where no data set is at hand."""
    lexicon = Lexicon(0)
    for number, (part, lines) in enumerate(LINES.items()):
        if not (folder / f"{part}.txt").exists():
            text = "".join(" ".join(sentence.target) + "\n" for sentence in lexicon.draw_sentences(number, lines))
            write_bytes(folder / f"{part}.txt", text.encode())
    files = {part: str((folder / f"{part}.txt").absolute()) for part in LINES}
    return {"data": files["train"], "valid": files["valid"], "test": files["test"], "units": "word"}

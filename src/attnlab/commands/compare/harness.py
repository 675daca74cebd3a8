"""`attnlab compare model=… tasks=…`: scores of language models by lm-eval, and their differences, paired by item.

Every model answers the same items, so the difference of two models is the mean over items of the difference of their
scores, with a 95 % t-interval. Pairing removes what makes items hard for both.

    items-N.json   the score of every item, of model N; an interrupted command goes on after the last model
    scores.csv     mean, interval, difference from the first model, p, and p corrected by Holm's method
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from attnlab.config import parse_value, split_list, suggest_nearest
from attnlab.experiments.significance import Contrast, Interval, compute_interval, contrast_seeds, correct_by_holm
from attnlab.files import write_csv, write_text
from attnlab.files.user_files import read_json
from attnlab.huggingface import pretrained
from attnlab.terminal import show_table
from attnlab.training.runs import choose_device

ItemScores = dict[str, dict[int, float]]  # of each measure, by item
COLUMNS = (
    "task",
    "measure",
    "model",
    "items",
    "mean",
    "low",
    "high",
    "difference",
    "diff_low",
    "diff_high",
    "p",
    "holm",
)


@dataclass(frozen=True, kw_only=True)
class HarnessConfig:
    """What is compared: the settings on the command line."""

    model: tuple[str, ...]  # ids or folders
    tasks: tuple[str, ...]  # names of lm-eval's tasks
    limit: int | None = None  # number of items of each task; default: all
    shots: int | None = None  # number of examples in the prompt; default: as the task says
    batch: int = 8  # number of items at a time
    include: str | None = None  # folder with tasks of your own, in lm-eval's format

    @classmethod
    def parse(cls, settings: Mapping[str, str]) -> "HarnessConfig":
        """Read the settings. Raises ValueError for an unknown or a missing key."""
        known = ("model", "tasks", "limit", "shots", "batch", "include")
        for key in settings:
            if key not in known:
                raise ValueError(f"compare model=… has no key {key!r}{suggest_nearest(key, known)}; it has {known}")
        for key in ("model", "tasks"):
            if not settings.get(key):
                raise ValueError(f"compare needs a task to train on, or model= and tasks=; {key}= is missing")
        numbers = {key: parse_value(settings[key], int, key) for key in ("limit", "shots", "batch") if key in settings}
        for key, least in (("limit", 1), ("shots", 0), ("batch", 1)):
            if key in numbers and numbers[key] < least:
                raise ValueError(f"{key} must be at least {least}, got {numbers[key]}")
        models, tasks = (tuple(split_list(settings[key], key)) for key in ("model", "tasks"))
        return cls(model=models, tasks=tasks, **numbers, include=settings.get("include"))

    def describe(self, model: str) -> dict[str, Any]:
        """Return what decides the scores of a model."""
        about = {"model": model, "tasks": list(self.tasks), "limit": self.limit, "shots": self.shots}
        return about | {"include": self.include}

    def name_folder(self) -> Path:
        text = json.dumps([self.describe(each) for each in self.model])
        return Path("compared") / f"tasks-{sha256(text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """The score of a model in one measure of a task, and its difference from the first model."""

    task: str
    measure: str
    model: str
    items: Mapping[int, float] = field(repr=False)
    interval: Interval | None
    contrast: Contrast | None  # None for the first model
    holm: float | None = None

    def to_cells(self) -> list[Any]:
        mean, none = statistics.fmean(self.items.values()), (None, None)
        against = self.contrast
        cells = [self.task, self.measure, self.model, len(self.items), mean, *(self.interval or none)]
        if against is None:
            return [*cells, None, None, None, None, None]
        return [*cells, against.mean, *(against.interval or none), against.p, self.holm]


def run_harness(settings: Mapping[str, str], *, out: Path | None, device: str, command: str) -> bool:
    """Score the models, print the table and write it; return True."""
    config = HarnessConfig.parse(settings)
    if find_spec("lm_eval") is None:
        raise ValueError("compare model=… tasks=… needs lm-eval, which is not installed: pip install lm-eval")
    folder = out or config.name_folder()
    scored = []
    for number, model in enumerate(config.model):
        path = folder / f"items-{number}.json"
        if (found := read_items(path, config.describe(model))) is None:
            print(f"{model}: scoring ({number + 1} of {len(config.model)})", flush=True)
            found = score_model(model, config, choose_device(device))
            about = {"about": config.describe(model), "command": command, "scores": found}
            write_text(path, json.dumps(about, indent=1) + "\n")
        scored.append(found)
    rows = list(contrast_models(config.model, scored))
    write_csv(folder / "scores.csv", [COLUMNS, *(row.to_cells() for row in rows)])
    show_table("tasks", list(COLUMNS), [[_show(cell) for cell in row.to_cells()] for row in rows])
    print(f"differences are from {config.model[0]}, paired by item, with 95 % t-intervals; table: {folder}/scores.csv")
    return True


def read_items(path: Path, about: Mapping[str, Any]) -> dict[str, ItemScores] | None:
    """Return the scores of an earlier command with the same settings, or None."""
    if not path.exists():
        return None
    stored = read_json(path)
    if stored.get("about") != about:
        raise ValueError(f"{path} has the scores of other settings: choose another --out")
    return {
        task: {name: {int(item): value for item, value in items.items()} for name, items in measures.items()}
        for task, measures in stored["scores"].items()
    }


def score_model(name: str, config: HarnessConfig, device: torch.device) -> dict[str, ItemScores]:
    """Return the score of every item of every task, by lm-eval's HFLM around the model, adapted or not."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = pretrained.open_model(name, device=device)
    wrapped = HFLM(
        pretrained=model, tokenizer=pretrained.open_tokenizer(name), batch_size=config.batch, device=str(device)
    )
    manager = TaskManager(include_path=config.include)
    how: dict[str, Any] = {"limit": config.limit, "num_fewshot": config.shots, "task_manager": manager}
    results = simple_evaluate(model=wrapped, tasks=list(config.tasks), log_samples=True, bootstrap_iters=0, **how)
    if results is None:
        raise ValueError(f"lm-eval returned no results for {name}")
    return {task: collect_items(samples) for task, samples in results["samples"].items()}


def collect_items(samples: Sequence[Mapping[str, Any]]) -> ItemScores:
    """Return the measures of lm-eval's samples that are one number for each item."""
    found: ItemScores = {}
    for sample in samples:
        part = "" if sample.get("filter", "none") == "none" else f" ({sample['filter']})"
        for measure in sample.get("metrics", ()):
            if isinstance(value := sample.get(measure), int | float):
                found.setdefault(f"{measure}{part}", {})[int(sample["doc_id"])] = float(value)
    return found


def contrast_models(models: Sequence[str], scored: Sequence[Mapping[str, ItemScores]]) -> Iterator[ScoreRow]:
    """Yield a row for each task, measure and model; Holm's correction is over the models of a measure."""
    for task, measures in scored[0].items():
        for measure, first in measures.items():
            rows = []
            for number, model in enumerate(models):
                items = scored[number][task][measure]
                if items.keys() != first.keys():
                    raise ValueError(f"{model} and {models[0]} have different items of {task}: score them again")
                contrast = contrast_seeds(items, first, paired=True) if number else None
                interval = compute_interval(list(items.values()))
                row = ScoreRow(
                    task=task, measure=measure, model=model, items=items, interval=interval, contrast=contrast
                )
                rows.append(row)
            ps = {number: row.contrast.p for number, row in enumerate(rows) if row.contrast}
            holm = correct_by_holm(ps)
            yield from (replace(row, holm=holm.get(number)) for number, row in enumerate(rows))


def _show(cell: Any) -> str:
    return "–" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)

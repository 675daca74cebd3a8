"""Planned runs that are seeds of an Experiment.

On a GPU all seeds of an experiment train as one population. On a CPU stacking helps only the smallest models, so each
seed is a run of its own unless `together` says otherwise.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attnlab.experiments.ledger import digest_recipe
from attnlab.experiments.plan import PlannedRun, Workplace
from attnlab.experiments.population_training import FILE, train_population
from attnlab.files import write_text
from attnlab.files.user_files import read_json


@dataclass(frozen=True)
class SeedRun(PlannedRun):
    """One seed of an experiment that is a frozen dataclass; its row holds the curves of its measures."""

    experiment: Any  # an Experiment
    seed: int
    together: bool = False  # train seeds as one on a CPU too, where Python takes most of the time
    edition: int = 1
    measure: str = "curves"

    @property
    def recipe(self) -> dict[str, Any]:
        return {"experiment": type(self.experiment).__name__, **asdict(self.experiment)}

    @property
    def name(self) -> str:
        return f"{type(self.experiment).__name__} {self.key.digest}, seed {self.seed}"

    @property
    def steps(self) -> int:
        steps: int = self.experiment.steps
        return steps

    def group(self, place: Workplace) -> str | None:
        return self.key.digest if self.together or place.device != "cpu" else None

    def group_limit(self, place: Workplace) -> int:
        return 1 << 20

    def is_trained(self, place: Workplace) -> bool:
        return self._file(place).exists()

    def train(self, place: Workplace) -> None:
        self.train_together((), place)

    def train_together(self, others: Sequence[PlannedRun], place: Workplace) -> None:
        runs = [self, *(other for other in others if isinstance(other, SeedRun))]
        seeds = [run.seed for run in runs]
        name = digest_recipe({"recipe": self.key.digest, "seeds": seeds})
        folder = place.folder / "populations" / name
        trained = train_population(self.experiment, seeds, device=place.device, folder=folder)
        for number, run in enumerate(runs):
            curves = {name: values[number].tolist() for name, values in trained.measures.items()}
            about = {"steps": list(trained.steps), "is_finite": bool(trained.finite[number]), "measures": curves}
            write_text(run._file(place), json.dumps(about))
        (folder / FILE).unlink()
        folder.rmdir()

    def take_measure(self, place: Workplace) -> dict[str, Any]:
        values: dict[str, Any] = read_json(self._file(place))
        return values

    def clean(self, place: Workplace) -> None:
        self._file(place).unlink(missing_ok=True)

    def _file(self, place: Workplace) -> Path:
        return place.folder / "populations" / f"{self.key.digest}-{self.edition}-{self.seed}.json"

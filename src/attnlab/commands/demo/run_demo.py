"""`attnlab demo`: train, measure, print, and write one page.

OUT/ledger.jsonl                     every measured run
OUT/work/runs/NAME/                  a run, as attnlab train makes it
OUT/work/runs/NAME/records/STEP.safetensors   of the first seed: the Record of the page's sentences
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnlab.commands.demo.demo_page import table, write
from attnlab.commands.demo.desktop import open_page
from attnlab.commands.demo.findings import findings
from attnlab.commands.demo.learners import QUALITY, DemoResults, Learner
from attnlab.commands.demo.measures import measure_learner
from attnlab.commands.demo.sentences import Sentences, on_page
from attnlab.commands.demo.settings import DemoConfig
from attnlab.config import replace_values
from attnlab.experiments.deadline import Deadline, stop_at_deadline
from attnlab.experiments.engine import RowReader, complete, gather
from attnlab.experiments.plan import Measure, TrainedRun, Workplace
from attnlab.experiments.schedulers import open_scheduler
from attnlab.experiments.study import Findings, Setting
from attnlab.provenance import collect_provenance
from attnlab.records.record import Record
from attnlab.studies import open_study
from attnlab.tasks import TASKS
from attnlab.terminal import Bar, show_table
from attnlab.training.runs import Run

RECORDS = "records"
STUDY, ITEM = "snell2021", "fig3"  # the study of copying


def run_demo(values: Mapping[str, str], command: str, until: str | None = None) -> bool:
    """Train, measure, print and write; return False if some run failed."""
    config = replace_values(DemoConfig(), dict(values))
    folder = config.folder()
    place = Workplace.at(folder, command=command)
    deadline = Deadline.parse(until) if until else None
    with stop_at_deadline(command), open_scheduler("local", device="cpu") as on, Bar(1) as bar:
        results = complete(partial(read_results, config, place), place, on, progress=bar.tick, until=deadline)
    recipe = config.recipe(config.attention[0], config.seed)
    task = TASKS[recipe.task].prepare(recipe.data, folder)
    gold = Sentences.of(task, "valid", on_page(task)).gold()
    about = {"command": config.command()} | collect_provenance(torch.device("cpu"))
    report = write(results, gold, about)
    shown = table(results.learners, QUALITY)
    show_table("learning to translate", list(shown.columns), [list(row) for row in shown.rows])
    show_table("what was found", ["about", ""], [list(found) for found in findings(results)])
    for name, reason in results.failed.items():
        print(f"{name} failed: {reason}")
    opened = config.open and open_page(report)
    print(f"{'report, opened in the browser' if opened else 'report'}: {report}")
    return not results.failed


def read_results(config: DemoConfig, place: Workplace, rows: RowReader) -> DemoResults:
    """Return what the ledger has; an attention whose first seed failed is left out."""
    learn, copy = partial(_read_learners, config, place), partial(_read_copying, config, place)
    functions: list[Any] = [copy, learn] if config.copying else [learn]
    *copied, (learners, failed) = gather(rows, functions)
    if not learners:
        raise ValueError("; ".join(f"{name}: {reason}" for name, reason in failed.items()))
    return DemoResults(config, learners, failed, copied[0] if copied else None, place.folder.parent)


def plan_run(config: DemoConfig, name: str, seed: int) -> TrainedRun:
    """Return the planned run of one attention and seed; the first seed also leaves records for the page."""
    recorded = seed == config.seed
    function = partial(measure_moments, config.moments, recorded)
    measure = Measure("demo with records" if recorded else "demo", function, clean=True)
    return TrainedRun(config.recipe(name, seed), measure)


def measure_moments(moments: tuple[int, ...], recorded: bool, run: Run, place: Workplace) -> dict[str, Any]:
    """Measure a run at its moments; with records of the page's sentences if asked for."""
    return measure_learner(run, moments, run.folder.path / RECORDS if recorded else None)


def _read_learners(config: DemoConfig, place: Workplace, rows: RowReader) -> tuple[list[Learner], dict[str, str]]:
    plan = {(name, seed): plan_run(config, name, seed) for name in config.attention for seed in config.all_seeds}
    measured = rows.read_plan(plan)
    learners = []
    for name in config.attention:
        values = {seed: x for seed in config.all_seeds if (x := measured.values.get((name, seed)))}
        if config.seed in values:
            folder = plan[name, config.seed].folder(place).path / RECORDS
            learners.append(Learner(name, config.parameters(name), values, _load_records(folder, config.moments)))
    return learners, {f"{name}, seed {seed}": reason for (name, seed), reason in measured.failures.items()}


def _load_records(folder: Path, moments: tuple[int, ...]) -> dict[int, Record]:
    try:
        return {step: Record.load(folder / f"{step}.safetensors") for step in moments}
    except FileNotFoundError as error:
        raise ValueError(f"{error}: the records of a finished run are gone; use another out=") from None


def _read_copying(config: DemoConfig, place: Workplace, rows: RowReader) -> Findings:
    seeds = tuple(range(config.seeds))
    return open_study(STUDY).items[ITEM].run(Setting("smoke", seeds, place, rows))

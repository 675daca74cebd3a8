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

from attnlab.commands.demo.demo_page import tabulate, write_demo
from attnlab.commands.demo.desktop import open_page
from attnlab.commands.demo.findings import list_findings
from attnlab.commands.demo.learners import QUALITY, DemoResults, Learner
from attnlab.commands.demo.measures import MEASURED, RECORDED, RECORDS
from attnlab.commands.demo.sentences import Sentences, choose_shown
from attnlab.commands.demo.settings import DemoConfig
from attnlab.config import replace_values
from attnlab.experiments.deadline import Deadline, stop_at_deadline
from attnlab.experiments.engine import RowReader, complete, gather
from attnlab.experiments.plan import TrainedRun, Workplace
from attnlab.experiments.schedulers import open_scheduler
from attnlab.experiments.study import Findings, Setting
from attnlab.provenance import collect_provenance
from attnlab.records.record import Record
from attnlab.studies import open_study
from attnlab.tasks import find_task
from attnlab.terminal import Bar, show_table

STUDY, ITEM = "snell2021", "fig3"  # on copying


def run_demo(values: Mapping[str, str], command: str, until: str | None = None) -> bool:
    """Train, measure, print and write; return False if a run failed."""
    config = replace_values(DemoConfig(), dict(values))
    folder = config.make_folder()
    place = Workplace.at(folder, command=command)
    deadline = Deadline.parse_optional(until)
    with stop_at_deadline(command), open_scheduler("local", device="cpu") as on, Bar(1) as bar:
        results = complete(partial(read_results, config, place), place, on, progress=bar.tick, until=deadline)
    recipe = config.recipe(config.attention[0], config.seed)
    task = find_task(recipe.task).prepare(recipe.data, folder)
    gold = Sentences.take(task, "valid", choose_shown(task)).list_gold()
    report = write_demo(results, folder, gold, collect_provenance(torch.device("cpu")))
    table = tabulate(results.learners, QUALITY)
    show_table("learning to translate", list(table.columns), [list(row) for row in table.rows])
    show_table("findings", ["about", ""], [list(finding) for finding in list_findings(results)])
    for name, reason in results.failures.items():
        print(f"{name} failed: {reason}")
    opened = config.open and open_page(report)
    print(f"{'report, opened in the browser' if opened else 'report'}: {report}")
    return not results.failures


def read_results(config: DemoConfig, place: Workplace, rows: RowReader) -> DemoResults:
    """Return the results that the ledger holds. An attention whose first seed failed is left out."""
    functions: list[Any] = [partial(_read_copying, config, place)] if config.copying else []
    *copied, (learners, failures) = gather(rows, [*functions, partial(_read_learners, config, place)])
    if not learners:
        raise ValueError("; ".join(f"{name}: {reason}" for name, reason in failures.items()))
    return DemoResults(config, learners, failures, copied[0] if copied else None)


def plan_run(config: DemoConfig, name: str, seed: int) -> TrainedRun:
    """Return the planned run of one attention and seed; the first seed also leaves Records for the page."""
    return TrainedRun(config.recipe(name, seed), RECORDED if seed == config.seed else MEASURED)


def _read_learners(config: DemoConfig, place: Workplace, rows: RowReader) -> tuple[list[Learner], dict[str, str]]:
    plan = {(name, seed): plan_run(config, name, seed) for name in config.attention for seed in config.all_seeds}
    measured = rows.read_plan(plan)
    learners = []
    for name in config.attention:
        values = {seed: x for seed in config.all_seeds if (x := measured.values.get((name, seed)))}
        if config.seed in values:
            folder = plan[name, config.seed].folder(place).path / RECORDS
            learners.append(Learner(name, config.count_parameters(name), values, _load_records(folder, config.moments)))
    return learners, {f"{name}, seed {seed}": reason for (name, seed), reason in measured.failures.items()}


def _load_records(folder: Path, moments: tuple[int, ...]) -> dict[int, Record]:
    try:
        return {step: Record.load(folder / f"{step}.safetensors") for step in moments}
    except FileNotFoundError as error:
        raise ValueError(f"{error}: the Records of a measured run were deleted; use another --out") from None


def _read_copying(config: DemoConfig, place: Workplace, rows: RowReader) -> Findings:
    return open_study(STUDY).items[ITEM].run(Setting("smoke", tuple(range(config.seeds)), place, rows))

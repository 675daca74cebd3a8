"""`attnlab demo` from its words to its page."""

from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attnlab.commands.demo import jobs_of_demo as work
from attnlab.commands.demo.demo_page import table, write
from attnlab.commands.demo.desktop import opened
from attnlab.commands.demo.findings import findings
from attnlab.commands.demo.learners import QUALITY, DemoResults, Learner
from attnlab.commands.demo.sentences import Sentences, on_page
from attnlab.commands.demo.settings import DemoConfig
from attnlab.config import replace_values
from attnlab.experiments.schedulers import Job, scheduler
from attnlab.provenance import collect_provenance
from attnlab.records.record import Record
from attnlab.tasks import TASKS
from attnlab.terminal import show_table

COPYING = "copying"


def run(said: Mapping[str, str]) -> bool:
    """Train, measure, print and write; False where some run failed. KeyboardInterrupt where it was asked to stop."""
    config = replace_values(DemoConfig(), dict(said))
    folder = config.folder()
    failed = train(config, folder)
    results = collected(config, folder, failed)
    recipe = config.recipe(config.attention[0], config.seed)
    task = TASKS[recipe.task].prepare(recipe.data, folder)
    gold = Sentences.of(task, "valid", on_page(task)).gold()
    about = {"command": config.command()} | collect_provenance(torch.device("cpu"))
    report = write(results, gold, about)
    shown = table(results.learners, QUALITY)
    show_table("learning to translate", list(shown.columns), [list(row) for row in shown.rows])
    show_table("what was found", ["about", ""], [list(found) for found in findings(results)])
    for name, why in failed.items():
        print(f"{name} failed: {why}")
    told = "report, opened in the browser" if config.open and opened(report) else "report"
    print(f"{told}: {report}")
    return not failed


def train(config: DemoConfig, folder: Path) -> dict[str, str]:
    """Run what is not there yet, on all cores; why some runs failed, by attention and seed."""
    places = _places(config, folder)
    study = (work.copied, str(folder / COPYING), config.seeds)
    jobs = [Job(COPYING, work.stoppable, study)] if config.copying else []  # the longest goes first
    for (name, seed), place in places.items():
        recorded = seed == config.seed
        if work.found(place, recorded) is None:
            arguments = (work.learn, config.recipe(name, seed), str(place), config.moments, recorded)
            jobs.append(Job(f"{name}, seed {seed}", work.stoppable, arguments))
    columns = [TextColumn("{task.description:>14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with scheduler("local", device="cpu") as on, Progress(*columns, console=Console(stderr=True)) as progress:
        bars = {name: progress.add_task(name, total=config.steps * config.seeds) for name in config.attention}

        def watch() -> None:
            for name, bar in bars.items():
                progress.update(bar, completed=sum(work.step(places[name, seed]) for seed in config.all_seeds))

        watch()
        failed = on.run(jobs, watch=watch)
        watch()
    return failed


def collected(config: DemoConfig, folder: Path, failed: Mapping[str, str]) -> DemoResults:
    """What the jobs left; an attention whose first seed did not come to its end is left out."""
    learners = []
    for name in config.attention:
        places = {seed: _places(config, folder)[name, seed] for seed in config.all_seeds}
        found = {seed: values for seed, place in places.items() if (values := work.found(place)) is not None}
        if config.seed in found:
            files = {step: places[config.seed] / work.RECORDS / f"{step}.safetensors" for step in config.moments}
            records = {step: Record.load(file) for step, file in files.items()}
            learners.append(Learner(name, config.parameters(name), found, records))
    if not learners:
        raise ValueError("; ".join(f"{name}: {why}" for name, why in failed.items()))
    copying = work.copied(str(folder / COPYING), config.seeds) if config.copying and COPYING not in failed else None
    return DemoResults(config, learners, failed, copying, folder)


def _places(config: DemoConfig, folder: Path) -> dict[tuple[str, int], Path]:
    """The folder of each run."""
    return {
        (name, seed): (folder / "runs" / config.recipe(name, seed).name()).absolute()
        for name in config.attention
        for seed in config.all_seeds
    }

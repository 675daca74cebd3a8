"""`attnlab compare`: read the settings, compare, print the tables and write the page; or plan the number of seeds."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from attnlab.commands.compare.comparison import ComparisonTerms, Controls, compare, draw
from attnlab.commands.compare.comparison_page import list_remarks, tabulate, write_comparison
from attnlab.commands.compare.plan import PLAN_KEYS, plan_comparison
from attnlab.commands.compare.seed_plan import WantedEffect, check_pilot, describe_needs, list_needs, tabulate_needs
from attnlab.commands.compare.summary import list_findings
from attnlab.experiments.deadline import Deadline, stop_at_deadline
from attnlab.experiments.ledger import FILE
from attnlab.experiments.schedulers import open_scheduler
from attnlab.provenance import collect_provenance
from attnlab.terminal import Bar, show_table


@dataclass(frozen=True, kw_only=True)
class ComparisonRequest:
    """How a comparison was asked for on the command line."""

    out: Path | None
    runs: Path
    controls: Controls
    on: str
    device: str
    jobs: int | None
    command: str
    until: str | None = None
    population: bool = True
    source: Path | None = None  # a ledger or its folder to draw from; nothing is trained

    def find_ledger(self) -> Path:
        """Return the ledger to draw from; FileNotFoundError if there is none."""
        source = self.source or Path()
        ledger = source / FILE if source.is_dir() else source
        if not ledger.is_file():
            raise FileNotFoundError(f"--from {source}: no {FILE} there")
        return ledger

    @contextmanager
    def open_terms(self, *, timed: bool = True) -> Iterator[ComparisonTerms]:
        """Yield the terms, with a scheduler and a progress bar."""
        deadline = Deadline.parse_optional(self.until)
        scheduler = open_scheduler(self.on, jobs=self.jobs, device=self.device)
        with stop_at_deadline(self.command), scheduler as on, Bar(1) as bar:
            shown = bar.note, bar.tick, self.command
            yield ComparisonTerms(on, self.out, self.runs, self.controls, *shown, deadline, timed, self.population)


def run_comparison(task: str, settings: Mapping[str, str], request: ComparisonRequest) -> bool:
    """Compare, print and write; return False if a run failed."""
    plan = plan_comparison(task, dict(settings))
    with request.open_terms() as terms:
        results, folder = compare(plan, terms) if request.source is None else draw(plan, terms, request.find_ledger())
        about: dict[str, str | int] = {"command": request.command, "on": request.on}
        about |= {"seeds": ", ".join(map(str, plan.seeds))}
        about |= collect_provenance(torch.device(terms.on.device if terms.on.here else "cpu"))
        about |= {"trained on": "; ".join(results.hardware)} if results.hardware else {}
    report = write_comparison(results, folder, about)
    for group in ("quality", "inside", "cost"):
        table = tabulate(results, group)
        if len(table.columns) > 1:
            show_table(f"{task}: {group}", list(table.columns), [list(row) for row in table.rows])
    print("\n".join((*list_findings(results), *list_remarks(results), f"report: {report}")), flush=True)
    return request.source is not None or not any(row.failures for row in results.rows)


def run_seed_plan(task: str, settings: Mapping[str, str], request: ComparisonRequest) -> bool:
    """Run the pilot, or read it from the ledger, and print how many seeds an effect needs; False if a run failed."""
    wanted = WantedEffect.parse(settings)
    plan = plan_comparison(task, {key: text for key, text in settings.items() if key not in PLAN_KEYS})
    check_pilot(plan)
    with request.open_terms(timed=False) as terms:
        results, _ = compare(plan, terms)
    needs = list_needs(results, wanted)
    table = tabulate_needs(needs)
    show_table(f"{task}: seeds needed", list(table.columns), [list(row) for row in table.rows])
    print("\n".join(describe_needs(results, wanted, needs)), flush=True)
    return not any(row.failures for row in results.rows)

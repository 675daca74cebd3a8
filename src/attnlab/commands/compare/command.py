"""`attnlab compare`: read the settings, compare, print the tables and write the page."""

from collections.abc import Mapping
from pathlib import Path

import torch

from attnlab.commands.compare.comparison import ComparisonTerms, compare
from attnlab.commands.compare.comparison_page import list_remarks, tabulate, write_comparison
from attnlab.commands.compare.plan import plan_comparison
from attnlab.commands.compare.summary import list_findings
from attnlab.experiments.deadline import Deadline, stop_at_deadline
from attnlab.experiments.schedulers import open_scheduler
from attnlab.provenance import collect_provenance
from attnlab.terminal import Bar, show_table


def run_comparison(
    task: str,
    settings: Mapping[str, str],
    *,
    out: Path | None,
    runs: Path,
    controls: bool,
    on: str,
    device: str,
    jobs: int | None,
    command: str,
    until: str | None = None,
) -> bool:
    """Compare, print and write; return False if a run failed."""
    plan = plan_comparison(task, dict(settings))
    deadline = Deadline.parse_optional(until)
    with stop_at_deadline(command), open_scheduler(on, jobs=jobs, device=device) as scheduler, Bar(1) as bar:
        terms = ComparisonTerms(scheduler, out, runs, controls, bar.note, bar.tick, command, deadline)
        results, folder = compare(plan, terms)
        about: dict[str, str | int] = {"command": command, "on": on, "seeds": ", ".join(map(str, plan.seeds))}
        about |= collect_provenance(torch.device(scheduler.device if scheduler.here else "cpu"))
        about |= {"trained on": "; ".join(results.hardware)} if results.hardware else {}
    report = write_comparison(results, folder, about)
    for group in ("quality", "inside", "cost"):
        table = tabulate(results, group)
        if len(table.columns) > 1:
            show_table(f"{task}: {group}", list(table.columns), [list(row) for row in table.rows])
    print("\n".join((*list_findings(results), *list_remarks(results), f"report: {report}")), flush=True)
    return not any(row.failures for row in results.rows)

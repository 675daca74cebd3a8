"""`attnlab compare` from its words to its table."""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from attnlab.commands.compare.comparison import ComparisonTerms, compare
from attnlab.commands.compare.comparison_page import remarks, table, write
from attnlab.commands.compare.plan import plan_comparison
from attnlab.commands.compare.summary import findings
from attnlab.experiments.deadline import Deadline, stop_at_deadline
from attnlab.experiments.schedulers import open_scheduler
from attnlab.provenance import collect_provenance
from attnlab.terminal import Bar, show_table


def run_comparison(
    task: str,
    said: Mapping[str, str],
    *,
    controls: bool,
    on: str,
    jobs: int | None,
    command: str,
    until: str | None = None,
) -> bool:
    """Compare, print and write; return False if some run failed. OutOfTimeError near the deadline."""
    values = dict(said)
    out, device = values.pop("out", None), values.pop("device", "auto")
    folder = Path(values.pop("runs", "runs"))
    plan = plan_comparison(task, values)
    deadline = Deadline.parse(until) if until else None
    with stop_at_deadline(command), open_scheduler(on, jobs=jobs, device=device) as where, Bar(1) as bar:
        terms = ComparisonTerms(
            where, Path(out) if out else None, folder, controls, bar.note, bar.tick, command, deadline
        )
        results, place = compare(plan, terms)
        about: dict[str, str | int] = {"command": command, "on": on, "seeds": ", ".join(map(str, plan.seeds))}
        about |= collect_provenance(torch.device(where.device if where.here else "cpu"))
        about |= {"trained on": "; ".join(results.hardware)} if results.hardware else {}
    report = write(results, place, about)
    for group in ("quality", "inside", "cost"):
        shown = table(results, group)
        if len(shown.columns) > 1:
            show_table(f"{task}: {group}", list(shown.columns), [list(row) for row in shown.rows])
    for line in (*findings(results), *remarks(results)):
        print(line)
    print(f"report: {report}")
    sys.stdout.flush()
    return not any(outcome.failed for outcome in results.outcomes)

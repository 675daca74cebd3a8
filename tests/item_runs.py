"""Items of a study in tests: run in this process, or drawn from values that are known by hand."""

from dataclasses import replace

from inline_scheduler import InlineScheduler

from attnlab.experiments.engine import Measured, RowReader, complete
from attnlab.experiments.ledger import Row
from attnlab.experiments.plan import Workplace
from attnlab.experiments.study import Setting


def make_setting(out, scale="smoke", seeds=(0,), *, rows=None, running=True, options=None, **place):
    """Return a setting whose ledger is OUT/ledger.jsonl, unless other rows are given."""
    where = Workplace.at(out, **place)
    reader = RowReader(where.open_ledger(), running=running) if rows is None else rows
    return Setting(scale, seeds, where, reader, options or {})


def run_item(item, out, on=None, *, progress=lambda done, total, what: None, **about):
    """Run what an item needs and the ledger of OUT lacks, then return what it finds."""
    setting = make_setting(out, **about)
    return complete(
        lambda rows: item(replace(setting, rows=rows)), setting.place, on or InlineScheduler(), progress=progress
    )


class KnownRows(RowReader):
    """Rows whose values are a function of the planned run; where it raises ValueError, the run failed."""

    def __init__(self, function):
        self.function, self.running = function, True
        self.asked = []  # every run, in order

    def read_plan(self, plan):
        self.asked += plan.values()
        rows = {key: self.make_row(run) for key, run in plan.items()}
        values = {key: dict(row.values) for key, row in rows.items() if not row.failed}
        return Measured(values, {key: row.failed for key, row in rows.items() if row.failed}, rows)

    def make_row(self, run):
        about = {"recipe": run.recipe, "seed": run.seed, "measure": run.measure, "edition": run.edition}
        try:
            about["values"] = self.function(run)
        except ValueError as error:
            about["failed"] = str(error)
        return Row(**about, provenance={"hardware": "a card", "torch": "2"})

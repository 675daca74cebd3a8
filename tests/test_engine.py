"""The engine: plan − ledger = jobs; every run leaves a row, with its values or the reason why it failed."""

import time
from dataclasses import dataclass
from functools import partial

import pytest
from inline_scheduler import InlineScheduler

from attnlab.experiments.deadline import GRACE_S, Deadline, OutOfTimeError
from attnlab.experiments.engine import MissingRunsError, RowReader, complete, gather, make_jobs
from attnlab.experiments.plan import Calculation, PlannedRun, Workplace
from attnlab.training.loop import NotFiniteError

CALLS = []


def compute(name, place, seed):
    CALLS.append((name, seed))
    if name == "broken":
        raise ValueError("no data")
    if name == "diverged":
        raise NotFiniteError("the loss is not finite")
    return {"square": seed * seed}


def plan(name="squares", seeds=(0, 1, 2)):
    return {seed: Calculation("square", {"name": name}, partial(compute, name), seed) for seed in seeds}


@pytest.fixture
def place(tmp_path):
    CALLS.clear()
    return Workplace.at(tmp_path, command="attnlab test")


@pytest.fixture
def on():
    return InlineScheduler()


def test_what_the_ledger_lacks_is_run_and_nothing_else(place, on):
    assert complete(lambda rows: rows.read_plan(plan(seeds=(0, 1))), place, on).values == {
        0: {"square": 0},
        1: {"square": 1},
    }
    measured = complete(lambda rows: rows.read_plan(plan()), place, on)
    assert {seed: x["square"] for seed, x in measured.values.items()} == {0: 0, 1: 1, 2: 4}
    assert CALLS == [("squares", 0), ("squares", 1), ("squares", 2)]
    about = measured.rows[2].provenance
    assert about["command"] == "attnlab test"
    assert {"hardware", "torch", "commit", "began"} <= set(about)


def test_what_depends_on_results_is_planned_when_they_are_there(place, on):
    def best(rows):
        first = rows.read_plan(plan("search")).values
        winner = max(first, key=lambda seed: first[seed]["square"])
        return rows.read_plan(plan("final", (winner,))).values

    assert complete(best, place, on) == {2: {"square": 4}}
    assert CALLS[-1] == ("final", 2)


def test_several_functions_run_side_by_side(place, on):
    functions = [lambda rows: rows.read_plan(plan("a")).values, lambda rows: rows.read_plan(plan("b", (5,))).values]
    both = complete(lambda rows: gather(rows, functions), place, on)
    assert both == [{0: {"square": 0}, 1: {"square": 1}, 2: {"square": 4}}, {5: {"square": 25}}]
    assert len(CALLS) == 4


def test_a_failure_is_a_row_and_is_tried_again_by_the_next_command_unless_it_is_final(place, on):
    ask = lambda rows: rows.read_plan(plan("broken", (0,)) | {"d": plan("diverged", (1,))[1]})  # noqa: E731
    measured = complete(ask, place, on)
    assert measured.failures == {0: "no data", "d": "the loss is not finite"}
    assert not measured.values
    assert CALLS == [("broken", 0), ("diverged", 1)]
    assert {row.failed: row.final for row in place.open_ledger().rows()} == {
        "no data": False,
        "the loss is not finite": True,
    }
    complete(ask, place, on)
    assert CALLS[2:] == [("broken", 0)]


def test_again_measures_what_the_ledger_has(place, on):
    for _ in range(2):
        reader = RowReader(place.open_ledger(), running=True, again=True)
        for _ in range(2):  # two items of one command share the run
            complete(lambda rows: rows.read_plan(plan(seeds=(3,))), place, on, reader=reader)
    assert CALLS == [("squares", 3)] * 2
    assert len(place.open_ledger().rows()) == 1


def test_without_running_missing_rows_are_failures(place, on):
    complete(lambda rows: rows.read_plan(plan(seeds=(0,))), place, on)
    rows = RowReader(place.open_ledger(), running=False)
    assert rows.read_plan(plan()).failures == dict.fromkeys((1, 2), "not in the ledger")
    with pytest.raises(MissingRunsError, match="2 planned runs"):
        RowReader(place.open_ledger(), running=True).read_plan(plan())


def test_rows_of_another_edition_are_kept_and_not_used(place, on):
    old = Calculation("square", {"name": "squares"}, partial(compute, "squares"), 1, edition=1)
    new = Calculation("square", {"name": "squares"}, partial(compute, "squares"), 1, edition=2)
    for run in (old, new):
        complete(lambda rows, run=run: rows.read_plan({0: run}), place, on)
    assert len(CALLS) == 2
    assert len(place.open_ledger().rows()) == 2


def test_a_row_from_before_a_key_was_added_still_counts(place, on):
    @dataclass(frozen=True)
    class Grown(Calculation):
        @property
        def defaults(self):
            return {"extra": 1}

    old, function = plan(seeds=(3,))[3], partial(compute, "squares")
    complete(lambda rows: rows.read_plan({0: old}), place, on)
    same, other = (Grown("square", {"name": "squares", "extra": extra}, function, 3) for extra in (1, 2))
    assert complete(lambda rows: rows.read_plan({0: same}), place, on).values == {0: {"square": 9}}
    assert len(CALLS) == 1
    complete(lambda rows: rows.read_plan({0: other}), place, on)
    assert len(CALLS) == 2


def test_a_failure_before_the_deadline_is_a_row_too(place):
    class Late(InlineScheduler):
        def run(self, jobs, **options):
            failed, error = super().run(jobs[:1]), OutOfTimeError()
            error.failed = failed
            raise error

    runs = {**plan("broken", (0,)), **plan(seeds=(1,))}
    with pytest.raises(OutOfTimeError, match="2 of 2 runs are left"):
        complete(lambda rows: rows.read_plan(runs), place, Late())
    assert [row.failed for row in place.open_ledger().rows()] == ["no data"]


def test_near_the_deadline_nothing_starts_and_the_message_counts_what_is_left(place, on):
    until = Deadline(time.monotonic() + GRACE_S + 1)
    with pytest.raises(OutOfTimeError, match="3 of 3 runs are left"):
        complete(lambda rows: rows.read_plan(plan()), place, on, until=until)
    assert not CALLS


@dataclass(frozen=True)
class Member(PlannedRun):
    """A run of a population of at most two; those of role B need A of the same seed."""

    role: str
    seed: int
    measure: str = "m"
    edition: int = 1

    @property
    def name(self):
        return f"{self.role}{self.seed}"

    @property
    def recipe(self):
        return {"role": self.role}

    @property
    def needs(self):
        return (Member("A", self.seed),) if self.role == "B" else ()

    @property
    def steps(self):
        return 10

    def group(self, place):
        return self.role

    def group_limit(self, place):
        return 2

    def is_trained(self, place):
        return (place.folder / self.name).exists()

    def train_together(self, others, place):
        CALLS.append(tuple(run.name for run in (self, *others)))
        for run in (self, *others):
            if run.seed != 9:  # which diverges
                (place.folder / run.name).parent.mkdir(parents=True, exist_ok=True)
                (place.folder / run.name).touch()

    def train(self, place):
        raise NotFiniteError(f"{self.name} diverges")

    def take_measure(self, place):
        gold = place.open_ledger().find(Member("A", self.seed).key)
        return {"value": self.seed, "after": None if gold is None else gold.values["value"]}

    def clean(self, place):
        (place.folder / self.name).unlink()


def test_groups_train_as_populations_and_needs_come_first(place, on):
    runs = {(role, seed): Member(role, seed) for role in "BA" for seed in (0, 1, 2)}
    measured = complete(lambda rows: rows.read_plan(runs), place, on)
    assert sorted(CALLS) == [("A0", "A1"), ("A2",), ("B0", "B1"), ("B2",)]
    assert measured.values["B", 2] == {"value": 2, "after": 2}
    trained = [name for name in on.names if "training" in name]
    assert all(name.startswith("A") for name in trained[:2])  # what others need comes first
    assert not any(place.folder.iterdir())  # cleaned once the rows are written


def test_a_member_that_diverges_is_trained_alone_and_fails_with_its_reason(place, on):
    measured = complete(lambda rows: rows.read_plan({seed: Member("A", seed) for seed in (1, 9)}), place, on)
    assert measured.values == {1: {"value": 1, "after": None}}
    assert measured.failures == {9: "A9 diverges"}


def test_a_run_whose_need_is_nowhere_is_refused(place):
    with pytest.raises(ValueError, match="B0 needs A0"):
        make_jobs([Member("B", 0)], place)

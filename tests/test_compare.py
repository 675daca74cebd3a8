"""`attnlab compare`: its settings, its controls, and its statistics over seeds."""

import math
from pathlib import Path

import numpy as np
import pytest
from properties import given, st
from scipy import stats

from attnlab.commands.compare.controls import HEADS, MATCHED, add_controls
from attnlab.commands.compare.cost import CostTable, take_first_batch
from attnlab.commands.compare.measures import list_measures
from attnlab.commands.compare.plan import plan_comparison
from attnlab.config import split_list
from attnlab.experiments.significance import compute_bootstrap_p, compute_interval, contrast_seeds, correct_by_holm
from attnlab.mechanisms import MECHANISMS
from attnlab.mechanisms.per_layer import LayerAttention, split_options
from attnlab.models.presets import build_on_meta
from attnlab.tasks import TASKS
from attnlab.training.recipe import resolve_recipe

TINY = {"data": "lexicon", "examples": "100", "held_out": "10", "width": "12", "layers": "1", "heads": "2"}
TINY |= {"feed_forward": "7", "batch_tokens": "200"}


# --- words ---


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("5e-4,1e-3", ["5e-4", "1e-3"]),
        ("(0.9,0.98)", ["(0.9,0.98)"]),
        ("(0.9,0.98),(0.9,0.999)", ["(0.9,0.98)", "(0.9,0.999)"]),
        ('"my, own.txt"', ["my, own.txt"]),
        ('"a,b",c', ["a,b", "c"]),
        ("", [""]),
        ("dagpam(initial=(1,2),tied=no),coda", ["dagpam(initial=(1,2),tied=no)", "coda"]),
    ],
)
def test_commas_separate_but_not_in_parentheses_or_quotes(text, values):
    assert split_list(text, "key") == values


@given(st.lists(st.text(alphabet="ab1.,()=", min_size=1), min_size=1, max_size=5, unique=True))
def test_what_is_quoted_comes_back_as_it_was(values):
    assert split_list(",".join(f'"{value}"' for value in values), "key") == values


@pytest.mark.parametrize("text", ["(1,2", "1,2)", 'a,"b', "1,,2", "1,", "a,a"])
def test_a_list_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="key="):
        split_list(text, "key")


def test_options_of_one_row():
    options = {"initial": "(1,2)", "tied": "no"}
    assert split_options("dagpam(initial=(1,2),tied=no)") == LayerAttention("dagpam", options)
    with pytest.raises(ValueError, match=r"NAME\(key=value"):
        split_options("dagpam(initial=1")


# --- the plan ---


def test_rows_differ_in_their_attention_and_runs_in_their_seed_alone():
    plan = plan_comparison("synthetic", TINY | {"attention": "softmax,coda", "seeds": "4", "seed": "7"})
    assert plan.seeds == (7, 8, 9, 10)
    one, other = (plan.recipe(row, 0, 9) for row in plan.rows)
    assert (one.data, one.training, one.decoding) == (other.data, other.training, other.decoding)
    assert one.training.seed == 9
    assert one.model != other.model
    task = TASKS["synthetic"].prepare(one.data, Path())
    assert take_first_batch(one, task).indices == take_first_batch(other, task).indices


def test_an_option_goes_to_the_attentions_that_have_it_and_to_the_row_that_says_it():
    plan = plan_comparison(
        "synthetic", TINY | {"attention": "softmax,coda,coda(alpha=8),softmax(heads=4)", "alpha": "2"}
    )
    options = [plan.recipe(row, 0, 1).model.attention_options for row in plan.rows]
    assert options == [{}, {"alpha": 2.0}, {"alpha": 8}, {}]
    assert [plan.recipe(row, 0, 1).model.heads for row in plan.rows] == [2, 2, 2, 4]


def test_lists_make_every_combination():
    plan = plan_comparison(
        "synthetic", TINY | {"attention": "softmax", "lr": "1e-3,2e-3", "betas": "(0.9,0.98),(0.9,0.999)"}
    )
    made = {(r.training.lr, r.training.betas) for k in range(4) for r in [plan.recipe(plan.rows[0], k, 1)]}
    assert made == {(lr, (0.9, b)) for lr in (1e-3, 2e-3) for b in (0.98, 0.999)}


def test_the_same_question_has_the_same_name_and_another_has_another():
    said = TINY | {"attention": "softmax,coda"}
    assert plan_comparison("synthetic", said).name == plan_comparison("synthetic", dict(reversed(said.items()))).name
    others = [said | {"seeds": "2"}, said | {"attention": "coda,softmax"}, said | {"lr": "1e-3,2e-3"}]
    assert len({plan_comparison("synthetic", each).name for each in [said, *others]}) == 4


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({}, "attention= is missing"),
        ({"attention": "softmax,cosa"}, "no attention is called 'cosa' .did you mean 'coda'"),
        ({"attention": "softmax,softmax"}, "softmax is given twice"),
        ({"attention": "softmax", "seeds": "0"}, "at least 1, got 0"),
        ({"attention": "softmax", "seeds": "many"}, "seeds=many: expected a whole number"),
        ({"attention": "softmax", "sedes": "3"}, "unknown key 'sedes' .did you mean 'seeds'"),
        ({"attention": "softmax,coda", "alhpa": "3"}, "unknown key 'alhpa' .did you mean 'alpha'"),
        ({"attention": "coda(alhpa=3)"}, "unknown key 'alhpa' .did you mean 'alpha'"),
        ({"attention": "softmax", "betas": "0.9,0.98"}, "parentheses, betas="),
        ({"attention": "softmax,coda", "alpha": "1,2"}, "more trials"),
        ({"attention": "softmax", "seed": "1,2"}, "--seeds 2"),
        ({"attention": "softmax", "examples": "10,20"}, "validation loss cannot choose"),
        ({"attention": "softmax", "beam": "1,5"}, "validation loss cannot choose"),
        ({"attention": "softmax", "lr": "1e-3,x"}, "lr=x: expected a number"),
        ({"attention": "softmax", "lr": "1e-3,-1"}, "lr must be above 0"),
        ({"attention": "softmax(examples=5)"}, "examples must be the same"),
        ({"attention": "softmax,softmax(lr=3)", "lr": "1,2"}, "also a grid, lr=1,2"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(said, message):
    with pytest.raises(ValueError, match=message):
        plan_comparison("synthetic", TINY | said)


# --- cost and controls ---


def counted(recipe):
    task = TASKS["synthetic"].prepare(recipe.data, Path())
    return sum(p.numel() for p in build_on_meta(recipe.resolve_model(task)).parameters())


def controlled(**said):
    plan = plan_comparison("synthetic", TINY | {"seeds": "1"} | said)
    costs = CostTable(TASKS["synthetic"].prepare(plan.recipe(plan.rows[0], 0, 1).data, Path()))
    return add_controls(plan, costs.count_parameters)


@pytest.mark.parametrize(
    ("attention", "most"),
    [("softmax,dagpam", "dagpam"), ("nap,talking-heads", "nap"), ("coda,dagpam", "coda")],
)
def test_no_other_feed_forward_is_nearer_to_the_largest_row(attention, most):
    plan = controlled(attention=attention)
    (control,) = [row for row in plan.rows if row.label == MATCHED]
    largest = max(counted(plan.recipe(row, 0, 1)) for row in plan.rows if not row.is_control)
    units = int(control.by_point[0]["feed_forward"])
    fixed = {key: text for key, text in TINY.items() if key != "feed_forward"}
    near = {
        n: counted(resolve_recipe("synthetic", fixed | {"feed_forward": str(n)})) for n in range(units - 2, units + 3)
    }
    assert min(near, key=lambda n: abs(near[n] - largest)) == units
    assert (
        f"feed_forward={units} instead of 7: {near[units]:,} parameters, {most} has {largest:,}" in control.description
    )
    assert plan.recipe(control, 0, 1).model.attention == "softmax"


def test_twice_the_heads_are_as_many_parameters():
    plan = controlled(attention="softmax,dagpam")
    (control,) = [row for row in plan.rows if row.label == HEADS]
    one, other = plan.recipe(plan.rows[0], 0, 1), plan.recipe(control, 0, 1)
    assert (one.model.heads, other.model.heads) == (2, 4)
    assert counted(one) == counted(other)


def test_a_control_follows_the_grid():
    plan = controlled(attention="softmax,dagpam", width="12,24")
    at = {row.label: [plan.recipe(row, k, 1).model for k in range(2)] for row in plan.rows if row.is_control}
    assert [model.width for model in at[MATCHED]] == [12, 24]
    assert at[MATCHED][0].feed_forward != at[MATCHED][1].feed_forward


@pytest.mark.parametrize(
    ("said", "note"),
    [
        (
            {"attention": "softmax,realformer"},
            "no row “softmax, matched parameters”: one unit of feed_forward adds 50,",
        ),
        ({"attention": "softmax,dagpam", "width": "14"}, "no row with twice the heads"),
        ({"attention": "dot", "model": "lstm-copy", "data": "subset"}, "no controls"),
    ],
)
def test_a_control_that_cannot_be_had_is_said(said, note):
    base = {k: x for k, x in TINY.items() if k not in ("layers", "feed_forward")} if "model" in said else TINY
    plan = plan_comparison("synthetic", base | {"seeds": "1", "length": "5"} | said)
    costs = CostTable(TASKS["synthetic"].prepare(plan.recipe(plan.rows[0], 0, 1).data, Path()))
    assert any(line.startswith(note) for line in add_controls(plan, costs.count_parameters).notes)


def test_softmax_alone_needs_no_control():
    assert len(controlled(attention="softmax").rows) == 1


def test_flops_are_those_of_the_matrix_products():
    """Of a classifier without its elementwise parts, by hand: forward once, backward twice; 12 tokens of width e."""
    said = {
        "data": "keyword",
        "length": "5",
        "examples": "3",
        "held_out": "3",
        "width": "8",
        "layers": "1",
        "heads": "2",
    }
    recipe = resolve_recipe("synthetic", said | {"feed_forward": "11", "batch_examples": "3"})
    size = CostTable(TASKS["synthetic"].prepare(recipe.data, Path())).find(recipe)
    b, n, e, f, classes = 3, 5, 8, 11, 2
    attention = 2 * b * n * e * e * 4 + 2 * 2 * b * n * n * e  # four projections; q kᵀ and the weights times v
    forward = attention + 2 * 2 * b * n * e * f + 2 * b * e * classes
    assert size.flops == 3 * forward / b


def test_a_model_that_cannot_be_built_has_a_reason():
    recipe = resolve_recipe("synthetic", TINY | {"attention": "shaped"})
    costs = CostTable(TASKS["synthetic"].prepare(recipe.data, Path()))
    assert costs.find(recipe) is None
    assert "cannot be a cross attention" in costs.explain(recipe)


def test_flops_that_cannot_be_counted_have_a_reason(tmp_path):
    code = (
        "from attnlab.mechanisms.softmax import Softmax\n\nclass Looks(Softmax):\n    def mix(self, q, *more, **named):"
    )
    code += "\n        assert float(q.sum()) < 1e9\n        return super().mix(q, *more, **named)\n"
    (tmp_path / "looks.py").write_text(code)
    recipe = resolve_recipe("synthetic", TINY | {"attention": f"{tmp_path / 'looks.py'}:Looks"})
    size = CostTable(TASKS["synthetic"].prepare(recipe.data, Path())).find(recipe)
    assert size.parameters == counted(recipe)
    assert size.flops is None
    assert "meta" in size.uncounted


# --- conclusions ---

VALUES = st.lists(st.floats(-100, 100), min_size=3, max_size=7)


@given(VALUES, VALUES)
def test_the_paired_test_is_scipys(ours, theirs):
    seeds = range(min(len(ours), len(theirs)))
    rows = ({s: ours[s] for s in seeds}, {s: theirs[s] for s in seeds} | {99: 1.0})
    found = contrast_seeds(*rows, paired=True)
    differences = np.subtract(ours[: len(seeds)], theirs[: len(seeds)])
    if np.std(differences) < 1e-6:
        return
    wanted = stats.ttest_rel(ours[: len(seeds)], theirs[: len(seeds)])
    assert found.p == pytest.approx(wanted.pvalue, rel=1e-6, abs=1e-12)
    low, high = wanted.confidence_interval(0.95)
    assert found.interval == pytest.approx((low, high), rel=1e-6, abs=1e-9)


@given(VALUES, VALUES)
def test_the_unpaired_test_is_scipys_by_welch_and_reads_all_seeds(ours, theirs):
    if min(np.std(ours), np.std(theirs)) < 1e-3:
        return
    found = contrast_seeds(dict(enumerate(ours)), dict(enumerate(theirs)), paired=False)
    wanted = stats.ttest_ind(ours, theirs, equal_var=False)
    assert found.mean == pytest.approx(np.mean(ours) - np.mean(theirs), abs=1e-9)
    assert found.p == pytest.approx(wanted.pvalue, rel=1e-6, abs=1e-12)
    low, high = wanted.confidence_interval(0.95)
    assert found.interval == pytest.approx((low, high), rel=1e-6, abs=1e-9)


def test_equal_rows_and_too_few_seeds_prove_nothing():
    for paired in (True, False):
        same = contrast_seeds(*[{1: 2.0, 2: 3.0, 3: 5.0}] * 2, paired=paired)
        assert (same.p, same.mean) == (1.0, 0.0)
        few = contrast_seeds({1: 2.0, 2: 3.0}, {1: 1.0, 2: 5.0}, paired=paired)
        assert (few.mean, few.interval, few.p, few.detectable) == (-0.5, None, None, None)
        assert contrast_seeds({1: 2.0}, {2: 2.0}, paired=paired) is None
        assert contrast_seeds({1: math.inf}, {1: 2.0}, paired=paired) is None
    constant = contrast_seeds({1: 2.0, 2: 3.0, 3: 5.0}, {1: 1.0, 2: 2.0, 3: 4.0}, paired=True)
    assert (constant.p, constant.detectable) == (None, None)
    flat = contrast_seeds({1: 2.0, 2: 2.0, 3: 2.0}, {1: 1.0, 2: 1.0, 3: 1.0}, paired=False)
    assert (flat.p, flat.detectable) == (None, None)
    rows = ({s: (k + d) / 200 for s, k in enumerate((163, 77, 20))} for d in (1, 0))
    assert contrast_seeds(*rows, paired=True).p is None, "a constant, but for rounding"
    assert compute_interval([1.0, 2.0, math.inf]) is None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holms_method_rejects_as_it_is_defined(ps):
    """Step down: the k-th smallest p is rejected while p ≤ level/(m − k + 1), and none after the first that is not."""
    found = correct_by_holm({str(k): p for k, p in enumerate(ps)} | {"none": None})
    assert found["none"] is None
    for level in (0.01, 0.05, 0.2):
        rejected, going = set(), True
        for place, k in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
            going = going and ps[k] * (len(ps) - place) <= level
            rejected |= {k} if going else set()
        assert {k for k in range(len(ps)) if found[str(k)] <= level} == rejected


def test_the_paired_bootstrap_tells_a_better_translation_from_an_equal_one():
    lines = [f"the {a} sees the {b} near the old {c}" for a in "pqrst" for b in "klm" for c in "xyz"]
    worse = [line.replace("sees the", "and a") if k % 2 else line for k, line in enumerate(lines)]
    assert compute_bootstrap_p(lines, worse, lines) < 0.01
    assert compute_bootstrap_p(worse, worse, lines) == 1.0


def test_a_measure_that_no_run_has_is_left_out_and_the_task_names_the_judge():
    found = {"perplexity": 3.0, "valid_loss": 1.1, "accuracy": math.nan, "scores": {"BLEU": 20.0}, "inside": {"jsd": 1}}
    log, valid, bleu = "log-perplexity (nats)", "validation log-perplexity (nats)", "BLEU"
    names = [m.name for m in list_measures("perplexity", "test", [found])]
    assert names == [log, valid, bleu, "perplexity", "head JSD (nats a sentence)"]
    assert list_measures("perplexity", "test", [found])[0].read(found) == math.log(3)
    names = [m.name for m in list_measures("accuracy", "valid", [found | {"accuracy": 0.5}])]
    assert names[:3] == ["accuracy", log, bleu]  # where there is no test part, validation is not shown twice


def test_all_stands_for_every_mechanism_with_softmax_first():
    plan = plan_comparison("synthetic", {"attention": "all,softmax(scale=0.1)"})
    labels = [row.label for row in plan.rows]
    assert labels[0] == "softmax"
    assert labels[-1] == "softmax(scale=0.1)"
    assert sorted(labels[:-1]) == sorted(MECHANISMS)

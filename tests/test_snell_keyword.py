"""Figure 7: which order of γ holds, from measures known by hand, and when it is looked at."""

import pytest
import torch
from item_runs import KnownRows, make_setting

from attnlab.studies.snell2021.copying import read_seeds
from attnlab.studies.snell2021.keyword import PLACES, KeywordExperiment, check_hypothesis, fig7, find_early

# at, after, mean, last: Hypothesis 2 at the second measure, Observation 3 at the last
SECOND = [(0.0, 0.0, 0.0, 0.0), (2.0, 1.0, 0.1, 0.2), (9.0, 11.0, 4.0, 20.0), (3.0, 11.0, 2.5, 20.0)]
# γ_l* never exceeds γ̄ by 1
NEVER = [(0.0, 0.0, 0.0, 0.0), (0.5, 0.4, 0.1, 0.2), (0.6, 0.4, 0.1, 0.2), (0.9, 0.4, 0.1, 0.2)]


@pytest.fixture
def setting(tmp_path):
    """Rows of seeds with these measures; nothing is trained."""

    def make(*seeds):
        def curves(run):
            measures = {place: [row[k] for row in seeds[run.seed]] for k, place in enumerate(PLACES)}
            return {"steps": [0, 2, 4, 100], "is_finite": True, "measures": measures}

        return make_setting(tmp_path, seeds=tuple(range(len(seeds))), rows=KnownRows(curves))

    return make


@pytest.fixture
def cells(setting):
    return lambda *seeds: {(cell.row, cell.column): cell for cell in fig7(setting(*seeds)).cells}


def test_early_is_the_first_time_and_never_is_said(setting):
    results = read_seeds(setting(SECOND, NEVER), {"case": KeywordExperiment()}, (0, 1))["case"]
    assert find_early(results).tolist() == [1, -1]


def test_the_early_order_is_read_where_it_is(cells):
    found = cells(SECOND, SECOND, SECOND)
    assert found["one direction", "early: γ_l* − γ_l*+1"].values == (1.0,) * 3
    assert found["one direction", "early: Hypothesis 2 (eq. 24) holds, share of seeds"].mean == 1.0
    assert found["one direction", "early: Hypothesis 1 (eq. 23) holds, share of seeds"].mean == 0.0
    assert found["both directions", "late: Observation 3 (eq. 25) holds, share of seeds"].mean == 1.0
    assert found["both directions", "late: γ_L − γ_l*"].values == (17.0,) * 3


def test_a_seed_without_an_early_order_is_left_out_and_told(cells):
    found = cells(SECOND, NEVER, SECOND)
    cell = found["one direction", "early: γ_l*+1 − γ̄"]
    assert cell.values == pytest.approx((0.9, 0.9))
    assert cell.note.endswith("in 1 of 3 seeds γ_l* never exceeds γ̄ by 1")
    assert len(found["one direction", "late: γ_L − γ_l*"].values) == 3
    none = cells(NEVER, NEVER)["one direction", "early: Hypothesis 2 (eq. 24) holds, share of seeds"]
    assert none.not_run == "in 2 of 2 seeds γ_l* never exceeds γ̄ by 1"


@pytest.mark.parametrize(
    ("four", "expected"),
    [
        ((9, 5, 1, 1.5), True),
        ((9, 5, 1.5, 1), True),
        ((5, 9, 1, 1), False),
        ((9, 5, 1, 4.9), False),
        ((9, 8.9, 5, 1), False),
    ],
)
def test_about_the_same_is_closer_than_what_is_far_apart(four, expected):
    assert bool(check_hypothesis(*torch.tensor(four)[:, None])) is expected


def test_the_first_updates_are_measured_finely():
    assert KeywordExperiment(steps=300, every=100, finely=(6, 2)).measured_at == (0, 2, 4, 6, 100, 200, 300)
    assert KeywordExperiment(steps=4, every=2, finely=(100, 1)).measured_at == (0, 1, 2, 3, 4)
    assert KeywordExperiment(steps=200, every=100).measured_at[:3] == (0, 100, 200)

"""The search for a learning rate, from perplexities known by hand, and the items that use it."""

import pytest
from item_runs import KnownRows, make_setting

from attnlab.experiments import learning_rates as rates
from attnlab.experiments.corpora import StudyCorpus
from attnlab.experiments.engine import NOT_MEASURED
from attnlab.experiments.plan import Measure
from attnlab.experiments.variants import Variant, Variants, read_perplexity
from attnlab.studies import open_study
from attnlab.studies.heo2024.deep import rates as deep_rates
from attnlab.studies.zheng2021.cascade_ablation import rates as ablation_rates

PLAIN = Variant("softmax", "plain", {"attention": "softmax"})
OTHER = Variant("coda", "other", {"attention": "coda", "heads": "4"})
THIRD = Variant("nap", "third", {"attention": "nap"})
TEXT = StudyCorpus(
    "lexicon", "a text", "synthetic",
    {"smoke": {"data": "lexicon", "examples": "60", "held_out": "20", "layers": "1", "width": "8", "heads": "2",
               "lr": "4e-3", "steps": "3"}},
)  # fmt: skip
VALID, LENGTH, TEST = rates.VALIDATION, "length", "test perplexity"
BESTS = {"softmax": 2e-3, "coda": 8e-3, "nap": 4e-3}


class World:
    """Runs whose values follow from their recipes: an attention is best at its rate of BESTS, and its seed is added.

    Test perplexity is twice that of validation; the length is 7 for coda, else 9.
    """

    def __init__(self, out):
        self.out, self.fail, self.reason = out, lambda attention, rate, seed: False, "it diverged"

    def known(self, run):
        attention, rate, seed = run.trained.model.attention, run.trained.training.lr, run.seed
        if self.fail(attention, rate, seed):
            raise ValueError(self.reason)
        valid = {"coda": 50.0, "nap": 60.0}.get(attention, 53.0) + 1e3 * abs(rate - BESTS[attention]) + seed
        return {
            "perplexity": {"valid": valid, "test": 2 * valid},
            "length": 7 if attention == "coda" else 9,
            "scores": {"BLEU": valid / 2, "compound-split BLEU": valid / 2},
        }

    def setting(self, scale="smoke", seeds=(5, 7, 11), **options):
        self.rows = KnownRows(self.known)
        return make_setting(self.out, scale, seeds, rows=self.rows, options=options)

    @property
    def asked(self):
        recipes = [run.trained for run in self.rows.asked]
        return [(r.model.attention, r.training.lr, r.training.seed, r.model.heads) for r in recipes]

    def cells(self, scale="smoke", corpus=TEXT, **options):
        found = rates.compare_at_best_rates(
            corpus.at(self.setting(scale, **options)), (PLAIN, OTHER, THIRD), peer=PLAIN,
            columns={TEST: read_perplexity("test"), LENGTH: lambda values: values["length"]},
            side=lambda variant, column: {"coda": -1, "nap": 1}[variant.name] * (1 if column == TEST else -1),
            train=lambda ground, some: Variants("rates", ground, some, Measure("none", dict), tuple(BESTS)),
        )  # fmt: skip
        self.remarks = found.remarks
        return {(cell.row, cell.column): cell for cell in found.cells}


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_one_seed_searches_and_all_seeds_are_trained_at_the_best(world):
    world.cells()
    heads = {"coda": 4, "softmax": 2, "nap": 2}  # what a variant changes beside its rate stays changed
    assert set(world.asked[:9]) == {(name, rate, 5, heads[name]) for name in BESTS for rate in (2e-3, 4e-3, 8e-3)}
    assert set(world.asked[9:]) == {
        (name, rate, seed, heads[name]) for name, rate in BESTS.items() for seed in (5, 7, 11)
    }


def test_the_rows_are_these_and_no_others(world):
    cells = world.cells()
    search = {
        (f"a text, lr {rate}: {name}", VALID)
        for rate in ("0.002", "0.004", "0.008")
        for name in ("plain", "other", "third")
    }
    both = {f"a text: {name}, at the best rate tried" for name in ("plain", "other", "third")}
    both |= {f"a text: {name} − plain, each at the best rate tried" for name in ("other", "third")}
    assert set(cells) == search | {(row, column) for row in both for column in (TEST, LENGTH)}
    assert all(cell.sign == 0 for cell in cells.values() if cell.column == VALID)  # which chose, and judges nothing
    assert world.remarks == (rates.REMARK, "Trained on a card, torch 2.")


def test_each_is_compared_with_its_peer_at_that_ones_own_best(world):
    cells = world.cells()
    assert cells["a text, lr 0.002: other", VALID].values == (61.0,)
    assert cells["a text: other, at the best rate tried", TEST].values == (110.0, 114.0, 122.0)
    assert cells["a text: other, at the best rate tried", TEST].note == "lr 0.008, the highest tried"
    assert cells["a text: third, at the best rate tried", TEST].note == "lr 0.004"
    gap = cells["a text: other − plain, each at the best rate tried", TEST]
    assert gap.values == (-6.0,) * 3  # and not −10, with the peer at the recipe's rate
    assert (gap.sign, gap.verdict) == (-1, "same direction")
    assert gap.note == "lr 0.008, the highest tried; lr 0.002, the lowest tried"
    length = cells["a text: other − plain, each at the best rate tried", LENGTH]
    assert (length.values, length.sign, length.verdict) == ((-2,) * 3, 1, "opposite")
    assert cells["a text: third − plain, each at the best rate tried", TEST].sign == 1


def test_the_recipes_own_rate_is_the_run_of_other_items(world):
    settings = TEXT.settings["smoke"] | {"lr": "1.2345678e-3"}
    for corpus in (TEXT, StudyCorpus("odd", "odd", "synthetic", {"smoke": settings})):
        ground = corpus.at(world.setting(seeds=(5,)))
        own = rates.vary_rate(PLAIN, ground)[1.0]
        assert ground.recipe(5, own.values).name() == ground.recipe(5, PLAIN.values).name()


def test_a_recipe_that_names_its_rate_nowhere_has_the_one_of_its_model(world):
    settings = {name: value for name, value in TEXT.settings["smoke"].items() if name != "lr"}
    cells = world.cells(corpus=StudyCorpus("named", "named", "synthetic", {"smoke": settings}))
    assert len({row for row, column in cells if column == VALID}) == 9
    assert all(cell.values for cell in cells.values())


def test_what_is_left_out_is_said_and_nothing_is_trained_for_it(world):
    cells = world.cells(attention="softmax,nap")
    assert {name for name, *_ in world.asked} == {"softmax", "nap"}
    left_out = cells["a text: other − plain, each at the best rate tried", TEST]
    assert "excluded" in left_out.not_run
    assert not left_out.note
    assert "runs at scale smoke" in world.cells("small")["a text, 1 times the rate: plain", VALID].not_run
    assert not world.asked


def test_a_rate_that_diverges_is_not_the_best(world):
    world.fail = lambda attention, rate, seed: attention == "coda" and rate == 8e-3 and seed == 5
    cells = world.cells()
    assert cells["a text, lr 0.008: other", VALID].not_run == "it diverged"
    assert cells["a text: other, at the best rate tried", TEST].note == "lr 0.004"


def test_a_seed_that_diverges_at_the_best_is_told_beside_the_rate(world):
    world.fail = lambda attention, rate, seed: attention == "nap" and seed == 11
    cell = world.cells()["a text: third − plain, each at the best rate tried", TEST]
    assert len(cell.values) == 2
    assert cell.note.startswith("lr 0.004; lr 0.002, the lowest tried; 1 of 3 seeds")


def test_where_every_rate_diverges_no_seed_is_spent(world):
    world.fail = lambda attention, rate, seed: attention == "coda" and seed == 5
    cells = world.cells()
    assert not any(name == "coda" for name, *_ in world.asked[9:])
    for row in ("a text: other, at the best rate tried", "a text: other − plain, each at the best rate tried"):
        assert cells[row, TEST].not_run == "other fails at every rate: it diverged"
    assert cells["a text: third − plain, each at the best rate tried", TEST].values


def at_best(findings):
    return {
        (cell.row.rpartition(": ")[2].removesuffix(", each at the best rate tried"), cell.column): (
            cell.item,
            cell.sign,
        )
        for cell in findings.cells
        if cell.row.endswith("each at the best rate tried") and cell.values
    }


def test_the_items_compare_attentions_with_softmax_on_the_test_part(world, monkeypatch):
    monkeypatch.setitem(BESTS, "dagpam", 4e-3)
    for name in ("non", "de-attention", "coda-cs", "realformer"):
        monkeypatch.setitem(BESTS, name, 4e-3)
    here = world.setting(seeds=(0, 1, 2))
    assert at_best(deep_rates(here)) == {
        ("daGPAM, λ trained − softmax", TEST): ("rates", -1), ("daGPAM, λ⁺ = 1, λ⁻ = 1 − softmax", TEST): ("rates", 0),
        ("NAP − softmax", TEST): ("rates", 1), ("NON − softmax", TEST): ("rates", 1),
        ("de-attention − softmax", TEST): ("rates", 1),
    }  # fmt: skip
    assert {cell.row.split(":")[0].split(",")[0] for cell in deep_rates(here).cells} == {
        "Penn Treebank",
        "artificial text",
    }
    assert at_best(ablation_rates(here)) == {
        (f"{name} − Transformer", "BLEU"): ("rates", 1) for name in ("CODA", "CODA-CS", "RealFormer")
    }
    assert all("rates" in open_study(name).items for name in ("heo2024", "zheng2021"))


def test_a_rate_that_an_old_ledger_lacks_is_no_edge(world):
    """A search that was longer later leaves the notes of earlier runs true."""
    world.fail, world.reason = lambda attention, rate, seed: rate == 8e-3, NOT_MEASURED
    assert world.cells()["a text: third, at the best rate tried", TEST].note == "lr 0.004, the highest tried"

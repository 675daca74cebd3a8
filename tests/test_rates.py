"""The search for a rate of learning, from perplexities known by hand."""

import pytest
import torch

from attnlab.studies import rates, variants
from attnlab.studies.corpora import Corpus
from attnlab.studies.study import Setting
from attnlab.studies.trained import Measure, Trained
from attnlab.studies.variants import Variant, Variants

PLAIN, OTHER = Variant("softmax", "plain", {"attention": "softmax"}), Variant("coda", "other", {"attention": "coda"})
TEXT = Corpus(
    "lexicon", "a text", "synthetic",
    {"smoke": {"data": "lexicon", "examples": "60", "held_out": "20", "layers": "1", "width": "8", "heads": "2",
               "lr": "4e-3", "steps": "3"}},
)  # fmt: skip


@pytest.fixture
def searched(tmp_path, monkeypatch):
    """Cells by row and column, and every (attention, rate, seed) that was trained; plain is best at its recipe's,
    other at twice that."""
    asked = []

    def known(recipe):
        rate, seed = recipe.training.lr, recipe.training.seed
        asked.append((recipe.model.attention, rate, seed))
        best = 8e-3 if recipe.model.attention == "coda" else 4e-3
        valid = (50.0 if recipe.model.attention == "coda" else 53.0) + 1e3 * abs(rate - best) + seed
        return {"perplexity": {"valid": valid, "test": 2 * valid}}

    monkeypatch.setattr(
        variants, "trained", lambda recipes, *_: Trained({key: known(made) for key, made in recipes.items()}, {})
    )

    def run(scale="smoke", names=("softmax", "coda"), **options):
        ground = TEXT.on(Setting(scale, (5, 7, 11), torch.device("cpu"), tmp_path / "work" / "item", options=options))
        train = lambda ground, some: Variants("rates", ground, some, Measure("none", dict), names)  # noqa: E731
        columns = {"test perplexity": lambda found: found["perplexity"]["test"]}
        cells = rates.searched(ground, (PLAIN, OTHER), PLAIN, columns, lambda *_: -1, train)
        return {(cell.row, cell.column): cell for cell in cells}, asked

    return run


def test_one_seed_searches_and_all_seeds_are_trained_at_the_best(searched):
    _, asked = searched()
    search = {(name, rate, 5) for name in ("softmax", "coda") for rate in (2e-3, 4e-3, 8e-3)}
    best = {(name, rate, seed) for name, rate in (("softmax", 4e-3), ("coda", 8e-3)) for seed in (5, 7, 11)}
    assert set(asked[:6]) == search
    assert set(asked[6:]) == best


def test_each_is_held_against_its_peer_at_its_own_best(searched):
    cells, _ = searched()
    assert cells["a text, lr 0.002: other", "validation perplexity"].values == (61.0,)
    gap = cells["a text: other − plain, each at its best rate", "test perplexity"]
    assert gap.values == (-6.0,) * 3
    assert (gap.verdict, gap.note) == ("same direction", "lr 0.008 and lr 0.004")
    assert cells["a text: other, at its best rate", "test perplexity"].values == (110.0, 114.0, 122.0)


def test_the_recipes_own_rate_is_the_run_of_other_items(searched, tmp_path):
    ground = TEXT.on(Setting("smoke", (5,), torch.device("cpu"), tmp_path / "work" / "item"))
    own = rates.at_rates(PLAIN, ground)[1]
    assert ground.recipe(5, own.values).name() == ground.recipe(5, PLAIN.values).name()


def test_what_is_left_out_is_said_and_nothing_is_chosen_for_it(searched):
    cells, asked = searched(attention="softmax")
    assert {name for name, *_ in asked} == {"softmax"}
    assert "left out" in cells["a text: other − plain, each at its best rate", "test perplexity"].not_run
    assert (
        "run at scale smoke" in searched("small")[0]["a text, lr 1 times the recipe's: plain", rates.VALIDATION].not_run
    )

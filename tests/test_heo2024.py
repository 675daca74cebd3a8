"""Heo & Choi 2024: the geometry by formulas, the tables by hand, and deep models that are trained."""

import csv

import numpy as np
import pytest
import torch
from item_runs import KnownRows, make_setting, run_item
from matplotlib.path import Path as Polygon
from typer.testing import CliRunner

from attnlab.cli import app
from attnlab.experiments.corpora import StudyCorpus
from attnlab.experiments.joint_recipes import name_group
from attnlab.experiments.run_measures import initialize_model
from attnlab.mechanisms import attention
from attnlab.studies import open_study
from attnlab.studies.heo2024 import deep
from attnlab.studies.heo2024.attentions import ALL, GRID, SOFTMAX, STARTS, TRAINED, read_models
from attnlab.studies.heo2024.initialisation import faithfulness, read_start
from attnlab.studies.heo2024.measures import DEEP as MEASURE
from attnlab.studies.heo2024.measures import draw_batches
from attnlab.studies.heo2024.plan import ARTIFICIAL_TEXT, DEEP, LANGUAGE, OTHER, TINY, TRANSLATION
from attnlab.studies.heo2024.reachable import (
    VALUES,
    compute_area_ratio,
    compute_share_outside,
    convex,
    draw_outputs,
    find_region,
)
from attnlab.studies.heo2024.shallow import language, translation
from attnlab.training import runs

SEEDS = (0, 1, 2)
TEXT = "artificial text, 5 layers"
SHORT = StudyCorpus(
    "lexicon-text", "short", "language",
    {"smoke": {**ARTIFICIAL_TEXT, **TINY, "layers": "2", "steps": "7", "evaluate_at": "(3,7)"}}, tags=OTHER,
)  # fmt: skip


def cells(findings):
    return {(cell.row, cell.column): cell for cell in findings.cells}


# --- Figures 1 and 3 ---


@pytest.mark.parametrize("pair", [(0.0, 0.0), (1.0, 1.0), (1.0, 0.0), (0.5, 2.0)])
def test_the_area_of_a_triangle_by_minkowskis_formula(pair):
    """|A ⊕ B| = |A| + |B| + 2V(A, B); of a triangle T and −T the mixed area V is 2|T|."""
    plus, minus = pair
    triangle = np.array([[0.0, 0.0], [3.0, 1.0], [1.0, 2.0]])
    expected = (1 + plus) ** 2 + minus**2 + 2 * (1 + plus) * minus * 2
    assert compute_area_ratio(triangle, plus, minus) == pytest.approx(expected)


@pytest.mark.parametrize("pair", [(1.0, 1.0), (0.5, 0.5), (1.0, 0.5), (1.0, 2.0)])
def test_the_mechanism_stays_in_the_region_and_reaches_its_corners(pair):
    """Outputs of daGPAM itself, with logits small and huge."""
    plus, minus = pair
    mechanism = attention("dagpam", heads=1, head_dim=4, initial=pair, tied=plus == minus, fixed=True).eval()
    values = torch.tensor(VALUES, dtype=torch.float32)[None, None]
    sharp = torch.rand(1, 1, 1, 1) * torch.tensor([0.1, 1.0, 30.0, 300.0]).repeat(150)[:600, None]
    q, k = torch.randn(1, 1, 600, 4) * sharp, torch.randn(1, 1, 4, 4)
    made = (mechanism.weights(q, k)[0] @ values)[0, 0].detach().numpy()
    corners = find_region(VALUES, plus, minus)
    assert (
        Polygon(corners).contains_points(made, radius=1e-3).all()
        or Polygon(corners[::-1]).contains_points(made, radius=1e-3).all()
    )
    assert max(np.ptp(made, axis=0) / np.ptp(corners, axis=0)) > 0.7


def test_convex_weights_stay_inside_and_affine_ones_hold_the_hull():
    assert compute_share_outside(VALUES, draw_outputs(VALUES, 0.0, 0.0, 500, 3)) == 0.0
    assert compute_share_outside(VALUES, draw_outputs(VALUES, 1.0, 1.0, 500, 3)) > 0.3
    assert compute_share_outside(find_region(VALUES, 1.0, 1.0), VALUES) == 0.0
    assert (
        compute_share_outside(find_region(VALUES, 1.0, 2.0), VALUES * 0.0) == 0.0
    )  # the sum of the weights is 0: 0 is reached
    assert compute_share_outside(VALUES, np.array([[0.5, 0.5], [2.0, 2.0], [-0.1, 0.0], [0.0, 0.0]])) == 0.5


def test_the_item_draws_both_figures(tmp_path):
    found = convex(make_setting(tmp_path, seeds=SEEDS))
    assert set(found.figures) == {"figure1", "figure3"}
    by_place = cells(found)
    assert by_place["softmax", "outputs outside the convex hull (%)"].values == (0.0, 0.0, 0.0)
    signed = by_place["daGPAM, λ⁺ = 1, λ⁻ = 1", "outputs outside the convex hull (%)"]
    assert signed.verdict == "same direction"


# --- the tables, from values known by hand ---


@pytest.fixture
def known(tmp_path):
    """A setting whose runs have values known by hand; nothing is trained."""

    def make_values(run):
        name, seed = run.trained.model.attention, run.seed
        dagpam = name == "dagpam"
        quality = 100.0 - 2 * dagpam + (name in ("nap", "non")) * 20 + seed * 0.1
        by_layer = [9.0, 0.5 + 0.2 * dagpam, 0.1 + 0.01 * dagpam]
        rows = [{"step": s, "layer": layer, "norm": (1 + dagpam) * 2.0**s} for s in (0, 1) for layer in (0, 1)]
        states = dict.fromkeys(("relative residual", "residual norm"), by_layer)
        return {
            "perplexity": {"valid": quality, "test": quality}, "scores": {"BLEU": quality}, "gradients": rows,
            "states": {**states, "mean cosine": [-x for x in by_layer]},
        }  # fmt: skip

    return make_setting(tmp_path, seeds=SEEDS, rows=KnownRows(make_values))


def test_the_deep_tables_by_hand(known):
    found = cells(deep.ptb(known))
    assert found[f"{TEXT}: daGPAM, λ trained − softmax", "test perplexity"].values == pytest.approx((-2.0,) * 3)
    assert found[f"{TEXT}: NAP − softmax", "test perplexity"].verdict == "same direction"
    assert found[f"{TEXT}: de-attention − softmax", "test perplexity"].verdict == "open"
    residual = found[f"{TEXT}: daGPAM, λ trained − softmax", "relative residual, mean over layers"]
    assert residual.values == pytest.approx((0.105,) * 3)  # the state before any layer is not one of them
    last = found[f"{TEXT}: softmax", "mean cosine, after the last layer"]
    assert last.values == pytest.approx((-0.1,) * 3)
    assert found[f"{TEXT}: daGPAM, λ trained − softmax", "mean cosine, after the last layer"].sign == -1
    gradients = cells(deep.gradients(known))
    mean = gradients[f"{TEXT}: softmax", "query gradient, mean over steps and layers"]
    assert mean.values == (1.5,) * 3
    start = gradients[f"{TEXT}: daGPAM, λ trained − softmax", "query gradient at the start"]
    assert (start.values, start.sign) == ((1.0,) * 3, 1)


def test_the_published_figures_stand_where_they_belong(known):
    ptb = cells(deep.ptb(known))["Penn Treebank, 15 layers: softmax", "test perplexity"]
    assert (ptb.published, ptb.tags[0]) == (108.26, "other model")
    wikitext = cells(language(known))["WikiText-103, 8 layers: daGPAM, λ trained − softmax", "test perplexity"]
    assert (wikitext.published, wikitext.sign) == (-0.63, -1)
    iwslt = cells(translation(known))
    assert iwslt["IWSLT14 en→de, Pre-LN: daGPAM, λ trained − softmax", "BLEU"].published == 0.71
    post = iwslt["artificial language pair, Post-LN: daGPAM, λ trained − softmax", "BLEU"]
    assert (post.sign, post.verdict) == (0, "no verdict")


def test_enwik8_is_the_papers_text_but_has_no_number_of_it(known):
    found = cells(language(known))
    assert all(
        found[f"enwik8, 8 layers: {name}", "test perplexity"].published is None
        for name in ("softmax", "daGPAM, λ trained")
    )
    gap = found["enwik8, 8 layers: daGPAM, λ trained − softmax", "test perplexity"]
    assert (gap.published, gap.sign, gap.tags[0]) == (None, -1, "other model")


def test_where_lambda_starts_is_one_population_for_each_start_of_the_matrix(known, tmp_path):
    ground = DEEP[0].at(make_setting(tmp_path, "full"))
    groups: dict = {}
    for each in STARTS:
        groups.setdefault(name_group(ground.recipe(0, each.values)), []).append(each.label)
    assert None not in groups
    assert sorted(map(len, groups.values())) == [4, 4]
    found = cells(deep.starts(known))
    gap = found[f"{TEXT}: daGPAM, λ from 0.0, W⁻ random − softmax", "test perplexity"]
    assert (gap.values, gap.verdict) == (pytest.approx((-2.0,) * 3), "no verdict")


def test_the_recipes_are_what_their_names_say(tmp_path):
    full = make_setting(tmp_path, "full")
    made = {each.name: DEEP[0].at(full).recipe(0, each.values) for each in ALL}
    assert {recipe.model.layers for recipe in made.values()} == {15}
    assert made["dagpam"].model.attention_options == {"initial": (1.0, 1.0), "tied": False}
    assert made["dagpam-1-0.5"].model.attention_options == {"initial": (1.0, 0.5), "tied": False, "fixed": True}
    assert len({recipe.training for recipe in made.values()}) == 1  # the same effort for all
    assert LANGUAGE[0].at(full).recipe(0, {}).model.layers == 8
    assert {corpus.at(full).recipe(0, {}).data.pair for corpus in TRANSLATION[:3]} == {"en-de"}


# --- models, for real ---


@pytest.fixture(scope="module")
def trained_deep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deep")

    def read(setting):
        return read_models("ptb", SHORT.at(setting), (SOFTMAX, TRAINED, GRID[1]), MEASURE)

    return run_item(read, folder, seeds=(5,)), folder / "work" / "runs"


def test_gradients_over_training_begin_where_the_seed_does(trained_deep):
    """The norm at step 0 by backward through a fresh model; and the kept weights are gone."""
    models, folder = trained_deep
    (found,) = models.list_values(SOFTMAX)
    assert sorted({row["step"] for row in found["gradients"]}) == [0, 3, 7]
    path = next(path for path in folder.iterdir() if "softmax" in path.name)
    assert not (path / "steps").exists()
    run = runs.open_run(path, device="cpu")
    model = initialize_model(run.recipe.model, 5)
    norms = []
    for tokens, targets in draw_batches(run.task, model):
        model.zero_grad()
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)
        loss.backward()
        norms.append([float(block.attention.query.weight.grad.norm()) for block in model.decoder.blocks])
    expected = np.mean(norms, axis=0)
    measured = [row["norm"] for row in found["gradients"] if row["step"] == 0]
    assert measured == pytest.approx(expected.tolist(), rel=1e-4)


def test_states_and_lambdas_of_a_trained_model(trained_deep):
    models, _ = trained_deep
    (trained,), (fixed,), (softmax,) = map(models.list_values, (TRAINED, GRID[1], SOFTMAX))
    assert {name: len(column) for name, column in trained["states"].items()} == {
        "relative residual": 3, "residual norm": 3, "mean cosine": 3
    }  # fmt: skip
    assert all(value == [0.5, 0.5] for value in fixed["lambdas"].values())
    assert len(fixed["lambdas"]) == 2
    assert all(value != [1.0, 1.0] for value in trained["lambdas"].values())
    assert softmax["lambdas"] == {}
    assert 0 < softmax["states"]["relative residual"][-1] < 2


def test_at_initialisation_attention_alone_makes_tokens_alike(tmp_path):
    """Of softmax the residual falls from layer to layer; with all that is around it, much more is left."""
    found = run_item(faithfulness, tmp_path, seeds=(1,))
    ground = DEEP[1].at(make_setting(tmp_path, seeds=(1,)))  # reads what the item left in the ledger
    alone, whole = (read_start(ground, alone=x)[SOFTMAX][0]["relative residual"] for x in (True, False))
    assert alone == sorted(alone, reverse=True)
    assert alone[0] == whole[0]
    assert alone[-1] < whole[-1] / 3
    assert set(found.figures) == {"lexicon-text-alone", "lexicon-text-whole"}
    signs = {cell.row: cell.sign for cell in found.cells if cell.sign and cell.column.startswith("mean cosine")}
    assert set(signs.values()) == {-1}
    assert all("λ⁺ = 1, λ⁻ = 1 − softmax" in row for row in signs)


@pytest.mark.slow  # five seconds or more on an idle core
def test_from_the_command_line_models_are_trained_as_jobs(tmp_path):
    words = ["reproduce", "heo2024", "--only=language", "--only=convex", "--seeds=1", "--device=cpu", "--jobs=2"]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.exception
    with open(tmp_path / "smoke" / "cells.csv", newline="") as file:
        run = [cell for cell in csv.DictReader(file) if cell["values"]]
    assert {cell["item"] for cell in run} == {"language", "convex"}
    assert len(list((tmp_path / "work" / "runs").iterdir())) == 2
    missing = [name for name in open_study("heo2024").items if name not in ("language", "convex")]
    assert f"without a result in this ledger: {', '.join(missing)}" in (tmp_path / "smoke" / "report.html").read_text()

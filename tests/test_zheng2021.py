"""Zheng et al. 2021: its numbers, the arithmetic of its tables by hand, and models that are trained."""

import math

import numpy as np
import pytest
import torch
from inline_scheduler import InlineScheduler
from item_runs import KnownRows, make_setting, run_item
from scipy.spatial.distance import jensenshannon
from scipy.stats import pearsonr

from attnlab.mechanisms.noise import seed_noise
from attnlab.models.presets import PRESETS
from attnlab.recording.watch import record
from attnlab.studies import open_study
from attnlab.studies.zheng2021.cascade_ablation import NULL, SAMPLED, compute_published_correlation, section54, table4
from attnlab.studies.zheng2021.coda_models import CODA
from attnlab.studies.zheng2021.figures import average_matrices, draw_heat_maps
from attnlab.studies.zheng2021.forms import BOUND, EXPECTED, FORMS, MEAN, SAMPLES, forms
from attnlab.studies.zheng2021.language_models import depth, fig2, table1
from attnlab.studies.zheng2021.measures import measure_diversity
from attnlab.studies.zheng2021.plan import DEEP, LANGUAGE, TRANSLATION
from attnlab.studies.zheng2021.published import TABLE2, TABLE3, TABLE4
from attnlab.studies.zheng2021.translators import table2, table3
from attnlab.training import runs
from attnlab.training.recipe import TRAINING

JSD, BLEU = "average JSD (nats)", "BLEU"
PAIR = "artificial language pair"


def cells(findings):
    return {(cell.row, cell.column): cell for cell in findings.cells}


# --- the paper's numbers ---


def test_the_tables_of_the_paper_agree_with_each_other():
    for name in ("softmax", "coda"):
        assert TABLE2["iwslt14", name][1] == pytest.approx(TABLE3[name][4][0], abs=0.051)  # rounded
        assert TABLE4[name][1] == TABLE3[name][4][0]
    for few, many in ((4, 8), (8, 16), (16, 32)):
        assert TABLE3["softmax"][few][0] > TABLE3["softmax"][many][0]
        assert TABLE3["coda"][few][0] < TABLE3["coda"][many][0]


def test_the_published_correlation_follows_from_table_4():
    assert compute_published_correlation() == pytest.approx(pearsonr(*zip(*TABLE4.values(), strict=True)).statistic)


def test_parameters_are_the_papers(tmp_path):
    here = make_setting(tmp_path, "small", options={"data": "iwslt14"})  # nothing is trained
    sizes = [cell for item in (table1, table2) for cell in item(here).cells if cell.column == "million parameters"]
    assert len(sizes) == 6
    assert all(cell.verdict == "reproduced" and cell.group == "official" for cell in sizes)


def test_the_official_recipes_are_the_authors(tmp_path):
    full = make_setting(tmp_path, "full")
    made = {corpus.name: corpus.at(full).recipe(0, {}) for corpus in (*LANGUAGE, *TRANSLATION) if corpus.of_paper}
    assert set(made) == {"wikitext-103", "iwslt14", "wmt14"}
    assert (made["iwslt14"].data.data, made["iwslt14"].training.steps) == ("iwslt14", 25_000)
    assert (made["wmt14"].decoding.average, made["wmt14"].training.lr) == (10, 7e-4)
    assert (made["wikitext-103"].model.layers, made["wikitext-103"].training.optimiser) == (16, "nag")


# --- the tables, from values known by hand ---


@pytest.fixture
def known(tmp_path):
    """Settings whose runs have values known by hand: BLEU = 30 + place of the model + noise of the seed."""
    noise = {0: 0.0, 1: 0.3, 2: -0.2}
    order = ["softmax", "realformer", "coda-cs", "coda"]

    def make_values(run):
        place, seed, heads = order.index(run.trained.model.attention), run.seed, run.trained.model.heads
        bleu = 30 + place + noise[seed] * (place + 1) + (heads - 4) * (0.5 if place else -0.5)
        pair = {"kind": "decoder-self", "layer": 0, "head_a": 0, "head_b": 1, "jsd": float(place)}
        return {
            "scores": {"BLEU": bleu, "compound-split BLEU": bleu + 1},
            "perplexity": {"valid": 9.0 - place, "test": 8.0 - place},
            "mean": 2.0 * place + noise[seed], "mean_per_query": 0.1, "jsd": [pair],
            "sampled_mean": 7.0 + place, "noised_mean": 5.0 + seed,
        }  # fmt: skip

    return lambda **options: make_setting(tmp_path, seeds=(0, 1, 2), rows=KnownRows(make_values), options=options)


def test_table_4_by_hand(known):
    found = cells(table4(known()))
    assert found[f"{PAIR}: CODA", BLEU].values == pytest.approx((33.0, 34.2, 32.2))
    assert found[f"{PAIR}: CODA-CS − Transformer", BLEU].values == pytest.approx((2.0, 2.6, 1.6))
    gap = found[f"{PAIR}: CODA − RealFormer", JSD]
    assert gap.values == pytest.approx((4.0, 4.0, 4.0))
    assert (gap.sign, gap.verdict, gap.group) == (1, "same direction", "stand-in")
    assert found[f"{PAIR}: {NULL}", SAMPLED].values == (5.0, 6.0, 7.0)
    assert found[f"{PAIR}: CODA − {NULL}", SAMPLED].values == (5.0, 4.0, 3.0)
    assert found[f"{PAIR}: CODA − {NULL}", SAMPLED].verdict == "no verdict"  # the paper says nothing of it
    assert found["IWSLT14 de→en: CODA − CODA-CS", "compound-split BLEU"].published == pytest.approx(0.48)


def test_correlations_by_another_library(known):
    found = cells(section54(known()))
    jsd = np.array([[2.0 * place + noise for noise in (0.0, 0.3, -0.2)] for place in range(4)])
    bleu = np.array([[30 + place + noise * (place + 1) for noise in (0.0, 0.3, -0.2)] for place in range(4)])
    each = found[f"{PAIR}: r over the four models, of each seed", "JSD and BLEU"]
    assert each.values == pytest.approx([pearsonr(jsd[:, s], bleu[:, s]).statistic for s in range(3)])
    pooled = found[f"{PAIR}: r over models and seeds", "JSD and BLEU"]
    assert pooled.values == pytest.approx([pearsonr(jsd.ravel(), bleu.ravel()).statistic])
    within = [x - x.mean(1, keepdims=True) for x in (jsd, bleu)]
    inside = found[f"{PAIR}: r over seeds within a model", "JSD and BLEU"]
    assert inside.values == pytest.approx([pearsonr(*(x.ravel() for x in within)).statistic])
    assert (each.sign, inside.sign) == (1, 0)
    few = cells(section54(known(attention="coda,softmax")))
    assert all("all four models" in cell.not_run for (row, _), cell in few.items() if row.startswith(PAIR))


def test_table_3_has_the_trend_of_each_model(known):
    found = table3(known(heads="2,4"))
    by_place = cells(found)
    assert by_place[f"{PAIR}: Transformer, 4 − 2 heads", BLEU].values == pytest.approx((-1.0,) * 3)
    assert by_place[f"{PAIR}: Transformer, 4 − 2 heads", BLEU].verdict == "same direction"
    assert by_place[f"{PAIR}: CODA, 4 − 2 heads", BLEU].sign == 1
    assert by_place[f"{PAIR}, 4 heads: CODA − Transformer", "validation perplexity"].values == (-3.0,) * 3
    assert by_place["IWSLT14 de→en, 4 heads: Transformer", "validation perplexity"].published == 4.95
    assert set(found.figures) == {"lexicon"}


def test_the_language_tables(known):
    found = cells(table1(known()))
    assert found["artificial text: CODA − Transformer", "test perplexity"].verdict == "same direction"
    quoted = found["WikiText-103: Transformer†", "test perplexity"]
    assert (quoted.published, quoted.verdict) == (18.70, "not run")
    darker = cells(fig2(known()))["artificial text: CODA − Transformer", JSD]
    assert (darker.sign, darker.verdict) == (1, "same direction")


def test_depth_is_the_papers_at_two_rates(known, tmp_path):
    full = make_setting(tmp_path, "full")
    made = {corpus.name: corpus.at(full).recipe(0, {}) for corpus in DEEP[:2]}
    paper = TRAINING["wikitext103"]
    assert {recipe.model.layers for recipe in made.values()} == {PRESETS["wikitext103"].layers} == {16}
    nag = made["ptb-deep-nag"].training
    assert (nag.optimiser, nag.lr, nag.clip, nag.min_lr) == (paper.optimiser, paper.lr, paper.clip, paper.min_lr)
    gap = cells(depth(known()))["artificial text, 6 layers, NAG at 1.0: CODA − Transformer", "test perplexity"]
    assert (gap.sign, gap.verdict) == (-1, "same direction")
    assert "−0.60 in the paper" in gap.note.replace("-", "−")


def test_the_forms_of_coda_by_hand(tmp_path):
    """Every form differs from CODA in its own option alone, and no cell has a verdict."""

    def make_values(run):
        if run.measure == "zheng2021 expectation":
            return {
                MEAN: {"valid": 8.0, "test": 6.0},
                EXPECTED: {"valid": 8.5, "test": 6.25},
                BOUND: dict.fromkeys(("valid", "test"), 9.0),
            }
        options = dict(run.trained.model.attention_options)
        changed = {"alpha": 2, "variant": 3, "carry_dtype": 4}
        place = sum(changed[key] + (value == 8) * 3 for key, value in options.items())
        return {"scores": {"BLEU": 30 + run.seed + place}, "perplexity": {"valid": 9.0 - place}, "mean": 1.0 * place}

    rows = KnownRows(make_values)
    found = cells(forms(make_setting(tmp_path, seeds=(0, 1, 2), rows=rows)))
    assert found[f"{PAIR}: CODA", BLEU].values == (30.0, 31.0, 32.0)
    gaps = {label: found[f"{PAIR}: CODA, {label} − CODA", BLEU].values for label in ("α = 2", "as printed", "α = 8")}
    assert gaps == {"α = 2": (2.0,) * 3, "as printed": (3.0,) * 3, "α = 8": (5.0,) * 3}
    assert found[f"{PAIR}: CODA, carry in float32 − CODA", "validation perplexity"].values == (-4.0,) * 3
    gap = found[f"{PAIR}: CODA, {EXPECTED} − {MEAN}", "test perplexity"]
    assert (gap.values, gap.interval) == ((0.25,) * 3, (0.25, 0.25))
    assert all(cell.verdict == "no verdict" and not cell.has_claim for cell in found.values())
    table = KnownRows(lambda run: {})
    with pytest.raises(KeyError):
        table4(make_setting(tmp_path, seeds=(0, 1, 2), rows=table))
    shared = {run.key for run in table.asked} & {run.key for run in rows.asked}
    assert len(shared) == 3  # CODA's rows are those of table4
    assert all(
        cell.not_run for cell in forms(make_setting(tmp_path, rows=rows, options={"attention": "softmax"})).cells
    )
    full = make_setting(tmp_path, "full", rows=KnownRows(make_values))
    assert {cell.row.split(":")[0] for cell in forms(full).cells} == {"Multi30k de→en"}


def test_heat_maps_are_the_mean_over_seeds_and_symmetric():
    def seed(value):
        return {"jsd": [{"kind": "cross", "layer": 1, "head_a": 0, "head_b": 2, "jsd": value}]}

    (made,) = average_matrices([seed(1.0), seed(4.0)]).values()
    assert np.array_equal(made, [[0, 0, 2.5], [0, 0, 0], [2.5, 0, 0]])
    pairs = [{"kind": "decoder-self", "layer": k, "head_a": 0, "head_b": 1, "jsd": 1.0} for k in range(16)]
    figure = draw_heat_maps({"softmax": [{"jsd": pairs}], "coda": [{"jsd": pairs}]})
    assert sum(bool(axis.images) for axis in figure.axes) == 32


# --- models, for real ---


def test_what_is_measured_of_models_that_were_trained(tmp_path):
    """Table 4 with one seed, from nothing; then a number of it again from the model, by scipy; then all is reused."""
    found = cells(run_item(table4, tmp_path))
    assert all(cell.values for (row, _), cell in found.items() if row.startswith(PAIR))
    folders = {
        path.name.split("-")[1]: path for path in (tmp_path / "work" / "runs").iterdir() if "coda-cs" not in path.name
    }
    assert set(folders) == {"coda", "realformer", "softmax"}
    run = runs.open_run(folders["softmax"], device="cpu")
    values = []
    batch = run.task.make_batch("valid", list(range(60)))
    for layer in record(run.model, batch.inputs).layers:
        source, target = batch.inputs[0] != 0, batch.inputs[1] != 0
        rows = source if layer.kind == "encoder-self" else target
        for a in range(4):
            for b in range(a + 1, 4):
                each = jensenshannon(layer.weights[:, a].double(), layer.weights[:, b].double(), axis=-1) ** 2
                values.append(np.where(rows, np.nan_to_num(each), 0.0).sum(1).mean())
    assert found[f"{PAIR}: Transformer", JSD].values[0] == pytest.approx(np.mean(values), rel=1e-4)
    again = measure_diversity(run)
    assert again["mean"] < again["noised_mean"]  # noise alone raises it
    assert found[f"{PAIR}: CODA-CS", JSD].values[0] < found[f"{PAIR}: CODA-CS", SAMPLED].values[0]
    idle = InlineScheduler()
    assert cells(run_item(table4, tmp_path, idle)) == found
    others = [cells(run_item(item, tmp_path, idle)) for item in (table2, section54)]
    assert all(cell.values for (row, _), cell in others[0].items() if row.startswith(PAIR))
    assert others[1][f"{PAIR}: r over models and seeds", "JSD and BLEU"].values
    assert idle.names == []  # nothing was trained or measured again


@pytest.mark.slow  # five seconds or more on an idle core
def test_the_forms_of_coda_are_trained_and_scored(tmp_path):
    """The item from nothing; then the expectation again from the model: probabilities of each pass by softmax."""
    found = cells(run_item(forms, tmp_path))
    assert all(cell.values for cell in found.values())
    assert found[f"{PAIR}: CODA, carry in float32 − CODA", BLEU].values == (0.0,)  # the model is in float32 here
    assert found[f"{PAIR}: CODA, as printed − CODA", "validation perplexity"].values != (0.0,)
    opened = [runs.open_run(path, device="cpu") for path in (tmp_path / "work" / "runs").iterdir()]
    assert len(opened) == 1 + len(FORMS)
    (coda,) = (run for run in opened if not run.recipe.model.attention_options)
    assert coda.recipe.model.attention == CODA.name
    plan = coda.task.plan_batches("valid", tokens=4096, shuffle=False)
    nats, count, first = 0.0, 0, 0
    for indices in plan:
        batch = coda.task.make_batch("valid", indices)
        inputs, right = batch.inputs, batch.targets
        with torch.no_grad():
            passes = []
            for seed in range(first, first + SAMPLES):
                with seed_noise(coda.model, seed):
                    passes.append(coda.model(*inputs).double().softmax(-1))
        chosen = torch.stack(passes).mean(0).gather(-1, right[..., None])[..., 0][right != 0]
        nats, count, first = nats - chosen.log().sum().item(), count + len(chosen), first + SAMPLES
    column = "validation perplexity"
    assert found[f"{PAIR}: CODA, {EXPECTED}", column].values[0] == pytest.approx(math.exp(nats / count), rel=1e-4)
    assert found[f"{PAIR}: CODA, {BOUND}", column].values[0] > found[f"{PAIR}: CODA, {EXPECTED}", column].values[0]


def test_the_study_has_its_items_and_options():
    study = open_study("zheng2021")
    assert list(study.items) == ["table1", "fig2", "table2", "table3", "table4", "rates", "section54", "depth", "forms"]
    study.check_options(["heads", "data"], ["table3"])
    with pytest.raises(ValueError, match="no option 'heads'"):
        study.check_options(["heads"], ["table4"])

"""Word alignment by attention in translators: weights against norms, layer by layer and head by head (§5, Table 3).

A row of a map stands for the predicted word (AWO) or for the word that is read (AWI); `attnlab.analysis.alignment` has
the equations. "Layer mean" is the mean AER of the layers. "Best layer" is the lowest, chosen on the links that score
it. "By 2-fold choice" chooses the layer on one half of the pairs and scores it on the other, both ways.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from attnlab.aligning.choice import By, RowSetting
from attnlab.analysis.alignment import compute_rate, count_links
from attnlab.experiments.corpora import explain_missing_data
from attnlab.experiments.plan import Calculation, Measure, TrainedRun, Workplace
from attnlab.experiments.study import Findings, Scale, Setting
from attnlab.experiments.verdicts import Cell
from attnlab.mechanisms import find_mechanism
from attnlab.mechanisms.mechanism import Mechanism
from attnlab.models.presets import PRESETS
from attnlab.models.transformer_config import TransformerConfig
from attnlab.report.figures import draw_curves, draw_panels
from attnlab.studies.kobayashi2020.measures import METHODS, RELATIONS, SETTINGS, GoldCounts, measure_run
from attnlab.studies.kobayashi2020.plan import (
    EUROPARL,
    GoldCorpus,
    choose_folder,
    configure_europarl,
    load_europarl,
    load_lexicon,
)
from attnlab.tasks.synthetic import SyntheticConfig
from attnlab.training.loop import TrainConfig
from attnlab.training.recipe import TRAINING, DecodeConfig, Recipe
from attnlab.training.runs import Run

ITEM, MECHANISMS_ITEM = "alignment", "alignment-mechanisms"
MECHANISMS = ("softmax", "realformer", "coda", "dagpam")  # the paper has the first only
OPTIONS = ("attention",)  # attention=softmax,coda compares these instead
COMPARED_BY = ("layer mean", "best layer")  # rows whose error by norms is below that by weights in the paper
COMPARED_ROWS = ("weight, best layer", "norm, layer mean", "norm, best layer")  # rows with differences to the first

PUBLISHED: dict[tuple[str, str], float] = {  # means over 5 seeds, %
    ("weight, layer mean", "AWO"): 68.4, ("weight, layer mean", "AWI"): 68.5,
    ("weight, best layer", "AWO"): 47.7, ("weight, best layer", "AWI"): 29.8,
    ("norm, layer mean", "AWO"): 62.9, ("norm, layer mean", "AWI"): 60.4,
    ("norm, best layer", "AWO"): 41.4, ("norm, best layer", "AWI"): 25.0,
    ("norm, layer of the highest norm", "AWO"): 83.0, ("norm, layer of the highest norm", "AWI"): 25.0,
    ("norm, head of the highest norm", "AWO"): 87.1, ("norm, head of the highest norm", "AWI"): 35.5,
    ("heads: Spearman's ρ of AER and norm", "AWO"): 0.56, ("heads: Spearman's ρ of AER and norm", "AWI"): -0.44,
    ("heads: Pearson's r of AER and norm", "AWO"): 0.55, ("heads: Pearson's r of AER and norm", "AWI"): -0.52,
}  # fmt: skip
SPREADS: dict[tuple[str, str], float] = {  # standard deviations over the paper's 5 seeds: the margins
    ("weight, layer mean", "AWO"): 1.0, ("weight, layer mean", "AWI"): 1.9,
    ("weight, best layer", "AWO"): 1.7, ("weight, best layer", "AWI"): 3.7,
    ("norm, layer mean", "AWO"): 0.7, ("norm, layer mean", "AWI"): 1.4,
    ("norm, best layer", "AWO"): 1.4, ("norm, best layer", "AWI"): 1.5,
    ("norm, layer of the highest norm", "AWO"): 1.1, ("norm, layer of the highest norm", "AWI"): 1.5,
    ("norm, head of the highest norm", "AWO"): 2.3, ("norm, head of the highest norm", "AWI"): 21.0,
}  # fmt: skip
PUBLISHED_LAYERS = {  # layers 1 … 6, from the figures of each seed
    ("weight", "AWO"): (92.2, 86.5, 63.2, 55.6, 48.4, 64.8),
    ("norm", "AWO"): (87.9, 83.0, 61.7, 49.2, 41.4, 53.9),
    ("weight", "AWI"): (49.3, 29.8, 56.4, 91.7, 91.2, 93.0),
    ("norm", "AWI"): (32.5, 25.0, 51.7, 85.2, 83.5, 84.8),
}
PUBLISHED_LAYER_COUNT = 6
EXAMPLES: dict[Scale, int] = {"smoke": 5_000, "small": 20_000}  # training pairs of the artificial language pair
RecipeMaker = Callable[[str, int, Setting], Recipe]  # of an attention and a seed
BASELINES = (
    "Published on the gold set, for comparison: fast_align 28.4, GIZA++ 21.0 (German to English, trained on all of "
    "Europarl v7). The item alignment-ibm1 has IBM Model 1 on the text used here."
)


def measure_alignment(scale: Scale, run: Run, place: Workplace, data: str = EUROPARL) -> dict[str, Any]:
    """Return the link counts of all maps of a translator on the gold pairs of a scale."""
    corpus = load_corpus(scale, place, data)
    return measure_run(run, corpus.source, corpus.target, corpus.gold).to_json() | {"remark": corpus.remark}


def alignment(setting: Setting) -> Findings:
    """The item: the table and the figure of the paper's Transformer."""
    measure = Measure("alignment error", partial(measure_alignment, setting.scale))
    return tabulate_alignment(setting, make_recipe, measure)


def tabulate_alignment(setting: Setting, recipe: RecipeMaker, measure: Measure, data: str = EUROPARL) -> Findings:
    """Return the table and the figure of Transformers that are trained by a recipe, at full scale on a data set."""
    if reason := explain_absence(setting, data):
        return Findings(_make_absent(ITEM, reason, _list_tags(setting)))
    by_name, remarks = _read_runs(("softmax",), setting, recipe, measure, data)
    if not by_name:
        return Findings(_make_absent(ITEM, remarks[0], _list_tags(setting)))
    found, tags = list(by_name["softmax"].values()), _list_tags(setting)
    cells = [*_make_table(found, tags), *_make_layers(found, tags), *_make_chance(by_name["softmax"], setting, tags)]
    caption = "AER of each layer, by weights and by norms. Rows of a map stand for output (AWO) or input (AWI) words."
    return Findings(cells, {"layers": (_draw_layers(found), caption)}, (*remarks, BASELINES))


def mechanisms(setting: Setting) -> Findings:
    """The item: the same rows for models with other attention, and their difference to the first, seed by seed."""
    names = tuple(dict.fromkeys(setting.options.get("attention", ",".join(MECHANISMS)).split(",")))
    for name in names:
        if find_mechanism(name).finish is not Mechanism.finish:
            raise ValueError(f"attention={name} transforms the mixed context, so it is no sum of α·f(x): leave it out")
    if reason := explain_absence(setting):
        return Findings(_make_absent(MECHANISMS_ITEM, reason, _list_tags(setting)))
    measure = Measure("alignment error", partial(measure_alignment, setting.scale))
    found, remarks = _read_runs(names, setting, make_recipe, measure)
    if not found:
        return Findings(_make_absent(MECHANISMS_ITEM, remarks[0], _list_tags(setting)))
    names = tuple(found)
    tags = tuple(dict.fromkeys((*_list_tags(setting), "other model")))
    cells: list[Cell] = []
    for name, way in product(names, SETTINGS):
        about: dict[str, Any] = {"item": MECHANISMS_ITEM, "column": way.upper(), "tags": tags}
        for row, values in _list_rows(list(found[name].values()), way).items():
            cells.append(Cell(row=f"{name}: {row}", values=values, correlation=row in RELATIONS, **about))
        for row in COMPARED_ROWS if name != names[0] else ():
            both = [(found[name][seed], found[names[0]][seed]) for seed in found[name] if seed in found[names[0]]]
            gaps = tuple(own.make_rows(way)[row] - first.make_rows(way)[row] for own, first in both)
            reason = "" if gaps else f"{name} and {names[0]} have no seed in common"
            cells.append(Cell(row=f"{name} − {names[0]}: {row}", values=gaps, not_run=reason, **about))
    caption = "AER of each layer by norms, for every attention. Rows stand for output (AWO) or input (AWI) words."
    return Findings(cells, {"layers": (_draw_attentions(found), caption)}, remarks)


def load_corpus(scale: Scale, place: Workplace, data: str = EUROPARL) -> GoldCorpus:
    """Load the text and the gold pairs of a scale; OSError if they are not available."""
    return load_europarl(place, data) if scale == "full" else load_lexicon(EXAMPLES[scale])


def explain_absence(setting: Setting, data: str = EUROPARL) -> str:
    """Return why the items cannot be run, or an empty text."""
    return explain_missing_data(lambda: load_corpus(setting.scale, setting.place, data)) if setting.running else ""


def make_recipe(attention: str, seed: int, setting: Setting) -> Recipe:
    """Return the recipe of one seed: the iwslt14 Transformer at full scale, else a small one.

    The recipe of iwslt14 has 25,000 updates. With a cosine schedule the validation loss hardly falls after 5,000, and
    twelve runs take half an hour on a large GPU. The recipe was not tuned.
    """
    if setting.scale == "full":
        model: Any = replace(PRESETS["iwslt14"], attention=attention)
        training = replace(
            TRAINING["iwslt14"], steps=5000, batch_tokens=16_384, accumulate=1, lr=7e-4, warmup=2000, schedule="cosine",
            evaluate_every=500, checkpoint_every=1000, seed=seed,
        )  # fmt: skip
        model, data = replace(model, vocabulary=4, target_vocabulary=4), configure_europarl(setting.place)
        return Recipe("translation", data, model, training, DecodeConfig())
    layers, width, steps = setting.at(smoke=(2, 64, 120), small=(3, 128, 1500), full=(0, 0, 0))
    small = TransformerConfig(
        model="translator", vocabulary=4, attention=attention, layers=layers, width=width, heads=2,
        feed_forward=2 * width, dropout=0.0,
    )  # fmt: skip
    training = TrainConfig(
        steps=steps, batch_examples=64, lr=3e-3, warmup=50, evaluate_every=steps, checkpoint_every=steps,
        log_every=steps, seed=seed,
    )  # fmt: skip
    examples = SyntheticConfig(data="lexicon", examples=EXAMPLES[setting.scale])
    return Recipe("synthetic", examples, small, training, DecodeConfig())


def _read_runs(
    names: Sequence[str], setting: Setting, recipe: RecipeMaker, measure: Measure, data: str = EUROPARL
) -> tuple[dict[str, dict[int, GoldCounts]], tuple[str, ...]]:
    """Read the runs of these attentions; return their counts by seed, and remarks on training and failures.

    Without any counts, the only remark says why.
    """
    folder = choose_folder(setting.place, data)
    files = folder if data == EUROPARL else folder.parent  # rows of other text keep its name
    plan = {
        (name, seed): TrainedRun(recipe(name, seed, setting), measure, files)
        for name in names
        for seed in setting.seeds
    }
    measured = setting.rows.read_plan(plan)
    found: dict[str, dict[int, GoldCounts]] = {name: {} for name in names}
    for (name, seed), stored in measured.values.items():
        found[name][seed] = GoldCounts.from_json(stored)
    missing = [f"{name}, seed {seed}, has no values: {reason}" for (name, seed), reason in measured.failures.items()]
    found = {name: models for name, models in found.items() if models}
    if not found:
        reason = f"{missing[0]} ({len(missing)} of {len(plan)} runs failed)"
        if setting.running:
            raise ValueError(reason)
        return found, (reason,)
    losses = [f"{name} {', '.join(f'{m.valid_loss:.3f}' for m in models.values())}" for name, models in found.items()]
    remark = next(iter(measured.values.values()))["remark"]
    trained = f"Best validation loss of each seed, nats per target: {'; '.join(losses)}."
    return found, (remark, f"Trained on {'; '.join(measured.hardware)}.", trained, *missing)


def _list_rows(models: Sequence[GoldCounts], setting: RowSetting) -> dict[str, tuple[float, ...]]:
    """Return the rows that every seed has, with a value for each seed."""
    each = [model.make_rows(setting) for model in models]
    return {row: tuple(rows[row] for rows in each) for row in each[0] if all(row in rows for rows in each)}


def _make_table(found: Sequence[GoldCounts], tags: tuple[str, ...]) -> Iterator[Cell]:
    for setting in SETTINGS:
        way = setting.upper()
        rows = _list_rows(found, setting)
        for row, values in rows.items():
            about = {"row": row, "column": way, "tags": tags, "correlation": row in RELATIONS}
            yield Cell(item=ITEM, values=values, **about, **_state_claim(found, row, way))  # type: ignore[arg-type]
        for row in COMPARED_BY:
            differences = tuple(a - b for a, b in zip(rows[f"norm, {row}"], rows[f"weight, {row}"], strict=True))
            published = _select_published(found, _compute_gap(row, way))
            about = {"row": f"norm − weight, {row}", "column": way, "published": published, "tags": tags}
            sign: Any = 0 if published is None else -1
            yield Cell(item=ITEM, values=differences, sign=sign, number="", **about)  # type: ignore[arg-type]


def _make_layers(found: Sequence[GoldCounts], tags: tuple[str, ...]) -> Iterator[Cell]:
    for (by, way), published in PUBLISHED_LAYERS.items():
        values = [model.list_layer_errors(by, way.lower()) for model in found]  # type: ignore[arg-type]
        for layer in range(found[0].layers):
            like = _select_published(found, published[layer] if layer < len(published) else None)
            errors = tuple(seed[layer] for seed in values)
            yield Cell(item=ITEM, row=f"{by}, layer {layer + 1}", column=way, published=like, values=errors, tags=tags)


def _select_published(found: Sequence[GoldCounts], published: float | None) -> float | None:
    """Return the published number if the model has as many layers as the paper's."""
    return published if found[0].layers == PUBLISHED_LAYER_COUNT else None


def _state_claim(found: Sequence[GoldCounts], row: str, way: str) -> dict[str, float | None]:
    published = _select_published(found, PUBLISHED.get((row, way)))
    return {"published": published, "margin": None if published is None else SPREADS.get((row, way))}


def _make_absent(item: str, reason: str, tags: tuple[str, ...]) -> list[Cell]:
    """Return the cells that an item would have, without values."""
    about: dict[str, Any] = {"item": item, "not_run": reason, "tags": tags}
    if item == MECHANISMS_ITEM:
        return [Cell(row=row, column=way.upper(), **about) for row, way in product(COMPARED_ROWS, SETTINGS)]
    cells = [
        Cell(row=row, column=way, published=x, margin=SPREADS.get((row, way)), **about)
        for (row, way), x in PUBLISHED.items()
    ]
    for row, way in product(COMPARED_BY, SETTINGS):
        claim: dict[str, Any] = {"published": _compute_gap(row, way.upper()), "number": "", "sign": -1}
        cells.append(Cell(row=f"norm − weight, {row}", column=way.upper(), **claim, **about))
    for (by, column), layers in PUBLISHED_LAYERS.items():
        rows = {f"{by}, layer {number}": error for number, error in enumerate(layers, start=1)}
        cells += [Cell(row=row, column=column, published=error, **about) for row, error in rows.items()]
    return cells


def _compute_gap(row: str, way: str) -> float:
    """Return the published error by norms − by weights."""
    return round(PUBLISHED[f"norm, {row}", way] - PUBLISHED[f"weight, {row}", way], 1)


def _list_tags(setting: Setting) -> tuple[str, ...]:
    return ("other data",) if setting.scale == "full" else ("other data", "other model", "smaller scale")


def _make_chance(found: Mapping[int, GoldCounts], setting: Setting, tags: tuple[str, ...]) -> Iterator[Cell]:
    """Yield the error of linking every target word to a random source word, and how much better norms are."""
    settings, function = {"scale": setting.scale}, partial(measure_chance, setting.scale)
    plan = {seed: Calculation("chance alignment", settings, function, seed) for seed in found}
    measured = setting.rows.read_plan(plan)
    chance = {seed: values["aer"] for seed, values in measured.values.items()}
    reason = "" if chance else next(iter(measured.failures.values()))
    about: dict[str, Any] = {"item": ITEM, "tags": tags, "not_run": reason}
    yield Cell(row="a random source word", column="AER", values=tuple(chance.values()), **about)
    best = {seed: min(min(found[seed].list_layer_errors("norm", way)) for way in SETTINGS) for seed in chance}
    differences = tuple(best[seed] - error for seed, error in chance.items())
    row = "norm, best layer − a random source word"
    yield Cell(row=row, column="better of AWO and AWI", values=differences, sign=-1, **about)


def measure_chance(scale: Scale, place: Workplace, seed: int | None) -> dict[str, float]:
    """Return the AER in % of links from every target word to a random source word."""
    draw, corpus = np.random.default_rng(seed), load_corpus(scale, place)
    links = [
        {(int(draw.integers(len(x))), place) for place in range(len(y))}
        for x, y in zip(corpus.source, corpus.target, strict=True)
    ]
    return {"aer": 100 * compute_rate("aer", count_links(links, corpus.gold.sure, corpus.gold.possible))}


def _draw_layers(models: Sequence[GoldCounts]) -> Any:
    lines = {f"{by}, {way.upper()}": _average_layers(models, by, way) for by, way in product(METHODS, SETTINGS)}
    return draw_curves(lines, x="layer", y="AER (%), mean over seeds")


def _draw_attentions(found: Mapping[str, Mapping[int, GoldCounts]]) -> Any:
    panels = {}
    for way in SETTINGS:
        lines = {name: _average_layers(list(models.values()), "norm", way) for name, models in found.items()}
        panels[f"by norms, {way.upper()}"] = lines
    return draw_panels(panels, x="layer", y="AER (%), mean over seeds")


def _average_layers(models: Sequence[GoldCounts], by: By, way: RowSetting) -> tuple[range, list[float]]:
    mean = np.mean([model.list_layer_errors(by, way) for model in models], axis=0)
    return range(1, len(mean) + 1), mean.tolist()

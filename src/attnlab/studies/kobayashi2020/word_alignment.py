"""Word alignment by attention in translators: weights against norms, layer by layer and head by head (§5, Table 3).

A map is read with its rows taken for the word that is predicted (AWO) or read (AWI); `attnlab.analysis.alignment` has
the equations. "Layer mean" is the mean of the layers' AER, "best layer" the lowest of them, which is chosen on the very
links it is scored on; beside it stands the layer chosen on one half of the pairs and scored on the other, both ways.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from attnlab.aligning.choice import By, Way
from attnlab.analysis.alignment import compute_rate, count_links
from attnlab.config import compute_digest
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.trained import Measure, trained
from attnlab.experiments.verdicts import Cell
from attnlab.mechanisms import find_mechanism
from attnlab.mechanisms.mechanism import Mechanism
from attnlab.models.presets import PRESETS
from attnlab.models.transformer import TransformerConfig
from attnlab.report.figures import draw_curves, draw_panels
from attnlab.studies.kobayashi2020.measures import METHODS, RELATIONS, SETTINGS, Measured, kept
from attnlab.studies.kobayashi2020.plan import GoldCorpus, europarl, lexicon
from attnlab.tasks import TASKS
from attnlab.training.loop import TrainConfig
from attnlab.training.recipe import TRAINING, DecodeConfig, Recipe

ITEM, MECHANISMS_ITEM = "alignment", "alignment-mechanisms"
MECHANISMS = ("softmax", "realformer", "coda", "dagpam")  # of which the paper has the first
OPTIONS = ("attention",)  # attention=softmax,coda or any other: these in their place
HELD_AGAINST = ("weight, best layer", "norm, layer mean", "norm, best layer")  # rows in which others less the first are

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
PUBLISHED_LAYERS = {  # layers 1 … 6, from the figures of each seed
    ("weight", "AWO"): (92.2, 86.5, 63.2, 55.6, 48.4, 64.8),
    ("norm", "AWO"): (87.9, 83.0, 61.7, 49.2, 41.4, 53.9),
    ("weight", "AWI"): (49.3, 29.8, 56.4, 91.7, 91.2, 93.0),
    ("norm", "AWI"): (32.5, 25.0, 51.7, 85.2, 83.5, 84.8),
}
PUBLISHED_LAYER_COUNT = 6


def alignment(setting: Setting) -> Findings:
    """The item: the paper's Transformer, its table and its figure."""
    try:
        corpus = text_of(setting)
    except OSError as error:
        return Findings(_not_run(ITEM, " ".join(str(error).split())))
    by_name, remarks = _all_measured(corpus, ("softmax",), setting)
    found, tags = list(by_name["softmax"].values()), _tags(setting)
    cells = [*_table(found, tags), *_per_layer(found, tags), *_against_chance(by_name["softmax"], corpus, tags)]
    says = "AER of each layer, by weights and by norms, with rows taken for output (AWO) and input (AWI)."
    return Findings(cells, {"layers": (_figure(found), says)}, (corpus.remark, *remarks, _baselines()))


def mechanisms(setting: Setting) -> Findings:
    """The item: the same of models with other attention, and how they differ from the first, seed by seed."""
    names = tuple(dict.fromkeys(setting.options.get("attention", ",".join(MECHANISMS)).split(",")))
    for name in names:
        if find_mechanism(name).finish is not Mechanism.finish:
            raise ValueError(f"{name} changes the mixed context, so its output is no sum of α·f(x): leave it out")
    try:
        corpus = text_of(setting)
    except OSError as error:
        return Findings(_not_run(MECHANISMS_ITEM, " ".join(str(error).split())))
    found, remarks = _all_measured(corpus, names, setting)
    names = tuple(found)
    tags = tuple(dict.fromkeys((*_tags(setting), "other model")))
    cells: list[Cell] = []
    for name, way in product(names, SETTINGS):
        about: dict[str, Any] = {"item": MECHANISMS_ITEM, "column": way.upper(), "tags": tags}
        for row, values in _by_seed(list(found[name].values()), way).items():
            cells.append(Cell(row=f"{name}: {row}", values=values, correlation=row in RELATIONS, **about))
        for row in HELD_AGAINST if name != names[0] else ():
            both = [(found[name][seed], found[names[0]][seed]) for seed in found[name] if seed in found[names[0]]]
            gaps = tuple(own.rows(way)[row] - first.rows(way)[row] for own, first in both)
            reason = "" if gaps else f"no seed of which both {name} and {names[0]} were trained"
            cells.append(Cell(row=f"{name} − {names[0]}: {row}", values=gaps, not_run=reason, **about))
    says = "AER of each layer by norms, for every attention, with rows taken for output and input."
    figure = _by_attention(found)
    return Findings(cells, {"layers": (figure, says)}, (corpus.remark, *remarks))


def text_of(setting: Setting) -> GoldCorpus:
    """What goes with this scale; only what is asked for is read."""
    made: dict[str, Callable[[], GoldCorpus]] = {
        "smoke": lambda: lexicon(5_000), "small": lambda: lexicon(20_000), "full": lambda: europarl(setting)
    }  # fmt: skip
    return made[setting.scale]()


def recipe(corpus: GoldCorpus, attention: str, seed: int, setting: Setting) -> Recipe:
    """The run of one seed: the iwslt14 Transformer at full scale, else a small one.

    The recipe of iwslt14 takes 25,000 updates; with a rate that falls to 0 by a cosine 5,000 bring the validation loss
    to where it hardly falls, so that twelve such runs take a large GPU half an hour. It was not searched.
    """
    if setting.scale == "full":
        model: Any = replace(PRESETS["iwslt14"], attention=attention)
        base, decoding = TRAINING["iwslt14"]
        training = replace(
            base, steps=5000, batch_tokens=16_384, accumulate=1, lr=7e-4, warmup=2000, schedule="cosine",
            evaluate_every=500, checkpoint_every=1000, seed=seed,
        )  # fmt: skip
        return Recipe(corpus.task, corpus.data, replace(model, vocabulary=4, target_vocabulary=4), training, decoding)
    layers, width, steps = setting.at(smoke=(2, 64, 120), small=(3, 128, 1500), full=(0, 0, 0))
    small = TransformerConfig(
        model="translator", vocabulary=4, attention=attention, layers=layers, width=width, heads=2,
        feed_forward=2 * width, dropout=0.0,
    )  # fmt: skip
    training = TrainConfig(
        steps=steps, batch_examples=64, lr=3e-3, warmup=50, evaluate_every=steps, checkpoint_every=steps,
        log_every=steps, seed=seed,
    )  # fmt: skip
    return Recipe(corpus.task, corpus.data, small, training, DecodeConfig())


def _all_measured(
    corpus: GoldCorpus, names: Sequence[str], setting: Setting
) -> tuple[dict[str, dict[int, Measured]], tuple[str, ...]]:
    """Train what is not trained yet, and measure it, seed by seed; runs are shared by the items of a results folder.

    Returns what was found of each attention, by seed, and remarks: on what they were trained, how well, what failed.
    """
    recipes = {(name, seed): recipe(corpus, name, seed, setting) for name in names for seed in setting.seeds}
    folder = (setting.folder.parent / "vocabulary" / compute_digest(corpus.data)).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    TASKS[corpus.task].prepare(corpus.data, folder)
    pairs = (corpus.source, corpus.target, corpus.gold)
    measure = Measure(f"alignment-{corpus.pairs_digest}", partial(kept, *pairs))
    made = trained(recipes, measure, folder, setting)
    found: dict[str, dict[int, Measured]] = {name: {} for name in names}
    for (name, seed), stored in made.found.items():
        found[name][seed] = Measured.from_json(stored)
    missing = [f"{name}, seed {seed}, has no values: {reason}" for (name, seed), reason in made.failed.items()]
    found = {name: models for name, models in found.items() if models}
    if not found:
        raise ValueError(f"{missing[0]} ({len(missing)} of {len(recipes)} runs failed)")
    losses = [f"{name} {', '.join(f'{m.valid_loss:.3f}' for m in models.values())}" for name, models in found.items()]
    trained_well = f"Best validation loss of each seed, nats a target: {'; '.join(losses)}."
    return found, (f"Trained on {'; '.join(made.on)}.", trained_well, *missing)


def _by_seed(models: Sequence[Measured], setting: Way) -> dict[str, tuple[float, ...]]:
    """The table's rows, with a value for each seed; those that every seed has."""
    each = [model.rows(setting) for model in models]
    return {row: tuple(rows[row] for rows in each) for row in each[0] if all(row in rows for rows in each)}


def _table(found: Sequence[Measured], tags: tuple[str, ...]) -> Iterator[Cell]:
    for setting in SETTINGS:
        way = setting.upper()
        rows = _by_seed(found, setting)
        for row, values in rows.items():
            published = _comparable(found, PUBLISHED.get((row, way)))
            about = {"row": row, "column": way, "published": published, "tags": tags, "correlation": row in RELATIONS}
            yield Cell(item=ITEM, values=values, **about)  # type: ignore[arg-type]
        for row in ("layer mean", "best layer"):  # norms align better, says the paper
            differences = tuple(a - b for a, b in zip(rows[f"norm, {row}"], rows[f"weight, {row}"], strict=True))
            gap = PUBLISHED[f"norm, {row}", way] - PUBLISHED[f"weight, {row}", way]
            published = _comparable(found, round(gap, 1))
            about = {"row": f"norm − weight, {row}", "column": way, "published": published, "tags": tags}
            sign: Any = 0 if published is None else -1
            yield Cell(item=ITEM, values=differences, sign=sign, **about)  # type: ignore[arg-type]


def _per_layer(found: Sequence[Measured], tags: tuple[str, ...]) -> Iterator[Cell]:
    for (by, way), published in PUBLISHED_LAYERS.items():
        values = [model.by_layer(by, way.lower()) for model in found]  # type: ignore[arg-type]
        for layer in range(found[0].layers):
            like = _comparable(found, published[layer] if layer < len(published) else None)
            own = tuple(of_seed[layer] for of_seed in values)
            yield Cell(item=ITEM, row=f"{by}, layer {layer + 1}", column=way, published=like, values=own, tags=tags)


def _comparable(found: Sequence[Measured], published: float | None) -> float | None:
    """What the paper prints, where the model is of its shape: the numbers of two layers are not those of six."""
    return published if found[0].layers == PUBLISHED_LAYER_COUNT else None


def _tags(setting: Setting) -> tuple[str, ...]:
    return ("other data",) if setting.scale == "full" else ("other data", "other model", "smaller scale")


def _against_chance(found: Mapping[int, Measured], corpus: GoldCorpus, tags: tuple[str, ...]) -> Iterator[Cell]:
    """A random source word for every target word, beside the better of AWO and AWI."""
    chance = [chance_error(corpus, seed) for seed in found]
    ours = [min(min(model.by_layer("norm", setting)) for setting in SETTINGS) for model in found.values()]
    yield Cell(item=ITEM, row="a random source word", column="AER", values=tuple(chance), tags=tags)
    differences = tuple(a - b for a, b in zip(ours, chance, strict=True))
    row = "norm, best layer − a random source word"
    yield Cell(item=ITEM, row=row, column="better of AWO and AWI", values=differences, sign=-1, tags=tags)


def chance_error(corpus: GoldCorpus, seed: int) -> float:
    """AER in % where every target word is linked to a source word drawn at random."""
    draw = np.random.default_rng(seed)
    links = [
        {(int(draw.integers(len(x))), place) for place in range(len(y))}
        for x, y in zip(corpus.source, corpus.target, strict=True)
    ]
    return 100 * compute_rate("aer", count_links(links, corpus.gold.sure, corpus.gold.possible))


def _not_run(item: str, reason: str) -> list[Cell]:
    return [
        Cell(item=item, row=row, column=way, published=published, not_run=reason)
        for (row, way), published in PUBLISHED.items()
    ]


def _figure(models: Sequence[Measured]) -> Any:
    lines = {f"{by}, {way.upper()}": _mean_by_layer(models, by, way) for by, way in product(METHODS, SETTINGS)}
    return draw_curves(lines, x="layer", y="AER (%), mean over seeds")


def _by_attention(found: Mapping[str, Mapping[int, Measured]]) -> Any:
    panels = {
        f"by norms, {way.upper()}": {
            name: _mean_by_layer(list(models.values()), "norm", way) for name, models in found.items()
        }
        for way in SETTINGS
    }
    return draw_panels(panels, x="layer", y="AER (%), mean over seeds")


def _mean_by_layer(models: Sequence[Measured], by: By, way: Way) -> tuple[range, list[float]]:
    mean = np.mean([model.by_layer(by, way) for model in models], axis=0)
    return range(1, len(mean) + 1), mean.tolist()


def _baselines() -> str:
    return (
        "Published on the gold set, for comparison: fast_align 28.4, GIZA++ 21.0 (from German to English, trained on "
        "the whole of Europarl v7); the item alignment-ibm1 has IBM Model 1 on the text used here."
    )

"""Word alignment by attention in translators: weights against norms, layer by layer and head by head (§5, Table 3).

A map is read with its rows taken for the word that is predicted (AWO) or read (AWI); `attnlab.analysis.alignment` has
the equations. "Layer mean" is the mean of the layers' AER, "best layer" the lowest of them, which is chosen on the very
links it is scored on; beside it stands the layer chosen on one half of the pairs and scored on the other, both ways.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import pearsonr, spearmanr

from attnlab import runs
from attnlab.aligning.attention import find
from attnlab.aligning.readers import run_reader
from attnlab.aligning.reading import By, Candidate, Place, Way
from attnlab.analysis.alignment import counted, rate
from attnlab.models.presets import PRESETS
from attnlab.models.transformer import TransformerConfig
from attnlab.recipe import TRAINING, DecodeConfig, Recipe
from attnlab.report.figures import curves
from attnlab.store import RunFolder
from attnlab.studies.claims import Cell
from attnlab.studies.kobayashi2020.corpus import Corpus, europarl, lexicon
from attnlab.studies.study import Findings, Setting
from attnlab.tasks.links import Gold
from attnlab.train import TrainConfig

ITEM, MECHANISMS_ITEM = "alignment", "alignment-mechanisms"
METHODS: tuple[By, ...] = ("weight", "norm")
SETTINGS: tuple[Way, ...] = ("awo", "awi")
OTHERS = ("realformer", "coda", "dagpam")  # which the paper does not have

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


@dataclass(frozen=True, eq=False)
class Measured:
    """One trained model on the gold pairs: what the rates of every map are made of, and the mean norm of its places."""

    layers: int
    heads: int
    counts: dict[Candidate, np.ndarray]  # (pairs, 4)
    norms: dict[tuple[Place, Place], float]
    valid_loss: float

    def error(self, by: By, setting: Way, layer: Place, head: Place = "mean") -> float:
        """AER in %."""
        return 100 * rate("aer", self.counts[Candidate(by, setting, layer, head)])

    def by_layer(self, by: By, setting: Way) -> list[float]:
        return [self.error(by, setting, layer) for layer in range(self.layers)]

    def by_head(self, by: By, setting: Way) -> list[float]:
        return [self.error(by, setting, *place) for place in self.places()]

    def places(self) -> list[tuple[int, int]]:
        return [(layer, head) for layer in range(self.layers) for head in range(self.heads)]

    def two_fold(self, by: By, setting: Way) -> float:
        """AER in %, every half scored by the layer that is best on the other half."""
        layers = [self.counts[Candidate(by, setting, layer, "mean")] for layer in range(self.layers)]
        half = np.random.default_rng(0).permutation(len(layers[0])) % 2
        scored = []
        for here in (0, 1):
            best = min(range(self.layers), key=lambda layer: rate("aer", layers[layer][half == here]))
            scored.append(layers[best][half != here])
        return 100 * rate("aer", np.concatenate(scored))

    def rows(self, setting: Way) -> dict[str, float]:
        """The table's rows for AWO or AWI."""
        rows: dict[str, float] = {}
        for by in METHODS:
            layers = self.by_layer(by, setting)
            rows[f"{by}, layer mean"] = float(np.mean(layers))
            rows[f"{by}, best layer"] = min(layers)
            rows[f"{by}, best layer by 2-fold choice"] = self.two_fold(by, setting)
            rows[f"{by}, best head"] = min(self.by_head(by, setting))
        layer = max(range(self.layers), key=lambda layer: self.norms[layer, "mean"])
        head = max(self.places(), key=self.norms.__getitem__)
        rows["norm, layer of the highest norm"] = self.error("norm", setting, layer)
        rows["norm, head of the highest norm"] = self.error("norm", setting, *head)
        errors, sizes = self.by_head("norm", setting), [self.norms[place] for place in self.places()]
        if len(set(errors)) > 1:  # else there is no correlation
            rows["heads: Spearman's ρ of AER and norm"] = float(spearmanr(errors, sizes).statistic)
            rows["heads: Pearson's r of AER and norm"] = float(pearsonr(errors, sizes).statistic)
        return rows


def alignment(setting: Setting) -> Findings:
    """The item: the paper's Transformer, its table and its figure."""
    try:
        corpus = text_of(setting)
    except OSError as error:
        return Findings(_not_run(ITEM, " ".join(str(error).split())))
    found = _all_measured(corpus, {"softmax": setting.seeds}, setting)["softmax"]
    tags = _tags(setting)
    cells = [*_table(found, tags), *_per_layer(found, tags), *_against_chance(found, corpus, setting.seeds, tags)]
    says = "AER of each layer, by weights and by norms, with rows taken for output (AWO) and input (AWI)."
    return Findings(cells, {"layers": (_figure({"": found}), says)}, (corpus.remark, _baselines(), _losses(found)))


def mechanisms(setting: Setting) -> Findings:
    """The item: the same of models with other attention."""
    try:
        corpus = text_of(setting)
    except OSError as error:
        return Findings(_not_run(MECHANISMS_ITEM, " ".join(str(error).split())))
    found = _all_measured(corpus, dict.fromkeys(("softmax", *OTHERS), setting.seeds), setting)
    tags = tuple(dict.fromkeys((*_tags(setting), "other model")))
    cells = [
        Cell(item=MECHANISMS_ITEM, row=f"{name}: {row}", column=way.upper(), values=values, tags=tags)
        for name, models in found.items()
        for way in SETTINGS
        for row, values in _by_seed(models, way).items()
    ]
    says = "AER of each layer by norms, for every attention, with rows taken for output and input."
    figure = _figure({f"{name}, ": models for name, models in found.items()}, methods=("norm",))
    return Findings(cells, {"layers": (figure, says)}, (corpus.remark,))


def text_of(setting: Setting) -> Corpus:
    """What goes with this scale; only what is asked for is read."""
    made: dict[str, Callable[[], Corpus]] = {
        "smoke": lambda: lexicon(5_000), "small": lambda: lexicon(20_000), "full": lambda: europarl(setting)
    }  # fmt: skip
    return made[setting.scale]()


def recipe(corpus: Corpus, attention: str, seed: int, setting: Setting) -> Recipe:
    """The run of one seed: the iwslt14 Transformer at full scale, else a small one."""
    if setting.scale == "full":
        model: Any = replace(PRESETS["iwslt14"], attention=attention)
        base, decoding = TRAINING["iwslt14"]
        training = replace(base, steps=10_000, batch_tokens=16_384, accumulate=1, seed=seed)
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


def measured(run: runs.Run, corpus: Corpus, gold: Gold) -> Measured:
    """Every map of a run on the gold pairs, in one pass."""
    found = find(run_reader(run, corpus.source, corpus.target), _every_map, with_norms=True)
    layers = 1 + max(c.layer for c in found.aligned if isinstance(c.layer, int))
    heads = 1 + max(c.head for c in found.aligned if isinstance(c.head, int))
    counts = {candidate: found.counts(candidate, gold) for candidate in found.aligned}
    norms = {(c.layer, c.head): found.norm(c) for c in found.aligned}
    return Measured(layers, heads, counts, norms, float(run.folder.position().get("best", 0.0)))


def _every_map(layers: int, heads: int) -> list[Candidate]:
    places: list[Place] = ["mean", *range(heads)]
    return [Candidate(*spot) for spot in product(METHODS, SETTINGS, range(layers), places)]


def _all_measured(corpus: Corpus, wanted: dict[str, tuple[int, ...]], setting: Setting) -> dict[str, list[Measured]]:
    """Train what is not trained yet, and measure it, seed by seed; runs are shared by the items of a results folder."""
    found: dict[str, list[Measured]] = {name: [] for name in wanted}
    order = [(name, seed) for name, seeds in wanted.items() for seed in seeds]
    for number, (name, seed) in enumerate(order):
        setting.progress(number, len(order), f"{name}, seed {seed}")
        made = recipe(corpus, name, seed, setting)
        folder = setting.folder.parent / "runs" / made.name()
        _train(made, folder, setting)
        found[name].append(measured(runs.open_run(folder, device=str(setting.device)), corpus, corpus.gold))
    setting.progress(len(order), len(order), "")
    return found


def _train(made: Recipe, folder: Path, setting: Setting) -> None:
    if RunFolder(folder).position().get("finished"):
        return
    _, outcome = runs.start(
        made, out=str(folder), device=str(setting.device), report=lambda values: None, note=lambda line: None
    )
    if not outcome.finished:
        raise KeyboardInterrupt


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
            yield Cell(item=ITEM, row=row, column=way, published=published, values=values, tags=tags)
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


def _against_chance(
    found: Sequence[Measured], corpus: Corpus, seeds: Sequence[int], tags: tuple[str, ...]
) -> Iterator[Cell]:
    """A random source word for every target word, beside the better of AWO and AWI."""
    chance = [chance_error(corpus, seed) for seed in seeds]
    ours = [min(min(model.by_layer("norm", setting)) for setting in SETTINGS) for model in found]
    yield Cell(item=ITEM, row="a random source word", column="AER", values=tuple(chance), tags=tags)
    differences = tuple(a - b for a, b in zip(ours, chance, strict=True))
    row = "norm, best layer − a random source word"
    yield Cell(item=ITEM, row=row, column="better of AWO and AWI", values=differences, sign=-1, tags=tags)


def chance_error(corpus: Corpus, seed: int) -> float:
    """AER in % where every target word is linked to a source word drawn at random."""
    draw = np.random.default_rng(seed)
    links = [
        {(int(draw.integers(len(x))), place) for place in range(len(y))}
        for x, y in zip(corpus.source, corpus.target, strict=True)
    ]
    return 100 * rate("aer", counted(links, corpus.gold.sure, corpus.gold.possible))


def _not_run(item: str, reason: str) -> list[Cell]:
    return [
        Cell(item=item, row=row, column=way, published=published, not_run=reason)
        for (row, way), published in PUBLISHED.items()
    ]


def _figure(found: dict[str, list[Measured]], methods: Sequence[By] = METHODS) -> Any:
    lines = {}
    for name, models in found.items():
        for by in methods:
            for setting in SETTINGS:
                mean = np.mean([model.by_layer(by, setting) for model in models], axis=0)
                lines[f"{name}{by}, {setting.upper()}"] = (range(1, len(mean) + 1), mean.tolist())
    return curves(lines, x="layer", y="AER (%), mean over seeds")


def _baselines() -> str:
    return (
        "Published on the gold set, for comparison: fast_align 28.4, GIZA++ 21.0 (from German to English, trained on "
        "the whole of Europarl v7); the item alignment-ibm1 has IBM Model 1 on the text used here."
    )


def _losses(found: Sequence[Measured]) -> str:
    return f"Best validation loss of each seed, nats a target: {', '.join(f'{m.valid_loss:.3f}' for m in found)}."

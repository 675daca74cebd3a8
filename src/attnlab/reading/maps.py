"""From Records to what the viewer shows: every map that an analysis can make of them.

    view(record)                                       one model on its texts
    view({"softmax": first, "dagpam": second})         several on the same texts
    view({0: first, 100: second, …}, curves=…)         one at several steps of its training
    view({"softmax": {0: …, 100: …}, "dagpam": {…}})   both

The statistics of a head, over the queries of an example; p_ij = |α_ij| / Σ_j |α_ij|:

    entropy   mean over i of −Σ_j p_ij ln p_ij
    jsd       mean over i, and over the other heads of the layer, of the Jensen–Shannon divergence (analysis.diversity)
    norm      mean over i of Σ_j ‖α_ij f(x_j)‖
    sink      the largest mean over i of p_ij: the share of the key that gets most
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlab.analysis.contribution import Norms, norms, widen
from attnlab.analysis.contribution_table import read_side, select_layers
from attnlab.analysis.diversity import jsd
from attnlab.analysis.mixing import mixing
from attnlab.analysis.rollout import rollout
from attnlab.analysis.words import join_pieces, number_words
from attnlab.config import suggest_nearest
from attnlab.reading.best_head import best_aligned
from attnlab.records.record import KINDS, Layer, Record
from attnlab.report.view import Best, Frame, View, ViewAttention, ViewExample, ViewGold, ViewRun, ViewSide
from attnlab.report.viewer_html import Viewer

CELLS = 40_000_000  # weights of all heads that a page may hold; beyond it has the heads of a layer together
MOST = 250_000_000  # that can be shown at all

Curves = Mapping[str, tuple[Sequence[float], Sequence[float]]]  # steps and values, by name
Records = Record | Mapping[str, Record] | Mapping[int, Record] | Mapping[str, Mapping[int, Record]]


def show(records: Records, **options: Any) -> Viewer:
    """The viewer of a record, or of several of the same texts: displays itself in a notebook, and can be saved.

    options   those of `view`: title, layers, heads, gold, curves, best
    """
    return Viewer(view(records, **options))


def view(
    records: Records,
    *,
    title: str = "",
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
    gold: Sequence[ViewGold | None] | None = None,
    curves: Mapping[str, Any] | None = None,
    best: Mapping[str, Best] | None = None,
) -> View:
    """What the viewer shows of records.

    layers, heads   only these; layers are counted within their kind
    gold            an alignment for each example, made by hand
    curves          of the training: {"accuracy": (steps, values)}; with several runs, that for each of their names
    best            by the run's name, the head to open at; else, where there is gold, the one with the lowest AER
    """
    runs = _runs(records)
    for name in best or ():
        if name not in runs:
            raise ValueError(
                f"best: no run is called {name!r}{suggest_nearest(name, runs)}; there are {', '.join(runs)}"
            )
    first = next(iter(next(iter(runs.values())).values()))
    known = _examples(first, gold)
    together = _cells(runs, layers, heads) > CELLS
    notes: dict[str, None] = {}
    if together:
        notes["Heads are shown together, as their mean: all of them would be too large. Choose layers or heads."] = None
    shown = []
    for name, steps in runs.items():
        frames = []
        for step, record in steps.items():
            _same_texts(first, record, name)
            attentions = _attentions(record, layers, heads, together, notes)
            frames.append(Frame(attentions, step))
        opened = _best(known, frames) if best is None else best.get(name)
        shown.append(ViewRun(name, frames, _curves_of(curves, name, len(runs)), opened))
    return View(title or titled(first), known, shown, tuple(notes))


def _best(examples: Sequence[ViewExample], frames: Sequence[Frame]) -> Best | None:
    """The head that aligns best at the end, where every step has it."""
    found = best_aligned(examples, frames[-1])
    return found if found is not None and all(frame.has(found) for frame in frames) else None


def titled(record: Record) -> str:
    """What was recorded, in a word: a model of ours with its attention, another by its name."""
    model, attention = (str(record.meta.get(name) or "") for name in ("model", "mechanism"))
    if attention and model.isidentifier():  # a class
        return f"{model} with {attention} attention"
    return named(model)


def named(model: str) -> str:
    """A model on the Hub by its name there, one in a folder by that of the folder."""
    local = model.startswith((".", "/", "~")) or model.count("/") > 1 or (0 < len(model) < 256 and Path(model).exists())
    return Path(model).expanduser().resolve().name or model if local else model


def joined(views: Sequence[View]) -> View:
    """The examples of several views of the same model, one after the other."""
    runs = []
    for number, run in enumerate(views[0].runs):
        frames = []
        for place, frame in enumerate(run.frames):
            attentions, before = [], 0
            for view in views:
                own = view.runs[number].frames[place].attentions
                attentions += [replace(a, example=a.example + before) for a in own]
                before += len(view.examples)
            frames.append(replace(frame, attentions=attentions))
        runs.append(replace(run, frames=frames, best=None))  # it was of the first view's examples
    examples = [example for view in views for example in view.examples]
    named = [replace(example, name=str(number + 1)) for number, example in enumerate(examples)]
    return View(views[0].title, named, runs, tuple(dict.fromkeys(note for view in views for note in view.notes)))


def _runs(records: Records) -> dict[str, dict[int | None, Record]]:
    """Records by name and step."""
    if isinstance(records, Record):
        return {str(records.meta.get("mechanism") or records.meta.get("model") or "model"): {None: records}}
    if not isinstance(records, Mapping) or not records:
        raise TypeError(f"the viewer shows a Record, or Records by name or by step, not a {type(records).__name__}")
    if all(isinstance(key, int) for key in records):
        return {"model": dict(sorted(records.items()))}  # type: ignore[arg-type]
    made: dict[str, dict[int | None, Record]] = {}
    for name, given in records.items():
        made[str(name)] = {None: given} if isinstance(given, Record) else dict(sorted(given.items()))
    if not all(isinstance(record, Record) for steps in made.values() for record in steps.values()):
        raise TypeError("the viewer shows Records: {name: record}, {step: record} or {name: {step: record}}")
    return made


def _cells(
    runs: Mapping[str, Mapping[int | None, Record]], layers: Collection[int] | None, heads: Collection[int] | None
) -> int:
    counted = each = 0
    for steps in runs.values():
        for record in steps.values():
            for layer in select_layers(record, None, layers):
                b, h, i, _ = layer.context.shape
                each += (pairs := b * i * layer.grouped_values.shape[2])
                counted += pairs * (h if heads is None else len(set(heads)))
    if each > MOST:
        raise ValueError(
            f"a page of {each:,} pairs of tokens is more than a browser holds: choose layers, fewer examples or steps, "
            "or a shorter text"
        )
    return counted


def _examples(record: Record, gold: Sequence[ViewGold | None] | None) -> list[ViewExample]:
    if gold is not None and len(gold) != len(record):
        raise ValueError(f"gold has {len(gold)} alignments for {len(record)} examples; None stands for one without")
    lengths: dict[str, int] = {}
    for kind in dict.fromkeys(record.kinds):
        layer = record.kind(kind)[0]
        sizes = layer.context.shape[2], layer.grouped_values.shape[2]
        lengths |= dict(zip(KINDS[kind], sizes, strict=True))
    made = []
    for number in range(len(record)):
        sides = {name: _side(record, name, number, length) for name, length in lengths.items()}
        made.append(ViewExample(str(number + 1), sides, None if gold is None else gold[number]))
    return made


def _side(record: Record, name: str, example: int, length: int) -> ViewSide:
    tokens = [str(token) for token in read_side(record, name, example, length, False).labels]
    words = number_words(tokens) if name in record.words else list(range(len(tokens)))
    return ViewSide(tuple(tokens), tuple(words), tuple(join_pieces(tokens, words) if name in record.words else tokens))


def _same_texts(first: Record, record: Record, name: str) -> None:
    same = record.tokens.keys() == first.tokens.keys() and all(
        x.shape == first.tokens[side].shape and torch.equal(x.cpu(), first.tokens[side].cpu())
        for side, x in record.tokens.items()
    )
    if not same:
        raise ValueError(f"{name} was recorded on other tokens than the first record: one page shows the same texts")


def _attentions(
    record: Record,
    layers: Collection[int] | None,
    heads: Collection[int] | None,
    together: bool,
    notes: dict[str, None],
) -> list[ViewAttention]:
    made = []
    for layer in select_layers(record, None, layers):
        made += _layer(record, layer, heads, together, notes)
    try:
        whole = rollout(record, "norm")
    except ValueError as error:
        notes[f"No rollout: {error}."] = None
        return made
    for kind, x in whole.items():
        for example in range(len(record)):
            made.append(
                ViewAttention(example, kind, None, (), {"rollout": _cut(record, kind, example, x[example][None])})
            )
    return made


def _layer(
    record: Record, layer: Layer, heads: Collection[int] | None, together: bool, notes: dict[str, None]
) -> list[ViewAttention]:
    """One layer on every example."""
    count = layer.context.shape[1]
    numbers = list(range(count)) if heads is None else sorted(set(heads))
    if absent := [head for head in numbers if not 0 <= head < count]:
        raise ValueError(f"{layer.name} has no head {absent[0]}; heads are 0 … {count - 1}")
    maps, found = _maps(layer, notes)
    b, _, i, _ = layer.context.shape
    j = layer.grouped_values.shape[2]
    seen = layer.mask.expand(b, 1, i, j)
    made = []
    for example in range(b):
        shown = {name: _cut(record, layer.kind, example, x[example][None]) for name, x in maps.items()}
        vector, statistics = None, {}
        if together:
            weights = found.weight if found is not None else widen(layer.weights).mean(1)
            shown = {"weight": _cut(record, layer.kind, example, weights[example][None])} | shown
        else:
            cut = _cut(record, layer.kind, example, widen(layer.weights[example, numbers]))
            shown = {"weight": cut} | shown
            if found is not None:
                keys = read_side(record, KINDS[layer.kind][1], example, j, False).places
                vector = found.vector[example, numbers][:, keys.to(found.vector.device)]
            statistics = _statistics(cut, vector)
        mask = _cut(record, layer.kind, example, seen[example])[0]
        names = () if together else tuple(numbers)
        made.append(ViewAttention(example, layer.kind, layer.index, names, shown, vector, mask, statistics))
    return made


def _maps(layer: Layer, notes: dict[str, None]) -> tuple[dict[str, Tensor], Norms | None]:
    """What the layer has beside its weights: maps (b,i,j) of its heads together, and its norms where there are any."""
    maps: dict[str, Tensor] = {}
    found = None
    try:
        found = norms(layer)
        maps["norm-layer"] = found.layer
        maps["norm-block"] = mixing(layer, "norm").map
    except ValueError as error:
        notes[f"Not all norms: {error}."] = None
    extras = {name: x.detach() for name, x in layer.extras.items()}
    if "beta" in extras:
        maps["probe"] = extras["beta"].exp()
    if "saliency" in extras:
        maps["saliency"] = extras["saliency"]
    return maps, found


def _cut(record: Record, kind: str, example: int, x: Tensor) -> Tensor:
    """A map (…,i,j) of one example without its padding."""
    for axis, name in zip((-2, -1), KINDS[kind], strict=True):
        if name in record.masks:
            x = x.index_select(axis, record.masks[name][example].nonzero().flatten().to(x.device))
    return x


def _statistics(weights: Tensor, vector: Tensor | None) -> dict[str, list[float]]:
    """Of each head, as the module's docstring has them; weights (h,i,j), vector (h,j)."""
    h, i, _ = weights.shape
    size = weights.abs()
    shares = size / size.sum(-1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)
    entropy = -torch.special.xlogy(shares, shares).sum(-1).mean(-1)  # (h,)
    made = {"entropy": entropy, "sink": shares.mean(1).amax(-1)}
    if h > 1:
        made["jsd"] = jsd(weights[None]).sum(1) / (i * (h - 1))
    if vector is not None:
        made["norm"] = (size * vector[:, None]).sum(-1).mean(-1)
    return {name: x.tolist() for name, x in made.items()}


def _curves_of(curves: Mapping[str, Any] | None, name: str, runs: int) -> Curves:
    if curves is None:
        return {}
    return curves.get(name, {}) if runs > 1 else curves.get(name, curves)

"""Build the view of Records that the viewer shows: every map that an analysis can compute.

    build_view(record)                                       one model on its texts
    build_view({"softmax": first, "dagpam": second})         several models on the same texts
    build_view({0: first, 100: second, …}, curves=…)         one model at several steps of its training
    build_view({"softmax": {0: …, 100: …}, "dagpam": {…}})   several models at several steps

The statistics of a head, over the queries of an example, with p_ij = |α_ij| / Σ_j |α_ij|:

    entropy   mean over i of −Σ_j p_ij ln p_ij
    jsd       mean over i, and over the other heads of the layer, of the Jensen–Shannon divergence (analysis.diversity)
    norm      mean over i of Σ_j ‖α_ij f(x_j)‖
    sink      the largest mean over i of p_ij: the share of the key with the most weight
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlab.analysis.contribution import NOT_A_SUM, Norms, average_heads, is_linear, norms
from attnlab.analysis.contribution_table import read_side, select_heads, select_layers
from attnlab.analysis.diversity import jsd
from attnlab.analysis.mixing import mixing
from attnlab.analysis.rollout import rollout
from attnlab.analysis.words import join_pieces, number_words
from attnlab.config import suggest_nearest
from attnlab.mechanisms.mechanism import widen
from attnlab.reading.best_head import find_best_head
from attnlab.records.record import KINDS, Layer, Record
from attnlab.report.view import Best, Frame, View, ViewAttention, ViewExample, ViewGold, ViewRun, ViewSide
from attnlab.report.viewer_html import Viewer
from attnlab.tasks.hub import is_path

HEAD_CELLS = 40_000_000  # maximum number of weights on a page; with more, the page shows the mean of the heads
CACHED = re.compile(r"models--(.+?)--(.+)")  # the folder of a model in the cache of the Hugging Face hub
MAX_PAIRS = 250_000_000  # maximum number of pairs of tokens on a page
TURNED = "Norms include the gate or other linear map that the mechanism applies to the mixed context of each query."

Curves = Mapping[str, tuple[Sequence[float], Sequence[float]]]  # steps and values, by name
Records = Record | Mapping[str, Record] | Mapping[int, Record] | Mapping[str, Mapping[int, Record]]


def show(
    records: Records,
    *,
    title: str = "",
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
    gold: Sequence[ViewGold | None] | None = None,
    curves: Mapping[str, Any] | None = None,
    best: Mapping[str, Best] | None = None,
    example: int = 0,
) -> Viewer:
    """Return the viewer of one Record, or of several Records of the same texts. It displays itself in a notebook.

    title           heading of the page
    layers, heads   show only these; layers are counted within their kind
    gold            a gold alignment, or None, for each example
    curves          training curves, {"accuracy": (steps, values)}; with several runs, a dict of them by run name
    best            the head to open at, by run name; by default the head with the lowest AER, if there is gold
    example         the index of the example to open at
    """
    how: dict[str, Any] = {"gold": gold, "curves": curves, "best": best, "example": example}
    return Viewer(build_view(records, title=title, layers=layers, heads=heads, **how))


def build_view(
    records: Records,
    *,
    title: str = "",
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
    gold: Sequence[ViewGold | None] | None = None,
    curves: Mapping[str, Any] | None = None,
    best: Mapping[str, Best] | None = None,
    example: int = 0,
) -> View:
    """Build the view of Records for the viewer. The options are those of `show`."""
    runs = _group_records(records)
    for name in best or ():
        if name not in runs:
            guess = suggest_nearest(name, runs)
            raise ValueError(f"best: unknown run {name!r}{guess}; choose from {', '.join(runs)}")
    first = next(iter(next(iter(runs.values())).values()))
    known = _build_examples(first, gold)
    together = _count_cells(runs, layers, heads) > HEAD_CELLS
    notes: dict[str, None] = {}
    if together:
        notes["Maps show the mean of the heads: all heads would be too large. Choose layers or heads."] = None
    shown = []
    for name, steps in runs.items():
        frames = []
        for step, record in steps.items():
            _check_same_texts(first, record, name)
            if unrecorded := record.meta.get("unrecorded"):
                notes[f"The maps leave out {unrecorded}."] = None
            attentions = _build_attentions(record, layers, heads, together, notes)
            frames.append(Frame(attentions, step))
        opened = find_best_head(known, frames) if best is None else best.get(name)
        shown.append(ViewRun(name, frames, _select_curves(curves, name, len(runs)), opened))
    return View(title or make_title(first), known, shown, tuple(notes), example)


def make_title(record: Record) -> str:
    """Return the record's title, the class and attention of an attnlab model, or the name of a Hugging Face model."""
    title, model, attention = (str(record.meta.get(name) or "") for name in ("title", "model", "mechanism"))
    if title:
        return title
    if attention and model.isidentifier():  # the name of a class
        return f"{model} with {attention} attention"
    return name_model(model)


def name_model(model: str) -> str:
    """Return the id of a model on the Hugging Face hub, also if it is in the hub's cache, or the name of its folder."""
    if not model or not (is_path(model) or (len(model) < 256 and Path(model).exists())):
        return model
    folder = Path(model).expanduser().resolve()
    if cached := next((found for part in reversed(folder.parts) if (found := CACHED.fullmatch(part))), None):
        return f"{cached[1]}/{cached[2]}"
    return (folder.parent if folder.name == "hugging_face" else folder).name or model  # a run has such a folder


def join_views(views: Sequence[View]) -> View:
    """Join several views of the same model into one that shows all their examples."""
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
        runs.append(replace(run, frames=frames, best=None))  # the best head of one view may not be that of all
    examples = [example for view in views for example in view.examples]
    examples = [replace(example, name=str(number + 1)) for number, example in enumerate(examples)]
    return View(views[0].title, examples, runs, tuple(dict.fromkeys(note for view in views for note in view.notes)))


def _group_records(records: Records) -> dict[str, dict[int | None, Record]]:
    """Return the Records by run name and step."""
    if isinstance(records, Record):
        return {str(records.meta.get("mechanism") or records.meta.get("model") or "model"): {None: records}}
    if not isinstance(records, Mapping) or not records:
        raise TypeError(f"expected a Record, or Records by name or by step, got {type(records).__name__}")
    if all(isinstance(key, int) for key in records):
        return {"model": dict(sorted(records.items()))}  # type: ignore[arg-type]
    runs: dict[str, dict[int | None, Record]] = {}
    for name, given in records.items():
        runs[str(name)] = {None: given} if isinstance(given, Record) else dict(sorted(given.items()))
    if not all(isinstance(record, Record) for steps in runs.values() for record in steps.values()):
        raise TypeError("expected Records: {name: record}, {step: record} or {name: {step: record}}")
    return runs


def _count_cells(
    runs: Mapping[str, Mapping[int | None, Record]], layers: Collection[int] | None, heads: Collection[int] | None
) -> int:
    cells = pairs = 0
    for steps in runs.values():
        for record in steps.values():
            for layer in select_layers(record, None, layers):
                record.check_count(layer.context)
                b, h, i, _ = layer.context.shape
                pairs += (size := b * i * layer.grouped_values.shape[2])
                maps = 1 if layer.turning is None else 2  # with a turning, norms are maps of their own
                cells += size * maps * (h if heads is None else len(set(heads)))
    if pairs > MAX_PAIRS:
        raise ValueError(
            f"{pairs:,} pairs of tokens are too many for a browser: choose layers, fewer examples or steps, or "
            "shorter texts"
        )
    return cells


def _build_examples(record: Record, gold: Sequence[ViewGold | None] | None) -> list[ViewExample]:
    if gold is not None and len(gold) != len(record):
        raise ValueError(f"gold has {len(gold)} alignments for {len(record)} examples; use None for examples without")
    lengths: dict[str, int] = {}
    for kind in dict.fromkeys(record.kinds):
        layer = record.kind(kind)[0]
        sizes = layer.context.shape[2], layer.grouped_values.shape[2]
        lengths |= dict(zip(KINDS[kind], sizes, strict=True))
    examples = []
    for number in range(len(record)):
        sides = {name: _build_side(record, name, number, length) for name, length in lengths.items()}
        examples.append(ViewExample(str(number + 1), sides, None if gold is None else gold[number]))
    return examples


def _build_side(record: Record, name: str, example: int, length: int) -> ViewSide:
    tokens = [str(token) for token in read_side(record, name, example, length, False).labels]
    words = number_words(tokens) if name in record.words else list(range(len(tokens)))
    return ViewSide(tuple(tokens), tuple(words), tuple(join_pieces(tokens, words) if name in record.words else tokens))


def _check_same_texts(first: Record, record: Record, name: str) -> None:
    same = record.tokens.keys() == first.tokens.keys() and all(
        x.shape == first.tokens[side].shape and torch.equal(x.cpu(), first.tokens[side].cpu())
        for side, x in record.tokens.items()
    )
    if not same:
        raise ValueError(f"{name} was recorded on other tokens than the first record: record the same texts")


def _build_attentions(
    record: Record,
    layers: Collection[int] | None,
    heads: Collection[int] | None,
    together: bool,
    notes: dict[str, None],
) -> list[ViewAttention]:
    attentions = []
    for layer in select_layers(record, None, layers):
        attentions += _build_layer(record, layer, heads, together, notes)
    if not all(is_linear(layer) for layer in record.layers):
        return attentions
    try:
        rollouts = rollout(record, "norm")
    except ValueError as error:
        notes[f"The rollout is missing: {error}."] = None
        return attentions
    for kind, x in rollouts.items():
        reached = None if kind == "cross" else _find_reached(record, kind)
        for example in range(len(record)):
            cut = partial(_cut_padding, record, kind, example)
            mask = None if reached is None else cut(reached[example][None])[0]
            attentions.append(ViewAttention(example, kind, None, (), {"rollout": cut(x[example][None])}, mask=mask))
    return attentions


def _find_reached(record: Record, kind: str) -> Tensor:
    """Return the input tokens that each output token can be made of, given the masks of one self-attention: (b,i,j)."""
    reached = None
    for layer in record.kind(kind):
        b, _, i, _ = layer.context.shape
        step = layer.mask.expand(b, 1, i, i)[:, 0] | torch.eye(i, dtype=torch.bool, device=layer.mask.device)
        reached = step if reached is None else step.float() @ reached.float() > 0
    assert reached is not None
    return reached


def _build_layer(
    record: Record, layer: Layer, heads: Collection[int] | None, together: bool, notes: dict[str, None]
) -> list[ViewAttention]:
    """Return one layer on every example."""
    numbers = select_heads(layer, heads)
    maps, computed = _build_maps(layer, notes)
    b, _, i, _ = layer.context.shape
    j = layer.grouped_values.shape[2]
    seen = layer.mask.expand(b, 1, i, j)
    attentions = []
    for example in range(b):
        cut = partial(_cut_padding, record, layer.kind, example)
        vector, statistics, own = None, {}, {}
        if together:
            weights = cut(average_heads(layer)[example][None])
        else:
            weights = cut(widen(layer.weights[example, numbers]))
            if computed is not None and layer.turning is not None:
                own["norm"] = cut(computed.head[example, numbers])
            elif computed is not None:
                keys = read_side(record, KINDS[layer.kind][1], example, j, False).places
                vector = computed.vector[example, numbers][:, keys.to(computed.vector.device)]
            statistics = _compute_statistics(weights, vector, own.get("norm"))
        shown = {"weight": weights} | own | {name: cut(x[example][None]) for name, x in maps.items()}
        names, mask = () if together else tuple(numbers), cut(seen[example])[0]
        attentions.append(ViewAttention(example, layer.kind, layer.index, names, shown, vector, mask, statistics))
    return attentions


def _build_maps(layer: Layer, notes: dict[str, None]) -> tuple[dict[str, Tensor], Norms | None]:
    """Return maps (b,i,j) of the layer's heads together, and its norms if they can be computed."""
    maps: dict[str, Tensor] = {}
    computed = None
    if is_linear(layer):
        computed = norms(layer)
        maps["norm-layer"] = computed.layer
        try:
            maps["norm-block"] = mixing(layer, "norm").map
        except ValueError as error:
            notes[f"Some norms are missing: {error}."] = None
    else:
        notes[f"Weights are shown without norms and rollout: {NOT_A_SUM}."] = None
    if layer.turning is not None and computed is not None:
        notes[TURNED] = None
    if "beta" in layer.extras:
        maps["probe"] = layer.extras["beta"].detach().exp()
    if "saliency" in layer.extras:
        maps["saliency"] = layer.extras["saliency"].detach()
    return maps, computed


def _cut_padding(record: Record, kind: str, example: int, x: Tensor) -> Tensor:
    """Remove the padding of one example from a map (…,i,j)."""
    for axis, name in zip((-2, -1), KINDS[kind], strict=True):
        if name in record.masks:
            x = x.index_select(axis, record.masks[name][example].nonzero().flatten().to(x.device))
    return x


def _compute_statistics(weights: Tensor, vector: Tensor | None, norm: Tensor | None) -> dict[str, list[float]]:
    """Compute the statistics of each head that the module docstring defines, from weights (h,i,j).

    vector (h,j) and norm (h,i,j) are those of a ViewAttention: one of them, or none
    """
    h, i, _ = weights.shape
    size = weights.abs()
    shares = size / size.sum(-1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)
    entropy = -torch.special.xlogy(shares, shares).sum(-1).mean(-1)  # (h,)
    statistics = {"entropy": entropy, "sink": shares.mean(1).amax(-1)}
    if h > 1:
        statistics["jsd"] = jsd(weights[None]).sum(1) / (i * (h - 1))
    if vector is not None:
        norm = size * vector[:, None]
    if norm is not None:
        statistics["norm"] = norm.sum(-1).mean(-1)
    return {name: x.tolist() for name, x in statistics.items()}


def _select_curves(curves: Mapping[str, Any] | None, name: str, runs: int) -> Curves:
    if curves is None:
        return {}
    return curves.get(name, {}) if runs > 1 else curves.get(name, curves)

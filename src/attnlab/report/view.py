"""The data of the viewer as plain tensors: texts, and maps of what is attended in them.

    View     runs (a model, a mechanism, a seed) over the same examples
    Run      frames, one for each recorded training step, or a single one; curves over the same steps
    Frame    attentions: one for each example, kind and layer; an attention without an index is of the whole model
    maps     by the names in MEASURES: (h,i,j) with one map for each head, (1,i,j) with one for all heads

`attnlab.reading.maps` creates a View from Records; `attnlab.report.packing` writes it as JSON and reads it back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnlab.records.record import KINDS, Layer, Record

KIND_NAMES = {
    "encoder-self": "self-attention of the encoder",
    "decoder-self": "self-attention of the decoder",
    "cross": "cross-attention",
}
MEASURES = {
    "weight": ("weight α", "the attention weight of each key"),
    "norm": ("norm ‖αf(x)‖", "the norm of each key's contribution, for each head"),
    "norm-layer": ("norm ‖Σαf(x)‖", "the norm of each key's contribution, summed over heads"),
    "norm-block": ("norm + residual + LN", "the norm of each contribution with the residual, after the layer norm"),
    "probe": ("probe β", "the probability of the right word if all attention were on this key"),
    "saliency": ("saliency Δ", "how much this key's embedding adds to the log-probability of the right word"),
    "rollout": ("rollout", "the share of each input token in each output token of the whole model"),
}
STATISTICS = {
    "entropy": "entropy (nats)",
    "jsd": "JSD from the layer's other heads (nats per query)",
    "norm": "mean norm Σ‖αf(x)‖",
    "sink": "sink share",
}


@dataclass(frozen=True)
class ViewSide:
    """The tokens of one sequence of an example, and the words that they form."""

    tokens: tuple[str, ...]
    words: tuple[int, ...]  # the index of each token's word, without gaps
    texts: tuple[str, ...]  # the words


@dataclass(frozen=True)
class ViewGold:
    """A manual word alignment: links (source, target), and the word of each row and key of the map."""

    sure: frozenset[tuple[int, int]]
    possible: frozenset[tuple[int, int]]
    rows: tuple[int, ...]  # the target word of each query; −1 = none
    keys: tuple[int, ...]  # the source word of each key; indices from `words` on are special tokens
    words: int  # number of source words


@dataclass(frozen=True)
class ViewExample:
    """A text or a sentence pair, with an optional manual alignment."""

    name: str
    sides: Mapping[str, ViewSide]  # "source", "target"
    gold: ViewGold | None = None


@dataclass(frozen=True, eq=False)
class ViewAttention:
    """One layer on one example, or the whole model on it."""

    example: int
    kind: str
    index: int | None  # among the layers of its kind; None = the whole model
    heads: tuple[int, ...]  # the heads in maps (h,i,j); empty if combined
    maps: Mapping[str, Tensor]
    vector: Tensor | None = None  # ‖f_h(x_j)‖ (h,j): replaces the map "norm" = |weight| · vector
    mask: Tensor | None = None  # (i,j) bool, True = visible; None = all visible
    statistics: Mapping[str, Sequence[float]] = field(default_factory=dict)  # for each head, as in STATISTICS


@dataclass(frozen=True)
class Best:
    """The head that the viewer opens with and marks."""

    kind: str
    layer: int
    head: int
    why: str  # the reason, shown as a tooltip


@dataclass(frozen=True, eq=False)
class Frame:
    """All attentions of a run at one training step."""

    attentions: Sequence[ViewAttention]
    step: int | None = None

    def has(self, best: Best) -> bool:
        return any((a.kind, a.index) == (best.kind, best.layer) and best.head in a.heads for a in self.attentions)


@dataclass(frozen=True, eq=False)
class ViewRun:
    """One model over the examples, at one or several training steps."""

    name: str
    frames: Sequence[Frame]
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)  # steps and values
    best: Best | None = None


@dataclass(frozen=True, eq=False)
class View:
    """Everything that one viewer shows."""

    title: str
    examples: Sequence[ViewExample]
    runs: Sequence[ViewRun]
    notes: Sequence[str] = ()  # remarks below the viewer, such as what is left out
    example: int = 0  # the index of the example that the viewer opens with

    def __post_init__(self) -> None:
        if not 0 <= self.example < max(len(self.examples), 1):
            raise ValueError(f"example must be between 0 and {len(self.examples) - 1}, got {self.example}")
        for run in self.runs:
            steps = [frame.step for frame in run.frames]
            if len(steps) > 1 and (None in steps or steps != sorted(set(steps))):  # type: ignore[type-var]
                raise ValueError(f"the frames of run {run.name!r} must have increasing steps, got {steps}")
            for frame in run.frames:
                for attention in frame.attentions:
                    _check(self.examples, run, attention)
                if run.best is not None and not frame.has(run.best):
                    where = f"{run.best.kind} layer {run.best.layer}, head {run.best.head}"
                    raise ValueError(f"run {run.name!r} has no {where} at step {frame.step}, but opens with it")
        if not any(frame.attentions for run in self.runs for frame in run.frames):
            raise ValueError("the view has no attention to show: no run has a layer")

    @property
    def cells(self) -> int:
        """The number of values in all maps."""
        return sum(
            x.numel() for run in self.runs for frame in run.frames for a in frame.attentions for x in a.maps.values()
        )


def record_of(view: View, *, example: int = 0, run: int = 0, frame: int = 0) -> Record:
    """Return the weights of one example as a Record. Everything that a View does not store is NaN."""
    attentions = [a for a in view.runs[run].frames[frame].attentions if a.example == example and "weight" in a.maps]
    sides = view.examples[example].sides
    return Record(
        [_layer(attention) for attention in attentions],
        tokens={name: torch.arange(len(side.tokens))[None] for name, side in sides.items()},
        masks={name: torch.ones(1, len(side.tokens), dtype=torch.bool) for name, side in sides.items()},
        words={name: [list(side.tokens)] for name, side in sides.items()},
        meta={"view": view.title, "run": view.runs[run].name, "step": view.runs[run].frames[frame].step},
    )


def _layer(attention: ViewAttention) -> Layer:
    weights = attention.maps["weight"][None]  # (1,h,i,j)
    _, h, i, j = weights.shape
    mask = torch.ones(i, j, dtype=torch.bool) if attention.mask is None else attention.mask
    unknown = weights.new_full((1, h, i, 1), torch.nan)
    states = weights.new_full((1, i, 1), torch.nan)
    return Layer(
        kind=attention.kind, index=attention.index or 0, name=f"{attention.kind}.{attention.index}", attended=weights,
        grouped_values=weights.new_full((1, h, j, 1), torch.nan), context=unknown, mixed=unknown,
        output_weight=weights.new_full((h, 1, 1), torch.nan), output_bias=None, inputs=states, outputs=states,
        mask=mask[None, None],
    )  # fmt: skip


def _check(examples: Sequence[ViewExample], run: ViewRun, attention: ViewAttention) -> None:
    where = f"run {run.name!r}, {attention.kind} layer {attention.index}"
    if not 0 <= attention.example < len(examples):
        raise ValueError(f"{where} refers to example {attention.example}, but there are only {len(examples)}")
    if attention.kind not in KINDS:
        raise ValueError(f"{where}: unknown kind of layer; choose one of {', '.join(KINDS)}")
    sides = examples[attention.example].sides
    shape = tuple(len(sides[name].tokens) if name in sides else -1 for name in KINDS[attention.kind])
    for name, x in attention.maps.items():
        if name not in MEASURES:
            raise ValueError(f"{where}: unknown measure {name!r}; choose one of {', '.join(MEASURES)}")
        if x.dim() != 3 or tuple(x.shape[1:]) != shape or len(x) not in (1, len(attention.heads)):
            raise ValueError(
                f"{where}: its {name} has shape {tuple(x.shape)}, expected {len(attention.heads)} heads (or 1), "
                f"{shape[0]} queries and {shape[1]} keys"
            )
    if (attention.heads or attention.vector is not None) and "weight" not in attention.maps:
        raise ValueError(f"{where} has heads but no map 'weight', which the overview needs")

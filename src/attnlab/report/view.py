"""What the viewer shows, as plain tensors: texts, and maps of what was attended in them.

    View     runs (a model, a mechanism, a seed) over the same examples
    Run      frames, one for each recorded step of training, or one alone; curves over the same steps
    Frame    attentions: one for each example, kind and layer; those without an index are of the whole model
    maps     by the names in MEASURES: (h,i,j) where heads have their own, (1,i,j) where they are together

`attnlab.reading.maps` makes a View of Records, `packed` writes it as JSON and reads it back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnlab.records.record import KINDS, Layer, Record

NOWHERE = -1  # a row or a key that is of no word
MEASURES = {
    "weight": ("weight α", "what the attention gives each key"),
    "norm": ("norm ‖αf(x)‖", "the length of what each key brings, head by head"),
    "norm-layer": ("norm ‖Σαf(x)‖", "the length of what each key brings, all heads together"),
    "norm-block": ("norm + residual + LN", "the same with the residual, after the layer norm; all heads together"),
    "probe": ("probe β", "the probability of the right word, were all attention at this key"),
    "saliency": ("saliency Δ", "how much the log-probability of the right word gains from this key's embedding"),
    "rollout": ("rollout", "the share of each input token in each token after the last layer: the whole model"),
}
STATISTICS = {
    "entropy": "entropy (nats)",
    "jsd": "JSD from the layer's other heads (nats a query)",
    "norm": "mean norm Σ‖αf(x)‖",
    "sink": "sink share",
}


@dataclass(frozen=True)
class ViewSide:
    """The tokens of one sequence of an example, and the words they are pieces of."""

    tokens: tuple[str, ...]
    words: tuple[int, ...]  # the number of each token's word, from 0 without a gap
    texts: tuple[str, ...]  # the words


@dataclass(frozen=True)
class ViewGold:
    """An alignment made by hand, between words: links (source, target), and the words that rows and keys are of."""

    sure: frozenset[tuple[int, int]]
    possible: frozenset[tuple[int, int]]
    rows: tuple[int, ...]  # the target word of each query, or NOWHERE
    keys: tuple[int, ...]  # the source word of each key; from `words` on they are special tokens
    words: int


@dataclass(frozen=True)
class ViewExample:
    name: str
    sides: Mapping[str, ViewSide]  # "source", "target"
    gold: ViewGold | None = None


@dataclass(frozen=True, eq=False)
class ViewAttention:
    """One layer on one example, or the whole model on it."""

    example: int
    kind: str
    index: int | None  # among the layers of its kind; None: the whole model
    heads: tuple[int, ...]  # the numbers of the heads in maps (h,i,j); none where they are together
    maps: Mapping[str, Tensor]
    vector: Tensor | None = None  # ‖f_h(x_j)‖ (h,j): with it, "norm" is |weight| times this and need not be stored
    mask: Tensor | None = None  # (i,j) bool, True = visible; None: all is
    statistics: Mapping[str, Sequence[float]] = field(default_factory=dict)  # of each head, by the names in STATISTICS


@dataclass(frozen=True)
class Best:
    """The head that the viewer opens at and marks."""

    kind: str
    layer: int
    head: int
    why: str  # what it is best at


@dataclass(frozen=True, eq=False)
class Frame:
    attentions: Sequence[ViewAttention]
    step: int | None = None

    def has(self, best: Best) -> bool:
        return any((a.kind, a.index) == (best.kind, best.layer) and best.head in a.heads for a in self.attentions)


@dataclass(frozen=True, eq=False)
class ViewRun:
    name: str
    frames: Sequence[Frame]
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)  # steps and values
    best: Best | None = None


@dataclass(frozen=True, eq=False)
class View:
    title: str
    examples: Sequence[ViewExample]
    runs: Sequence[ViewRun]
    notes: Sequence[str] = ()  # what is not in it, and why

    def __post_init__(self) -> None:
        for run in self.runs:
            steps = [frame.step for frame in run.frames]
            if len(steps) > 1 and (None in steps or steps != sorted(set(steps))):  # type: ignore[type-var]
                raise ValueError(f"the frames of run {run.name!r} must have rising steps, not {steps}")
            for frame in run.frames:
                for attention in frame.attentions:
                    _check(self.examples, run, attention)
            if run.best is not None:
                _check_best(run, run.best)
        if not any(frame.attentions for run in self.runs for frame in run.frames):
            raise ValueError("there is no attention to show: the view has no run with a layer")

    @property
    def cells(self) -> int:
        """How many numbers all maps hold together."""
        return sum(
            x.numel() for run in self.runs for frame in run.frames for a in frame.attentions for x in a.maps.values()
        )


def record_of(view: View, *, example: int = 0, run: int = 0, frame: int = 0) -> Record:
    """The weights of one example as a Record of that example; what a View does not hold is NaN in it."""
    found = [a for a in view.runs[run].frames[frame].attentions if a.example == example and "weight" in a.maps]
    sides = view.examples[example].sides
    return Record(
        [_layer(attention) for attention in found],
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


def _check_best(run: ViewRun, best: Best) -> None:
    for frame in run.frames:
        if not frame.has(best):
            where = f"{best.kind} layer {best.layer}, head {best.head}"
            raise ValueError(f"run {run.name!r} is to open at {where}, which is not there at step {frame.step}")


def _check(examples: Sequence[ViewExample], run: ViewRun, attention: ViewAttention) -> None:
    where = f"run {run.name!r}, {attention.kind} layer {attention.index}"
    if not 0 <= attention.example < len(examples):
        raise ValueError(f"{where} is of example {attention.example}, and there are {len(examples)}")
    if attention.kind not in KINDS:
        raise ValueError(f"{where}: no kind of layer is called that; there are {', '.join(KINDS)}")
    sides = examples[attention.example].sides
    shape = tuple(len(sides[name].tokens) if name in sides else -1 for name in KINDS[attention.kind])
    for name, x in attention.maps.items():
        if name not in MEASURES:
            raise ValueError(f"{where}: no measure is called {name!r}; there are {', '.join(MEASURES)}")
        if x.dim() != 3 or tuple(x.shape[1:]) != shape or len(x) not in (1, len(attention.heads)):
            raise ValueError(
                f"{where}: its {name} is {tuple(x.shape)}, but {len(attention.heads)} heads, {shape[0]} queries and "
                f"{shape[1]} keys are wanted"
            )
    if (attention.heads or attention.vector is not None) and "weight" not in attention.maps:
        raise ValueError(f"{where} has heads but no map 'weight', which the overview shows of every head")

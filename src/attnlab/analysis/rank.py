"""Rank collapse: how similar the tokens of a sentence become from layer to layer (Dong et al. 2021; Heo & Choi 2024).

For the states X (n tokens, e numbers each) of one sentence, with ‖·‖₁ the largest column sum of absolute values and
‖·‖_∞ the largest row sum,

    res(X) = X − 1xᵀ                 the part that differs from one vector x for all tokens
    ‖X‖_{1,∞} = √(‖X‖₁ ‖X‖_∞)        the composite norm
    residual = ‖res(X)‖_{1,∞}        relative_residual = residual / ‖X‖_{1,∞}
    cosine = the mean of cos(X_i, X_k) over i ≠ k

The x that minimises ‖res(X)‖_{1,∞} has no closed form. Here x is the mean over tokens, as in Dong et al.'s code, or the
median of each coordinate, which minimises ‖·‖₁ but not the product. So both residuals are upper bounds. A relative
residual of 0 and a cosine of 1 mean that all tokens have collapsed into one. Neither depends on the scale of X. A token
whose state is 0 has no cosine; states that are all 0 have neither: nan.

For a matrix of attention weights with singular values σ; both are 1 if all rows are the same:

    stable_rank = Σσ² / max σ²        effective_rank = exp(H(σ / Σσ))  (Roy & Vetterli 2007)

Every value is computed for each sentence without its padding, then averaged. Sentences with fewer than two tokens whose
state is not 0 are left out.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import pandas as pd
import torch
from torch import Tensor

from attnlab.analysis.diversity import entropy
from attnlab.analysis.sums import Analysis, build_pair_mask, check_record, read_token_masks
from attnlab.mechanisms.mechanism import widen
from attnlab.records.record import Layer, Record

Centre = Literal["mean", "median"]
COLUMNS = ("residual_mean", "residual_median", "relative_residual_mean", "relative_residual_median", "cosine")


def composite_norm(x: Tensor) -> Tensor:
    """Compute √(‖X‖₁ ‖X‖_∞) of matrices (…,n,e); (…)."""
    size = x.abs()
    return (size.sum(-2).amax(-1) * size.sum(-1).amax(-1)).sqrt()


def residual(x: Tensor, mask: Tensor | None = None, centre: Centre = "mean") -> Tensor:
    """Compute X − 1xᵀ of states (…,n,e), with x their mean or median; 0 where the mask (…,n) is False."""
    live_tokens = _token_mask(x, mask)
    if centre == "mean":
        middle = x.where(live_tokens, 0.0).sum(-2, keepdim=True) / live_tokens.sum(-2, keepdim=True).clamp_min(1)
    elif centre == "median":
        alive = x.masked_fill(~live_tokens, torch.nan)
        lower, upper = alive.nanmedian(-2, keepdim=True).values, -(-alive).nanmedian(-2, keepdim=True).values
        middle = (lower + upper) / 2  # of the two middle values if their number is even
    else:
        raise ValueError(f"centre must be one of {', '.join(get_args(Centre))}, got {centre!r}")
    return (x - middle).where(live_tokens, 0.0)


def relative_residual(x: Tensor, mask: Tensor | None = None, centre: Centre = "mean") -> Tensor:
    """Compute ‖res(X)‖_{1,∞} / ‖X‖_{1,∞} of states (…,n,e); (…), nan if X is 0."""
    x = x.where(_token_mask(x, mask), 0.0)
    x = x / x.abs().amax((-2, -1), keepdim=True)  # avoids underflow in the product of two small norms
    return composite_norm(residual(x, mask, centre)) / composite_norm(x)


def mean_cosine(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the mean of cos(X_i, X_k) over tokens i ≠ k of states (…,n,e); (…). nan below two nonzero tokens."""
    nonzero = _find_nonzero(x, mask)
    scaled = x / x.abs().amax(-1, keepdim=True)
    unit: Tensor = (scaled / scaled.norm(dim=-1, keepdim=True)).where(nonzero, 0.0)
    count = nonzero.sum((-2, -1))
    pairs = unit.sum(-2).square().sum(-1) - unit.square().sum((-2, -1))
    return pairs / (count * (count - 1))


def compute_ranks(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the stable and the effective rank of matrices (…,i,j); (…) each, 0 for a matrix of zeros."""
    sigma = torch.linalg.svdvals(widen(weights))
    top, total = sigma[..., 0], sigma.sum(-1, keepdim=True)
    some = top > 0
    stable = (sigma / top.where(some, 1.0).unsqueeze(-1)).square().sum(-1)
    effective = entropy(sigma / total.where(total > 0, 1.0)).exp()
    return stable, effective.where(some, 0.0)


def collapse(states: Tensor | Sequence[Tensor], mask: Tensor | None = None) -> pd.DataFrame:
    """Return a row for each of the states (b,n,e), the first before any layer: layer, and means over examples.

    mask   (b,n) bool, True = a token; the means are nan if the states of every example are 0
    """
    rows = []
    for number, x in enumerate(states):
        if x.dim() != 3:
            raise ValueError(f"the states after layer {number} must be (batch, tokens, size), got {tuple(x.shape)}")
        if not bool((_token_mask(x, mask).sum((-2, -1)) > 1).any()):
            raise ValueError("no example has two tokens, so there is nothing to compare")
        measured, count = _measure_states(x, mask)
        rows.append({"layer": number} | {name: float(value / count) for name, value in measured.items()})
    return pd.DataFrame(rows)


def rank(record: Record) -> pd.DataFrame:
    """Return a table with a row for every layer and place in it: see `Rank.states`."""
    return Rank().add(record, weights=False).states()


def weight_ranks(record: Record) -> pd.DataFrame:
    """Return a table with a row for every head: see `Rank.weights`."""
    return Rank().add(record, states=False).weights()


class Rank(Analysis):
    """The tables over many records. Several processes can merge their sums."""

    @torch.no_grad()
    def add(self, record: Record, *, states: bool = True, weights: bool = True) -> "Rank":
        """Add the examples of one record. `weights` adds their ranks: one singular value decomposition a head."""
        for layer in check_record(record, "rank").layers:
            queries, keys = read_token_masks(record, layer)
            if states:
                named = {"state": layer.around.get("residual"), "inputs": layer.inputs, "outputs": layer.outputs}
                for of, x in named.items():
                    if x is None:
                        continue
                    measured, count = _measure_states(x, queries)
                    for name, value in measured.items():
                        self.accumulate(layer, f"{of}.{name}", value)
                    self.accumulate(layer, f"{of}.examples", count)
            if weights:
                self._weights(layer, build_pair_mask(layer, queries, keys))
        return self

    def table(self) -> pd.DataFrame:
        """Return `states`."""
        return self.states()

    def states(self) -> pd.DataFrame:
        """Return kind, layer, of, and the columns described above with x the mean and the median; of is

        state     the state that the attention's output is added to (for supported blocks: see docs/record.md)
        inputs    the input of the attention: the state, or its norm
        outputs   the output of the attention
        """
        rows = []
        for kind, layer in self.list_layers():
            for of in ("state", "inputs", "outputs"):
                if self.has(kind, layer, f"{of}.examples"):
                    count = self.get(kind, layer, f"{of}.examples")  # 0 gives NaN: one token is not enough
                    values = {name: float(self.get(kind, layer, f"{of}.{name}") / count) for name in COLUMNS}
                    rows.append({"kind": kind, "layer": layer, "of": of} | values)
        return pd.DataFrame(rows)

    def weights(self) -> pd.DataFrame:
        """Return kind, layer, head, stable_rank and effective_rank of the weights, and tokens, the largest rank."""
        frames = []
        for kind, layer in self.list_layers():
            count = self.get(kind, layer, "weights.examples").clamp_min(1)
            names = ("stable_rank", "effective_rank")
            values = {name: (self.get(kind, layer, f"weights.{name}") / count).numpy() for name in names}
            head = range(len(values["stable_rank"]))
            tokens = float(self.get(kind, layer, "weights.tokens") / count)
            frames.append(pd.DataFrame({"kind": kind, "layer": layer, "head": head, **values, "tokens": tokens}))
        return pd.concat(frames, ignore_index=True)

    def _weights(self, layer: Layer, counted: Tensor) -> None:
        stable, effective = compute_ranks(widen(layer.weights).where(counted, 0.0))  # (b,h)
        least = torch.minimum(counted[:, 0].any(2).sum(1), counted[:, 0].any(1).sum(1))  # of queries and keys
        some = least > 1
        self.accumulate(layer, "weights.stable_rank", stable[some].sum(0))
        self.accumulate(layer, "weights.effective_rank", effective[some].sum(0))
        self.accumulate(layer, "weights.tokens", least[some].sum())
        self.accumulate(layer, "weights.examples", some.sum())


def _measure_states(x: Tensor, mask: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
    """Sum the columns of states (b,n,e) over examples with two nonzero tokens. Returns the sums and their number."""
    x, mask = widen(x), None if mask is None else mask.to(x.device)
    some = _find_nonzero(x, mask).sum((-2, -1)) > 1
    x, mask = x[some], None if mask is None else mask[some]
    sums = {}
    for centre in get_args(Centre):
        sums[f"residual_{centre}"] = composite_norm(residual(x, mask, centre)).double().sum()
        sums[f"relative_residual_{centre}"] = relative_residual(x, mask, centre).double().sum()
    return sums | {"cosine": mean_cosine(x, mask).double().sum()}, some.sum()


def _find_nonzero(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return a bool mask (…,n,1) of the tokens whose state is not 0."""
    return _token_mask(x, mask) & (x != 0).any(-1, keepdim=True)


def _token_mask(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask as (…,n,1), or all True without one."""
    if mask is None:
        return torch.ones(*x.shape[:-1], 1, dtype=torch.bool, device=x.device)
    if mask.shape != x.shape[:-1] or mask.dtype != torch.bool:
        given = f"{mask.dtype} {tuple(mask.shape)}"
        raise ValueError(f"mask must be bool {tuple(x.shape[:-1])}, one value for each token, got {given}")
    return mask.to(x.device).unsqueeze(-1)

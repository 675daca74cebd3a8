"""Sinks: tokens that receive much of the weight and give next to nothing (Xiao et al. 2024; Gu et al. 2025).

From the totals of a layer (`totals`), for each head over N queries, mean over examples:

    first_weight      Σ_i α_i,first / N             the mean weight on the first token
    first_norm        Σ_i ‖α_i,first f‖ / Σ_ij ‖α_ij f‖     its share of what the head takes, by norm
    first_uniform     the same if each query spread its weight evenly over the keys up to it (in a decoder), or over all
    is_sink           first_weight > 0.3, as Gu et al. 2025 count sinks (ε = 0.3)
    top_key           the key with the most weight; top_weight and top_norm are its shares of weight and of norm
    entropy_nats      mean over queries

The sink rate of a layer or a model is the share of its heads with a sink. A head whose first_weight is far above its
first_norm rests there: it takes weight and gives nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from attnlab.analysis.totals import Totals

EPSILON = 0.3
MASSIVE, TIMES_MEDIAN = 100.0, 1000.0  # Sun et al. 2024: the least size, and the least ratio to the median


@dataclass(frozen=True)
class Activations:
    """The sizes |x| of the states that enter a block: its largest, and how many of them are massive."""

    largest: float
    median: float
    token: int  # of the largest, in the first example
    channel: int
    massive: int  # |x| > 100 and |x| > 1000 · median (Sun et al. 2024)


def tabulate_sinks(layers: Sequence[Totals]) -> pd.DataFrame:
    """Return one row for each layer and head, with the columns above."""
    return pd.concat([_tabulate_layer(layer) for layer in layers], ignore_index=True)


def _tabulate_layer(layer: Totals) -> pd.DataFrame:
    queries = layer.entropy.shape[2]
    weight, norm = layer.received_weight.double(), layer.received_norm.double()  # (b,h,j)
    shares = weight / weight.sum(-1, keepdim=True)
    by_norm = norm / norm.sum(-1, keepdim=True)
    top, key = shares.max(-1)
    numbers = {
        "first_weight": weight[..., 0] / queries, "first_norm": by_norm[..., 0], "top_weight": top,
        "top_norm": by_norm.gather(-1, key[..., None])[..., 0], "entropy_nats": layer.entropy.double().mean(-1),
        "norm_mean": layer.taken_norm.double().mean(-1),
    }  # fmt: skip
    stacked = torch.stack([x.mean(0) for x in numbers.values()]).cpu()  # (number,h)
    columns = dict(zip(numbers, stacked.tolist(), strict=True))
    table = pd.DataFrame({"kind": layer.kind, "layer": layer.index, "head": range(stacked.shape[1])} | columns)
    table["first_uniform"] = _measure_uniform(layer.kind, queries, weight.shape[2])
    table["top_key"] = key[0].tolist()
    table["is_sink"] = table["first_weight"] > EPSILON
    return table


def _measure_uniform(kind: str, queries: int, keys: int) -> float:
    """Return the mean weight on the first token if every query weighs the keys that it may see evenly."""
    if kind != "decoder-self":
        return 1 / keys
    return float((1 / torch.arange(keys - queries + 1, keys + 1).double()).mean())


def measure_activations(states: Tensor) -> Activations:
    """Measure states (b,n,e). The median is of at most 2²² of them, evenly spaced."""
    sizes = states.detach().abs()
    flat = sizes.flatten()
    median = flat[:: max(1, flat.numel() // 2**22)].float().median()
    largest, place = flat.max(0)
    bound = torch.clamp(median * TIMES_MEDIAN, min=MASSIVE)
    massive = (sizes > bound).sum()
    numbers = torch.stack([largest.double(), median.double(), place.double(), massive.double()]).tolist()
    token, channel = divmod(int(numbers[2]) % (states.shape[1] * states.shape[2]), states.shape[2])
    return Activations(numbers[0], numbers[1], token, channel, int(numbers[3]))

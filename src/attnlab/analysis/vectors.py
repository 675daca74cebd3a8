"""The vectors that keys add to queries, Σ_h α_hij (v_hj A_hi) W_h: (b,i,j,e), a few queries at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnlab.mechanisms.mechanism import widen
from attnlab.records.record import Layer, turn_values

HELD = 2**24  # values in one tensor of vectors


def read_vectors(layer: Layer, width: int = 0) -> Iterator[tuple[slice, Tensor]]:
    """Yield ranges of queries with the vectors (b,·,j,e) of every key.

    width   size of the largest vector that the caller makes of each, if it is more than e
    """
    values, projection = widen(layer.values), widen(layer.output_weight)
    f = values @ projection  # (b,h,j,e)
    b, _, j, e = f.shape
    for rows, weights in layer.chunks(max(1, HELD // max(1, b * j * max(e, width)))):
        if layer.turning is None:
            yield rows, torch.einsum("bhij,bhje->bije", widen(weights), f)
        else:
            turned = turn_values(layer.turning[:, :, rows].to(values.dtype), values)  # (b,h,·,j,d)
            yield rows, torch.einsum("bhijd,hde->bije", widen(weights).unsqueeze(-1) * turned, projection)

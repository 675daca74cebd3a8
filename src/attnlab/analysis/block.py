"""The block around an attention, as Layer.around holds it: its parts, and its norms applied to contributions."""

from torch import Tensor

from attnlab.mechanisms.mechanism import widen
from attnlab.records.record import Layer


def apply_norm(layer: Layer, norm: str, x: Tensor, *, rows: slice = slice(None), scaled: bool = True) -> Tensor:
    """Compute γ·(x − mean x) or γ·x; if scaled, divided by σ_i, with x (b,i,k,e) of the queries in `rows`."""
    gain = widen(read_part(layer, f"{norm}.gain"))
    if bool(read_part(layer, f"{norm}.centred")):
        x = x - x.mean(-1, keepdim=True)
    return x * gain * read_part(layer, f"{norm}.scale")[:, rows, None] if scaled else x * gain


def read_part(layer: Layer, name: str) -> Tensor:
    """Return a part of the block around the attention. Raises ValueError with the reason if it is missing."""
    if name in layer.around:
        return layer.around[name]
    if layer.strange:
        raise ValueError(f"{layer.name}: the block around this attention is not supported: {layer.strange}")
    if name.startswith(("feed_forward.", "closing.")):
        raise ValueError(f"{layer.name}: the feed-forward was not recorded; record with feed_forward=True")
    raise ValueError(f"{layer.name}: the record lacks the block around the attention; record it again")

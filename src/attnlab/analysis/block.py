"""The block around an attention, as Layer.around holds it: its parts, and its norms as they act on contributions."""

from torch import Tensor

from attnlab.analysis.contribution import widen
from attnlab.records.record import Layer


def apply_norm(layer: Layer, norm: str, x: Tensor, *, rows: slice = slice(None), scaled: bool = True) -> Tensor:
    """γ·(x − mean x) or γ·x, over σ_i if scaled: then x is (b,i,k,e), its queries those in rows."""
    gain = widen(read_part(layer, f"{norm}.gain"))
    if bool(read_part(layer, f"{norm}.centred")):
        x = x - x.mean(-1, keepdim=True)
    return x * gain * read_part(layer, f"{norm}.scale")[:, rows, None] if scaled else x * gain


def read_part(layer: Layer, name: str) -> Tensor:
    """A part of the block around the attention, or a sentence on why it is not there."""
    if name in layer.around:
        return layer.around[name]
    if layer.strange:
        raise ValueError(f"{layer.name}: the block around this attention is not understood: {layer.strange}")
    if name.startswith(("feed_forward.", "closing.")):
        raise ValueError(f"{layer.name}: its feed-forward was not recorded; record with feed_forward=True")
    raise ValueError(f"{layer.name}: this record does not hold the block around the attention; record it again")

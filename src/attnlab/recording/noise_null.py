"""What noise alone does to attention weights: the null that CODA's sampled weights are to be held against.

A mechanism that draws N(0,1) noise on its logits has more different heads for that alone. How much is seen on a
model that has learnt without noise, given the same noise:

    with_noise(model)      the model, its softmax attentions drawing noise in every layer: record(…, noise=SEED)
    noised(record, SEED)   a record, each layer noised by itself: P' = softmax(ln P + ε), which is softmax(logits + ε)

In the second no layer feels the noise of the layers before it, and no model is needed. Both draw what CODA-CS with
this seed would draw at the same place (mechanisms/noise.py).
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.mechanisms.coda_cs import CodaCS
from attnlab.mechanisms.mechanism import masked_softmax, wide
from attnlab.mechanisms.noise import gaussian
from attnlab.mechanisms.softmax import Softmax
from attnlab.models.attention import Attention
from attnlab.recording.probe import evaluated
from attnlab.records.record import Layer, Record

OFF = 1e-2  # how far a row of a softmax may sum from 1, in half precision


def with_noise(model: nn.Module) -> Any:
    """A softmax model of ours as one whose attentions are CODA-CS; it shares its weights, and the model stays."""
    inner = evaluated(model)
    made = copy.deepcopy(inner, {id(x): x for x in (*inner.parameters(), *inner.buffers())})
    for name, attention in made.named_modules():
        if isinstance(attention, Attention):
            old = attention.mechanism
            if type(old) is not Softmax:
                raise ValueError(f"{name} is {type(old).__name__}; the null is of a model whose attentions are softmax")
            new = CodaCS(old.heads, old.head_dim, layer=old.layer, scale=old.scale, dropout=old.dropout)
            attention.mechanism = new.eval()
    return made


@torch.no_grad()
def noised(record: Record, seed: int) -> Record:
    """The same record with N(0,1) noise on the logits of every layer; context, mixed and outputs follow the weights."""
    if not isinstance(record, Record):
        raise TypeError(f"noised takes a Record, not a {type(record).__name__}; attnlab.record makes one")
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"a noise seed is a whole number from 0 to {2**32 - 1}, not {seed!r}")
    layers = [_noised(layer, seed | (place << 32)) for place, layer in enumerate(record.layers)]
    return replace(record, layers=layers, meta={**record.meta, "noise": seed})


def _noised(layer: Layer, seed: int) -> Layer:
    if layer.mixed is not layer.context and not torch.equal(layer.mixed, layer.context):
        raise ValueError(f"{layer.name}: its mechanism changes the mixed context (finish): it is no softmax attention")
    weights = layer.weights
    visible = layer.mask[(None,) * (4 - layer.mask.dim())]
    _check_softmax(layer.name, weights, visible)
    b, h, i, j = weights.shape
    drawn = gaussian(seed, layer.index, b, h, torch.arange(i, device=weights.device), j)
    made = masked_softmax(wide(weights).log() + drawn.to(wide(weights).dtype), visible).to(weights.dtype)
    context = made @ layer.values
    outputs = torch.einsum("bhid,hde->bie", context, layer.output_weight)
    if layer.output_bias is not None:
        outputs = outputs + layer.output_bias
    strange = "noise was added to its weights after it had run"
    states = {"context": context, "mixed": context, "outputs": outputs}
    return replace(layer, attended=made, around={}, strange=strange, **states)  # type: ignore[arg-type]


def _check_softmax(name: str, weights: Tensor, visible: Tensor) -> None:
    total = wide(weights).sum(-1)
    wrong = (total - 1.0).abs() > OFF
    if bool((weights < 0).any()) or bool((wrong & visible.any(-1)).any()):
        raise ValueError(f"{name}: its weights are not a softmax's (not negative, a sum of 1), so they have no logits")

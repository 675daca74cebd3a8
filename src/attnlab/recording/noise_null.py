"""The effect of noise alone on attention weights: the null hypothesis for CODA's sampled weights.

A mechanism that adds N(0,1) noise to its logits has more diverse heads because of the noise alone. To measure this
effect, add the same noise to a model that was trained without noise:

    make_noisy_model(model)   a model whose softmax attentions draw noise in every layer: record(…, noise=SEED)
    add_noise(record, SEED)   a record with noise in each layer: P' = softmax(ln P + ε), which is softmax(logits + ε)

In the second form no layer sees the noise of the layers before it, and no model is needed. Both draw the noise that
CODA-CS draws at the same layer and entry with the same seed (mechanisms/noise.py).
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.analysis.contribution import is_linear
from attnlab.mechanisms.coda_cs import CodaCS
from attnlab.mechanisms.mechanism import masked_softmax, widen
from attnlab.mechanisms.noise import gaussian
from attnlab.mechanisms.softmax import Softmax
from attnlab.models.attention import Attention
from attnlab.recording.probe import require_eval_model
from attnlab.records.record import Layer, Record, apply_turning

SUM_TOLERANCE = 1e-2  # allowed error of a row sum of a softmax, in half precision


def make_noisy_model(model: nn.Module) -> Any:
    """Return a copy of a softmax model with CODA-CS as its attentions; the two share their weights."""
    inner = require_eval_model(model)
    noisy = copy.deepcopy(inner, {id(x): x for x in (*inner.parameters(), *inner.buffers())})
    for name, attention in noisy.named_modules():
        if isinstance(attention, Attention):
            old = attention.mechanism
            if type(old) is not Softmax:
                raise ValueError(f"{name} is {type(old).__name__}; this needs a model whose attentions are all softmax")
            new = CodaCS(old.heads, old.head_dim, layer=old.layer, scale=old.scale, dropout=old.dropout)
            attention.mechanism = new.eval()
    return noisy


@torch.no_grad()
def add_noise(record: Record, seed: int) -> Record:
    """Return the record with N(0,1) noise on the logits of every layer. Context, mixed and outputs are recomputed.

    Raises ValueError if a layer is not a softmax attention.
    """
    if not isinstance(record, Record):
        raise TypeError(f"add_noise needs a Record, as from attnlab.record, got a {type(record).__name__}")
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed must be an integer from 0 to {2**32 - 1}, got {seed!r}")
    layers = [_add_layer_noise(layer, seed | (place << 32)) for place, layer in enumerate(record.layers)]
    return replace(record, layers=layers, meta={**record.meta, "noise": seed})


def _add_layer_noise(layer: Layer, seed: int) -> Layer:
    if not is_linear(layer):
        raise ValueError(f"{layer.name} is no softmax attention: its mechanism transforms the mixed context (finish)")
    weights = layer.weights
    visible = layer.see(0, layer.context.shape[2])
    _check_softmax(layer.name, weights, visible)
    b, h, i, j = weights.shape
    noise = gaussian(seed, layer.index, b, h, torch.arange(i, device=weights.device), j)
    noisy = masked_softmax(widen(weights).log() + noise.to(widen(weights).dtype), visible).to(weights.dtype)
    context = noisy @ layer.values
    mixed = context if layer.turning is None else apply_turning(layer.turning, context)
    outputs = torch.einsum("bhid,hde->bie", mixed, layer.output_weight)
    if layer.output_bias is not None:
        outputs = outputs + layer.output_bias
    strange = "noise was added to its weights after the forward pass"
    states = {"context": context, "mixed": mixed, "outputs": outputs}
    return replace(layer, attended=noisy, around={}, strange=strange, **states)  # type: ignore[arg-type]


def _check_softmax(name: str, weights: Tensor, visible: Tensor) -> None:
    total = widen(weights).sum(-1)
    wrong = (total - 1.0).abs() > SUM_TOLERANCE
    if bool((weights < 0).any()) or bool((wrong & visible.any(-1)).any()):
        raise ValueError(f"{name} is no softmax attention: its weights are negative or do not sum to 1")

"""What a model loses without one head (Michel et al. 2019, §3): the loss of a batch with each head set to 0 in turn.

    output = Σ_h ξ_h · mixed_h W_h + b        ξ_h = 0 for one head of one layer, 1 for all others

The head's weights are made as before, so what a mechanism hands on to the next layer (CODA's and RealFormer's logits)
stays; only what the head adds to its layer's output is gone. One pass of the model for each head.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.models.attention import Attention
from attnlab.recording.probe import Batch, called, check_targets, evaluated
from attnlab.recording.watch import record
from attnlab.records.record import Record


@torch.no_grad()
def ablated(model: nn.Module, batch: Batch, targets: Tensor) -> Record:
    """The record of a batch, in the extras of each layer: what its targets cost, and what they cost without each head.

    nll          (b,)    Σ −log p(target), in nats        scored   (b,)   how many targets that is
    ablated_nll  (b,h)   the same with head h set to 0

    targets   the true next tokens (b,i), padding where nothing is predicted; or the classes (b,)
    """
    inner = evaluated(model)
    found = record(inner, batch)
    scored = torch.ones_like(targets, dtype=torch.bool) if targets.dim() == 1 else targets != inner.padding
    nll = _nll(inner, batch, targets, scored)
    extras = {"nll": nll, "scored": scored.view(len(targets), -1).sum(1)}
    layers = []
    for layer in found.layers:
        attention = inner.get_submodule(layer.name)
        assert isinstance(attention, Attention)
        without = [_nll_without(inner, batch, targets, scored, attention, h) for h in range(attention.mechanism.heads)]
        layers.append(replace(layer, extras={**layer.extras, **extras, "ablated_nll": torch.stack(without, dim=1)}))
    return replace(found, layers=layers)


def _nll_without(model: Any, batch: Batch, targets: Tensor, scored: Tensor, attention: Attention, head: int) -> Tensor:
    def erase(mechanism: nn.Module, args: tuple, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        mixed = output[0].clone()  # (b,h,i,d)
        mixed[:, head] = 0.0
        return mixed, output[1]

    with attention.mechanism.register_forward_hook(erase):
        return _nll(model, batch, targets, scored)


def _nll(model: Any, batch: Batch, targets: Tensor, scored: Tensor) -> Tensor:
    """(b,)."""
    with torch.compiler.set_stance("force_eager"):  # hooks on compiled code never fire
        hidden = called(model.hidden, batch)
        check_targets(targets, hidden.shape[:-1])
        nll = model.readout.nll(hidden, targets)
    return nll.where(scored, 0.0).view(len(targets), -1).sum(1)

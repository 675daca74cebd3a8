"""Head ablation (Michel et al. 2019, §3): the loss of a batch with each head knocked out in turn.

    output = Σ_h ξ_h · mixed_h W_h + b        ξ_h = 0 for one head of one layer, 1 for all others

Each head takes one forward pass under `KnockOutHead` of attnlab.recording.interventions.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.recording.interventions import KnockOutHead, change_model
from attnlab.recording.probe import Batch, compute_nll, require_eval_model
from attnlab.recording.watch import record
from attnlab.records.record import Record


@torch.no_grad()
def record_ablation(model: nn.Module, batch: Batch, targets: Tensor) -> Record:
    """Record a batch, with the loss of its targets with and without each head in the extras of each layer.

    targets   the true next tokens (b,i), padding where nothing is predicted; or the classes (b,)

    The extras are

    nll          (b,)    Σ −log p(target), in nats        scored   (b,)   number of targets
    ablated_nll  (b,h)   nll with head h set to 0
    """
    inner = require_eval_model(model)
    full = record(inner, batch)
    nll, scored = _sum_nll(inner, batch, targets)
    extras = {"nll": nll, "scored": scored}
    layers = []
    for layer in full.layers:
        without = []
        for head in range(layer.context.shape[1]):
            with change_model(inner, [KnockOutHead(kind=layer.kind, layer=layer.index, head=head)]):
                without.append(_sum_nll(inner, batch, targets)[0])
        layers.append(replace(layer, extras={**layer.extras, **extras, "ablated_nll": torch.stack(without, dim=1)}))
    return replace(full, layers=layers)


def _sum_nll(model: Any, batch: Batch, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and the number of targets of each example, (b,) each."""
    nll, scored = compute_nll(model, batch, targets)
    return nll.where(scored, 0.0).view(len(nll), -1).sum(1), scored.view(len(nll), -1).sum(1)

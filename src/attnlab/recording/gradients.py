"""The gradients of the projections of every attention of a Transformer, and the projections themselves.

    gradient_norms(model)                   after backward
    gradient_norms(model, flat.views(…))    of gradients that lie elsewhere, as those of a Stepper do (stepping.py)
    batch_gradient_norms(model, …)          of the mean loss of one batch: at any step whose weights were kept

Rows are what attnlab.analysis.gradient reads: kind, layer, projection ("query", "key", "value", "output"), norm, the
Frobenius norm of the gradient of its matrix.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.models.attention import MultiHead
from attnlab.recording.probe import Batch, called, check_targets
from attnlab.recording.watch import unwrapped

PROJECTIONS = ("query", "key", "value", "output")


def gradient_norms(model: nn.Module, gradients: Mapping[str, Tensor] | None = None) -> list[dict[str, Any]]:
    """A row for each projection of each attention.

    gradients   by the name of the parameter; by default what backward left at the parameters
    """
    inner = unwrapped(model)
    if gradients is None:
        gradients = {name: p.grad for name, p in inner.named_parameters() if p.grad is not None}
    found = _attentions(inner)
    if not any(f"{name}.{projection}.weight" in gradients for name, _ in found for projection in PROJECTIONS):
        raise ValueError(
            f"no attention of this {type(inner).__name__} has a gradient: ask after backward and before gradients are "
            "let go, or hand them in (gradients=)"
        )
    rows = []
    for name, attention in found:
        for projection in PROJECTIONS:
            gradient = gradients.get(f"{name}.{projection}.weight", torch.zeros(()))  # 0 where none arrived
            norm = float(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64))
            rows.append({"kind": attention.kind, "layer": attention.index, "projection": projection, "norm": norm})
    return rows


def batch_gradient_norms(model: nn.Module, batch: Batch, targets: Tensor) -> list[dict[str, Any]]:
    """The same of the mean of −log p over the targets of one batch, in the mode that the model is in.

    The gradients that the model holds stay as they are.

    targets   the true next tokens (b,i), padding where nothing is predicted; or the classes (b,)
    """
    inner = unwrapped(model)
    weights = {
        f"{name}.{projection}.weight": getattr(attention, projection).weight
        for name, attention in _attentions(inner)
        for projection in PROJECTIONS
    }
    with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        hidden = called(inner.hidden, batch)
        check_targets(targets, hidden.shape[:-1])
        nll = inner.readout.nll(hidden, targets)
        loss = nll.mean() if targets.dim() == 1 else nll[targets != inner.padding].mean()
        gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True, materialize_grads=True)
    return gradient_norms(inner, dict(zip(weights, gradients, strict=True)))


def projections(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """W_Q, W_K and W_V of every attention, each (h,e,d), under the name that its layer has in a Record.

    x W_Q are its queries, without bias; a key head that serves several query heads is there for each.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, attention in _attentions(unwrapped(model)):
        heads, size = attention.mechanism.heads, attention.mechanism.head_dim
        found[name] = {}
        for projection in PROJECTIONS[:3]:
            split = getattr(attention, projection).weight.detach().T.unflatten(1, (-1, size)).transpose(0, 1)  # (g,e,d)
            found[name][projection] = split.repeat_interleave(heads // len(split), dim=0).clone()
    return found


def _attentions(model: nn.Module) -> list[tuple[str, MultiHead]]:
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, MultiHead)]
    if not found:
        raise ValueError(f"a {type(model).__name__} has no attention with query, key, value and output projections")
    return found

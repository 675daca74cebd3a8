"""Gradient norms of the projections of every attention of a Transformer, and the projections themselves.

    gradient_norms(model)                   the gradients at the parameters, after backward
    gradient_norms(model, flat.views(…))    gradients stored elsewhere, such as in a Flat of attnlab.training.step
    batch_gradient_norms(model, …)          the gradients of the mean loss of one batch, at any saved step

attnlab.analysis.gradient reads the rows: kind, layer, projection ("query", "key", "value", "output") and norm, the
Frobenius norm of the gradient of its matrix.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.models.attention import MultiHead
from attnlab.models.rotary import Rotary
from attnlab.recording.probe import Batch, compute_nll
from attnlab.recording.watch import unwrap_model

PROJECTIONS = ("query", "key", "value", "output")


def gradient_norms(model: nn.Module, gradients: Mapping[str, Tensor] | None = None) -> list[dict[str, Any]]:
    """Return a row for each projection of each attention.

    gradients   by parameter name; by default the gradients at the parameters

    Raises ValueError if no attention has a gradient.
    """
    inner = unwrap_model(model)
    if gradients is None:
        gradients = {name: p.grad for name, p in inner.named_parameters() if p.grad is not None}
    attentions = _find_attentions(inner)
    if not any(f"{name}.{projection}.weight" in gradients for name, _ in attentions for projection in PROJECTIONS):
        raise ValueError(
            f"no attention of this {type(inner).__name__} has a gradient; call this between backward and zero_grad, or "
            "pass gradients="
        )
    rows = []
    for name, attention in attentions:
        for projection in PROJECTIONS:
            gradient = gradients.get(f"{name}.{projection}.weight", torch.zeros(()))  # 0: not used by the loss
            norm = float(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64))
            rows.append({"kind": attention.kind, "layer": attention.index, "projection": projection, "norm": norm})
    return rows


def batch_gradient_norms(model: nn.Module, batch: Batch, targets: Tensor) -> list[dict[str, Any]]:
    """Return the rows for the mean of −log p over the targets of one batch, in the model's current mode.

    targets   the true next tokens (b,i), padding where nothing is predicted; or the classes (b,)

    The gradients at the parameters do not change.
    """
    inner = unwrap_model(model)
    weights = {
        f"{name}.{projection}.weight": getattr(attention, projection).weight
        for name, attention in _find_attentions(inner)
        for projection in PROJECTIONS
    }
    with torch.enable_grad():
        nll, scored = compute_nll(inner, batch, targets)
        loss = nll[scored].mean()
        gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True, materialize_grads=True)
    return gradient_norms(inner, dict(zip(weights, gradients, strict=True)))


def projections(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return W_Q, W_K and W_V of every attention, each (h,e,d), by the name of its layer in a Record.

    x W_Q are the queries without bias. A key head that several query heads share is repeated for each of them.
    Raises ValueError if RoPE, QK-norm or the mechanism makes queries or values of something else.
    """
    matrices: dict[str, dict[str, Tensor]] = {}
    inner = unwrap_model(model)
    if any(isinstance(module, Rotary) or getattr(module, "query_norm", None) is not None for module in inner.modules()):
        raise ValueError("x W_Q are not the queries of this model, because RoPE or QK-norm changes them")
    for name, attention in _find_attentions(inner):
        mechanism = attention.mechanism
        heads, size = mechanism.heads, mechanism.head_dim
        if mechanism.query_heads != heads:
            kind, count = type(mechanism).__name__, mechanism.query_heads
            raise ValueError(f"{name}: {kind} has {count} query heads for {heads} heads, so no head has one W_Q")
        if mechanism.carry_of == "keys":
            raise ValueError(f"{name}: x W_V are not the values of {type(mechanism).__name__}, which carries others")
        matrices[name] = {}
        for projection in PROJECTIONS[:3]:
            split = getattr(attention, projection).weight.detach().T.unflatten(1, (-1, size)).transpose(0, 1)  # (g,e,d)
            matrices[name][projection] = split.repeat_interleave(heads // len(split), dim=0).clone()
    return matrices


def _find_attentions(model: nn.Module) -> list[tuple[str, MultiHead]]:
    attentions = [(name, module) for name, module in model.named_modules() if isinstance(module, MultiHead)]
    if not attentions:
        raise ValueError(f"a {type(model).__name__} has no attention with query, key, value and output projections")
    return attentions

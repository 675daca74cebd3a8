"""LoRA (Hu et al. 2022, §4.1): a trained update of low rank beside each projection of the attention, which stays fixed.

    y = W x + c + B A x        A (r,in) random, B (out,r) = 0, so that the model is unchanged before training

It is what PEFT trains with lora_alpha = r and no dropout. Everything else that the model came with is fixed too; the
parameters of a mechanism are trained. Nothing here imports transformers.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.huggingface.adaptation import is_added
from attnlab.recording.around import is_linear, weight_matrix


class LowRank(nn.Module):
    """A linear map with its update; `base_layer` is PEFT's name, by which a record finds the map."""

    def __init__(self, base_layer: nn.Module, rank: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        weight = weight_matrix(base_layer)
        inputs, outputs = weight.shape
        kind: dict[str, Any] = {"bias": False, "dtype": weight.dtype, "device": weight.device}
        self.a, self.b = nn.Linear(inputs, rank, **kind), nn.Linear(rank, outputs, **kind)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.b(self.a(x))

    @torch.no_grad()
    def merge(self) -> nn.Module:
        """Add the update to the weight of the linear map, and return the map."""
        weight_matrix(self.base_layer).add_((self.b.weight @ self.a.weight).T)
        return self.base_layer


def add_lora(model: nn.Module, attentions: Iterable[nn.Module], rank: int) -> None:
    """Give the linear maps of these attention modules an update, and fix all other weights that the model came with.

    A map with a hook stays as it is: a mechanism with more query heads reads it, and trains a projection of its own.
    """
    for name, parameter in model.named_parameters():
        if not is_added(name):
            parameter.requires_grad_(False)
    found = [
        (parent, name, linear)
        for attention in attentions
        for path, parent in attention.named_modules()
        for name, linear in parent.named_children()
        if is_linear(linear) and not is_added(f"{path}.{name}.") and not linear._forward_hooks
    ]
    if not found:
        raise ValueError(f"lora={rank}: the attention of this {type(model).__name__} has no linear map to update")
    for parent, name, linear in found:
        setattr(parent, name, LowRank(linear, rank))


def merge_lora(model: nn.Module) -> None:
    """Replace every map with an update by its merged map, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LowRank):
                setattr(parent, name, child.merge())

"""Freeze the nonlinear parts of a Transformer, so that its output is a sum over its inputs and biases.

With the attention weights α, the deviations σ of norms and the slopes of activations kept at their values, every part
is linear, and the pass computes the same numbers as before:

    norm         γ·(x − mean x)·[1/σ] + β           RMSNorm: without the mean
    activation   x·[g(x)/x]
    gate         [u] and [a] of a product a·u each get half, as in the uniform rule of AttnLRP (Achtibat et al. 2024)

[·] is constant for the gradient. Of the attention, either the weights are constant, or, as in AttnLRP, the softmax has
its gradient and the factors of the products q·k and α·v get half each. With constant weights, each input e_s has the
exact part e_s·∂logit/∂e_s, and each bias the part b·∂/∂b (DecompX, Modarressi et al. 2023, follows the same vectors
forwards). Modules are recognized by what flows through them. If one is not, the parts do not sum to the whole, and the
completeness error shows it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.recording.around import classify_module, compute_slope, find_misfit, match_norm
from attnlab.recording.interventions import halve_gradient

RECENT = 4  # linear maps whose outputs may be the other factor of a gate


@contextmanager
def freeze_blocks(model: nn.Module) -> Iterator[None]:
    """Freeze norms, activations and gates while the context is open. Attention is frozen by FreezeWeights."""
    gates = GateFinder()
    with ExitStack() as stack:
        for module in model.modules():
            match classify_module(module):
                case "norm":
                    stack.enter_context(module.register_forward_pre_hook(gates.halve_gate))  # BitNet norms a·u
                    stack.enter_context(module.register_forward_hook(_freeze_norm))
                case "activation":
                    stack.enter_context(module.register_forward_hook(gates.freeze_activation))
                case "linear":
                    stack.enter_context(module.register_forward_pre_hook(gates.halve_gate))
                    stack.enter_context(module.register_forward_hook(gates.note_linear))
        yield


def _freeze_norm(module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
    if not args or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
        return None
    x = args[0]
    parts = match_norm(module, x.detach(), output.detach())
    if not parts:
        return None
    centred = x - x.mean(-1, keepdim=True) if bool(parts["centred"]) else x
    bias = getattr(module, "bias", None)
    frozen = centred * (parts["gain"] * parts["scale"]).to(x.dtype)
    return frozen if bias is None else frozen + bias


class GateFinder:
    """Freezes activations, and finds the linear map or norm that reads the product a·u with a linear map's output."""

    def __init__(self) -> None:
        self.active: Tensor | None = None
        self.recent: list[Tensor] = []  # outputs of linear maps

    def freeze_activation(self, module: Any, args: tuple[Any, ...], output: Any) -> Tensor | None:
        if len(args) != 1 or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
            return None
        x = args[0]
        if x.shape != output.shape or not x.is_floating_point() or find_misfit(module, x.detach(), output.detach()):
            return None
        slope = compute_slope(module.forward, x.detach())
        self.active = x * slope.to(x.dtype)
        return self.active

    def note_linear(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor):
            self.recent = [*self.recent[1 - RECENT :], output.detach()]

    def halve_gate(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Halve the gradient at the input of a map or norm that reads a·u: each factor gets half of the product."""
        a = self.active
        if a is None or not args or not isinstance(args[0], Tensor) or args[0].shape != a.shape:
            return None
        x = args[0]
        halves = [half for u in self.recent if u.shape[-1] == 2 * a.shape[-1] for half in u.chunk(2, dim=-1)]
        factors = [u for u in (*self.recent, *halves) if u.shape == a.shape]
        if torch.equal(x, a) or not any(torch.allclose(x.detach(), a.detach() * u) for u in factors):
            return None
        self.active = None
        return (halve_gradient(x), *args[1:])

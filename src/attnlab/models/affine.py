"""Linear maps of many models at once, y = x Wᵀ + b, each as one product: what `population.py` maps its model within.

vmap of F.linear    for every example a product with a copy of W, then the bias; as many ∂L/∂W, then their sum
here                torch.baddbmm(b, x, Wᵀ) of (models, tokens, inputs), and ∂L/∂W by one product
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attnlab.models.batching_rule import as_one_call


class OneProduct(TorchFunctionMode):
    """Within, a linear map is one product of all tokens of a model, bias and all: vmap would repeat its weights for
    every example, add up as many gradients, and add the bias by itself."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is F.linear and not kwargs and len(args) == 3 and args[2] is not None:
            x, weight, bias = args
            return Affine.apply(bias[None, None], x.reshape(1, -1, x.shape[-1]), weight[None]).view(*x.shape[:-1], -1)
        if func is torch.baddbmm and not kwargs and args[0].shape[1] == 1:
            bias, x, across = args
            return Affine.apply(bias, x, across.mT)
        return func(*args, **(kwargs or {}))


class Affine(torch.autograd.Function):
    """bias + x Wᵀ of some maps, (s,1,o), (s,n,i), (s,o,i) -> (s,n,o); under vmap of more maps, as one call."""

    @staticmethod
    def forward(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return torch.baddbmm(bias, x, weight.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        products = (lambda: grad.sum(1, keepdim=True)), (lambda: grad @ weight), (lambda: grad.mT @ x)
        return tuple(made() if asked else None for made, asked in zip(products, ctx.needs_input_grad, strict=True))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *given: Tensor) -> tuple[Tensor, int]:
        (made,) = as_one_call(Affine, info.batch_size, in_dims, given)
        return made, 0

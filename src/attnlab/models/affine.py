"""Linear maps y = x Wᵀ + b of many models at once, each as one product; `population.py` uses it.

vmap of F.linear    one product per example with a copy of W, then the bias; one ∂L/∂W per example, then their sum
this module         torch.baddbmm(b, x, Wᵀ) of (models, tokens, inputs), and one product for ∂L/∂W
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attnlab.models.batching_rule import apply_as_one_call
from attnlab.provenance import HAS_TRITON

KERNEL_TYPES = (torch.float32, torch.float16, torch.bfloat16)  # kernels compute in float32


class OneProduct(TorchFunctionMode):
    """A mode in which each linear map is one product of all tokens of a model, bias included.

    Without it, vmap repeats the weights for every example, sums the gradients of all examples and adds the bias apart.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is F.linear and not kwargs and len(args) == 3 and args[2] is not None:
            x, weight, bias = args
            return Affine.apply(bias[None, None], x.reshape(1, -1, x.shape[-1]), weight[None]).view(*x.shape[:-1], -1)
        if func is torch.baddbmm and not kwargs and args[0].shape[1] == 1:
            bias, x, across = args
            return Affine.apply(bias, x, across.mT)
        return func(*args, **(kwargs or {}))


class Affine(torch.autograd.Function):
    """bias + x Wᵀ of s maps, (s,1,o), (s,n,i), (s,o,i) -> (s,n,o). vmap over more maps stays one call."""

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
        pairs = zip(products, ctx.needs_input_grad, strict=True)
        return tuple(compute() if needed else None for compute, needed in pairs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[Tensor, int]:
        (output,) = apply_as_one_call(Affine, info.batch_size, in_dims, inputs)
        return output, 0


class SumOfMaps(torch.autograd.Function):
    """bias + x Wᵀ + z Vᵀ of s maps: (s,1,o), (s,n,i), (s,o,i), (s,n,j), (s,o,j) -> (s,n,o), without joining x and z."""

    @staticmethod
    def forward(bias: Tensor, x: Tensor, weight: Tensor, other: Tensor, second: Tensor) -> Tensor:
        return torch.baddbmm(bias, x, weight.mT).baddbmm_(other, second.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, weight, other, second = ctx.saved_tensors
        return grad.sum(1, keepdim=True), grad @ weight, grad.mT @ x, grad @ second, grad.mT @ other

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[Tensor, int]:
        (output,) = apply_as_one_call(SumOfMaps, info.batch_size, in_dims, inputs)
        return output, 0


def has_kernels(x: Tensor) -> bool:
    """Return whether the kernels of member_kernel.py take x: on a GPU, in a type that loses nothing in float32."""
    return x.is_cuda and HAS_TRITON and x.dtype in KERNEL_TYPES


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b. With weights (s,o,i) and (s,o), each s-th part of x along its first axis has its own."""
    if weight.dim() == 2:
        return F.linear(x, weight, bias)
    parts = x.reshape(len(weight), -1, x.shape[-1])
    if bias is None:
        y = parts @ weight.mT
    elif has_kernels(x):
        from attnlab.models.member_kernel import affine

        y = affine(parts, weight, bias)
    else:
        y = torch.baddbmm(bias.unsqueeze(1), parts, weight.mT)
    return y.view(*x.shape[:-1], weight.shape[1])

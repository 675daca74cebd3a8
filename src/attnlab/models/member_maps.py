"""Layers of members whose weights are views of one flat matrix, and whose gradients are written into another.

    y = x Wᵀ + b        dW = dyᵀ x and db = Σ dy over tokens, straight into the flat gradient (s,parameters)

Autograd would allocate each gradient, and an optimiser would copy it. Linear maps of one input, as those of queries,
keys and values, lie side by side: they are one product, without joining their weights. torch.compile looks inside the
layers, so there they compute as without this module.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.models.affine import has_kernels
from attnlab.models.attention import MultiHead
from attnlab.models.members import MemberLinear, MemberNorm, MemberReadout

Layer = MemberLinear | MemberReadout | MemberNorm


class Maps:
    """Parameters of one or more layers side by side, and the places of their gradients.

    weight   (s,o,i) of linear maps, (s,e) of a norm        bias   (s,o) or (s,e), or None
    """

    def __init__(self, layers: Sequence[Layer], weights: Sequence[Any], grads: Sequence[Any]) -> None:
        self.parameters = [p for layer in layers for p in (layer.weight, layer.bias) if p is not None]
        (self.weight, self.bias), (self.weight_grad, self.bias_grad) = weights, grads
        self.is_written = False  # in this backward pass

    def __call__(self, x: Tensor) -> Tensor:
        """x Wᵀ + b of each member: (s·b,…,i) -> (s·b,…,o)."""
        parts = x.reshape(len(self.weight), -1, x.shape[-1])
        y: Tensor = _Linear.apply(parts, self, *self.parameters)
        return y.view(*x.shape[:-1], self.weight.shape[1])

    def normalise(self, x: Tensor, eps: float, centred: bool) -> Tensor:
        """Return the norms of x (s,n,e), by kernels."""
        y: Tensor = _Norm.apply(x, self, eps, centred, *self.parameters)
        return y

    def compute(self, x: Tensor) -> Tensor:
        """x Wᵀ + b: (s,n,i) -> (s,n,o)."""
        if self.bias is None:
            return torch.bmm(x, self.weight.mT)
        if has_kernels(x):
            from attnlab.models.member_kernel import affine

            y: Tensor = affine.function(x, self.weight, self.bias)
            return y
        return torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.mT)

    def write_gradients(self, grad: Tensor, x: Tensor) -> None:
        """Write the gradients of linear maps, or add them to those that this pass has written."""
        if self.is_written:
            torch.baddbmm(self.weight_grad, grad.mT, x, out=self.weight_grad)
        else:
            torch.bmm(grad.mT, x, out=self.weight_grad)
        if self.bias_grad is not None:
            self._write_sums(grad)
        self.is_written = True

    def _write_sums(self, grad: Tensor) -> None:
        """Sum over tokens for the bias."""
        if self.is_written:
            self.bias_grad += grad.sum(1)
        elif has_kernels(grad):
            from attnlab.models.member_kernel import sum_tokens_into

            sum_tokens_into(grad, self.bias_grad)
        else:
            torch.sum(grad, 1, out=self.bias_grad)


class _Linear(torch.autograd.Function):
    """Maps.compute; the parameters are given for autograd alone, which gets no gradient of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, maps: Maps, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.maps = maps
        return maps.compute(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), maps = ctx.saved_tensors, ctx.maps
        dx = torch.bmm(grad, maps.weight) if ctx.needs_input_grad[0] else None
        maps.write_gradients(grad, x)
        return dx, None, *[None] * len(maps.parameters)


class _Norm(torch.autograd.Function):
    """A norm by kernels, as _Linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, maps: Maps, eps: float, centred: bool, *parameters: Tensor) -> Tensor:
        from attnlab.models.member_kernel import normalise

        ctx.save_for_backward(x)
        ctx.maps, ctx.eps, ctx.centred = maps, eps, centred
        y: Tensor = normalise.function(x, maps.weight, maps.bias, eps, centred)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from attnlab.models.member_kernel import normalise_backward, normalise_backward_into

        (x,), maps = ctx.saved_tensors, ctx.maps
        given = (grad, x, maps.weight, ctx.eps, ctx.centred)
        if maps.is_written:
            dx, sums = normalise_backward.function(*given)
            for into, more in zip((maps.weight_grad, maps.bias_grad), sums, strict=True):
                if into is not None:
                    into += more
        else:
            dx = normalise_backward_into(*given, maps.weight_grad, maps.bias_grad)
        maps.is_written = True
        return dx, None, None, None, *[None] * len(maps.parameters)


def list_layers(model: nn.Module) -> Iterator[tuple[MultiHead | None, list[Layer]]]:
    """Yield the layers with parameters to write, those of one input together, and the attention that has them."""
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, MultiHead):
            linears: list[Any] = [module.query, module.key, module.value]
            if module.kind == "cross":
                linears = linears[1:]
            if all(isinstance(linear, MemberLinear) for linear in linears):
                inside.update(map(id, linears))
                yield module, linears
        elif isinstance(module, Layer) and id(module) not in inside:
            yield None, [module]


def can_write(layers: Sequence[Layer]) -> bool:
    """Return whether all parameters of the layers are trained."""
    return all(p is None or p.requires_grad for layer in layers for p in (layer.weight, layer.bias))

"""Layers of members whose weights are views of one flat matrix, and whose gradients are written into another.

    y = x Wᵀ + b        dW = dyᵀ x and db = Σ dy over tokens, straight into the flat gradient (s,parameters)

Autograd would allocate each gradient, and an optimiser would copy it. Linear maps of one input, as those of queries,
keys and values, lie side by side: they are one product, without joining their weights. On a GPU a bias is added, and
its gradient is summed, in a pass that reads the numbers anyway: with the ReLU, with dropout and the residual sum, or
where the gradients of queries, keys and values are joined. torch.compile looks inside the layers, so there they compute
as without this module.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.models.affine import has_kernels
from attnlab.models.attention import MultiHead
from attnlab.models.blocks import Block
from attnlab.models.members import MemberLinear, MemberNorm, MemberReadout

Layer = MemberLinear | MemberReadout | MemberNorm


class Maps:
    """Parameters of one or more layers side by side, and the places of their gradients.

    weight   (s,o,i) of linear maps, (s,e) of a norm        bias   (s,o) or (s,e), or None
    """

    def __init__(self, layers: Sequence[Layer], weights: Sequence[Any], grads: Sequence[Any]) -> None:
        self.weights = [layer.weight for layer in layers]
        self.biases = [layer.bias for layer in layers if layer.bias is not None]
        (self.weight, self.bias), (self.weight_grad, self.bias_grad) = weights, grads
        self.is_written = self.is_summed = False  # the gradient of the weight and of the bias, in this backward pass
        self.defers = False  # the bias to the dropout after it

    @property
    def parameters(self) -> list[Any]:
        return [*self.weights, *self.biases]

    def __call__(self, x: Tensor) -> Tensor:
        """x Wᵀ + b of each member: (s·b,…,i) -> (s·b,…,o). The dropout after it adds b if `defers`."""
        y: Tensor = _Linear.apply(self._split(x), self, *self.weights, *([] if self.defers else self.biases))
        return y.view(*x.shape[:-1], self.weight.shape[1])

    def rectify(self, x: Tensor) -> Tensor:
        """Return max(x Wᵀ + b, 0)."""
        y: Tensor = _Rectified.apply(self._split(x), self, *self.parameters)
        return y.view(*x.shape[:-1], self.weight.shape[1])

    def project(self, x: Tensor) -> list[Tensor]:
        """Return x Wᵀ + b of each of the layers."""
        parts = _Several.apply(self._split(x), self, *self.parameters)
        return [y.view(*x.shape[:-1], y.shape[-1]) for y in parts]

    def add_dropped(self, x: Tensor, part: Tensor, seeds: Tensor, rates: Tensor) -> Tensor:
        """Return x + dropout(part + b), by a kernel; (s·b,n,e)."""
        y: Tensor = _Residual.apply(x, part, self, seeds, rates, *self.biases)
        return y

    def normalise(self, x: Tensor, eps: float, centred: bool) -> Tensor:
        """Return the norms of x (s,n,e), by kernels."""
        y: Tensor = _Norm.apply(x, self, eps, centred, *self.parameters)
        return y

    def compute(self, x: Tensor) -> Tensor:
        """x Wᵀ + b: (s,n,i) -> (s,n,o)."""
        if self.bias is None or self.defers:
            return torch.bmm(x, self.weight.mT)
        if has_kernels(x):
            from attnlab.models.member_kernel import affine

            y: Tensor = affine.function(x, self.weight, self.bias)
            return y
        return torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.mT)

    def write_product(self, grad: Tensor, x: Tensor) -> None:
        """Write the gradient of the weights, or add it to that which this pass has written."""
        if self.is_written:
            torch.baddbmm(self.weight_grad, grad.mT, x, out=self.weight_grad)
        else:
            torch.bmm(grad.mT, x, out=self.weight_grad)
        self.is_written = True

    def write_sums(self, grad: Tensor) -> None:
        """Write the sum over the tokens of grad (s,n,o), the gradient of the bias, or add it."""
        if has_kernels(grad) and not self.is_summed:
            from attnlab.models.member_kernel import sum_tokens_into

            sum_tokens_into(grad, self.bias_grad)
            self.is_summed = True
        else:
            self._write_bias(grad.sum(1))

    def write_parts(self, sums: Tensor) -> None:
        """Write the sum over parts (s,parts,o), the gradient of the bias, or add it."""
        from attnlab.models.member_kernel import add_parts

        if self.is_summed:
            self.bias_grad += sums.sum(1)
        else:
            add_parts(sums, self.bias_grad)
        self.is_summed = True

    def _write_bias(self, total: Tensor) -> None:
        if self.is_summed:
            self.bias_grad += total
        else:
            self.bias_grad.copy_(total)
        self.is_summed = True

    def _split(self, x: Tensor) -> Tensor:
        """(s·b,…,i) -> (s,tokens,i)."""
        return x.reshape(len(self.weight), -1, x.shape[-1])


class _Linear(torch.autograd.Function):
    """Maps.compute; the parameters are given for autograd alone, which gets no gradient of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, maps: Maps, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.maps, ctx.defers = maps, maps.defers
        return maps.compute(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.maps.bias is not None and not ctx.defers:
            ctx.maps.write_sums(grad)
        return _propagate(ctx, grad, *ctx.saved_tensors)


class _Rectified(torch.autograd.Function):
    """max(x Wᵀ + b, 0), as _Linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, maps: Maps, *parameters: Tensor) -> Tensor:
        ctx.maps = maps
        if has_kernels(x):
            from attnlab.models.member_sums_kernel import rectify

            y = torch.bmm(x, maps.weight.mT)
            rectify(y, maps.bias)
        else:
            y = maps.compute(x).relu()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        if has_kernels(grad):
            from attnlab.models.member_sums_kernel import rectify_backward

            grad, sums = rectify_backward(grad, y)
            ctx.maps.write_parts(sums)
        else:
            grad = grad * (y > 0)
            ctx.maps.write_sums(grad)
        return _propagate(ctx, grad, x)


class _Several(torch.autograd.Function):
    """The outputs of several layers, views of one product, as _Linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, maps: Maps, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x)
        ctx.maps = maps
        return maps.compute(x).split([weight.shape[1] for weight in maps.weights], dim=2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.maps.bias is not None and has_kernels(grads[0]):
            from attnlab.models.member_sums_kernel import join

            grad, sums = join(grads)
            ctx.maps.write_parts(sums)
        else:
            grad = torch.cat(grads, dim=2)
            if ctx.maps.bias is not None:
                ctx.maps.write_sums(grad)
        return _propagate(ctx, grad, *ctx.saved_tensors)


class _Residual(torch.autograd.Function):
    """x + dropout(part + b) by a kernel, for a layer that defers its bias b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Tensor, maps: Maps, seeds: Tensor, rates: Tensor, *biases: Tensor) -> Tensor:
        from attnlab.models.dropout_kernel import drop_biased

        ctx.save_for_backward(seeds, rates)
        ctx.maps = maps
        return drop_biased(part, maps.bias, x, seeds, rates)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from attnlab.models.dropout_kernel import drop_summed

        dropped, sums = drop_summed(grad, *ctx.saved_tensors)
        ctx.maps.write_parts(sums)
        return grad, dropped, None, None, None, *[None] * len(ctx.maps.biases)


def _propagate(ctx: Any, grad: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    """Write the gradient of the weights of ctx.maps, and return that of x, and None for all else."""
    dx = torch.bmm(grad, ctx.maps.weight) if ctx.needs_input_grad[0] else None
    ctx.maps.write_product(grad, x)
    return dx, *[None] * (len(ctx.needs_input_grad) - 1)


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
        maps.is_written = maps.is_summed = True
        return dx, None, None, None, *[None] * len(maps.parameters)


def link_biases(model: nn.Module) -> None:
    """Let the residual connections of blocks add the biases of the layers before them, in the pass that drops."""
    for block in model.modules():
        if isinstance(block, Block):
            pairs: list[tuple[Any, Any]] = [(block.attention.output, block.attention_residual)]
            pairs += [(block.feed_forward.output, block.feed_forward_residual)]
            if block.cross is not None:
                pairs.append((block.cross.output, block.cross_residual))
            for linear, residual in pairs:
                maps, dropout = getattr(linear, "maps", None), residual.dropout
                if maps is not None and maps.bias is not None and linear.scale == 1 and any(dropout.rates):
                    maps.defers, dropout.bias = True, maps
            feed_forward = block.feed_forward
            maps = getattr(feed_forward.inner, "maps", None)
            if maps is not None and maps.bias is not None and isinstance(feed_forward.activation, nn.ReLU):
                feed_forward.rectified = maps.rectify


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

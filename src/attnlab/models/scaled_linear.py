"""The linear map that ends a block: its output is multiplied before it is added to the residual stream."""

from torch import Tensor, nn


class ScaledLinear(nn.Linear):
    """scale · (x Wᵀ + b)."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, scale: float = 1.0) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.scale == 1 else self.scale * y

    def fold_scale(self) -> tuple[Tensor, Tensor | None]:
        """Return scale · W and scale · b, the weight and bias of the same map without a scale."""
        if self.scale == 1:
            return self.weight, self.bias
        return self.scale * self.weight, None if self.bias is None else self.scale * self.bias

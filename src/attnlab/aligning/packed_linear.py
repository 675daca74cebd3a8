"""Linear maps in the memory layout of oneDNN, for inference in float32 on a CPU.

PyTorch multiplies float32 matrices by MKL, which is slow on some processors of AMD. oneDNN computes the same sums, in
another order, so results differ in their last digits.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PackedLinear(nn.Linear):
    """A linear map that shares the weights of another one, and packs them when it first runs without gradients."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.packed: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return F.linear(input, self.weight, self.bias)
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())
        product: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")
        return product


def pack_linears(model: nn.Module) -> None:
    """Replace float32 linear maps of a model on a CPU in place, if this PyTorch has oneDNN."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and (child.weight.dtype, child.weight.device.type) == (torch.float32, "cpu"):
                setattr(module, name, PackedLinear(child))

"""Linear maps packed for oneDNN compute what torch's own compute, and keep their gradients."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnlab.aligning.packed_linear import PackedLinear, pack_linears


@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_linear_map_is_the_linear_map(bias):
    torch.manual_seed(0)
    linear = nn.Linear(37, 53, bias=bias)
    packed = PackedLinear(linear)
    for shape in ((5, 37), (1, 37), (2, 7, 37), (0, 3, 37)):
        x = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(packed(x), F.linear(x, linear.weight, linear.bias))
    assert packed.packed is not None  # the comparison was not with itself
    x = torch.randn(3, 37, requires_grad=True)
    (own,) = torch.autograd.grad(packed(x).square().sum(), x)
    (wanted,) = torch.autograd.grad(linear(x).square().sum(), x)
    assert torch.equal(own, wanted)


def test_only_plain_float32_linear_maps_are_packed():
    class Other(nn.Linear):
        """A linear map with code of its own."""

    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5)), Other(5, 6), nn.Linear(6, 2).bfloat16())
    x = torch.randn(7, 3)
    wanted = model[:3](x)
    pack_linears(model)
    assert [type(m) for m in (model[0], model[1][0], model[2], model[3])] == [
        PackedLinear,
        PackedLinear,
        Other,
        nn.Linear,
    ]
    with torch.no_grad():
        torch.testing.assert_close(model[:3](x), wanted)

"""An Operator computes the same by its Python function and as a custom operator."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from attnlab.mechanisms.kernels.launch import operator

CALLS: list[str] = []


@operator("attnlab_tests::scaled_square")
def scaled_square(x: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    CALLS.append(type(x).__name__)
    return x * x * scale, x.abs()


@scaled_square.register_fake
def _(x: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, _, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x)


def _gradients(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor, None, None]:
    return grad * 2 * ctx.saved_tensors[0] * ctx.scale, None, None


scaled_square.register_autograd(_gradients, setup_context=_save_inputs)


def square(x: Tensor) -> Tensor:
    return scaled_square(x, None, scale=0.5)[0].sum()


@pytest.mark.parametrize("compiled", [False, True])
def test_an_operator_has_its_derivative_eager_and_compiled(compiled):
    call = torch.compile(square, fullgraph=True, backend="aot_eager") if compiled else square
    x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    call(x).backward()
    assert x.grad.tolist() == [1.0, -2.0, 3.0]
    with torch.no_grad():
        assert call(x).item() == 7.0


def test_an_operator_is_one_opaque_call_where_tensors_have_no_data():
    CALLS.clear()
    with FakeTensorMode(), FlopCounterMode(display=False):
        assert square(torch.empty(3)).shape == ()
    assert CALLS == []
    square(torch.ones(3))
    assert CALLS == ["Tensor"]


def test_an_operator_must_get_every_parameter():
    with pytest.raises(KeyError, match="mask"):
        scaled_square(torch.ones(3), scale=1.0)

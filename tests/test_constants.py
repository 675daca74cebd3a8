"""Constants are made once, and never where they would belong to somebody else."""

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from attnlab.mechanisms import attention
from attnlab.mechanisms.constants import remember
from attnlab.mechanisms.ssmax import log_counts


def test_a_constant_is_made_once_for_the_same_arguments():
    made = []

    @remember
    def fill(size, dtype):
        made.append(size)
        return torch.ones(size, dtype=dtype)

    assert fill(3, torch.float32) is fill(3, torch.float32)
    assert fill(3, torch.float64).dtype == torch.float64
    assert made == [3, 3]


def test_a_mode_gets_its_own_and_leaves_none_behind():
    given = (3, 7, torch.float32, torch.device("cpu"))
    with FakeTensorMode():
        assert isinstance(log_counts(*given), FakeTensor)
    real = log_counts(*given)
    assert not isinstance(real, FakeTensor)
    torch.testing.assert_close(real.flatten(), torch.tensor([5.0, 6.0, 7.0]).log())


def test_a_constant_of_inference_mode_can_be_saved_for_a_gradient():
    with torch.inference_mode():
        log_counts(5, 11, torch.float64, torch.device("cpu"))
    x = torch.ones(5, 1, dtype=torch.float64, requires_grad=True)
    logs = log_counts(5, 11, torch.float64, torch.device("cpu"))
    assert torch.equal(torch.autograd.grad((x * logs).sum(), x)[0], logs[0, 0])


def test_alibi_keeps_its_bias_until_slopes_or_keys_change():
    mechanism = attention("alibi", heads=4, head_dim=8)
    first = mechanism._rise(5)
    assert mechanism._rise(5) is first
    assert mechanism._rise(6).shape == (4, 1, 6)
    mechanism.slopes.mul_(2)
    torch.testing.assert_close(mechanism._rise(5), 2 * first)
    mechanism.slopes = torch.ones(4, 1, 1)
    torch.testing.assert_close(mechanism._rise(5)[0, 0], torch.arange(5.0).double())

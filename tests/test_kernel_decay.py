"""The kernel that sums the gates of forgetting attention: equal to torch's running sums in float64."""

import pytest
import torch

pytest.importorskip("triton")
from gpu_compile import assert_compiles, some_and_all
from kernel_cases import DEVICE, OPERATOR_TESTS, SLACK, TYPES, fill_memory_with_nan, project

from attnlab.mechanisms.kernels import decay
from attnlab.mechanisms.kernels.pairs import split_float64

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [None, (2, 1, 1, -1), (-1,)], ids=["open", "padded", "one mask"])
@pytest.mark.parametrize("keys", [1, 67, 2500])
def test_it_equals_running_sums(keys, shape, dtype, monkeypatch):
    """Gates are a slice of something wider; 2,500 keys are several steps; all that is written starts as NaN."""
    fill_memory_with_nan(monkeypatch)
    torch.manual_seed(0)
    log_f = project(2, keys, 3, 2)[..., :1].to(dtype).requires_grad_()
    mask = None if shape is None else torch.rand([keys if n < 0 else n for n in shape], device=DEVICE) < 0.6
    exact = log_f.detach().double().requires_grad_()
    want = -(exact.mT if mask is None else exact.mT.masked_fill(~mask, 0.0)).cumsum(-1)
    found = decay.make_decay(log_f, mask)
    torch.testing.assert_close(found, want, atol=1e-10, rtol=0)
    torch.testing.assert_close(found.halves[1], split_float64(found.detach()), atol=0, rtol=0)
    grad = torch.randn_like(want)
    slopes = [torch.autograd.grad(y, x, grad)[0] for y, x in ((found, log_f), (want, exact))]
    assert slopes[0].dtype == dtype
    assert (slopes[0].double() - slopes[1]).norm() <= SLACK[dtype] * slopes[1].norm().clamp_min(1.0)


def test_a_closed_gate_has_no_fine_part():
    log_f = torch.tensor([-1.0, -torch.inf, -2.0], device=DEVICE).view(1, 1, 3, 1)
    found, halves = decay.sum_gates(log_f, None)
    assert found.flatten().tolist() == [1.0, torch.inf, torch.inf]
    assert halves.flatten().tolist() == [1.0, torch.inf, torch.inf, 0.0, 0.0, 0.0]


def test_it_obeys_torchs_rules_for_operators():
    log_f = project(2, 7, 3, 1).requires_grad_()
    for mask in (None, torch.ones(2, 1, 1, 7, dtype=torch.bool, device=DEVICE)):
        torch.library.opcheck(decay.sum_gates.opaque, (log_f, mask), test_utils=OPERATOR_TESTS)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.mechanisms.kernels import decay

for kind in ("bf16", "fp32") if EVERY else ("bf16",):
    for backward, masked, size in ((False, True, 1024), (True, True, 1024), (True, False, 128)):
        fixed = {"BACKWARD": backward, "MASKED": masked, "BLOCK": size}
        types = {"x": "*fp64", "out": f"*{kind}"} if backward else {"x": f"*{kind}", "out": "*fp64"}
        types |= {"mask": "*u8", "halves": "*fp32"} | dict.fromkeys(fixed, "constexpr")
        signature = {name: types.get(name, "i32") for name in decay._sum_gates.arg_names}
        triton.compile(ASTSource(decay._sum_gates, signature, fixed), target=GPUTarget("cuda", 90, 32))
"""


@some_and_all
def test_kernels_compile_for_a_gpu_that_is_not_here(every):
    assert_compiles(COMPILE, every)

"""Adam of many rows by one kernel: equal to torch's Adam and AdamW of each row, with its own numbers."""

import pytest
import torch
from gpu_compile import assert_compiles
from kernel_cases import DEVICE

pytest.importorskip("triton")
from attnlab.training import adam_kernel

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")]
ROWS = [  # lr, beta1, beta2, eps, weight decay
    (1e-2, 0.9, 0.98, 1e-8, 0.0),
    (3e-3, 0.8, 0.999, 1e-6, 0.1),
    (1e-1, 0.0, 0.5, 1e-3, 0.01),
    (5e-2, 0.9, 0.9, 1e-8, 0.3),
]
FACTORS, FAILED, SIZE = [1.0, 0.3, 1.0, 1.0], 3, 101


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_rows_are_updated_as_by_torch(decoupled, half, monkeypatch):
    monkeypatch.setattr(adam_kernel, "BLOCK", 32)
    torch.manual_seed(0)
    master = torch.randn(len(ROWS), SIZE, device=DEVICE)
    work = master.half() if half else master
    first, second = torch.zeros_like(master), torch.zeros_like(master)
    steps, flags = torch.zeros(len(ROWS), device=DEVICE), torch.zeros(len(ROWS), device=DEVICE)
    numbers, factors = torch.tensor(ROWS, device=DEVICE), torch.tensor(FACTORS, device=DEVICE)
    alone = [torch.nn.Parameter(row.clone()) for row in master]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    given = [{"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay} for lr, *betas, eps, decay in ROWS]
    optimisers = [kind([x], **options) for x, options in zip(alone, given, strict=True)]
    for step in range(5):
        flags[FAILED] = float(step >= 2)
        steps += flags == 0
        grad = torch.randn_like(master)
        adam_kernel.update_rows(master, work, grad, first, second, numbers, factors, steps, flags, decoupled=decoupled)
        for number, (x, optimiser) in enumerate(zip(alone, optimisers, strict=True)):
            x.grad = grad[number] * FACTORS[number]
            if number != FAILED or step < 2:
                optimiser.step()
    for number, (x, optimiser) in enumerate(zip(alone, optimisers, strict=True)):
        torch.testing.assert_close(master[number], x.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(second[number], optimiser.state[x]["exp_avg_sq"], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(work[number].float(), x.detach(), rtol=1e-3 if half else 1e-5, atol=1e-6)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.training.adam_kernel import _adam
fixed = {"DECOUPLED": True, "COPIED": True, "BLOCK": 4096}
types = {"work": "*bf16", "size": "i32"} | dict.fromkeys(fixed, "constexpr")
signature = {name: types.get(name, "*fp32") for name in _adam.arg_names}
triton.compile(ASTSource(_adam, signature, fixed), target=GPUTarget("cuda", 90, 32))
"""


def test_the_kernel_compiles_for_a_gpu_that_is_not_here():
    assert_compiles(COMPILE)

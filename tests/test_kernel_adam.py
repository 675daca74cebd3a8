"""Adam of many rows by one kernel: equal to torch's Adam and AdamW of each row, with its own numbers."""

from types import SimpleNamespace

import pytest
import torch
from gpu_compile import assert_compiles
from kernel_cases import DEVICE

pytest.importorskip("triton")
from attnlab.experiments import population_updates
from attnlab.experiments.population import Population
from attnlab.experiments.population_updates import Updates
from attnlab.studies.snell2021.copying import CopyExperiment
from attnlab.training import adam_kernel
from attnlab.training.member_step import RowAdam

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")]
ROWS = [  # lr, beta1, beta2, eps, weight decay
    (1e-2, 0.9, 0.98, 1e-8, 0.0),
    (3e-3, 0.8, 0.999, 1e-6, 0.1),
    (1e-1, 0.0, 0.5, 1e-3, 0.01),
    (5e-2, 0.9, 0.9, 1e-8, 0.3),
]
FACTORS, FAILED, SIZE = [1.0, 0.3, 1.0, 1.0], 3, 101


def make_rows(master, work, rows, decoupled):
    """Return what updates the rows of master by the kernel, and torch's optimiser of a copy of each row."""
    flat = SimpleNamespace(master=master, work=work, grad=torch.zeros_like(master))
    given = [{"betas": tuple(betas), "eps": eps, "weight_decay": decay} for _, *betas, eps, decay in rows]
    name = "adamw" if decoupled else "adam"
    adam = RowAdam(flat, [SimpleNamespace(optimiser=name, **options) for options in given])
    rates = [row[0] for row in rows]
    adam.numbers[:, 0] = torch.tensor(rates)
    kind, alone = torch.optim.AdamW if decoupled else torch.optim.Adam, [torch.nn.Parameter(x.clone()) for x in master]
    return adam, [kind([x], lr=lr, **options) for x, lr, options in zip(alone, rates, given, strict=True)], alone


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_rows_are_updated_as_by_torch(decoupled, half, monkeypatch):
    monkeypatch.setattr(adam_kernel, "BLOCK", 32)
    torch.manual_seed(0)
    master = torch.randn(len(ROWS), SIZE, device=DEVICE)
    work = master.half() if half else master
    adam, optimisers, alone = make_rows(master, work, ROWS, decoupled)
    for step in range(5):
        adam.flags[FAILED] = float(step >= 2)
        grad = torch.randn_like(master)
        adam.flat.grad.copy_(grad)
        adam.step(adam.flat.grad.clone(), torch.tensor(FACTORS, device=DEVICE))
        for number, (x, optimiser) in enumerate(zip(alone, optimisers, strict=True)):
            x.grad = grad[number] * FACTORS[number]
            if number != FAILED or step < 2:
                optimiser.step()
    for number, (x, optimiser) in enumerate(zip(alone, optimisers, strict=True)):
        torch.testing.assert_close(master[number], x.detach(), rtol=1e-5, atol=1e-6)
        second = adam.moments[1][number]
        torch.testing.assert_close(second, optimiser.state[x]["exp_avg_sq"], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(work[number].float(), x.detach(), rtol=1e-3 if half else 1e-5, atol=1e-6)


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("beta2", [0.999, 0.9999])
def test_the_first_updates_keep_their_digits(beta2, updates):
    """1 − β₂ and 1 − β₂ᵗ are small differences, which float32 would compute with four digits."""
    torch.manual_seed(0)
    master = torch.zeros(1, SIZE, device=DEVICE)
    adam, (optimiser,), (alone,) = make_rows(master, master, [(1.0, 0.9, beta2, 1e-8, 0.0)], decoupled=False)
    for _ in range(updates):
        adam.flat.grad.copy_(torch.randn_like(master))
        adam.step(adam.flat.grad.clone(), torch.ones(1, device=DEVICE))
        alone.grad = adam.flat.grad[0].clone()
        optimiser.step()
    torch.testing.assert_close(adam.moments[1][0], optimiser.state[alone]["exp_avg_sq"], rtol=2e-6, atol=0)
    torch.testing.assert_close(master[0], alone.detach(), rtol=2e-6, atol=1e-6)


def test_seeds_are_updated_by_the_kernel_as_by_torch(monkeypatch):
    """A population of an experiment: weights that are views of a matrix, clipping, and a seed that fails."""
    case, seeds = CopyExperiment(data="subset", length=5, types=7, width=11, steps=4, examples=9), range(3)
    ends, device = [], torch.device(DEVICE)
    for by_kernel in (False, True):
        monkeypatch.setattr(population_updates, "has_kernels", lambda x, answer=by_kernel: answer)
        population, feed = Population([case.model(seed) for seed in seeds], device), case.feed(seeds, device)
        updates = Updates(population, seeds=seeds, lr=3e-2, clip=0.1)
        updates.captured = False
        for step in range(4):
            if step == 2:
                with torch.no_grad():
                    population.weights["readout.bias"][1, 0] = torch.inf
            updates(*feed(step))
        assert updates.finite.tolist() == [True, False, True]
        ends.append(updates.state())
    assert isinstance(updates.adam, RowAdam)
    for name in ends[0].keys() - {"adam.0.step", "finite"}:
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=1e-4, atol=1e-6, msg=name)


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

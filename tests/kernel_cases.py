"""Cases of fused kernels: arguments as a model passes them, and a comparison with the definition in float64."""

import torch

from attnlab.mechanisms import attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")  # the interpreter's bf16 is wrong
SLACK = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}  # what is allowed beside twice eager's error
OPERATOR_TESTS = ("test_schema", "test_autograd_registration", "test_faketensor")
OPERATOR_TESTS += ("test_aot_dispatch_static",) if DEVICE == "cpu" else ("test_aot_dispatch_dynamic",)


def fill_memory_with_nan(monkeypatch):
    """Let memory that kernels write to start as NaN."""

    def fill(empty):
        def make(*arguments, **options):
            made = empty(*arguments, **options)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        return make

    for owner, name in ((torch.Tensor, "new_empty"), (torch.Tensor, "new_empty_strided"), (torch, "empty_like")):
        monkeypatch.setattr(owner, name, fill(getattr(owner, name)))


def project(b, n, h, d):
    """Draw (b,h,n,d) as a joint projection leaves it: not contiguous, and a slice of something wider."""
    return torch.randn(b, n, h * d + 3, device=DEVICE)[..., 3:].unflatten(-1, (h, d)).transpose(1, 2)


def compute(mechanism, qkv, grad, mask, causal):
    """Return context and gradients of q, k and v."""
    inputs = [x.detach().requires_grad_() for x in qkv]
    context = mechanism(*inputs, mask, causal=causal)[0]
    return dict(zip(("context", "q", "k", "v"), (context, *torch.autograd.grad(context, inputs, grad)), strict=True))


def assert_fused(name, b, h, i, j, d, dtype, mask="none", causal=False, shared=1, change=None, **options):
    """Compare kernels and definition of one case; change: a function of q, k and v that makes them special."""
    qkv = [project(b, n, heads, d) for n, heads in ((i, h), (j, h // shared), (j, h // shared))]
    qkv = [x.to(dtype) for x in (qkv if change is None else change(*qkv))]
    grad = torch.randn(b, h, i, d, device=DEVICE).to(dtype)
    shape = {"none": None, "keys": (b, 1, 1, j), "full": (b, 1, i, j), "one": (i, j)}[mask]
    seen = None if shape is None else torch.rand(shape, device=DEVICE) < 0.6  # some rows see nothing
    build = {impl: attention(name, heads=h, head_dim=d, impl=impl, **options) for impl in ("fused", "reference")}
    fused, eager = (compute(mechanism, qkv, grad, seen, causal) for mechanism in build.values())
    exact = compute(build["reference"], [x.double() for x in qkv], grad.double(), seen, causal)
    for place, y in exact.items():
        size = y.norm() if y.norm() > 1e-2 else 1.0
        error, allowed = ((x[place].double() - y).norm() / size for x in (fused, eager))
        assert error <= 2 * allowed + SLACK[dtype], f"{place}: {error:.1e}, eager {allowed:.1e}"


def assert_dropout(run, weights, k, q, v, rate):
    """Check what `run(v, seed)` drops: its rate, and that the backward pass drops the same. v must be square."""
    seed = torch.tensor(1234567890123, device=DEVICE)
    eye = torch.eye(v.shape[2], device=DEVICE).expand(v.shape)
    full, dropped = run(eye, None).detach(), run(eye, seed).detach()
    there = full.abs() > 1e-6
    kept = torch.where(there, dropped / full, 0.0)
    torch.testing.assert_close(kept[kept != 0], torch.full_like(kept[kept != 0], 1 / (1 - rate)), atol=1e-3, rtol=0)
    assert abs((kept != 0).sum() / there.sum() - (1 - rate)) < 4 * (rate * (1 - rate) / there.sum()) ** 0.5
    direction = torch.randn_like(v)
    found = torch.autograd.grad(run(v, seed), (q, k, v), direction)
    for x, y in zip(found, torch.autograd.grad((weights * kept) @ v, (q, k, v), direction), strict=True):
        torch.testing.assert_close(x, y, atol=3e-5, rtol=1e-4)

"""Cases of a cascade: a layer of CODA or RealFormer through its kernels and by its definition, with every gradient."""

import torch
from kernel_cases import DEVICE, SLACK, project

from attnlab.mechanisms import attention
from attnlab.mechanisms.mechanism import repeat_heads


def shaken(name, h, d, layer=1, *, far=False, **options):
    """With random parameters; far: so biased that no unit of σ comes near LeakyReLU's kink, where rounding decides."""
    mechanism = attention(name, heads=h, head_dim=d, layer=layer, **options).to(DEVICE).eval()
    for parameter in mechanism.parameters():
        torch.nn.init.normal_(parameter, std=0.5 * parameter.shape[-1] ** -0.5)
        if far and parameter.dim() == 1:
            parameter.data += 4 * torch.where(torch.rand_like(parameter) < 0.5, 1, -1)
    return mechanism


class Case:
    """Arguments of one layer, and what comes of them: context, carry where visible, and every gradient of both."""

    def __init__(self, b, h, i, j, d, mask="none", causal=False, carried=True, groups=None):
        self.qkv = [project(b, n, heads, d) for n, heads in ((i, h), (j, groups or h), (j, groups or h))]
        self.carry = torch.randn(b, h, i, j, device=DEVICE) if carried else None
        shape = {"none": None, "keys": (b, 1, 1, j), "full": (b, 1, i, j), "one": (i, j)}[mask]
        self.mask = None if shape is None else torch.rand(shape, device=DEVICE) < 0.6  # some rows see nothing
        self.causal = causal
        self.grads = [torch.randn(b, h, i, n, device=DEVICE) for n in (d, j)]

    def of(self, mechanism, dtype, impl, **noise):
        """Of the mechanism in one type: through its kernels, or by its definition."""
        rounded = (x if x is None else x.to(self.type).to(dtype) for x in (*self.qkv, self.carry))
        q, k, v, carry = (x if x is None else x.detach().requires_grad_() for x in rounded)
        mechanism = mechanism.to(self.type).to(dtype)
        mechanism.impl = impl
        if impl == "fused":
            context, z = mechanism(q, k, v, self.mask, carry, causal=self.causal)
        else:
            weights, z = mechanism.weights(q, k, self.mask, carry, causal=self.causal, **noise)
            context = weights @ repeat_heads(v, weights.shape[1])
        hidden = ~mechanism.visible(q, k, self.mask, causal=self.causal).expand(z.shape)
        found = {"q": q, "k": k, "v": v, "carry": carry, **dict(mechanism.named_parameters())}
        found = {name: x for name, x in found.items() if x is not None and x.requires_grad}
        if carry is None:
            found = {name: x for name, x in found.items() if "sigma" not in name}
        grads = [g.to(self.type).to(x.dtype) for g, x in zip(self.grads, (context, z), strict=True)]
        grads[1] = grads[1].masked_fill(hidden, 0.0 if impl == "reference" else float("nan"))  # hidden: never read
        made = torch.autograd.grad([context, z], list(found.values()), grads)
        return {"context": context, "z": z.masked_fill(hidden, 0.0)} | dict(zip(found, made, strict=True))

    def assert_same(self, mechanism, dtype, **noise):
        """The kernels are as near to the definition in float64 as twice the definition in their own type."""
        self.type = dtype
        fused = self.of(mechanism, dtype, "fused")
        eager = self.of(mechanism, dtype, "reference", **noise)
        exact = self.of(mechanism, torch.float64, "reference", **noise)
        for name, y in exact.items():
            size = y.norm().clamp_min(1e-2)
            error, allowed = ((x[name].double() - y).norm() / size for x in (fused, eager))
            assert error <= 2 * allowed + SLACK[dtype], f"{name}: {error:.1e}, eager {allowed:.1e}"

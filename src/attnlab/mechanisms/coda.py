"""Cascaded head-colliding attention (Zheng et al. 2021, §3–4, eq. 4; App. A).

    μ_l = S_l + Z_{l−1} + σ(S_l + Z_{l−1})        σ: heads → αh → αh → h, LeakyReLU(0.2), at each (query, key)
    Z_l = μ_l + ε,  ε ~ N(0, I) in training       Z_l = μ_l at evaluation        P = softmax(Z_l)

This is what the authors' code computes and what the published parameter totals fit. Eq. 4 as printed has two
linears on Z_{l−1} alone: variant="paper", μ_l = S_l + σ(Z_{l−1}), with App. A's residual Z_{l−1} unless residual=False.
The first layer has no Z_{l−1}: its σ is there, and counted in the published totals, but neither used nor trained.
impl and carry_dtype: see cascade.py.
"""

from itertools import pairwise
from typing import Literal

import torch
from torch import nn

from attnlab.mechanisms.cascade import CarryDtype, Impl, check_choices, handed_on, run_kernels, takes_kernels
from attnlab.mechanisms.mechanism import Mechanism, logits, masked_softmax
from attnlab.mechanisms.noise import logit_noise, noise_rows, noise_seed


class Coda(Mechanism):
    carries = True
    stochastic = True

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        alpha: int = 4,
        variant: Literal["code", "paper"] = "code",
        residual: bool = True,
        impl: Impl = "auto",
        carry_dtype: CarryDtype = "input",
        **base,
    ) -> None:
        super().__init__(heads, head_dim, **base)
        check_choices(impl, carry_dtype)
        if alpha not in (2, 4, 8):
            raise ValueError(f"alpha must be 2, 4 or 8, not {alpha}")
        if variant not in ("code", "paper"):
            raise ValueError(f"variant must be 'code' or 'paper', not {variant!r}")
        if variant == "code" and not residual:
            raise ValueError("residual=False belongs to variant='paper'; the authors' code always adds the residual")
        self.variant, self.residual, self.impl, self.carry_dtype = variant, residual, impl, carry_dtype
        self.width = alpha * heads
        self.sigma = head_net(heads, self.width, hidden=2 if variant == "code" else 1)
        self.sigma.requires_grad_(self.layer > 0)

    row_sum = 1.0

    def weights(self, q, k, mask=None, carry=None, *, causal=False, at=None, bias=None, noise=None):
        """noise: a draw (b,h,i,j) or a seed; by default a fresh draw in training and none at evaluation."""
        seen = self.visible(q, k, mask, causal=causal, at=at)
        z = s = logits(q, k, self.scale, bias)
        if carry is not None:
            previous = self.previous(carry, s, seen).to(s.dtype)
            z = s + previous if self.residual else s
            inner = z if self.variant == "code" else previous
            z = z + self.sigma(inner.masked_fill(~seen, 0.0).movedim(1, -1)).movedim(-1, 1)
        z = z + logit_noise(self, z, noise_rows(q, k, causal, at), noise)
        return masked_softmax(z, seen), handed_on(z, self.carry_dtype)

    def mix(self, q, k, v, mask=None, carry=None, *, causal=False, at=None, bias=None):
        width = 0 if carry is None else self.width
        if not takes_kernels(self, self.impl, q, k, v, mask, carry, at=at, bias=bias, width=width):
            return super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)
        seed, layer = noise_seed(self, q.device)
        options = {"causal": causal, "carry_dtype": self.carry_dtype, "seed": seed, "layer": layer}
        if carry is not None:
            net = torch.cat([parameter.flatten() for parameter in self.sigma.parameters()])
            options |= {"net": net, "width": width, "own": self.variant == "code", "residual": self.residual}
        return run_kernels(self, q, k, v, mask, carry, **options)


def head_net(heads: int, width: int, hidden: int) -> nn.Sequential:
    """An MLP over the head axis: linears without norm or dropout, Xavier with gain 1/√2, zero biases."""
    sizes = [heads, *[width] * hidden, heads]
    linears = [nn.Linear(m, n) for m, n in pairwise(sizes)]
    for linear in linears:
        nn.init.xavier_uniform_(linear.weight, gain=2**-0.5)
        nn.init.zeros_(linear.bias)
    first, *rest = linears
    return nn.Sequential(first, *(part for linear in rest for part in (nn.LeakyReLU(0.2), linear)))

"""Cascaded head-colliding attention (Zheng et al. 2021, §3–4, eq. 4; App. A): heads are latent and depend on others.

    μ_l = S_l + Z_{l−1} + σ(S_l + Z_{l−1})        σ: heads → αh → αh → h, LeakyReLU(0.2), at each (query, key)
    Z_l = μ_l + ε,  ε ~ N(0, I) in training       Z_l = μ_l at evaluation        P = softmax(Z_l)

This is what the authors' code computes and what the published parameter totals fit. Eq. 4 as printed has two
linears on Z_{l−1} alone: variant="paper", μ_l = S_l + σ(Z_{l−1}), with App. A's residual Z_{l−1} unless residual=False.
The first layer has no Z_{l−1}. Its σ exists and is counted in the published totals, but is neither used nor trained.
carry_dtype: see cascade.py.
"""

from itertools import pairwise
from typing import Any, Literal

from torch import Tensor, nn

from attnlab.mechanisms.cascade import CarryDtype, can_mix_one_pass, cast_carry, check_carry_dtype, mix_fused
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, masked_softmax
from attnlab.mechanisms.noise import logit_noise


class Coda(Mechanism):
    kernels = frozenset({"cascade", "coda"})
    carries = True
    stochastic = True
    row_sum = 1.0

    def __init__(
        self, heads: int, head_dim: int, *, alpha: Literal[2, 4, 8] = 4, variant: Literal["code", "paper"] = "code",
        residual: bool = True, carry_dtype: CarryDtype = "input", **base: Any,
    ) -> None:  # fmt: skip
        super().__init__(heads, head_dim, **base)
        check_carry_dtype(carry_dtype)
        if alpha not in (2, 4, 8):
            raise ValueError(f"alpha must be 2, 4 or 8, got {alpha}")
        if variant not in ("code", "paper"):
            raise ValueError(f"variant must be 'code' or 'paper', got {variant!r}")
        if variant == "code" and not residual:
            raise ValueError("residual=False needs variant='paper'; the authors' code always adds the residual")
        self.variant, self.residual, self.carry_dtype = variant, residual, carry_dtype
        self.sigma = make_head_net(heads, alpha * heads, hidden=2 if variant == "code" else 1)
        self.sigma.requires_grad_(self.layer > 0)

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None,
                noise: int | Tensor | None = None) -> WithCarry:  # fmt: skip
        """noise: a draw (b,h,i,j) or a seed; by default a fresh draw in training and none at evaluation."""
        seen = self.visible(q, k, mask, causal=causal, at=at, bias=bias)
        z = s = logits(q, k, self.scale, bias)
        if carry is not None:
            previous = self.read_carry(carry, s, seen)
            z = s + previous if self.residual else s
            z = z + apply_head_net(self.sigma, z if self.variant == "code" else previous, seen)
        z = z + logit_noise(self, z, causal, at, noise)
        return masked_softmax(z, seen), cast_carry(z, self.carry_dtype)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        self.check(q, k, mask, at, v)
        options: dict[str, Any] = {"causal": causal, "at": at, "bias": bias}
        form: dict[str, Any] = {"sigma": self.sigma, "own": self.variant == "code", "residual": self.residual}
        fused = mix_fused(self, q, k, v, mask, carry, carry_dtype=self.carry_dtype, **options, **form)
        return fused or super().mix(q, k, v, mask, carry, **options)

    def takes_members(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor | None, bias: Tensor | None) -> bool:
        return can_mix_one_pass(self, q, k, v, at=at, bias=bias)


def make_head_net(heads: int, width: int, hidden: int) -> nn.Sequential:
    """Build an MLP over the head axis: linears without norm or dropout, Xavier with gain 1/√2, zero biases."""
    sizes = [heads, *[width] * hidden, heads]
    linears = [nn.Linear(m, n) for m, n in pairwise(sizes)]
    for linear in linears:
        nn.init.xavier_uniform_(linear.weight, gain=2**-0.5)
        nn.init.zeros_(linear.bias)
    first, *rest = linears
    return nn.Sequential(first, *(part for linear in rest for part in (nn.LeakyReLU(0.2), linear)))


def apply_head_net(net: nn.Module, z: Tensor, seen: Tensor) -> Tensor:
    """σ(z) over the heads at each (query, key), with 0 for hidden logits: (b,h,i,j) -> (b,h,i,j)."""
    mixed: Tensor = net(z.masked_fill(~seen, 0.0).movedim(1, -1))
    return mixed.movedim(-1, 1)

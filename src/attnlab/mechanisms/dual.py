"""daGPAM's two signs on a cascade: combinations of Heo & Choi 2024 with Zheng et al. 2021 and He et al. 2020.

    Q⁻ = ReLU(Q) W⁻        P⁺, P⁻ = what the base gives for 2h heads, Q beside Q⁻        P = (1 + λ⁺) P⁺ − λ⁻ P⁻

    coda+dagpam         positive and negative heads collide with each other, through one σ over 2h heads
    realformer+dagpam   each sign has a running sum of logits of its own

No paper has these. The carry is that of the base, (b,2h,i,j); a row's sum is daGPAM's, 1 + λ⁺ − λ⁻.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from attnlab.mechanisms.cascade import Impl
from attnlab.mechanisms.coda import Coda
from attnlab.mechanisms.dagpam import DaGPAM, for_both
from attnlab.mechanisms.mechanism import Mechanism, repeat_heads
from attnlab.mechanisms.realformer import RealFormer


def of_inner(name: str) -> Any:
    """An attribute that is the base's; what is said before there is one is not kept."""

    def put(self: "Dual", value: Any) -> None:
        if "inner" in self._modules:
            setattr(self.inner, name, value)

    return property(lambda self: getattr(self.inner, name), put)


class Dual(DaGPAM):
    """impl is the base's."""

    base: ClassVar[type[Mechanism]]
    carries = True
    dropout, sample_seed = of_inner("dropout"), of_inner("sample_seed")

    def __init__(self, heads: int, head_dim: int, *, impl: Impl = "auto", **options) -> None:
        super().__init__(heads, head_dim, impl=impl, **options)
        dropout = options.get("dropout", 0.0)
        shared: dict[str, Any] = {"layer": self.layer, "scale": self.scale, "dropout": dropout, "impl": impl}
        self.inner = self.base(2 * heads, head_dim, **shared)

    @property
    def carry_heads(self) -> int:
        return 2 * self.heads

    def weights(self, q, k, mask=None, carry=None, *, causal=False, at=None, bias=None, **noise):
        """noise: as the base takes it, if it does."""
        self.check(q, k, mask, at)
        places = {"causal": causal, "at": at, "bias": for_both(bias)}
        both, carry = self.inner.weights(self._beside(q), self._repeated(k), mask, carry, **places, **noise)
        return self.signed(*both.unflatten(1, (-1, 2)).unbind(2)), carry

    def mix(self, q, k, v, mask=None, carry=None, *, causal=False, at=None, bias=None):
        self.check(q, k, mask, at, v)
        places = {"causal": causal, "at": at, "bias": for_both(bias)}
        both, carry = self.inner.mix(self._beside(q), self._repeated(k), self._repeated(v), mask, carry, **places)
        return self.signed(*both.unflatten(1, (-1, 2)).unbind(2)), carry

    def _beside(self, q: Tensor) -> Tensor:
        """Each query head and its negative one, (b,2h,i,d)."""
        return torch.stack([q, self.negated(q)], dim=2).flatten(1, 2)

    def _repeated(self, x: Tensor) -> Tensor:
        return repeat_heads(x, 2 * self.heads)


class DualCoda(Dual):
    base = Coda
    stochastic = True


class DualRealFormer(Dual):
    base = RealFormer

"""1.5-entmax (Peters, Niculae & Martins 2019): between softmax and sparsemax.

    weights = argmax_{p ∈ Δ} pᵀS + H_{1.5}(p) = [S/2 − τ]²₊,  τ such that they sum to 1

The projection comes from the package `entmax`. On a GPU impl="auto" is the kernel of sparsemax, with another power.
"""

from functools import partial

from torch import Tensor

from attnlab.mechanisms.by_rows import mix_by_rows
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits
from attnlab.mechanisms.sparsemax import has_row_kernel, masked_projection, project_band


class Entmax15(Mechanism):
    kernels = frozenset({"sparsemax"})
    row_sum = 1.0

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        from entmax import entmax15

        seen = self.visible(q, k, mask, causal=causal, at=at)
        return masked_projection(entmax15, logits(q, k, self.scale, bias), seen), None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        self.check(q, k, mask, at, v)
        if has_row_kernel(self, q, k):
            weigh = partial(project_band, self, "ENTMAX")
            return mix_by_rows(self, weigh, q, k, v, mask, causal=causal, at=at, bias=bias), None
        return super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)

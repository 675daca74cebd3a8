"""1.5-entmax (Peters, Niculae & Martins 2019): between softmax and sparsemax.

    weights = argmax_{p ∈ Δ} pᵀS + H_{1.5}(p) = [S/2 − τ]²₊,  τ such that they sum to 1

The projection comes from the package `entmax`.
"""

from torch import Tensor

from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits
from attnlab.mechanisms.sparsemax import masked_projection


class Entmax15(Mechanism):
    row_sum = 1.0

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        from entmax import entmax15

        seen = self.visible(q, k, mask, causal=causal, at=at)
        return masked_projection(entmax15, logits(q, k, self.scale, bias), seen), None

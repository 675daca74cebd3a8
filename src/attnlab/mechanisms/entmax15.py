"""1.5-entmax (Peters, Niculae & Martins 2019): between softmax and sparsemax.

    weights = argmax_{p ∈ Δ} pᵀS + H_{1.5}(p) = [S/2 − τ]²₊,  τ such that they sum to 1

Of the k keys of positive weight, with mean m and variance v of S/2, τ = m − √(1/k − v). A key is one of them if S/2 is
above the τ of the keys up to it, sorted. Logits are computed at least in float32, as in sparsemax.
On a GPU impl="auto" is the kernels of sparsemax, with another power.
"""

from torch import Tensor

from attnlab.mechanisms.sparsemax import SimplexProjection, find_support, sort_logits


class Entmax15(SimplexProjection):
    form = "ENTMAX"

    @staticmethod
    def project(s: Tensor) -> Tensor:
        """Map rows of logits (…,j) to their 1.5-entmax."""
        half = s / 2
        ordered, k = sort_logits(half)
        mean = ordered.cumsum(-1) / k
        variance = ordered.square().cumsum(-1) / k - mean.square()
        support = find_support(half, ordered, ordered >= mean - (1 / k - variance).clamp_min(0).sqrt())
        size = support.sum(-1, keepdim=True).to(s.dtype)
        mean = (half * support).sum(-1, keepdim=True) / size
        variance = ((half - mean).square() * support).sum(-1, keepdim=True) / size
        return (half - mean + (1 / size - variance).sqrt()).relu().square()

"""Sparsemax (Martins & Astudillo 2016): the Euclidean projection of the logits onto the simplex, so most weights are 0.

    weights = argmin_{p ∈ Δ} ‖p − S‖² = [S − τ]₊,  τ such that they sum to 1

Over the k keys of positive weight, τ = (Σ S − 1) / k. After sorting, they are the first k, for the largest k with
1 + k S_k > Σ_{m≤k} S_m. Logits are computed at least in float32, since rounding them would change which keys these are.
On a GPU impl="auto" is a kernel that finds the threshold of each row without sorting it, and stores no logits. With a
bias, or queries placed by at=, it works on the stored logits of a band of queries at a time.
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnlab.mechanisms.by_rows import mix_by_rows
from attnlab.mechanisms.cascade import draw_dropping
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, repeat_heads, visible, widen


class SimplexProjection(Mechanism):
    """A mechanism whose weights are those of a point of the simplex that is near the logits: Sparsemax and Entmax15."""

    kernels = frozenset({"sparsemax"})
    row_sum = 1.0
    form: ClassVar[str]  # its name in kernels/sparsemax.py

    @staticmethod
    @abstractmethod
    def project(s: Tensor) -> Tensor:
        """Map rows of logits (…,j) to weights."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at)
        return masked_projection(self.project, logits(widen(q), widen(k), self.scale, bias), seen).to(q.dtype), None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        self.check(q, k, mask, at, v)
        options: dict[str, Any] = {"causal": causal, "at": at, "bias": bias}
        context = mix_projection(self, self.form, q, k, v, mask, **options)
        return super().mix(q, k, v, mask, carry, **options) if context is None else (context, None)


class Sparsemax(SimplexProjection):
    form = "SPARSEMAX"

    @staticmethod
    def project(s: Tensor) -> Tensor:
        """Project rows of logits (…,j) onto the simplex."""
        ordered, rank = sort_logits(s)
        support = find_support(s, ordered, rank * ordered > ordered.cumsum(-1) - 1)
        tau = ((s * support).sum(-1, keepdim=True) - 1) / support.sum(-1, keepdim=True)
        return (s - tau).relu()


def sort_logits(s: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of each row in falling order, without gradients, and their ranks 1 … j."""
    ordered = s.detach().sort(-1, descending=True).values
    return ordered, torch.arange(1, s.shape[-1] + 1, dtype=s.dtype, device=s.device)


def find_support(s: Tensor, ordered: Tensor, positive: Tensor) -> Tensor:
    """Return which logits have a positive weight, bool, by which of the sorted ones have: the first of them."""
    return s >= ordered.gather(-1, (positive.sum(-1, keepdim=True) - 1).clamp_min(0))


def masked_projection(project: Callable[..., Tensor], s: Tensor, seen: Tensor) -> Tensor:
    """Project the logits of the visible keys, at least in float32. A row without visible keys is 0.

    In sparsemax and 1.5-entmax a logit more than 2 below the largest has weight 0, so hidden keys get such a logit.
    """
    if not s.shape[-1]:
        return s
    seen = seen & (s != -torch.inf)
    top = widen(s).detach().masked_fill(~seen, -torch.inf).amax(-1, keepdim=True).nan_to_num(torch.nan, neginf=0.0)
    p = project(torch.where(seen, widen(s), top - 100.0) - top)
    return p.masked_fill(~seen, 0.0).to(s.dtype)


def mix_projection(
    mechanism: Mechanism, form: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool,
    at: Tensor | None, bias: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """Return the context by the kernels, or None where they do not apply; form: its name in kernels/sparsemax.py."""
    if can_stream_keys(mechanism, q, k, v, at, bias):
        from attnlab.mechanisms.kernels import sparse_pass, sparsemax

        rate, dropping = draw_dropping(mechanism, q)
        kind = getattr(sparsemax, form).value
        context: Tensor = sparse_pass.sparse_pass(q, k, v, mask, dropping, kind, causal, mechanism.scale, rate)[0]
        return context
    if has_row_kernel(mechanism, q, k):
        weigh = partial(project_band, mechanism, form)
        return mix_by_rows(mechanism, weigh, q, k, v, mask, causal=causal, at=at, bias=bias)
    return None


def can_stream_keys(
    mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, at: Tensor | None, bias: Tensor | None
) -> bool:  # fmt: skip
    """Whether impl asks for kernels, and those that store no logits cover these arguments."""
    if not mechanism.wants_kernels(q) or at is not None or bias is not None:
        return False
    from attnlab.mechanisms.kernels.tiles import find_tile_gap

    return find_tile_gap(q, k, v) is None


def has_row_kernel(mechanism: Mechanism, q: Tensor, k: Tensor) -> bool:
    """Whether impl asks for kernels and they cover these queries and keys."""
    if not mechanism.wants_kernels(q):
        return False
    from attnlab.mechanisms.kernels.sparsemax import find_gap

    return mechanism.is_covered(find_gap(q, k))


def project_band(
    mechanism: Mechanism, form: str, q: Tensor, k: Tensor, mask: Tensor | None, *, causal: bool, at: Tensor | None,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the weights of a band of queries by the kernel; form: its name in kernels/sparsemax.py."""
    from attnlab.mechanisms.kernels import sparsemax

    if causal and at is not None:
        mask, causal = visible(q, k, mask, causal=True, at=at), False
    s = sparsemax.wide_logits(q, repeat_heads(k, q.shape[1]), mechanism.scale)
    s = s if bias is None else s + bias
    weights: Tensor = sparsemax.project_rows(s, mask, causal, getattr(sparsemax, form).value, q.dtype)
    return weights

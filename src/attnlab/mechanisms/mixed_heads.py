"""How mechanisms that mix heads before and after the softmax call the kernels: see kernels/mixed_heads.py."""

from typing import Any

from torch import Tensor

from attnlab.mechanisms.by_rows import Weigh, mix_by_rows
from attnlab.mechanisms.mechanism import Mechanism, visible


def mix_fused_bands(
    mechanism: Mechanism, weigh: Weigh, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
) -> Tensor | None:
    """Return the context by bands whose weights the kernels compute, or None where the kernels do not apply."""
    if not mechanism.wants_kernels(q):
        return None
    from attnlab.mechanisms.kernels.mixed_heads import find_gap

    if not mechanism.is_covered(find_gap(q, k, keyed=mechanism.has_sides)):
        return None
    mechanism.check(q, k, mask, options["at"], v)
    return mix_by_rows(mechanism, weigh, q, k, v, mask, **options)


def weigh_heads(
    s: Tensor, q: Tensor, k: Tensor, mask: Tensor | None, before: Tensor | None, after: Tensor, *, causal: bool,
    at: Tensor | None, keyed: Tensor | None = None, near: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the weights of logits s (b,h,i,j), by the kernels. before, after, keyed and near: see `mix_heads`."""
    from attnlab.mechanisms.kernels.mixed_heads import mix_heads

    if causal and at is not None:
        mask, causal = visible(q, k, mask, causal=True, at=at), False
    weights: Tensor = mix_heads(s.to(q.dtype), near, before, after, keyed, mask, causal)[0]
    return weights

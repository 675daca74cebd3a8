"""How mechanisms that mix heads before and after the softmax call the kernels: see kernels/mixed_heads.py."""

from torch import Tensor

from attnlab.mechanisms.mechanism import Mechanism, visible


def can_mix_heads(mechanism: Mechanism, q: Tensor, k: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernels are asked for and cover these arguments. A mechanism with sides has matrices of the keys."""
    if not mechanism.wants_kernels(q):
        return False
    from attnlab.mechanisms.kernels.mixed_heads import find_gap

    gap = None if bias is None else "a bias, which may hide keys of one head"
    return mechanism.is_covered(gap or find_gap(q, k, keyed=mechanism.has_sides))


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

"""How mechanisms that mix heads before and after the softmax call the kernels: see kernels/mixed_heads.py."""

from torch import Tensor

from attnlab.mechanisms.by_rows import count_band_rows
from attnlab.mechanisms.head_bands import mix_bands
from attnlab.mechanisms.mechanism import Mechanism, visible
from attnlab.mechanisms.seeding import DROPOUT, draw_seed


def can_mix_heads(mechanism: Mechanism, q: Tensor, k: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernels are asked for and cover these arguments. A mechanism with sides has matrices of the keys."""
    if not mechanism.wants_kernels(q):
        return False
    from attnlab.mechanisms.kernels.head_tiles import find_gap

    gap = None if bias is None else "a bias, which may hide keys of one head"
    return mechanism.is_covered(gap or find_gap(q, k, keyed=mechanism.has_sides))


def weigh_heads(
    s: Tensor, q: Tensor, k: Tensor, mask: Tensor | None, before: Tensor | None, after: Tensor, *, causal: bool,
    at: Tensor | None, keyed: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the weights of logits s (b,h,i,j), by the kernels. before, after and keyed: see `mix_heads`."""
    from attnlab.mechanisms.kernels.mixed_heads import mix_heads

    if causal and at is not None:
        mask, causal = visible(q, k, mask, causal=True, at=at), False
    weights: Tensor = mix_heads(s.to(q.dtype), before, after, keyed, mask, causal)[0]
    return weights


def can_mix_in_bands(q: Tensor, k: Tensor, at: Tensor | None) -> bool:
    """Whether `mix_in_bands` serves these arguments: there are queries, which are the last keys."""
    return at is None and q.shape[2] > 0 and k.shape[2] > 0


def mix_in_bands(
    mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, before: Tensor | None, after: Tensor,
    *, causal: bool, scale: float = 1.0, keyed: Tensor | None = None, theta: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the context (b,h,i,d). before, after and keyed: see `mix_heads`; scale and theta: `mix_bands`."""
    size, rate = count_band_rows(mechanism, q, k), mechanism.dropout if mechanism.training else 0.0
    seed = draw_seed(mechanism, DROPOUT, q.device) if rate else None
    given = (theta, before, after, keyed, mask, seed, causal, scale, rate, size)
    context: Tensor = mix_bands(q, k, v, *given)[0]
    return context

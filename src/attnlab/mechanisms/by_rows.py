"""Attention by bands of queries, in O(n) memory: the weights of one band exist at a time.

    for each band of rows R:      C_R = (P_R ∘ D_R) V       P_R = weigh(q_R, k, …), (b,h,r,j)      D: dropout

The backward pass computes each band again. A causal band sees no keys after its last row, so these are cut off. A band
has about LOGITS weights. Attention that fits into one band is computed at once, and nothing is computed again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnlab.mechanisms.kernels.launch import is_mapped, operator
from attnlab.mechanisms.mechanism import ALL, Mechanism, Sides, repeat_heads, widen
from attnlab.mechanisms.seeding import DROPOUT, draw_seed, shift_seed

LOGITS = 2**26  # in a band, over the batch and all heads
ALIGNED = 64  # the rows of a larger band are a multiple of this

Weigh = Callable[..., Tensor]  # (q, k, mask, *, causal, at, bias[, sides]) -> weights (b,h,i,j)


def count_band_rows(mechanism: Mechanism, q: Tensor, k: Tensor, heads: int | None = None) -> int:
    """Return the number of queries in a band: all of them where they fit, and inside torch.func.

    heads   those with numbers for each pair in memory; by default all
    """
    rows = max(1, LOGITS // max(1, len(q) * (heads or mechanism.heads) * k.shape[2]))
    if rows >= q.shape[2] or is_mapped(q):
        return max(1, q.shape[2])
    return rows - rows % ALIGNED if rows > ALIGNED else rows


def needs_bands(mechanism: Mechanism, q: Tensor, k: Tensor) -> bool:
    """Whether the definition has more weights than a band, and can be computed by bands: no row needs all others."""
    carries_pairs = mechanism.carries and mechanism.carry_of == "pairs"
    apart = not (carries_pairs or mechanism.stochastic or mechanism.lookback == ALL)
    return apart and count_band_rows(mechanism, q, k) < q.shape[2]


def mix_by_rows(
    mechanism: Mechanism, weigh: Weigh, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool,
    at: Tensor | None = None, bias: Tensor | None = None, number: int = 0, **sides: Sides,
) -> Tensor:  # fmt: skip
    """Return the context (b,h,i,d) of the weights that `weigh` computes for each band of queries.

    weigh   takes q, k and mask, causal, at, bias and, where given, sides, all cut to a band; it returns the weights
            (b,h,r,j). Where mechanism.lookback is not 0, q begins with as many former queries; their rows are dropped.
    number  of the weights whose dropout is drawn, where a mechanism has several

    The keys of all bands are in float32, so that autograd sums their gradients in float32.
    """
    rows, length = count_band_rows(mechanism, q, k), q.shape[2]
    if rows >= length:
        weights = weigh(q, k, mask, causal=causal, at=at, bias=bias, **sides)
        return mechanism.drop(weights, number) @ repeat_heads(v, weights.shape[1])
    rate = mechanism.dropout if mechanism.training else 0.0
    seed = draw_seed(mechanism, DROPOUT, q.device, number) if rate else None
    mix = partial(_mix_band, weigh, k.dtype, v.dtype, rate, causal)
    k, v, contexts = widen(k), widen(v), []
    for first in range(0, length, rows):
        former = min(first, mechanism.lookback)
        end = min(first + rows, length)
        band = cut_band(first - former, end, q, k, v, mask, causal=causal, at=at, bias=bias, **sides)
        contexts.append(checkpoint(mix, former, first, seed, **band, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(contexts, dim=2)


def cut_band(
    first: int, end: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, at: Tensor | None,
    bias: Tensor | None, **sides: Sides,
) -> dict[str, Any]:  # fmt: skip
    """Return the arguments of queries first … end − 1, by name, with the keys that they may see."""
    former, keys = k.shape[2] - q.shape[2], k.shape[2]
    if at is not None:
        at = at[first:end]
    elif causal:
        keys = max(0, former + end)  # so these queries are the last keys, too
    else:
        at = torch.arange(former + first, former + end, device=q.device)
    pairs = {"mask": cut_pairs(mask, first, end, keys), "bias": cut_pairs(bias, first, end, keys), "at": at}
    cut = {name: (_cut_tokens(x, first, end), _cut_tokens(y, 0, keys)) for name, (x, y) in sides.items()}
    return {"q": q[:, :, first:end], "k": k[:, :, :keys], "v": v[:, :, :keys], **pairs, **cut}


def _cut_tokens(x: Tensor | None, first: int, end: int) -> Tensor | None:
    return None if x is None else x[:, :, first:end]


def cut_pairs(x: Tensor | None, first: int, end: int, keys: int) -> Tensor | None:
    """Cut a tensor that broadcasts to (b,h,i,j)."""
    if x is None or not x.dim():
        return x
    x = x if x.shape[-1] == 1 else x[..., :keys]
    return x if x.dim() == 1 or x.shape[-2] == 1 else x[..., first:end, :]


def _mix_band(
    weigh: Weigh, key_type: torch.dtype, value_type: torch.dtype, rate: float, causal: bool, former: int, first: int,
    seed: Tensor | None, *, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **given: Any,
) -> Tensor:  # fmt: skip
    """Return the context of a band without its first `former` queries; first: index of the row after them."""
    weights = weigh(q, k.to(key_type), mask, causal=causal, **given)[:, :, former:]
    if seed is not None:
        weights = weights * draw_kept(weights.detach(), seed, rate, first)
    return weights @ repeat_heads(v.to(value_type), weights.shape[1])


@operator("attnlab::draw_kept")
def draw_kept(weights: Tensor, seed: Tensor, rate: float, first: int) -> Tensor:
    """Dropout's keep / (1 − rate) for each weight: a function of the seed, so that both passes draw the same.

    first   index of the first row, where the weights are those of a band. On a GPU what is drawn for a weight depends
            on its place alone, not on the length of its row nor on the size of the bands.
    Raises ValueError if there are several seeds.
    """
    if seed.numel() != 1:
        raise ValueError(f"the weights of one model have one seed of dropout, got {seed.numel()}")
    kept = torch.empty_like(weights, memory_format=torch.contiguous_format)
    if weights.is_cuda:
        from attnlab.mechanisms.kernels.dropout import fill_kept

        return fill_kept(kept, seed, rate, first)
    generator = torch.Generator(weights.device).manual_seed(int(shift_seed(seed, first)))
    return kept.bernoulli_(1 - rate, generator=generator).div_(1 - rate)


@draw_kept.register_fake
def _(weights: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(weights, memory_format=torch.contiguous_format)

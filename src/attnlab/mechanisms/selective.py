"""Selective attention (Leviathan et al. 2024): a token may mask former tokens for all tokens after it.

    M_ij = max(0, S_ij of the first head) if j < i, else 0        F_ij = Σ_{l < i} M_lj        P = softmax(S − F)

All heads subtract the same F. It adds no parameters. The first visible key, where the sequence begins, is never masked.
A row reads all former queries: caches keep them, and each step computes all rows again. A hidden token masks nothing.
impl="auto" goes by bands of queries where it is large: Σ M of the bands before is passed on. On a GPU each band is one
softmax attention with the bias −F, whose logits are never stored; a kernel computes F. A band then counts one head,
and a single one is one operator, which computes F again in the backward pass where all heads would need bands.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from attnlab.mechanisms.by_rows import count_band_rows, cut_band, draw_kept
from attnlab.mechanisms.cascade import can_mix_one_pass, mix_one_pass
from attnlab.mechanisms.mechanism import (
    ALL,
    Mechanism,
    WithCarry,
    logits,
    masked_softmax,
    position,
    repeat_heads,
    visible,
    widen,
)
from attnlab.mechanisms.seeding import DROPOUT, draw_seed, shift_seed


class Selective(Mechanism):
    kernels = frozenset({"one_pass", "selective"})
    row_sum = 1.0
    self_only = True
    positional = True
    lookback = ALL

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at)
        z = widen(logits(q, k, self.scale, bias))
        masking = compute_masking(z[:, :1], seen, position(q, k, at))
        return masked_softmax(z - (masking.cumsum(-2) - masking), seen).to(q.dtype), None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        self.check(q, k, mask, at, v)
        fused, rows = can_mix_one_pass(self, q, k, v, at=at, bias=bias), count_band_rows(self, q, k)
        large = rows < q.shape[2]  # too much to be kept for the backward pass
        if self.impl == "reference" or not (fused or large):
            return super().mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias)
        if fused and (bias is None or bias.dim() < 3 or bias.shape[-3] == 1):
            rows = count_band_rows(self, q, k, heads=1)  # only F is in memory
        rate, length, former = self.dropout if self.training else 0.0, q.shape[2], k.shape[2] - q.shape[2]
        seed = draw_seed(self, DROPOUT, q.device) if rate else None
        if fused and bias is None and rows >= length > 0:
            from attnlab.mechanisms.kernels.selective import select_tokens

            context: Tensor = select_tokens(q, k, v, mask, seed, causal, self.scale, rate, not large)[0]
            return context, None
        mix = partial(mix_band, self, fused, causal, rate, k.dtype, v.dtype, former)
        call = partial(checkpoint, mix, use_reentrant=False, preserve_rng_state=False) if large else mix
        if large:
            k, v = widen(k), widen(v)  # so that autograd sums their gradients in float32
        contexts: list[Tensor] = []
        masked = widen(k.new_zeros(len(q), 1, 1, 0 if large else k.shape[2]))  # Σ M over the bands before, (b,1,1,j)
        for first in range(0, max(length, 1), rows):
            band = cut_band(first, min(first + rows, length), q, k, v, mask, causal=causal, at=at, bias=bias)
            context, masked = call(first, masked, seed, **band)
            contexts.append(context)
        return contexts[0] if len(contexts) == 1 else torch.cat(contexts, dim=2), None


def compute_masking(z: Tensor, seen: Tensor, own: Tensor) -> Tensor:
    """M (b,1,i,j) of the first head's logits z; own (i,): the key index of each query."""
    own, keys = own[:, None], torch.arange(z.shape[-1], device=z.device)
    seen = seen & (z != -torch.inf)  # a bias can hide keys, too
    present = (seen & (keys == own)).any(-1, keepdim=True)  # the query's token is not hidden itself
    masks = seen & present & (keys < own) & (seen.cumsum(-1) > 1)
    return z.relu().masked_fill(~masks, 0.0)


def mix_band(
    mechanism: Mechanism, fused: bool, causal: bool, rate: float, key_type: torch.dtype, value_type: torch.dtype,
    former: int, first: int, masked: Tensor, seed: Tensor | None, *, q: Tensor, k: Tensor, v: Tensor,
    mask: Tensor | None, at: Tensor | None, bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the context of a band from query `first` on, and Σ M up to its end. former: keys before all queries.

    The kernel counts the rows of a band from 0, so its dropout has another seed in each.
    """
    k, v = k.to(key_type), v.to(value_type)
    if masked.shape[3] < k.shape[2]:
        masked = F.pad(masked, (0, k.shape[2] - masked.shape[3]))
    shared = bias if bias is None or bias.dim() < 3 else bias[..., :1, :, :]
    z = logits(q[:, :1], k[:, :1], mechanism.scale, shared)
    if fused:
        from attnlab.mechanisms.kernels.selective import sum_masking

        shown = mask if shared is None else visible(q, k, mask) & (shared != -torch.inf)
        fade, masked = sum_masking(z, shown, masked, causal, former + first)
        added = fade if bias is None else fade + bias
        own = None if seed is None else shift_seed(seed, first)
        return mix_one_pass(mechanism, q, k, v, mask, causal=causal, bias=added, dropping=own), masked
    seen = visible(q, k, mask, causal=causal, at=at)
    masking = compute_masking(widen(z), seen, position(q, k, at))
    summed = masking.cumsum(-2) + masked
    p = masked_softmax(widen(logits(q, k, mechanism.scale, bias)) - (summed - masking), seen).to(q.dtype)
    p = p if seed is None else p * draw_kept(p.detach(), seed, rate, first)
    return p @ repeat_heads(v, mechanism.heads), summed[:, :, -1:]

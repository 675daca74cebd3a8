"""Softmax attention over tiles of keys, online: P = softmax(Z) is never stored. Z is read, or computed from q and k."""

import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import select_device
from attnlab.mechanisms.kernels.pairs import Visibility, draw_dropout, is_visible, last_key
from attnlab.mechanisms.kernels.tiles import choose_tile, load_tile, locate_tile, score_tile, write_tile

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def at_pairs(head, i, j, rows, keys):
    """Offsets of a head's pairs, and which exist. A tile is loaded whole, so that loads are wide, and masked later."""
    return head * rows * keys + i[:, None] * keys + j[None, :], (i < rows)[:, None] & (j < keys)[None, :]


@triton.jit
def _attend(
    z, q, k, v, mask, noise, dropping, out, lse, heads, rows, keys, q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d,
    v_b, v_h, v_j, v_d, m_b, m_i, m_j, scale, rate, layer, STORED: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, DROPPED: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, D: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """BI queries of one head; exponentials have base 2, with log₂ e in the logits. STORED: z holds the logits."""
    tiles = tl.cdiv(rows, BI)
    head, tile, b, h = locate_tile(tiles, heads)
    first = (tiles - 1 - tile) * BI  # causal: the longest rows are the last, and start first
    i = first + tl.arange(0, BI)
    if not STORED:
        x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
    top = tl.full((BI,), float("-inf"), tl.float32)
    total = tl.zeros((BI,), dtype=tl.float32)
    context = tl.zeros((BI, WIDE), dtype=tl.float32)
    for left in range(0, last_key(first + BI, rows, keys, CAUSAL), BJ):
        j = left + tl.arange(0, BJ)
        if STORED:
            place, inside = at_pairs(head, i, j, rows, keys)
            s = tl.load(z + place, mask=inside, other=0.0).to(tl.float32) * (scale * LOG2_E)
        else:
            y = load_tile(k, b, h, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
            s = score_tile(x, y, noise, b, h, i, left, rows, keys, scale, layer, True, CAUSAL, BJ) * LOG2_E
        seen = is_visible(mask, b, i[:, None], j[None, :], rows, keys, m_b, m_i, m_j, MASKED, CAUSAL)
        s = tl.where(seen, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        calm = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - calm[:, None])
        fade = tl.exp2(top - calm)
        total = total * fade + tl.sum(p, 1)
        if DROPPED:
            p *= draw_dropout(tl.load(dropping), rate, head, i[:, None], (left // 4 + tl.arange(0, BJ // 4))[None, :])
        values = load_tile(v, b, h, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
        context = tl.dot(p.to(values.dtype), values, context * fade[:, None], input_precision="ieee")
        top = higher
    blind = total == 0.0
    total = tl.where(blind, 1.0, total)
    write_tile(out, context / total[:, None], b, h, i, heads, rows, D, WIDE)
    tl.store(lse + head * rows + i, tl.where(blind, 0.0, top + tl.log2(total)), mask=i < rows)


def attend(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor | None, seen: Visibility, noise: Tensor | None, dropping: Tensor | None,
    out: Tensor, lse: Tensor, *, scale: float, rate: float, layer: int = 0,
) -> None:  # fmt: skip
    """Write out = (P ∘ D) v and the log₂-sums lse, with P = softmax(scale·z), or softmax(scale·qkᵀ + ε) without z."""
    (b, h, i, _), tile = q.shape, choose_tile(q)
    seeds = (q if seed is None else seed for seed in (noise, dropping))  # not read if None
    strides = (*q.stride(), *k.stride(), *v.stride(), *seen.strides)
    with select_device(q):
        _attend[(b * h * triton.cdiv(i, tile["BI"]),)](
            q if z is None else z, q, k, v, seen.mask, *seeds, out, lse, h, i, k.shape[2], *strides, scale, rate, layer,
            STORED=z is not None, DROPPED=dropping is not None, **seen.flags, **tile,
        )  # fmt: skip

"""A tile of logits with all heads, (BI,BJ,H), for the kernels of mixed_heads.py: places, matrices and scores."""

import triton
import triton.language as tl

from attnlab.mechanisms.kernels.online import LOG2_E
from attnlab.mechanisms.kernels.pairs import is_visible


@triton.jit
def place_pairs(i, j, h, heads, rows, keys):
    """Offsets of pairs in one example of (b,h,i,j), and which exist: (BI,BJ,H)."""
    inside = (i < rows)[:, None, None] & (j < keys)[None, :, None] & (h < heads)[None, None, :]
    return h[None, None, :] * (rows * keys) + i[:, None, None] * keys + j[None, :, None], inside


@triton.jit
def load_matrices(x, n, h, heads, size, x_n, x_r, x_c, T: tl.constexpr):
    """Load the matrices of rows or keys n of one example: (·,H,H), heads in, heads out, with these strides."""
    inside = (n < size)[:, None, None] & (h < heads)[None, :, None] & (h < heads)[None, None, :]
    place = n[:, None, None] * x_n + h[None, :, None] * x_r + h[None, None, :] * x_c
    return tl.load(x + place, mask=inside, other=0.0).to(T)


@triton.jit
def compose_heads(a, m, of_keys, j, h, heads, keys, T: tl.constexpr, KEYED: tl.constexpr, TURNED: tl.constexpr):
    """Mix the heads of a (BI,BJ,H) by m (BI,H,H) and by the keys' matrices. TURNED: by these transposed, as m is."""
    fed = a.to(T)
    mixed = tl.dot(fed, m, input_precision="ieee")
    if KEYED:
        k = load_matrices(of_keys, j, h, heads, keys, heads * heads, heads, 1, T)
        if TURNED:
            k = tl.permute(k, (0, 2, 1))
        mixed += tl.permute(tl.dot(tl.permute(fed, (1, 0, 2)), k, input_precision="ieee"), (1, 0, 2))
    return mixed


@triton.jit
def score_heads(
    s, m, of_keys, mask, b, i, j, h, heads, rows, keys, m_b, m_i, m_j, T: tl.constexpr, FIRST: tl.constexpr,
    KEYED: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """s and Z log₂ e of one tile, in float32, and which pairs are visible; s is 0 and Z is −∞ where they are not."""
    seen = is_visible(mask, b, i[:, None], j[None, :], rows, keys, m_b, m_i, m_j, MASKED, CAUSAL)[:, :, None]
    place, inside = place_pairs(i, j, h, heads, rows, keys)
    a = tl.load(s + place, mask=inside, other=0.0)
    a = tl.where(seen, a.to(tl.float32), 0.0)
    z = a
    if FIRST:
        z = compose_heads(a, m, of_keys, j, h, heads, keys, T, KEYED, False)
    return a, tl.where(seen, z * LOG2_E, float("-inf")), seen

"""Dropout of weights that are stored: one pass that only writes.

    D_ij = 1[u ≥ rate] / (1 − rate)        u = Philox(seed, j // 4, i, head), as `pairs.draw_dropout` draws it

A weight has the same D whatever the length of its row, and whichever band of queries it is in.
"""

import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import divide_up, remember_calls, round_up, select_device
from attnlab.mechanisms.kernels.pairs import draw_dropout

TILE = 2048  # numbers of a program


@remember_calls
@triton.jit(do_not_specialize=["heads", "rows", "first"])
def _fill_kept(seed, out, heads, rows, keys, first, rate, BI: tl.constexpr, BJ: tl.constexpr):
    """BI rows, counted through all heads, and BJ keys."""
    columns = tl.cdiv(keys, BJ)
    left = tl.program_id(0) % columns * BJ
    row, j = (tl.program_id(0) // columns).to(tl.int64) * BI + tl.arange(0, BI), left + tl.arange(0, BJ)
    quad = left // 4 + tl.arange(0, BJ // 4)
    kept = draw_dropout(tl.load(seed), rate, (row // rows)[:, None], (first + row % rows)[:, None], quad[None, :])
    inside = (row // rows < heads)[:, None] & (j < keys)[None, :]
    tl.store(out + row[:, None] * keys + j[None, :], kept, mask=inside)


def fill_kept(out: Tensor, seed: Tensor, rate: float, first: int = 0) -> Tensor:
    """Write keep / (1 − rate) into every number of out, (…,i,j) and contiguous, and return it.

    seed    one number, on the device
    first   index of the first row, where out has a band of queries
    """
    *_, rows, keys = out.shape
    if not out.numel():
        return out
    wide = min(256, round_up(keys))
    tile, heads = {"BI": TILE // wide, "BJ": wide}, out.numel() // (rows * keys)
    with select_device(out):
        grid = divide_up(heads * rows, tile["BI"]) * divide_up(keys, wide)
        _fill_kept[(grid,)](seed, out, heads, rows, keys, first, rate, **tile)
    return out

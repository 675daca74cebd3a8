"""The noise of `mechanisms/noise.py` in one pass that only writes: four normals for each Philox counter.

In plain PyTorch the ten rounds are about a hundred passes over 64-bit words; here they stay in registers. The words are
identical; the normals are equal up to the rounding of the device's logarithm and sine.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import divide_up, note_launch, operator, remember_calls, select_device
from attnlab.mechanisms.kernels.pairs import count_examples

COUNTERS = 256  # in a program


@remember_calls
@triton.jit(do_not_specialize=("layer", "total", "heads", "length", "each"))
def _gaussian(seed, rows, out, layer, total, heads, length, keys, each, COUNTERS: tl.constexpr):
    counter = tl.program_id(0).to(tl.int64) * COUNTERS + tl.arange(0, COUNTERS)
    quads = tl.cdiv(keys, 4)
    row, j = counter // quads, counter % quads
    bh, i = row // length, row % length
    place = tl.load(rows + i, mask=counter < total, other=0)
    c0, c1 = j.to(tl.uint32), place.to(tl.uint32)
    b = bh // heads
    c2, c3 = (b % each).to(tl.uint32), (bh % heads + (layer << 16)).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(seed + b // each, mask=counter < total, other=0), c0, c1, c2, c3)
    n0, n1 = tl.pair_uniform_to_normal(tl.uint_to_uniform_float(w0), tl.uint_to_uniform_float(w1))
    n2, n3 = tl.pair_uniform_to_normal(tl.uint_to_uniform_float(w2), tl.uint_to_uniform_float(w3))
    first = out + row * keys + 4 * j
    left = tl.where(counter < total, keys - 4 * j, 0)
    tl.store(first, n0, mask=left > 0)
    tl.store(first + 1, n1, mask=left > 1)
    tl.store(first + 2, n2, mask=left > 2)
    tl.store(first + 3, n3, mask=left > 3)


@operator("attnlab::gaussian")
def gaussian(seed: Tensor, layer: int, batch: int, heads: int, rows: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """ε (b,h,i,j), with the seed on the device: (), or (s,) for s members, whose examples come one after another."""
    out = rows.new_empty(batch, heads, len(rows), keys, dtype=dtype)
    total = batch * heads * len(rows) * divide_up(keys, 4)
    note_launch("noise")
    with select_device(rows):
        _gaussian[(divide_up(total, COUNTERS),)](
            seed, rows, out, layer, total, heads, len(rows), keys, count_examples(batch, seed), COUNTERS=COUNTERS
        )
    return out


@gaussian.register_fake
def _(seed: Tensor, layer: int, batch: int, heads: int, rows: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    return rows.new_empty(batch, heads, rows.shape[0], keys, dtype=dtype)

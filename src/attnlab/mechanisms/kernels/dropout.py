"""Dropout of weights that are stored: one pass that only writes, four numbers for each Philox counter."""

import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import divide_up, select_device

COUNTERS = 512  # in a program


@triton.jit
def _fill_kept(seed, out, total, rate, COUNTERS: tl.constexpr):
    counter = tl.program_id(0).to(tl.int64) * COUNTERS + tl.arange(0, COUNTERS)
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    words = tl.philox(tl.load(seed), low, high, low * 0, low * 0)
    for n in tl.static_range(4):
        kept = tl.where(tl.uint_to_uniform_float(words[n]) >= rate, 1.0 / (1.0 - rate), 0.0)
        tl.store(out + 4 * counter + n, kept, mask=4 * counter + n < total)


def fill_kept(out: Tensor, seed: Tensor, rate: float) -> Tensor:
    """Write keep / (1 − rate) into every number of out, which is dense, and return it. The seed is on the device."""
    with select_device(out):
        _fill_kept[(divide_up(out.numel(), 4 * COUNTERS),)](seed, out, out.numel(), rate, COUNTERS=COUNTERS)
    return out
